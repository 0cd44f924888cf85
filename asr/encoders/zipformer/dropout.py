"""What the Zipformer leaves out at random in training."""

from __future__ import annotations

import torch
from torch import Tensor

from asr.layers.random import chance
from asr.layers.schedule import Schedulable, Scheduled


class ChannelDropout(Scheduled):
    """Dropout of whole channels of an utterance: one draw serves all its frames. p: probability."""

    def __init__(self, p: Schedulable):
        super().__init__()
        self.p = p

    def forward(self, frames_BTD: Tensor) -> Tensor:
        p = self.now(self.p) if self.training else 0.0
        if p == 0.0:
            return frames_BTD
        kept = torch.rand(frames_BTD.size(0), 1, frames_BTD.size(-1), device=frames_BTD.device) >= p
        return frames_BTD * (kept / (1.0 - p)).to(frames_BTD.dtype)


class Skip(Scheduled):
    """Decides what to pass by in training. p: probability."""

    def __init__(self, p: Schedulable):
        super().__init__()
        self.p = p

    def batch(self) -> bool:
        """Whether the whole batch passes something by."""
        return self.training and chance(self.now(self.p))

    def kept(self, frames: Tensor) -> Tensor | None:
        """(B, 1, ...) of ones for the utterances that pass nothing by and zeros for the others; None when all do."""
        p = self.now(self.p) if self.training else 0.0
        if p == 0.0:
            return None
        shape = (frames.size(0), *[1] * (frames.dim() - 1))
        return (torch.rand(shape, device=frames.device) >= p).to(frames.dtype)


def add_kept(frames: Tensor, change: Tensor, kept: Tensor | None) -> Tensor:
    """The frames with the change added, where it is kept; in the type of the frames."""
    if kept is None:
        return frames + change
    return torch.addcmul(frames, change, kept.to(change.dtype))
