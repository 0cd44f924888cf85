"""Whiten: covariances are kept from collapsing onto few directions by their gradients (Yao et al., 2023, appendix)."""

from __future__ import annotations

import torch
from torch import Tensor

from asr.layers.balancer import frame_weights
from asr.layers.schedule import PiecewiseLinear, Scheduled


class Whiten(Scheduled):
    """Lets its input through, and in some training steps changes its gradient.

    The metric is the mean squared eigenvalue of the covariance over the square of the mean eigenvalue: 1 for white
    data, C where all variance lies in one direction. While it is above the limit, its own gradient is added, scaled to
    `strength` times the norm of the gradient that comes in. The metric is looked at in a quarter of the steps where it
    was above the limit the last time, else in a fortieth. Statistics are fp32 and over valid frames.

    limit, final_limit: of the metric at first, and from batch 20000 on.
    strength: of the change. num_groups: of channels; the covariances are those within groups, with one mean eigenvalue.
    """

    PROBABILITIES = (0.025, 0.25)
    above: Tensor

    def __init__(self, limit: float, final_limit: float, strength: float = 0.01, num_groups: int = 1):
        super().__init__()
        self.limit = PiecewiseLinear((0.0, limit), (20000.0, final_limit))
        self.strength = strength
        self.num_groups = num_groups
        # A number, so that the ranks of a run can agree on it.
        self.register_buffer("above", torch.tensor(1.0))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The input (..., C) itself. mask: over leading axes of x; True marks the valid ones."""
        if not (self.training and x.requires_grad):
            return x
        rare, often = self.PROBABILITIES
        draw = float(torch.rand(()))
        if draw >= often:
            return x
        return _Whiten.apply(x, mask, self, draw < rare)


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, whiten: Whiten, always: bool) -> Tensor:
        ctx.save_for_backward(x, mask)
        ctx.whiten, ctx.always = whiten, always
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mask = ctx.saved_tensors
        whiten = ctx.whiten
        if ctx.always or whiten.above > 0:
            with torch.autocast(grad.device.type, enabled=False):
                grad = _whitening(x, grad, mask, whiten)
        return grad, None, None, None


def _whitening(x: Tensor, grad: Tensor, mask: Tensor, whiten: Whiten) -> Tensor:
    """The gradient with that of the metric added where it is above the limit."""
    exact = x.float().flatten(0, -2)
    weights = frame_weights(mask, x)
    centred = (exact - weights @ exact).mul_(weights.sqrt().unsqueeze(1))
    grouped = centred.unflatten(1, (whiten.num_groups, -1)).transpose(0, 1)
    covariance = grouped.transpose(1, 2) @ grouped
    mean_eigenvalue = covariance.diagonal(dim1=1, dim2=2).mean()
    mean_squared = covariance.square().sum() / exact.size(1)
    whiten.above.copy_(mean_squared >= whiten.now(whiten.limit) * (mean_eigenvalue.square() + 1e-20))
    if not whiten.above > 0:
        return grad
    # Up to a factor, which the norms take away again, the gradient of mean_squared / mean_eigenvalue ** 2.
    towards_white = covariance - (mean_squared / mean_eigenvalue) * torch.eye(covariance.size(1), device=x.device)
    change = (grouped @ towards_white).transpose(0, 1).flatten(1).view_as(x)
    change.mul_(whiten.strength * grad.float().norm() / (change.norm() + 1e-20))
    return grad + change.to(grad.dtype)
