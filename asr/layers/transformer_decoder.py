"""Transformer decoder (Vaswani et al., 2017) with norms before the modules, in parallel and step by step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.layers.dropout import Dropout
from asr.layers.feed_forward import FeedForward
from asr.layers.masks import zero_padding
from asr.layers.multi_head import KeysValues, MultiHeadAttention, StepState
from asr.layers.positional import sinusoids


class DecoderState(NamedTuple):
    """Where N rows of tokens stand: what each layer keeps of them, and the memory that they look at, projected."""

    layers: tuple[StepState, ...]
    memory: tuple[KeysValues, ...]
    memory_mask: Tensor

    def reorder(self, rows_N: Tensor) -> DecoderState:
        """A state of its own whose row n goes on from row `rows_N[n]`, which looks at the same memory."""
        layers = tuple((keys[rows_N], values[rows_N], count) for keys, values, count in self.layers)
        return self._replace(layers=layers)

    def with_room(self, num_steps: int) -> DecoderState:
        """A state of its own, the same so far, for at most `num_steps` steps."""
        more = num_steps - self.layers[0][0].size(2)
        layers = tuple(
            (F.pad(keys, (0, 0, 0, more)), F.pad(values, (0, 0, 0, more)), count) for keys, values, count in self.layers
        )
        return self._replace(layers=layers)


class TransformerDecoder(nn.Module):
    """Logits of the next token, given those before it and a memory of encoder frames.

    Several rows of tokens may look at one utterance: N rows are B utterances times N / B rows each, side by side.

    vocab_size: V. dim: width D of memory and layers, even. num_layers, num_heads, feed_forward_dim: of the layers.
    dropout: of the input and of the output of every module. self_attention_dropout, cross_attention_dropout: of the
    attention weights.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int = 6,
        num_heads: int = 4,
        feed_forward_dim: int = 2048,
        dropout: float = 0.1,
        self_attention_dropout: float = 0.0,
        cross_attention_dropout: float = 0.0,
    ):
        super().__init__()
        self.dim = dim
        self.embedding = nn.Embedding(vocab_size, dim)
        # Times sqrt(D) in forward, so that tokens come in at the size of positions.
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(
                MultiHeadAttention(dim, num_heads, self_attention_dropout),
                MultiHeadAttention(dim, num_heads, cross_attention_dropout),
                FeedForward(dim, feed_forward_dim, dropout, activation="relu"),
                dim,
                dropout,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size)

    def forward(self, tokens_NU: Tensor, memory_BTD: Tensor, memory_mask_BT: Tensor) -> Tensor:
        """Logits (N, U, V) of the token that follows each of `tokens_NU`."""
        x, causal, memory, mask = self._prepare(tokens_NU, memory_BTD, memory_mask_BT)
        for layer, keys_values in zip(self._layers, memory, strict=True):
            x = layer(x, causal, keys_values, mask)
        return self.output(self.norm(x))

    def attended_frames(self, tokens_NU: Tensor, memory_BTD: Tensor, memory_mask_BT: Tensor) -> Tensor:
        """(N, U) frame that the last layer looks at most when it predicts what follows each token."""
        x, causal, memory, mask = self._prepare(tokens_NU, memory_BTD, memory_mask_BT)
        *lower, last = self._layers
        for layer, keys_values in zip(lower, memory, strict=False):
            x = layer(x, causal, keys_values, mask)
        return last.memory_weights(last.look_back(x, causal), memory[-1], mask).argmax(-1)

    def start(self, memory_BTD: Tensor, memory_mask_BT: Tensor, rows: int, num_steps: int) -> DecoderState:
        """The state of B * `rows` rows of tokens before the first of at most `num_steps` steps."""
        num_rows = memory_BTD.size(0) * rows
        return DecoderState(
            tuple(layer.self_attention.start(num_rows, num_steps) for layer in self._layers),
            self._project(memory_BTD, memory_mask_BT),
            memory_mask_BT.unsqueeze(1),
        )

    def step(self, tokens_N: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Logits (N, V) of what follows `tokens_N`, the next token of every row, and the state after it.

        The given state is used up: see `MultiHeadAttention.step`.
        """
        x = self._embed(tokens_N.unsqueeze(1), int(state.layers[0][2])).squeeze(1)
        after = []
        for layer, of_layer, keys_values in zip(self._layers, state.layers, state.memory, strict=True):
            x, of_layer = layer.step(x, of_layer, keys_values, state.memory_mask)
            after.append(of_layer)
        return self.output(self.norm(x)), state._replace(layers=tuple(after))

    def _prepare(
        self, tokens_NU: Tensor, memory_BTD: Tensor, memory_mask_BT: Tensor
    ) -> tuple[Tensor, Tensor, tuple[KeysValues, ...], Tensor]:
        num_tokens = tokens_NU.size(1)
        causal = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=tokens_NU.device).tril()
        return self._embed(tokens_NU, 0), causal, self._project(memory_BTD, memory_mask_BT), memory_mask_BT.unsqueeze(1)

    def _embed(self, tokens_NU: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + tokens_NU.size(1), device=tokens_NU.device)
        x = self.embedding(tokens_NU) * math.sqrt(self.dim)
        return self.dropout(x + sinusoids(positions, self.dim).to(x.dtype))

    def _project(self, memory_BTD: Tensor, memory_mask_BT: Tensor) -> tuple[KeysValues, ...]:
        memory_BTD = zero_padding(memory_BTD, memory_mask_BT)
        return tuple(layer.cross_attention.project(memory_BTD) for layer in self._layers)

    @property
    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the memory, feed-forward; each on a normed input and added to it."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention,
        feed_forward: FeedForward,
        dim: int,
        dropout: float,
    ):
        super().__init__()
        self.self_norm = nn.LayerNorm(dim)
        self.self_attention = self_attention
        self.cross_norm = nn.LayerNorm(dim)
        self.cross_attention = cross_attention
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = feed_forward
        self.dropout = Dropout(dropout)

    def forward(self, x_NUD: Tensor, causal: Tensor, memory: KeysValues, memory_mask: Tensor) -> Tensor:
        """(N, U, D) of (N, U, D); memory of B utterances, mask (B, 1, T)."""
        return self._finish(self.look_back(x_NUD, causal), memory, memory_mask)

    def step(self, x_ND: Tensor, state: StepState, memory: KeysValues, memory_mask: Tensor) -> tuple[Tensor, StepState]:
        """The same for one token of every row."""
        attended, state = self.self_attention.step(self.self_norm(x_ND), state)
        return self._finish((x_ND + attended).unsqueeze(1), memory, memory_mask).squeeze(1), state

    def look_back(self, x_NUD: Tensor, causal: Tensor) -> Tensor:
        """The first third of the layer."""
        normed = self.self_norm(x_NUD)
        return x_NUD + self.dropout(self.self_attention(normed, normed, causal))

    def memory_weights(self, x_NUD: Tensor, memory: KeysValues, memory_mask: Tensor) -> Tensor:
        """(N, U, T) weights of the attention over the memory, the mean over its heads."""
        queries = _beside(self.cross_norm(x_NUD), memory_mask.size(0))
        weights = self.cross_attention.weights(queries, memory[0], memory_mask).mean(1)
        return weights.unflatten(1, (-1, x_NUD.size(1))).flatten(0, 1)

    def _finish(self, x_NUD: Tensor, memory: KeysValues, memory_mask: Tensor) -> Tensor:
        queries = _beside(self.cross_norm(x_NUD), memory_mask.size(0))
        attended = self.cross_attention.attend(queries, memory, memory_mask)
        x_NUD = x_NUD + self.dropout(attended.unflatten(1, (-1, x_NUD.size(1))).flatten(0, 1))
        return x_NUD + self.feed_forward(self.feed_forward_norm(x_NUD))


def _beside(x_NUD: Tensor, batch_size: int) -> Tensor:
    """(B, N / B * U, D): what all rows of an utterance ask, side by side, so that its memory is not repeated."""
    return x_NUD.unflatten(0, (batch_size, -1)).flatten(1, 2)
