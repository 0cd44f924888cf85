"""Relative sinusoidal positions (Dai et al., Transformer-XL, 2019), as the Conformer uses them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RelativePositionalEncoding(nn.Module):
    """Encodings of the distances between frames, for inputs of any length.

    The table belongs to distances, not to a maximal length: it grows when a longer input comes, and what a distance is
    encoded as never depends on its size. It is computed in fp32 and is no part of the state dict.

    dim: width D, even.
    scale_input: multiply the input by sqrt(D), as the original Transformer and ESPnet do.
    """

    def __init__(self, dim: int, scale_input: bool = False):
        super().__init__()
        if dim % 2:
            raise ValueError(f"positions need an even width, got {dim}")
        self.dim = dim
        self.input_scale = math.sqrt(dim) if scale_input else 1.0
        # A plain attribute: a buffer would be rounded by module.to(torch.bfloat16).
        self._table = torch.empty(0, dim)

    def forward(self, frames_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """The frames (scaled where asked) and the (2T, D) encodings of the distances T-1, T-2, ..., -T.

        Row c encodes the distance i - j = T - 1 - c of a query frame i to a key frame j. The last row belongs to no
        pair of frames; with it the relative shift is a matter of views (see `relative_shift`).
        """
        if self.input_scale != 1.0:
            frames_BTD = frames_BTD * self.input_scale
        return frames_BTD, self.encodings(frames_BTD.size(1), frames_BTD)

    def encodings(self, num_frames: int, like: Tensor) -> Tensor:
        """(2T, D) encodings for T = `num_frames`, with the device and type of `like`."""
        if self._table.size(0) < 2 * num_frames or self._table.device != like.device:
            self._table = self._make_table(num_frames, like.device)
        centre = self._table.size(0) // 2
        return self._table[centre - num_frames : centre + num_frames].to(like.dtype)

    # A table that first grew under inference_mode must still serve a later training step.
    @torch.inference_mode(False)
    def _make_table(self, num_frames: int, device: torch.device) -> Tensor:
        distances = torch.arange(num_frames - 1, -num_frames - 1, -1, device=device, dtype=torch.float32)
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        angles = distances.unsqueeze(1) * torch.exp(steps * (-math.log(10000.0) / self.dim))
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
