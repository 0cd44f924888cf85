"""Values inside modules that change as training goes on."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


class PiecewiseLinear:
    """A function through `points` (x, y) with x rising; constant before the first and after the last.

    Raises ValueError when the x do not rise.
    """

    def __init__(self, *points: tuple[float, float]):
        xs = [x for x, _ in points]
        if not points or any(right <= left for left, right in pairwise(xs)):
            raise ValueError(f"points {points}: at least one is needed, and their first numbers must rise")
        self.points = points

    def __call__(self, x: float) -> float:
        if x <= self.points[0][0]:
            return self.points[0][1]
        for (left, before), (right, after) in pairwise(self.points):
            if x <= right:
                return before + (x - left) / (right - left) * (after - before)
        return self.points[-1][1]


Schedulable = float | PiecewiseLinear


class Scheduled(nn.Module):
    """A module some of whose values may be numbers or functions of the batch count."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_count = 0.0

    def now(self, value: Schedulable) -> float:
        """What `value` is at the current batch count."""
        return value(self.batch_count) if isinstance(value, PiecewiseLinear) else value


def set_batch_count(model: nn.Module, batch_count: float) -> None:
    """Tell every module that has a `batch_count` how many reference batches the model has been trained on.

    A reference batch is one of `trainer.reference_duration` seconds, as in icefall's adjusted batch count, so that
    schedules do not depend on batch size or number of GPUs.
    """
    for module in model.modules():
        if hasattr(module, "batch_count"):
            setattr(module, "batch_count", batch_count)  # noqa: B010
