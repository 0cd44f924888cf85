"""Linear layers that begin small."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def scaled_linear(input_dim: int, output_dim: int, initial_scale: float, bias: bool = True) -> nn.Linear:
    """A linear layer with PyTorch's initial weights times `initial_scale` and biases within a tenth of it."""
    linear = nn.Linear(input_dim, output_dim, bias)
    linear.weight.mul_(initial_scale)
    if bias:
        nn.init.uniform_(linear.bias, -0.1 * initial_scale, 0.1 * initial_scale)
    return linear
