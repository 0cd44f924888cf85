"""Masks over time. True marks a valid frame, everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def length_mask(lens_B: Tensor, num_frames: int) -> Tensor:
    """(B, T) mask of the frames below each length, for T = `num_frames`."""
    return torch.arange(num_frames, device=lens_B.device) < lens_B.unsqueeze(1)


def zero_padding(frames_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """The frames with zeros wherever the mask is False, even where the padding holds NaN or infinity."""
    return frames_BTD.masked_fill(~mask_BT.unsqueeze(-1), 0.0)
