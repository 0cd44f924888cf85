"""Strided 2-D convolutions that shorten the input of an encoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.layers.convolve import Conv2d
from asr.layers.masks import length_mask, zero_padding

FACTORS = (2, 4, 8)


class ConvSubsampling(nn.Module):
    """Two or three 3x3 convolutions with ReLU and a projection (Dong et al., Speech-Transformer, 2018; ESPnet's
    "conv2d"; factor 8 as in FastConformer, Rekesh et al., 2023).

    The convolutions do not pad time, so a valid output frame has seen valid input frames only. Each of stride 2 makes
    (T - 1) // 2 of T frames; there are as many as the factor has twos, and for factor 2 one of stride 1, which makes
    T - 2. An input below `min_frames` (7; 15 for factor 8) has no output frame.

    input_dim: mel bins F, at least `min_frames`. output_dim: width D. factor: 2, 4 or 8. channels: of the convolutions.
    """

    def __init__(self, input_dim: int, output_dim: int, factor: int = 4, channels: int = 64):
        super().__init__()
        if factor not in FACTORS:
            raise ValueError(f"subsampling {factor} is none of {FACTORS}")
        self.min_frames = 15 if factor == 8 else 7
        if input_dim < self.min_frames:
            raise ValueError(f"subsampling needs at least {self.min_frames} mel bins, got {input_dim}")
        self.factor = factor
        self.conv1 = Conv2d(1, channels, 3, stride=2)
        self.conv2 = Conv2d(channels, channels, 3, stride=min(2, factor // 2))
        self.conv3 = Conv2d(channels, channels, 3, stride=2) if factor == 8 else None
        self.project = nn.Linear(channels * self._output_size(input_dim), output_dim)
        # About half the time of the default layout on a CPU, and what tensor cores want.
        self.to(memory_format=torch.channels_last)

    def output_lens(self, lens_B: Tensor) -> Tensor:
        """Frames that remain of inputs of these lengths; 0 for those too short."""
        return self._output_size(lens_B).clamp(min=0)

    def forward(self, features_BTF: Tensor, lens_B: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T', D) and their lengths. T' is at least 1, so that later layers never meet an empty axis."""
        features_BTF = F.pad(features_BTF, (0, 0, 0, max(0, self.min_frames - features_BTF.size(1))))
        # One mask suffices: what padding leads to has no valid output frame, it must only be finite for the gradients.
        features_BTF = zero_padding(features_BTF, length_mask(lens_B, features_BTF.size(1)))
        x = features_BTF.unsqueeze(1).contiguous(memory_format=torch.channels_last)
        x = F.relu(self.conv1(x), inplace=True)
        x = F.relu(self.conv2(x), inplace=True)
        if self.conv3 is not None:
            x = F.relu(self.conv3(x), inplace=True)
        # Bin-major columns: in the channels-last layout this flattening moves nothing.
        return self.project(x.permute(0, 2, 3, 1).flatten(2)), self.output_lens(lens_B)

    def _output_size(self, size):
        halved = (size - 1) // 2
        if self.factor == 2:
            return halved - 2
        quarter = (halved - 1) // 2
        return quarter if self.factor == 4 else (quarter - 1) // 2
