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
            raise ValueError(f"positions need an even width, got output_dim {dim}")
        self.dim = dim
        self.input_scale = math.sqrt(dim) if scale_input else 1.0
        # A plain attribute: a buffer would be rounded by module.to(torch.bfloat16).
        self._table = torch.empty(0, dim)

    def forward(self, frames_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """The frames (scaled where asked) and the (2T, D) encodings of the distances T-1, T-2, ..., -T."""
        num_frames = frames_BTD.size(1)
        return self.scale(frames_BTD), self.of_distances(num_frames, num_frames, frames_BTD)

    def scale(self, frames_BTD: Tensor) -> Tensor:
        """The frames times sqrt(D), where that was asked for."""
        return frames_BTD if self.input_scale == 1.0 else frames_BTD * self.input_scale

    def of_distances(self, num_queries: int, num_keys: int, like: Tensor) -> Tensor:
        """(S + T, D) encodings of the distances S-1 ... -T of the last T = `num_queries` of S = `num_keys` frames.

        Row c encodes S - 1 - c, the distance of a query to a key before it. The last row belongs to no pair of frames;
        with it the relative shift is a matter of views (see `relative_shift`). Device and type are those of `like`.
        """
        centre = self._grow(max(num_queries, num_keys), like.device)
        return self._table[centre - num_keys : centre + num_queries].to(like.dtype)

    def of_positions(self, start: int, stop: int, like: Tensor) -> Tensor:
        """(stop - start, D) encodings of the positions start ... stop - 1, with the device and type of `like`."""
        centre = self._grow(max(stop, -start), like.device)
        return self._table[centre - stop : centre - start].flip(0).to(like.dtype)

    def _grow(self, num_frames: int, device: torch.device) -> int:
        """Let the table reach from distance num_frames - 1 to -num_frames at least; its middle is returned."""
        if self._table.size(0) < 2 * num_frames or self._table.device != device:
            self._table = self._make_table(num_frames, device)
        return self._table.size(0) // 2

    # A table that first grew under inference_mode must still serve a later training step.
    @torch.inference_mode(False)
    def _make_table(self, num_frames: int, device: torch.device) -> Tensor:
        return sinusoids(torch.arange(num_frames - 1, -num_frames - 1, -1, device=device), self.dim)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """(..., D) fp32 sines and cosines, by turns, of positions (...) times D/2 frequencies from 1 down to 1/10000."""
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * torch.exp(steps * (-math.log(10000.0) / dim))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
