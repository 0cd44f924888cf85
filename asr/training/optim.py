"""Parameter groups for an optimiser."""

from __future__ import annotations

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weights decay; biases, norms and everything else of one dimension do not. Without decay there is one group.

    Tied parameters appear once, frozen ones not at all.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if weight_decay and parameter.dim() > 1 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
