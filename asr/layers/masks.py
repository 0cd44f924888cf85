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


def chunk_mask(num_frames: int, chunk_size: int, left_chunks: int | None, device: torch.device) -> Tensor:
    """(T, T) mask of what each frame may look at: its own chunk and `left_chunks` before it, all for None.

    Chunks of `chunk_size` frames are counted from the first frame (U2, Zhang et al., 2020).
    """
    chunk_T = torch.arange(num_frames, device=device) // chunk_size
    behind_TT = chunk_T.unsqueeze(1) - chunk_T
    mask_TT = behind_TT >= 0
    return mask_TT if left_chunks is None else mask_TT & (behind_TT <= left_chunks)
