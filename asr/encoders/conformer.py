"""Conformer: convolution-augmented Transformer for speech recognition (Gulati et al., 2020), streaming as in U2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.layers.attention import RelativeSelfAttention
from asr.layers.convolution import ConvolutionModule
from asr.layers.dropout import Dropout
from asr.layers.feed_forward import FeedForward
from asr.layers.masks import chunk_mask, length_mask, zero_padding
from asr.layers.positional import RelativePositionalEncoding
from asr.layers.random import chance
from asr.layers.subsampling import ConvSubsampling
from asr.types import Encoded


class ChunkState(NamedTuple):
    """What the frames of a stream so far leave for those to come; N blocks, L frames that are still looked at.

    keys, values: (N, H, B, L, D / H) of the blocks' attention. valid: (B, L) whether each of these frames exists.
    convolution: (N, B, kernel - 1, D). offset: () number of frames so far.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    convolution: Tensor
    offset: Tensor


class Conformer(nn.Module):
    """Convolutional subsampling and a stack of Conformer blocks.

    input_dim: mel bins F.
    output_dim: width D of all blocks.
    num_layers, num_heads, feed_forward_dim, kernel_size: of the blocks; kernel_size in frames after subsampling, odd
        unless causal.
    macaron: two half-step feed-forward modules in a block, one at each end; otherwise one full step at the end.
    conv_norm: "batch_norm" or "layer_norm" in the convolution module.
    subsampling: 4 or 2 input frames for one output frame.
    subsampling_channels: of its convolutions; their cost grows with the square.
    dropout: of the input of the first block and of the output of every module.
    attention_dropout: of the attention weights.
    layer_drop: probability in training that an utterance passes a block by (LayerDrop, Fan et al., 2020).
    scale_input: multiply the input of the first block by sqrt(D).
    attention_scale, relative_shift: `scale` and `shift` of `RelativeSelfAttention`.
    final_norm: one more layer norm after the last block, as in WeNet.

    Streaming (U2, Zhang et al., 2020), which needs causal convolutions:
    causal: the convolution modules do not look ahead.
    chunk_probability: share of training batches that see each utterance through chunks of one random size, 1 to
        max_chunk frames, with all that was before: one model for every chunk size.
    chunk_size: frames of a chunk in evaluation, null for the whole utterance; left_chunks: chunks before its own that
        a frame may look at, null for all. Latency is a chunk and the 3 to 6 input frames that subsampling looks ahead.
    streaming: compute evaluation with chunk_size chunk by chunk, as live audio must; the result is the same.
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
        relative_shift: bool = True,
        final_norm: bool = False,
        causal: bool = False,
        chunk_probability: float = 0.0,
        max_chunk: int = 25,
        chunk_size: int | None = None,
        left_chunks: int | None = None,
        streaming: bool = False,
    ):
        super().__init__()
        if not 0.0 <= layer_drop < 1.0:
            raise ValueError(f"layer_drop {layer_drop} must lie in [0, 1)")
        _check_chunks(causal, chunk_size, left_chunks, streaming, chunk_probability)
        self.output_dim = output_dim
        self.layer_drop = layer_drop
        self.chunk_size, self.left_chunks, self.streaming = chunk_size, left_chunks, streaming
        self.random_chunk = RandomChunk(chunk_probability, max_chunk)
        self.subsampling = ConvSubsampling(input_dim, output_dim, subsampling, subsampling_channels)
        self.positions = RelativePositionalEncoding(output_dim, scale_input)
        self.dropout = Dropout(dropout)
        self.blocks = nn.ModuleList(
            ConformerBlock(
                attention=RelativeSelfAttention(
                    output_dim, num_heads, attention_dropout, attention_scale, relative_shift
                ),
                convolution=ConvolutionModule(output_dim, kernel_size, conv_norm, dropout, causal),
                feed_forward=FeedForward(output_dim, feed_forward_dim, dropout),
                macaron=FeedForward(output_dim, feed_forward_dim, dropout) if macaron else None,
                dim=output_dim,
                dropout=dropout,
            )
            for _ in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(output_dim) if final_norm else nn.Identity()
        self.relative_shift = relative_shift

    def output_lens(self, lens_B: Tensor) -> Tensor:
        """Frames that remain after subsampling; 0 for inputs below 7 frames."""
        return self.subsampling.output_lens(lens_B)

    def forward(self, features_BTF: Tensor, lens_B: Tensor) -> Encoded:
        """Frames (B, T', D), in the type of the parameters."""
        chunk_size = self.random_chunk() if self.training else self.chunk_size
        if self.streaming and chunk_size and not self.training:
            return self._forward_chunk_by_chunk(features_BTF, lens_B, chunk_size)
        x, lens_B = self._subsample(features_BTF, lens_B)
        mask_BT = length_mask(lens_B, x.size(1))
        mask = mask_BT.unsqueeze(1)
        if chunk_size:
            left_chunks = None if self.training else self.left_chunks
            mask = mask & chunk_mask(x.size(1), chunk_size, left_chunks, x.device)
        positions = self._positions(x.size(1), 0, 0, x)
        for block in self.blocks:
            x = self._maybe_skip(x, block(x, positions, mask, mask_BT))
        return Encoded(zero_padding(self.final_norm(x), mask_BT), lens_B)

    def start_stream(self, batch_size: int) -> ChunkState:
        """The state before the first chunk. With `left_chunks` its sizes stay as they are from the first chunk on."""
        attention = self._blocks[0].attention
        length = 0 if self.left_chunks is None else self.left_chunks * (self.chunk_size or 0)
        like = attention.query.weight
        keys = like.new_zeros(len(self.blocks), attention.num_heads, batch_size, length, attention.head_dim)
        return ChunkState(
            keys=keys,
            values=torch.zeros_like(keys),
            valid=torch.zeros(batch_size, length, dtype=torch.bool, device=like.device),
            convolution=torch.stack([block.convolution.past(batch_size) for block in self._blocks]),
            offset=torch.zeros((), dtype=torch.int64),
        )

    def forward_chunk(self, features_BTF: Tensor, lens_B: Tensor, state: ChunkState) -> tuple[Encoded, ChunkState]:
        """One chunk of a stream in evaluation: `chunk_size` frames, or fewer in the last one.

        features_BTF: the inputs that these frames are made of: subsampling * chunk_size and those it looks ahead,
            which come again in the next chunk (see `chunk_inputs`). lens_B: valid ones, 0 where a stream has ended.
        """
        x, lens_B = self._subsample(features_BTF, lens_B)
        mask_BT = length_mask(lens_B, x.size(1))
        past = state.valid.size(1)
        valid = torch.cat([state.valid, mask_BT], dim=1)
        positions = self._positions(x.size(1), past, int(state.offset), x)
        first = 0 if self.left_chunks is None else x.size(1)  # as many as there were are kept, or all
        keys, values, convolution = [], [], []
        for index, block in enumerate(self._blocks):
            caches = (state.keys[index], state.values[index]), state.convolution[index]
            x, (key, value), kept = block.forward_chunk(x, positions, valid.unsqueeze(1), mask_BT, *caches)
            keys.append(key[:, :, first:])
            values.append(value[:, :, first:])
            convolution.append(kept)
        encoded = Encoded(zero_padding(self.final_norm(x), mask_BT), lens_B)
        return encoded, ChunkState(
            torch.stack(keys), torch.stack(values), valid[:, first:], torch.stack(convolution), state.offset + x.size(1)
        )

    def chunk_inputs(self, chunk_size: int) -> tuple[int, int]:
        """Input frames that a chunk is made of, and how many later the next chunk begins."""
        stride = self.subsampling.factor * chunk_size
        return stride + self.subsampling.min_frames - self.subsampling.factor, stride

    def _forward_chunk_by_chunk(self, features_BTF: Tensor, lens_B: Tensor, chunk_size: int) -> Encoded:
        window, stride = self.chunk_inputs(chunk_size)
        total = self.output_lens(lens_B)
        state = self.start_stream(len(lens_B))
        chunks = []
        for start in range(0, max(1, int(total.max())) * self.subsampling.factor, stride):
            inputs = features_BTF[:, start : start + window]
            encoded, state = self.forward_chunk(inputs, (lens_B - start).clamp(0, inputs.size(1)), state)
            chunks.append(encoded.frames)
        return Encoded(torch.cat(chunks, dim=1), total)

    def _subsample(self, features_BTF: Tensor, lens_B: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the first block and its lengths."""
        dtype = self.subsampling.project.weight.dtype
        x, lens_B = self.subsampling(features_BTF.to(dtype), lens_B)
        # The sum over the blocks keeps the parameters' precision, also where autocast multiplies in half of it.
        return self.dropout(self.positions.scale(x.to(dtype))), lens_B

    def _positions(self, num_frames: int, past: int, offset: int, like: Tensor) -> Tensor:
        """Encodings for `num_frames` queries, the first of which is frame `offset`, and `past` keys before them."""
        if self.relative_shift:
            return self.positions.of_distances(num_frames, past + num_frames, like)
        return self.positions.of_positions(offset - past, offset + num_frames, like)

    @property
    def _blocks(self) -> list[ConformerBlock]:
        return [block for block in self.blocks if isinstance(block, ConformerBlock)]

    def _maybe_skip(self, x: Tensor, transformed: Tensor) -> Tensor:
        """For each utterance the block's output or, with probability `layer_drop` in training, its input.

        The block is computed all the same, so that its parameters have a gradient in every step and on every rank.
        """
        if not self.training or self.layer_drop == 0.0:
            return transformed
        skip = torch.rand(x.size(0), 1, 1, device=x.device) < self.layer_drop
        return torch.where(skip, x, transformed)


def _check_chunks(
    causal: bool, chunk_size: int | None, left_chunks: int | None, streaming: bool, chunk_probability: float
) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"encoder.chunk_size={chunk_size}: give a number of frames from 1, or null for all")
    if left_chunks is not None and left_chunks < 0:
        raise ValueError(f"encoder.left_chunks={left_chunks}: give 0 or more, or null for all")
    if streaming and chunk_size is None:
        raise ValueError("encoder.streaming=true: give encoder.chunk_size as well")
    if not causal and (chunk_size is not None or chunk_probability > 0):
        raise ValueError(
            f"encoder.chunk_size={chunk_size}, encoder.chunk_probability={chunk_probability}: chunks need "
            "encoder.causal=true, in training too, as in encoder=conformer_u2pp: convolutions that look ahead would "
            "leave every chunk"
        )


class RandomChunk(nn.Module):
    """Callable: a chunk size, uniform in 1 ... `longest`, with probability `p`, else None. One draw a batch."""

    def __init__(self, p: float, longest: int):
        super().__init__()
        if not 0.0 <= p <= 1.0 or longest < 1:
            raise ValueError(f"chunk_probability {p} must lie in [0, 1] and max_chunk {longest} be at least 1")
        self.p = p
        self.longest = longest

    def forward(self) -> int | None:
        return int(torch.randint(1, self.longest + 1, ())) if chance(self.p) else None


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

    def forward(self, x: Tensor, positions_RD: Tensor, mask: Tensor, mask_BT: Tensor) -> Tensor:
        """(B, T, D). mask: of the keys of each query (B, 1 or T, T); mask_BT: valid frames."""
        x = self._begin(x)
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), positions_RD, mask))
        x = x + self.convolution(self.convolution_norm(x), mask_BT)
        return self._end(x)

    def forward_chunk(
        self,
        x: Tensor,
        positions_RD: Tensor,
        mask: Tensor,
        mask_BT: Tensor,
        past_attention: tuple[Tensor, Tensor],
        past_convolution: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """The same for frames that follow others, with keys and values of all frames and what convolution keeps."""
        x = self._begin(x)
        attended, keys_values = self.attention.forward_chunk(self.attention_norm(x), positions_RD, mask, past_attention)
        x = x + attended
        convolved, kept = self.convolution.forward_chunk(self.convolution_norm(x), mask_BT, past_convolution)
        return self._end(x + convolved), keys_values, kept

    def _begin(self, x: Tensor) -> Tensor:
        if self.macaron is None or self.macaron_norm is None:
            return x
        return torch.add(x, self.macaron(self.macaron_norm(x)), alpha=0.5)

    def _end(self, x: Tensor) -> Tensor:
        step = 1.0 if self.macaron is None else 0.5
        return self.norm(torch.add(x, self.feed_forward(self.feed_forward_norm(x)), alpha=step))
