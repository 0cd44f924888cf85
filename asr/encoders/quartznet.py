"""QuartzNet: blocks of time-channel separable convolutions (Kriman et al., 2020), and Citrinet's, which squeeze and
excite as well (Majumdar et al., 2021)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.layers.convolve import convolve
from asr.layers.dropout import Dropout
from asr.layers.masks import length_mask, zero_padding
from asr.layers.norm import MaskedBatchNorm
from asr.types import Encoded

_EPS = 1e-3  # of batch norms, as NeMo has it


class QuartzNet(nn.Module):
    """A stack of blocks, each of `repeats` times (convolution, batch norm, ReLU, dropout) beside a shortcut.

    input_dim: mel bins F. The lists have one entry for each block:
    channels: output width; the last one is `output_dim`.
    kernel_sizes: frames, odd. repeats: convolutions in a row.
    strides: of the last convolution and of the shortcut; None: 2 in the first block, 1 elsewhere.
    dilations: None: 2 in the last block but one, 1 elsewhere.
    residual: whether the input is added, through a pointwise convolution and batch norm, before the last ReLU; None: in
        all but the first and the last two.
    separable: a depthwise convolution over time and a pointwise one, or one over both; None: in all but the last.
    dropout: one for all blocks, or a list.
    squeeze_ratio: width of a block over that of its squeeze-and-excitation layer; 0 for none.

    Raises ValueError where lists differ in length, a kernel is even, or a block has a stride and a dilation.
    """

    def __init__(
        self,
        input_dim: int,
        channels: list[int],
        kernel_sizes: list[int],
        repeats: list[int],
        strides: list[int] | None = None,
        dilations: list[int] | None = None,
        residual: list[bool] | None = None,
        separable: list[bool] | None = None,
        dropout: float | list[float] = 0.0,
        squeeze_ratio: int = 0,
    ):
        super().__init__()
        count = len(channels)

        def of_blocks(name: str, values: list[Any] | None, default: list[Any]) -> list[Any]:
            values = default if values is None else values
            if len(values) != count:
                raise ValueError(f"encoder.{name} has {len(values)} entries for the {count} blocks of encoder.channels")
            return values

        if count < 3 and None in (strides, dilations, residual, separable):
            raise ValueError(f"encoder.channels={channels}: three blocks are the least; for fewer, give all lists")
        self.strides = of_blocks("strides", strides, [2] + [1] * (count - 1))
        dropouts = dropout if isinstance(dropout, list) else [dropout] * count
        self.output_dim = channels[-1]
        self.blocks = nn.ModuleList(
            QuartzNetBlock(*sizes)
            for sizes in zip(
                [input_dim, *channels[:-1]],
                channels,
                of_blocks("kernel_sizes", kernel_sizes, []),
                of_blocks("repeats", repeats, []),
                self.strides,
                of_blocks("dilations", dilations, [1] * (count - 2) + [2, 1]),
                of_blocks("residual", residual, [False] + [True] * (count - 3) + [False, False]),
                of_blocks("separable", separable, [True] * (count - 1) + [False]),
                of_blocks("dropout", dropouts, []),
                [squeeze_ratio] * count,
                strict=True,
            )
        )

    def output_lens(self, lens_B: Tensor) -> Tensor:
        """Lengths divided by each stride, rounded up: an input of any frame has an output frame."""
        for stride in self.strides:
            lens_B = (lens_B + stride - 1) // stride
        return lens_B

    def forward(self, features_BTF: Tensor, lens_B: Tensor) -> Encoded:
        """Frames (B, T', D), in the type of the parameters."""
        features_BTF = F.pad(features_BTF, (0, 0, 0, max(0, 1 - features_BTF.size(1))))
        mask_BT = length_mask(lens_B, features_BTF.size(1))
        dtype = next(self.parameters()).dtype
        x = zero_padding(features_BTF.to(dtype), mask_BT)
        for block in self.blocks:
            x, mask_BT = block(x, mask_BT)
        return Encoded(zero_padding(x.to(dtype), mask_BT), self.output_lens(lens_B))


class QuartzNetBlock(nn.Module):
    """(Convolution, batch norm, ReLU, dropout) `repeats` times; the last ReLU follows the sum with the shortcut."""

    def __init__(
        self,
        input_dim: int,
        dim: int,
        kernel_size: int,
        repeats: int,
        stride: int,
        dilation: int,
        residual: bool,
        separable: bool,
        dropout: float,
        squeeze_ratio: int,
    ):
        super().__init__()
        self.layers = nn.ModuleList(
            ConvolutionNorm(
                dim if index else input_dim,
                dim,
                kernel_size,
                stride if index == repeats - 1 else 1,
                dilation,
                separable,
            )
            for index in range(repeats)
        )
        self.squeeze = SqueezeExcitation(dim, squeeze_ratio) if squeeze_ratio else None
        self.shortcut = ConvolutionNorm(input_dim, dim, 1, stride, 1, separable=False) if residual else None
        self.dropout = Dropout(dropout)

    def forward(self, frames_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, ceil(T / stride), D) and their mask; padding must be finite."""
        x, mask = frames_BTD, mask_BT
        for index, layer in enumerate(self.layers):
            if index:
                x = self.dropout(F.relu(x))
            x, mask = layer(x, mask)
        if self.squeeze is not None:
            x = self.squeeze(x, mask)
        if self.shortcut is not None:
            x = x + self.shortcut(frames_BTD, mask_BT)[0]
        return self.dropout(F.relu(x)), mask


class ConvolutionNorm(nn.Module):
    """A convolution over time, a pointwise one after it where they are separate, and batch norm over valid frames."""

    def __init__(self, input_dim: int, dim: int, kernel_size: int, stride: int, dilation: int, separable: bool):
        super().__init__()
        if kernel_size % 2 == 0 or (stride > 1 and dilation > 1):
            raise ValueError(f"kernel size {kernel_size} must be odd; stride {stride} or dilation {dilation} must be 1")
        self.stride = stride
        # No biases: batch norm takes every mean away.
        self.convolution = nn.Conv1d(
            input_dim,
            input_dim if separable else dim,
            kernel_size,
            stride,
            dilation=dilation,
            groups=input_dim if separable else 1,
            bias=False,
        )
        self.pointwise = nn.Linear(input_dim, dim, bias=False) if separable else None
        self.norm = MaskedBatchNorm(dim, eps=_EPS)

    def forward(self, frames_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, ceil(T / stride), D) and their mask. The kernel sees zeros as padding, which must be finite."""
        x = self._convolve(zero_padding(frames_BTD, mask_BT))
        if self.pointwise is not None:
            x = self.pointwise(x)
        mask_BT = mask_BT[:, :: self.stride]
        return self.norm(x, mask_BT), mask_BT

    def _convolve(self, x: Tensor) -> Tensor:
        conv, kernel_size = self.convolution, self.convolution.kernel_size[0]
        if kernel_size == 1 and conv.groups == 1:
            return F.linear(x[:, :: self.stride], conv.weight.squeeze(2))
        # With dilation d every d-th frame is a sequence of its own: PyTorch is ten times as slow when told of dilation.
        num_frames, dilation = x.size(1), conv.dilation[0]
        if dilation > 1:
            x = F.pad(x, (0, 0, 0, -num_frames % dilation)).unflatten(1, (-1, dilation)).transpose(1, 2).flatten(0, 1)
        # As an image of height 1, which is channels-last in memory as it is: see the Conformer's convolution module.
        image = x.transpose(1, 2).unsqueeze(2)
        padding, stride = (0, kernel_size // 2), (1, self.stride)
        image = convolve(image, conv.weight.unsqueeze(2), None, stride, padding, conv.groups)
        x = image.squeeze(2).transpose(1, 2)
        if dilation > 1:
            x = x.unflatten(0, (-1, dilation)).transpose(1, 2).flatten(1, 2)[:, :num_frames]
        return x


class SqueezeExcitation(nn.Module):
    """Scales every channel by what the mean over all valid frames says of it (Hu et al., 2018)."""

    def __init__(self, dim: int, ratio: int):
        super().__init__()
        self.squeeze = nn.Linear(dim, dim // ratio, bias=False)
        self.excite = nn.Linear(dim // ratio, dim, bias=False)

    def forward(self, frames_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        count_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
        mean_BD = zero_padding(frames_BTD, mask_BT).float().sum(1) / count_B1
        scale_BD = torch.sigmoid(self.excite(F.relu(self.squeeze(mean_BD.to(frames_BTD.dtype)))))
        return frames_BTD * scale_BD.unsqueeze(1)
