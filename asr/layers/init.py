"""Initialisation of weights by name of the scheme (`init_mode`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def _bounded(bound_of_fan_in: Callable[[int], float]) -> Callable[[Tensor], Tensor]:
    def fill(weight: Tensor) -> Tensor:
        bound = bound_of_fan_in(weight[0].numel())
        return nn.init.uniform_(weight, -bound, bound)

    return fill


_FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
    "kaiming_normal": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    "tds_uniform": _bounded(lambda fan_in: 2.0 / math.sqrt(fan_in)),
    "tds_normal": lambda weight: nn.init.normal_(weight, 0.0, 2.0 / math.sqrt(weight[0].numel())),
    "trunc_normal": lambda weight: nn.init.trunc_normal_(weight, 0.0, 0.02, -0.04, 0.04),
}

INIT_MODES = ("none", *_FILLS)


@torch.no_grad()
def initialise(module: nn.Module, mode: str | None) -> None:
    """Draw the weights of the linear and convolution layers in `module` anew. Raises ValueError on an unknown mode.

    | mode                    | weights of Linear, Conv1d, Conv2d                               |
    |-------------------------|-----------------------------------------------------------------|
    | None, "none", "null"    | as PyTorch made them: uniform within 1 / sqrt(fan_in)           |
    | "xavier_uniform"        | uniform within sqrt(6 / (fan_in + fan_out))                     |
    | "xavier_normal"         | normal, std sqrt(2 / (fan_in + fan_out))                        |
    | "kaiming_uniform"       | uniform within sqrt(6 / fan_in)                                 |
    | "kaiming_normal"        | normal, std sqrt(2 / fan_in)                                    |
    | "tds_uniform"           | uniform within 2 / sqrt(fan_in)                                 |
    | "tds_normal"            | normal, std 2 / sqrt(fan_in)                                    |
    | "trunc_normal"          | normal, std 0.02, cut at two std                                |

    | left as they are in every mode                                                            |
    |-------------------------------------------------------------------------------------------|
    | biases; weights and statistics of norms; embeddings, and linear weights tied to one;      |
    | parameters of other layers, such as the position biases of attention; recurrent layers    |

    fan_in is inputs per group times kernel size, fan_out outputs times kernel size, as PyTorch counts them. The gains
    are xavier's 1 and kaiming's sqrt(2) for ReLU (Glorot and Bengio, 2010; He et al., 2015); tds is that of time-depth
    separable networks (Hannun et al., 2019). The modes and formulas are those of NeMo's `init_mode`, which applies
    them to Linear and Conv1d; "trunc_normal" is BERT's.
    """
    if mode is None or mode in ("none", "null"):
        return
    if mode not in _FILLS:
        raise ValueError(f"init_mode {mode!r} is none of {', '.join(INIT_MODES)}")
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv1d, nn.Conv2d)) and id(part.weight) not in embeddings:
            _FILLS[mode](part.weight)
