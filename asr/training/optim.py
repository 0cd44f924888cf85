"""Parameter groups for an optimiser."""

from __future__ import annotations

import torch
from torch import nn

from asr.layers.adversary import Adversary


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weights decay; biases, norms and everything else of one dimension do not. Without decay there is one group.

    Tied parameters appear once, frozen ones and those of adversaries not at all.
    """
    foreign = {id(parameter) for adversary in adversaries(model) for parameter in adversary.parameters()}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in foreign:
            (decayed if weight_decay and parameter.dim() > 1 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adversaries(model: nn.Module) -> list[Adversary]:
    """The parts of the model that are trained against it."""
    return [module for module in model.modules() if isinstance(module, Adversary)]


def adversary_optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    """Adam over all adversaries, each with its own learning rate; None for a model without any."""
    groups = [{"params": list(adversary.parameters()), "lr": adversary.lr} for adversary in adversaries(model)]
    return torch.optim.Adam(groups) if groups else None
