"""Transformer decoder (Vaswani et al., 2017), in parallel and step by step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asr.layers.dropout import Dropout
from asr.layers.multi_head import State
from asr.layers.positional import sinusoids
from asr.layers.transformer_layer import TransformerLayer


class DecoderState(NamedTuple):
    """Where N rows of tokens stand: what each layer keeps of them, the memory that they look at, the number of steps.

    Like its parts (see `asr.layers.multi_head`), a state stays as good as it was when steps go on from it.
    """

    layers: tuple[State, ...]
    memory: tuple[State, ...]
    num_steps: int

    def reorder(self, rows_N: Tensor) -> DecoderState:
        """The state whose row n goes on from row `rows_N[n]`, which looks at the same memory."""
        on_cpu = rows_N.cpu()  # once, where it is wanted there
        layers = (
            tuple(part.index_select(0, on_cpu if part.device.type == "cpu" else rows_N) for part in layer)
            for layer in self.layers
        )
        return self._replace(layers=tuple(layers))


class TransformerDecoder(nn.Module):
    """Logits of the next token, given those before it and a memory of encoder frames.

    Several rows of tokens may look at one utterance: N rows are B utterances times N / B rows each, side by side.

    vocab_size: V. dim: width D of memory and layers, even. num_layers, num_heads, feed_forward_dim: of the layers.
    dropout: of the input and of the output of every module. self_attention_dropout, cross_attention_dropout: of the
    attention weights. attention: "full" or "linear".
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
        attention: str = "full",
    ):
        super().__init__()
        self.dim = dim
        self.embedding = nn.Embedding(vocab_size, dim)
        # Times sqrt(D) in forward, so that tokens come in at the size of positions.
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                dim, num_heads, feed_forward_dim, dropout, attention, causal=True, cross=True,
                self_attention_dropout=self_attention_dropout, cross_attention_dropout=cross_attention_dropout,
            )
            for _ in range(num_layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size)

    def forward(self, tokens_NU: Tensor, memory_BTD: Tensor, memory_lens_B: Tensor) -> Tensor:
        """Logits (N, U, V) of the token that follows each of `tokens_NU`."""
        return self.output(self.hidden(tokens_NU, memory_BTD, memory_lens_B))

    def hidden(self, tokens_NU: Tensor, memory_BTD: Tensor, memory_lens_B: Tensor, recompute: bool = False) -> Tensor:
        """(N, U, D) of which the logits are a projection.

        recompute: keep only what goes into each layer and compute the rest again for the gradients.
        """
        x, lens_N = self._embed(tokens_NU, 0), _all(tokens_NU)
        for layer in self._layers:
            memory = layer.remember(memory_BTD, memory_lens_B)
            x = checkpoint(layer, x, lens_N, memory, use_reentrant=False) if recompute else layer(x, lens_N, memory)
        return self.norm(x)

    def attended_frames(self, tokens_NU: Tensor, memory_BTD: Tensor, memory_lens_B: Tensor) -> Tensor:
        """(N, U) frame that the last layer looks at most when it predicts what follows each token."""
        x, lens_N = self._embed(tokens_NU, 0), _all(tokens_NU)
        *lower, last = self._layers
        for layer in lower:
            x = layer(x, lens_N, layer.remember(memory_BTD, memory_lens_B))
        return last.memory_weights(last.look_back(x, lens_N), memory_BTD, memory_lens_B).argmax(-1)

    def start(self, memory_BTD: Tensor, memory_lens_B: Tensor, rows: int, num_steps: int) -> DecoderState:
        """The state of B * `rows` rows of tokens before the first of at most `num_steps` steps."""
        num_rows = memory_BTD.size(0) * rows
        return DecoderState(
            tuple(layer.self_attention.start(num_rows, num_steps) for layer in self._layers),
            tuple(layer.remember(memory_BTD, memory_lens_B) for layer in self._layers),
            0,
        )

    def step(self, tokens_N: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Logits (N, V) of what follows `tokens_N`, the next token of every row, and the state after it."""
        x = self._embed(tokens_N.unsqueeze(1), state.num_steps).squeeze(1)
        after = []
        for layer, of_layer, memory in zip(self._layers, state.layers, state.memory, strict=True):
            x, of_layer = layer.step(x, of_layer, memory)
            after.append(of_layer)
        return self.output(self.norm(x)), DecoderState(tuple(after), state.memory, state.num_steps + 1)

    def with_room(self, state: DecoderState, num_steps: int) -> DecoderState:
        """The same state with room for `num_steps` steps from the first one on."""
        layers = (
            layer.self_attention.with_room(of_layer, num_steps)
            for layer, of_layer in zip(self._layers, state.layers, strict=True)
        )
        return state._replace(layers=tuple(layers))

    def _embed(self, tokens_NU: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + tokens_NU.size(1), device=tokens_NU.device)
        x = self.embedding(tokens_NU) * math.sqrt(self.dim)
        return self.dropout(x + sinusoids(positions, self.dim).to(x.dtype))

    @property
    def _layers(self) -> list[TransformerLayer]:
        return [layer for layer in self.layers if isinstance(layer, TransformerLayer)]


def _all(tokens_NU: Tensor) -> Tensor:
    """(N,) lengths: causal layers hide what comes later from what counts, so all may count."""
    return torch.full_like(tokens_NU[:, 0], tokens_NU.size(1))
