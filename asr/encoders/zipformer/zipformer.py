"""Zipformer: a faster and better encoder for automatic speech recognition (Yao et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.encoders.zipformer.dropout import Skip
from asr.encoders.zipformer.layer import ZipformerLayer
from asr.encoders.zipformer.options import check_options
from asr.encoders.zipformer.stack import Downsample, Stack
from asr.encoders.zipformer.subsampling import ConvNeXtSubsampling
from asr.layers.masks import length_mask, zero_padding
from asr.layers.schedule import PiecewiseLinear
from asr.types import Encoded

# Schedules count batches of `trainer.reference_duration` seconds, as published.
DROPOUT_BATCHES = 20000.0
WARMUP_BATCHES = 4000.0
# Probability that an utterance loses the upper channels, and again that it loses the uppermost of them.
CHANNEL_MASK_PROBABILITY = 0.125


class Zipformer(nn.Module):
    """A convolutional front end to half the frames, and stacks of layers at several lower frame rates.

    The output has the width of the widest stack: each channel comes from the last stack that has it.

    input_dim: mel bins F.
    num_layers, dims, unmasked_dims, feed_forward_dims, num_heads, kernel_sizes, downsampling: one number for each
        stack; its width, the channels that are never left out in training, the width of the second feed-forward module,
        the frames (odd) of the convolutions at the stack's own rate, its frames for one of the front end's.
    query_head_dim, value_head_dim, position_head_dim, position_dim: see `AttentionWeights` and `SelfAttention`.
    output_downsampling: frames of the front end for one output frame.
    subsampling_channels: of the front end's three convolutions; much of the time on a CPU goes to the last.
    mask_padding: false lets utterances see the padding behind them, in the front end and where frames are averaged. As
        icefall does: it reproduces that system's numbers in a batch, and needs finite padding.
    initial_dropout, dropout: of the feed-forward modules' and the front end's channels, at first and from batch 20000.

    Raises ValueError that names the option where lists differ in length or a number does not fit.
    """

    def __init__(
        self,
        input_dim: int,
        num_layers: list[int],
        dims: list[int],
        unmasked_dims: list[int],
        feed_forward_dims: list[int],
        num_heads: list[int],
        kernel_sizes: list[int],
        downsampling: list[int],
        query_head_dim: int = 32,
        value_head_dim: int = 12,
        position_head_dim: int = 4,
        position_dim: int = 48,
        output_downsampling: int = 2,
        subsampling_channels: Sequence[int] = (8, 32, 128),
        initial_dropout: float = 0.3,
        dropout: float = 0.1,
        mask_padding: bool = True,
    ):
        super().__init__()
        per_stack = {
            "num_layers": num_layers,
            "dims": dims,
            "unmasked_dims": unmasked_dims,
            "feed_forward_dims": feed_forward_dims,
            "num_heads": num_heads,
            "kernel_sizes": kernel_sizes,
            "downsampling": downsampling,
        }
        head = {
            "query_head_dim": query_head_dim,
            "value_head_dim": value_head_dim,
            "position_head_dim": position_head_dim,
            "position_dim": position_dim,
        }
        check_options(
            input_dim,
            per_stack,
            {**head, "output_downsampling": output_downsampling},
            {"initial_dropout": initial_dropout, "dropout": dropout},
            subsampling_channels,
        )
        self.dims = list(dims)
        self.unmasked_dims = list(unmasked_dims)
        self.output_dim = max(dims)
        self.mask_channels = Skip(CHANNEL_MASK_PROBABILITY)
        falling = PiecewiseLinear((0.0, initial_dropout), (DROPOUT_BATCHES, dropout))
        self.subsampling = ConvNeXtSubsampling(input_dim, dims[0], subsampling_channels, falling, mask_padding)
        self.stacks = nn.ModuleList()
        for index, factor in enumerate(downsampling):
            layers = [
                ZipformerLayer(
                    dim=dims[index],
                    num_heads=num_heads[index],
                    feed_forward_dim=feed_forward_dims[index],
                    kernel_size=kernel_sizes[index],
                    dropout=falling,
                    layer_drop=layer_drop,
                    **head,
                )
                for layer_drop in _layer_drops(index, len(dims), num_layers[index], factor)
            ]
            self.stacks.append(Stack(layers, dims[index], position_dim, factor, mask_padding))
        self.downsample = Downsample(output_downsampling, mask_padding) if output_downsampling > 1 else None

    def output_lens(self, lens_B: Tensor) -> Tensor:
        """Frames that remain after the front end and the last downsampling; 0 for inputs below 9 frames."""
        lens_B = self.subsampling.output_lens(lens_B)
        return lens_B if self.downsample is None else self.downsample.output_lens(lens_B)

    def forward(self, features_BTF: Tensor, lens_B: Tensor) -> Encoded:
        """Frames (B, T', D), in the type of the parameters."""
        dtype = self.subsampling.project.weight.dtype
        x, lens_B = self.subsampling(features_BTF.to(dtype), lens_B)
        # The sum over the modules keeps the parameters' precision, also where autocast multiplies in half of it.
        x = x.to(dtype)
        outputs = []
        for stack, dim, channel_mask_B1D in zip(self.stacks, self.dims, self._channel_masks(x), strict=True):
            x = stack(_with_width(x, dim), lens_B, channel_mask_B1D)
            outputs.append(x)
        x = _widest(outputs)
        if self.downsample is not None:
            x, lens_B = self.downsample(x, lens_B)
        return Encoded(zero_padding(x, length_mask(lens_B, x.size(1))), lens_B)

    def _channel_masks(self, frames_BTD: Tensor) -> list[Tensor | None]:
        """In training a mask (B, 1, D) for each stack; an utterance loses the same share of channels in all of them."""
        upper, uppermost = self.mask_channels.kept(frames_BTD), self.mask_channels.kept(frames_BTD)
        if upper is None or uppermost is None:
            return [None] * len(self.dims)
        masks: list[Tensor | None] = []
        for dim, unmasked in zip(self.dims, self.unmasked_dims, strict=True):
            middle = unmasked + (dim - unmasked) // 2
            mask = upper.repeat(1, 1, dim)
            mask[..., :unmasked] = 1.0
            mask[..., middle:] *= uppermost
            masks.append(mask)
        return masks


def _layer_drops(stack: int, num_stacks: int, num_layers: int, downsampling: int) -> list[PiecewiseLinear]:
    """For each layer of a stack the probability to pass it by: one after the other, the layers of one stack after those
    of another, they come in during the warm-up. The front end learns alone at first."""
    window = WARMUP_BATCHES / (num_stacks + 1)
    start, step = window * (stack + 1), window / num_layers
    final = 0.035 * downsampling**0.5
    return [
        PiecewiseLinear((start + step * layer, 0.5), (start + step * (layer + 1), final)) for layer in range(num_layers)
    ]


def _with_width(frames_BTD: Tensor, dim: int) -> Tensor:
    """The frames cut, or filled with zeros, to width `dim`."""
    return F.pad(frames_BTD, (0, dim - frames_BTD.size(-1)))


def _widest(outputs: list[Tensor]) -> Tensor:
    """Each channel from the last of the outputs that has it."""
    parts = [outputs[-1]]
    width = outputs[-1].size(-1)
    for output in reversed(outputs):
        if output.size(-1) > width:
            parts.append(output[..., width:])
            width = output.size(-1)
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
