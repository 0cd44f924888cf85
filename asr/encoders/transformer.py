"""Transformer encoder (Vaswani et al., 2017; Dong et al., Speech-Transformer, 2018), with full or linear attention."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from asr.layers.dropout import Dropout
from asr.layers.masks import length_mask, zero_padding
from asr.layers.positional import sinusoids
from asr.layers.subsampling import ConvSubsampling
from asr.layers.transformer_layer import TransformerLayer
from asr.types import Encoded


class Transformer(nn.Module):
    """Convolutional subsampling, absolute positions and a stack of layers with norms before the modules.

    input_dim: mel bins F.
    output_dim: width D of all layers, even.
    num_layers, num_heads, feed_forward_dim: of the layers.
    attention: "full", or "linear" (Katharopoulos et al., 2020) in time and memory linear in the number of frames.
    subsampling: 8, 4 or 2 input frames for one output frame.
    subsampling_channels: of its convolutions; their cost grows with the square.
    dropout: of the input of the first layer and of the output of every module.
    attention_dropout: of the attention weights; linear attention has none.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int = 256,
        num_layers: int = 12,
        num_heads: int = 4,
        feed_forward_dim: int = 2048,
        attention: Literal["full", "linear"] = "full",
        subsampling: int = 4,
        subsampling_channels: int = 256,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
    ):
        super().__init__()
        if output_dim % 2:
            raise ValueError(f"positions need an even width, got output_dim {output_dim}")
        self.output_dim = output_dim
        self.subsampling = ConvSubsampling(input_dim, output_dim, subsampling, subsampling_channels)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                output_dim, num_heads, feed_forward_dim, dropout, attention, causal=False, cross=False,
                self_attention_dropout=attention_dropout,
            )
            for _ in range(num_layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(output_dim)

    def output_lens(self, lens_B: Tensor) -> Tensor:
        """Frames that remain after subsampling; 0 for inputs that are too short."""
        return self.subsampling.output_lens(lens_B)

    def forward(self, features_BTF: Tensor, lens_B: Tensor) -> Encoded:
        """Frames (B, T', D), in the type of the parameters."""
        dtype = self.subsampling.project.weight.dtype
        x, lens_B = self.subsampling(features_BTF.to(dtype), lens_B)
        positions = sinusoids(torch.arange(x.size(1), device=x.device), self.output_dim)
        # The sum over the layers keeps the parameters' precision, also where autocast multiplies in half of it.
        x = self.dropout(x.to(dtype) * math.sqrt(self.output_dim) + positions.to(dtype))
        for layer in self.layers:
            x = layer(x, lens_B)
        return Encoded(zero_padding(self.norm(x), length_mask(lens_B, x.size(1))), lens_B)
