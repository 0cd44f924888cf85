"""Balancer: channels are kept alive and in range by their gradients (Yao et al., Zipformer, 2023, appendix)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asr.layers.random import chance
from asr.layers.schedule import PiecewiseLinear, Schedulable, Scheduled

# Half of the passes at first, an eighth of them later: enough, and not all layers at once.
USUAL_PROBABILITY = PiecewiseLinear((0.0, 0.5), (8000.0, 0.125))


class Balancer(Scheduled):
    """Lets its input through, and in some training steps changes its gradient.

    Each channel whose share of positive values or whose mean absolute value, over the valid frames, lies outside the
    limits gets a push back into them: gradient + |gradient| * push, where the push has the root mean square
    `strength` over the frames. The limits are applied as if the values were normally distributed, to mean / deviation
    and to the root mean square. Statistics are fp32.

    min_positive, max_positive: share of values above 0. min_abs, max_abs: mean absolute value.
    probability: that a training step is one of those.
    """

    def __init__(
        self,
        min_positive: Schedulable = 0.05,
        max_positive: Schedulable = 0.95,
        min_abs: Schedulable = 0.2,
        max_abs: Schedulable = 100.0,
        probability: Schedulable = USUAL_PROBABILITY,
        strength: float = 0.04,
    ):
        super().__init__()
        self.min_positive = min_positive
        self.max_positive = max_positive
        self.min_abs = min_abs
        self.max_abs = max_abs
        self.probability = probability
        self.strength = strength

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The input (..., C) itself. mask: over leading axes of x; True marks the valid ones."""
        if not (self.training and x.requires_grad and chance(self.now(self.probability))):
            return x
        mean_limits = tuple(_normal_mean(self.now(share)) for share in (self.min_positive, self.max_positive))
        # For a normal distribution around 0 the root mean square is sqrt(pi / 2) times the mean absolute value.
        rms_limits = tuple(math.sqrt(math.pi / 2) * self.now(limit) for limit in (self.min_abs, self.max_abs))
        return _Balance.apply(x, mask, mean_limits, rms_limits, self.strength)


def _normal_mean(share: float) -> float:
    """About the mean, in deviations, of a normal distribution with this share of its values above 0."""
    tiny = 1e-10
    inverse_error = 0.5 * math.log((2 * share + tiny) / (2 * (1 - share) + tiny))
    return inverse_error / (math.sqrt(math.pi) * math.log(2))


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, mean_limits, rms_limits, strength: float) -> Tensor:
        ctx.save_for_backward(x, mask)
        ctx.options = mean_limits, rms_limits, strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mask = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            exact = x.float().flatten(0, -2)
            weights = frame_weights(mask, x)
            work = exact.square()
            slope, offset = _push(weights @ exact, weights @ work, *ctx.options)
            torch.addcmul(offset, exact, slope, out=work)
            exact_grad = grad.float().flatten(0, -2)
            work.mul_(exact_grad.abs()).add_(exact_grad)
        return work.view_as(grad).to(grad.dtype), None, None, None, None


def frame_weights(mask: Tensor, x: Tensor) -> Tensor:
    """(N,) fp32 weights that average the valid ones of the N rows of x (..., C); all 0 where none is valid."""
    weights = mask.float() / mask.sum().clamp(min=1)
    repeats = x.shape[mask.dim() : -1].numel()
    return weights.flatten().repeat_interleave(repeats) / repeats if repeats > 1 else weights.flatten()


def _push(
    mean: Tensor, square: Tensor, mean_limits: tuple[float, float], rms_limits: tuple[float, float], strength: float
) -> tuple[Tensor, Tensor]:
    """Slope and offset (C,) of the push x * slope + offset, from the means (C,) of x and of its square.

    The push is the gradient of |m - clamp(m)| + |log(clamp(rms) / rms)| for m = mean / deviation, brought to the root
    mean square `strength`. In fp64: the powers would leave the range of fp32.
    """
    smallest = 1e-20
    mean, square = mean.double(), square.double()
    variance = square - mean.square()
    deviation = variance.clamp(min=smallest).sqrt()
    ratio = mean / deviation
    side = (ratio - ratio.clamp(*mean_limits)).sign()
    flat = variance <= smallest
    slope = torch.where(flat, 0.0, -side * mean / deviation**3)
    offset = torch.where(flat, side / deviation, side * square / deviation**3)

    rms = square.clamp(min=smallest).sqrt()
    excess = (rms - rms.clamp(*rms_limits)).sign()
    slope = slope + torch.where(square <= smallest, 0.0, excess / square.clamp(min=smallest))
    size = (slope.square() * square + 2 * slope * offset * mean + offset.square()).clamp(min=0).sqrt()
    scale = strength / size.clamp(min=smallest)
    return (slope * scale).float(), (offset * scale).float()
