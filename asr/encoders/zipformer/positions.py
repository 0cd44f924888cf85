"""Compact relative positions: fine near a frame, coarse far away (Yao et al., Zipformer, 2023)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asr.layers.positional import RelativePositionalEncoding


class CompactPositions(RelativePositionalEncoding):
    """Sines and cosines of a distance that is squeezed by a logarithm and an arctangent into half a circle.

    Distances up to about sqrt(P) are told apart exactly, large ones hardly: 1000 and 1001 frames are much the same to
    attention. The last column is 1, a bias.

    dim: width P, even.
    """

    @torch.inference_mode(False)
    def _make_table(self, num_frames: int, device: torch.device) -> Tensor:
        distances = torch.arange(num_frames - 1, -num_frames - 1, -1, device=device, dtype=torch.float32)
        unit = math.sqrt(self.dim)
        squeezed = unit * -distances.sign() * torch.log1p(distances.abs() / unit)
        angles = torch.atan(squeezed * (2 * math.pi / self.dim)).unsqueeze(1)
        angles = angles * torch.arange(1, self.dim // 2 + 1, device=device)
        table = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)
        table[:, -1] = 1.0
        return table
