"""Parameter groups for an optimiser."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from asr.layers.adversary import Adversary
from asr.layers.parts import check_places, place_of


def parameter_groups(model: nn.Module, weight_decay: float, lr_scale: Mapping[str, float] | None = None) -> list[dict]:
    """Weights decay; biases, norms and everything else of one dimension do not. Without decay these are one group.

    lr_scale: factors on the learning rate by part (see `asr.layers.parts`). Groups whose factor is not 1 hold it as
        `lr_scale`, and come after the others.

    Tied parameters appear once, frozen ones and those of adversaries not at all. Raises ValueError where nothing is
    left to train.
    """
    scales = lr_scale or {}
    check_places(model, scales, "lr_scale")
    foreign = {id(parameter) for adversary in adversaries(model) for parameter in adversary.parameters()}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in foreign:
            place = place_of(name, scales)
            decay = weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((1.0 if place is None else scales[place], decay), []).append(parameter)
    if not groups:
        raise ValueError("freeze: every parameter of the model is frozen; leave something to train")
    ordered = sorted(groups, key=lambda key: (key[0] != 1.0, key[0], -key[1]))
    return [
        {"params": groups[scale, decay], "weight_decay": decay} | ({} if scale == 1.0 else {"lr_scale": scale})
        for scale, decay in ordered
    ]


def adversaries(model: nn.Module) -> list[Adversary]:
    """The parts of the model that are trained against it."""
    return [module for module in model.modules() if isinstance(module, Adversary)]


def adversary_optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    """Adam over all adversaries, each with its own learning rate; None for a model without any."""
    groups = [{"params": list(adversary.parameters()), "lr": adversary.lr} for adversary in adversaries(model)]
    return torch.optim.Adam(groups) if groups else None
