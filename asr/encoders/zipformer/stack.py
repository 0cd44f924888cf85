"""A stack of Zipformer layers at its own frame rate, and the changes of rate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.encoders.zipformer.layer import Bypass, ZipformerLayer
from asr.encoders.zipformer.positions import CompactPositions
from asr.layers.dropout import Dropout
from asr.layers.masks import length_mask

POSITION_DROPOUT = 0.15


class Stack(nn.Module):
    """Layers that see every `downsampling`-th frame, with a bypass around them.

    layers: of one width D. position_dim: width of the encodings of distances. mask_padding: see `Zipformer`.
    """

    def __init__(
        self, layers: list[ZipformerLayer], dim: int, position_dim: int, downsampling: int, mask_padding: bool = True
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.positions = CompactPositions(position_dim)
        self.position_dropout = Dropout(POSITION_DROPOUT)
        self.downsample = Downsample(downsampling, mask_padding) if downsampling > 1 else None
        self.combine = Bypass(dim) if downsampling > 1 else None

    def forward(self, frames_BTD: Tensor, lens_B: Tensor, channel_mask_B1D: Tensor | None) -> Tensor:
        """(B, T, D) of frames (B, T, D) with these valid lengths. channel_mask: 0 for channels to be left out."""
        x = frames_BTD
        if self.downsample is not None:
            x, lens_B = self.downsample(x, lens_B)
        mask_BT = length_mask(lens_B, x.size(1))
        positions_RP = self.position_dropout(self.positions.of_distances(x.size(1), x.size(1), x))
        x = _masked(x, channel_mask_B1D)
        for layer in self.layers:
            x = _masked(layer(x, positions_RP, mask_BT), channel_mask_B1D)
        if self.downsample is None or self.combine is None:
            return x
        return self.combine(frames_BTD, upsample(x, self.downsample.factor, frames_BTD.size(1)))


def _masked(frames_BTD: Tensor, channel_mask_B1D: Tensor | None) -> Tensor:
    return frames_BTD if channel_mask_B1D is None else frames_BTD * channel_mask_B1D


class Downsample(nn.Module):
    """Weighted means of `factor` successive frames; the last valid frame stands in for those beyond it.

    mask_padding: see `Zipformer`.
    """

    def __init__(self, factor: int, mask_padding: bool = True):
        super().__init__()
        self.factor = factor
        self.mask_padding = mask_padding
        self.bias = nn.Parameter(torch.zeros(factor))

    def output_lens(self, lens_B: Tensor) -> Tensor:
        return (lens_B + self.factor - 1) // self.factor

    def forward(self, frames_BTD: Tensor, lens_B: Tensor) -> tuple[Tensor, Tensor]:
        """(B, ceil(T / factor), D) and the new lengths; padding, which must be finite, weighs nothing."""
        x = F.pad(frames_BTD, (0, 0, 0, -frames_BTD.size(1) % self.factor))
        weights = self.bias.float().softmax(0)
        from_here_on = weights.flip(0).cumsum(0).flip(0)
        weights, from_here_on = (of_group.repeat(x.size(1) // self.factor) for of_group in (weights, from_here_on))
        last_B = lens_B if self.mask_padding else torch.full_like(lens_B, frames_BTD.size(1))
        left = last_B.unsqueeze(1) - 1 - torch.arange(x.size(1), device=x.device)
        weights_BT = torch.where(left > 0, weights, from_here_on).masked_fill(left < 0, 0.0).to(x.dtype)
        x = (x * weights_BT.unsqueeze(-1)).unflatten(1, (-1, self.factor)).sum(2)
        return x, self.output_lens(lens_B)


def upsample(frames_BTD: Tensor, factor: int, num_frames: int) -> Tensor:
    """Each frame `factor` times, `num_frames` in all."""
    return frames_BTD.repeat_interleave(factor, dim=1)[:, :num_frames]
