"""Conformer: convolution-augmented Transformer for speech recognition (Gulati et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.layers.attention import RelativeSelfAttention
from asr.layers.convolution import ConvolutionModule
from asr.layers.dropout import Dropout
from asr.layers.feed_forward import FeedForward
from asr.layers.masks import length_mask, zero_padding
from asr.layers.positional import RelativePositionalEncoding
from asr.layers.subsampling import ConvSubsampling
from asr.types import Encoded


class Conformer(nn.Module):
    """Convolutional subsampling and a stack of Conformer blocks.

    input_dim: mel bins F.
    output_dim: width D of all blocks.
    num_layers, num_heads, feed_forward_dim, kernel_size: of the blocks; kernel_size in frames after subsampling, odd.
    macaron: two half-step feed-forward modules in a block, one at each end; otherwise one full step at the end.
    conv_norm: "batch_norm" or "layer_norm" in the convolution module.
    subsampling: 4 or 2 input frames for one output frame.
    subsampling_channels: of its convolutions; their cost grows with the square.
    dropout: of the input of the first block and of the output of every module.
    attention_dropout: of the attention weights.
    layer_drop: probability in training that an utterance passes a block by (LayerDrop, Fan et al., 2020).
    scale_input: multiply the input of the first block by sqrt(D).
    attention_scale: see `RelativeSelfAttention`.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int = 144,
        num_layers: int = 16,
        num_heads: int = 4,
        feed_forward_dim: int = 576,
        kernel_size: int = 31,
        macaron: bool = True,
        conv_norm: str = "batch_norm",
        subsampling: int = 4,
        subsampling_channels: int = 144,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        layer_drop: float = 0.0,
        scale_input: bool = False,
        attention_scale: str = "query",
    ):
        super().__init__()
        if not 0.0 <= layer_drop < 1.0:
            raise ValueError(f"layer_drop {layer_drop} must lie in [0, 1)")
        self.output_dim = output_dim
        self.layer_drop = layer_drop
        self.subsampling = ConvSubsampling(input_dim, output_dim, subsampling, subsampling_channels)
        self.positions = RelativePositionalEncoding(output_dim, scale_input)
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            ConformerBlock(
                attention=RelativeSelfAttention(output_dim, num_heads, attention_dropout, attention_scale),
                convolution=ConvolutionModule(output_dim, kernel_size, conv_norm, dropout),
                feed_forward=FeedForward(output_dim, feed_forward_dim, dropout),
                macaron=FeedForward(output_dim, feed_forward_dim, dropout) if macaron else None,
                dim=output_dim,
                dropout=dropout,
            )
            for _ in range(num_layers)
        )

    def output_lens(self, lens_B: Tensor) -> Tensor:
        """Frames that remain after subsampling; 0 for inputs below 7 frames."""
        return self.subsampling.output_lens(lens_B)

    def forward(self, features_BTF: Tensor, lens_B: Tensor) -> Encoded:
        """Frames (B, T', D), in the type of the parameters."""
        dtype = self.subsampling.project.weight.dtype
        x, lens_B = self.subsampling(features_BTF.to(dtype), lens_B)
        # The sum over the blocks keeps the parameters' precision, also where autocast multiplies in half of it.
        x, positions = self.positions(x.to(dtype))
        x = self.dropout(x)
        mask_BT = length_mask(lens_B, x.size(1))
        for block in self.blocks:
            x = self._maybe_skip(x, block(x, positions, mask_BT))
        return Encoded(zero_padding(x, mask_BT), lens_B)

    def _maybe_skip(self, x: Tensor, transformed: Tensor) -> Tensor:
        """For each utterance the block's output or, with probability `layer_drop` in training, its input.

        The block is computed all the same, so that its parameters have a gradient in every step and on every rank.
        """
        if not self.training or self.layer_drop == 0.0:
            return transformed
        skip = torch.rand(x.size(0), 1, 1, device=x.device) < self.layer_drop
        return torch.where(skip, x, transformed)


class ConformerBlock(nn.Module):
    """Half a feed-forward step, self-attention, convolution, half a feed-forward step, norm; each on a normed input.

    macaron: the first feed-forward module; without it the last one makes a full step.
    dim: width D. dropout: after attention; the other modules have their own.
    """

    def __init__(
        self,
        attention: RelativeSelfAttention,
        convolution: ConvolutionModule,
        feed_forward: FeedForward,
        macaron: FeedForward | None,
        dim: int,
        dropout: float,
    ):
        super().__init__()
        self.macaron = macaron
        self.macaron_norm = nn.LayerNorm(dim) if macaron is not None else None
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = attention
        self.attention_dropout = Dropout(dropout)
        self.convolution_norm = nn.LayerNorm(dim)
        self.convolution = convolution
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = feed_forward
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, positions_RD: Tensor, mask_BT: Tensor) -> Tensor:
        step = 1.0
        if self.macaron is not None and self.macaron_norm is not None:
            step = 0.5
            x = torch.add(x, self.macaron(self.macaron_norm(x)), alpha=step)
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), positions_RD, mask_BT.unsqueeze(1)))
        x = x + self.convolution(self.convolution_norm(x), mask_BT)
        x = torch.add(x, self.feed_forward(self.feed_forward_norm(x)), alpha=step)
        return self.norm(x)
