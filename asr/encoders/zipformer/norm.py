"""BiasNorm, and parameters that are kept within limits by their gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from asr.layers.random import chance

# Limits need not be minded in every step.
LIMIT_PROBABILITY = 0.6


class BiasNorm(nn.Module):
    """x exp(log_scale) / rms(x - bias): a norm that keeps a frame's length visible (Yao et al., 2023, section 3.3).

    The bias takes the part of the one large constant dimension by which networks defeat a LayerNorm. Statistics are
    fp32 in every precision mode.

    dim: width D.
    """

    LOG_SCALE_LIMITS = (-1.5, 1.5)

    def __init__(self, dim: int):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.empty(dim).normal_(std=1e-4))

    def forward(self, frames_BTD: Tensor) -> Tensor:
        """(B, T, D) in the type of the input."""
        log_scale = limited(self.log_scale, *self.LOG_SCALE_LIMITS) if self.training else self.log_scale
        return _BiasNorm.apply(frames_BTD, self.bias, log_scale)


class _BiasNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor, log_scale: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x.float() - bias.float(), dim=-1, keepdim=True)
        # A frame that equals the bias, as padding may, has no direction to keep.
        inverse = norm.clamp(min=1e-10).reciprocal_()
        scale = inverse * (log_scale.float().exp() * math.sqrt(x.size(-1)))
        ctx.save_for_backward(x, bias, log_scale, inverse, scale)
        return (x.float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, bias, log_scale, inverse, scale = ctx.saved_tensors
        grad_x = grad.float() * scale
        grad_log_scale = torch.linalg.vecdot(grad_x, x.float()).unsqueeze(-1)
        # d scale / d x is along x - bias; d scale / d bias is its opposite.
        through_norm = (x.float() - bias.float()).mul_(grad_log_scale * inverse.square())
        return (
            grad_x.sub_(through_norm).to(x.dtype),
            through_norm.flatten(0, -2).sum(0).to(bias.dtype),
            grad_log_scale.sum().to(log_scale.dtype),
        )


def limited(parameter: Tensor, lowest: float, highest: float) -> Tensor:
    """The parameter, with a gradient that, in most steps, drives it back where it lies outside these limits."""
    return _Limited.apply(parameter, lowest, highest) if chance(LIMIT_PROBABILITY) else parameter


class _Limited(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter: Tensor, lowest: float, highest: float) -> Tensor:
        ctx.save_for_backward(parameter)
        ctx.limits = lowest, highest
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (parameter,) = ctx.saved_tensors
        lowest, highest = ctx.limits
        away = ((parameter < lowest) & (grad > 0)) | ((parameter > highest) & (grad < 0))
        return torch.where(away, -grad, grad), None, None
