"""The Swoosh activations of the Zipformer (Yao et al., 2023), without the temporaries that their formula would need."""

from __future__ import annotations

import torch
from torch import Tensor

SLOPE = 0.08


def swoosh_l(x: Tensor) -> Tensor:
    """log(1 + exp(x - 4)) - 0.08 x - 0.035: zero at about 0, for where the input should stay near it."""
    return _Swoosh.apply(x, 4.0, 0.035)


def swoosh_r(x: Tensor) -> Tensor:
    """log(1 + exp(x - 1)) - 0.08 x - 0.313261687: zero at 0, with a steeper slope there."""
    return _Swoosh.apply(x, 1.0, 0.313261687)


class _Swoosh(torch.autograd.Function):
    """log(1 + exp(x - shift)) - 0.08 x - constant in fp32, given back in the type of x. Only x is kept for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, shift: float, constant: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.shift = shift
        exact = x.float()
        y = exact - shift
        torch.ops.aten.softplus.out(y, out=y)
        return y.sub_(exact, alpha=SLOPE).sub_(constant).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        slope = (x.float() - ctx.shift).sigmoid_().sub_(SLOPE)
        return slope.mul_(grad).to(grad.dtype), None, None
