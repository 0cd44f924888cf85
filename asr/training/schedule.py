"""Learning rate schedules: functions of step and epoch, so that a resumed run needs no state of theirs.

Every schedule maps a 1-based optimiser step and the 1-based epoch in progress to a factor on the optimiser's own
learning rate.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch


class Schedule(Protocol):
    """Factor on the base learning rate at a 1-based step of a 1-based epoch."""

    def factor(self, step: int, epoch: int) -> float: ...


class Constant:
    """Linear warm-up, then 1."""

    def __init__(self, warmup_steps: int = 0):
        self.warmup_steps = warmup_steps

    def factor(self, step: int, epoch: int) -> float:
        return min(1.0, step / max(1, self.warmup_steps))


class WarmupCosine:
    """Linear warm-up, then half a cosine down to `final_factor` at `total_steps`."""

    def __init__(self, total_steps: int, warmup_steps: int = 500, final_factor: float = 0.01):
        # A run shorter than its warm-up would never reach its learning rate.
        self.warmup_steps = max(1, min(warmup_steps, total_steps // 3))
        self.total_steps = max(total_steps, self.warmup_steps + 1)
        self.final_factor = final_factor

    def factor(self, step: int, epoch: int) -> float:
        if step < self.warmup_steps:
            return step / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.final_factor + (1 - self.final_factor) * 0.5 * (1 + math.cos(math.pi * progress))


class WarmupHoldDecay:
    """Linear warm-up, a constant stretch, then exponential decay to `final_factor` (the tri-stage schedule)."""

    def __init__(
        self, total_steps: int, warmup_share: float = 0.1, hold_share: float = 0.4, final_factor: float = 0.02
    ):
        if warmup_share + hold_share >= 1:
            raise ValueError(f"warmup_share={warmup_share} and hold_share={hold_share} must leave room for the decay")
        self.warmup_steps = max(1, round(warmup_share * total_steps))
        self.hold_until = self.warmup_steps + round(hold_share * total_steps)
        self.total_steps = max(total_steps, self.hold_until + 1)
        self.final_factor = final_factor

    def factor(self, step: int, epoch: int) -> float:
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if step < self.hold_until:
            return 1.0
        progress = min(1.0, (step - self.hold_until) / (self.total_steps - self.hold_until))
        return self.final_factor**progress


class WarmupInverseSqrt:
    """Linear warm-up, then decay with the inverse square root of the step (Noam; WeNet's WarmupLR).

    The factor is 1 at `warmup_steps`. Where `total_steps` is given, warm-up takes a third of it at most: a short run
    would never reach its learning rate.
    """

    def __init__(self, warmup_steps: int = 25000, total_steps: int | None = None):
        self.warmup_steps = max(1, warmup_steps if total_steps is None else min(warmup_steps, total_steps // 3))

    def factor(self, step: int, epoch: int) -> float:
        step = max(1, step)
        return min(step / self.warmup_steps, (self.warmup_steps / step) ** 0.5)


class Eden:
    """Falls with the fourth root of steps and of epochs, after a short linear warm-up (icefall's zipformer recipe).

    (1 + (step / lr_steps)^2)^-1/4 * (1 + (epochs done / lr_epochs)^2)^-1/4, and for the first `warmup_steps` times a
    factor that rises from `warmup_start` to 1.
    """

    def __init__(
        self, lr_steps: float = 7500, lr_epochs: float = 3.5, warmup_steps: int = 500, warmup_start: float = 0.1
    ):
        self.lr_steps = lr_steps
        self.lr_epochs = lr_epochs
        self.warmup_steps = warmup_steps
        self.warmup_start = warmup_start

    def factor(self, step: int, epoch: int) -> float:
        in_steps = 1 + (step / self.lr_steps) ** 2
        in_epochs = 1 + ((epoch - 1) / self.lr_epochs) ** 2
        warmup = 1.0
        if step < self.warmup_steps:
            warmup = self.warmup_start + (1 - self.warmup_start) * step / self.warmup_steps
        return warmup * (in_steps * in_epochs) ** -0.25


def apply_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule, step: int, epoch: int) -> float:
    """Set the learning rate of every group for `step`; the first group's is returned."""
    factor = schedule.factor(step, epoch)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
    return optimizer.param_groups[0]["lr"]
