"""Multi-head attention without positions (Vaswani et al., 2017), in parallel and step by step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from asr.layers.attention import masked_softmax
from asr.layers.dropout import Dropout

KeysValues = tuple[Tensor, Tensor]
# Keys and values with room for all steps, and how many there are so far.
StepState = tuple[Tensor, Tensor, Tensor]


class MultiHeadAttention(nn.Module):
    """Attention of queries over a memory. 1/sqrt(d_k) goes to the queries, which keeps half precision in range.

    Keys have no bias: it would move all scores of a query alike and leave the softmax as it is.

    dim: width D. num_heads: divides D. dropout: of the attention weights.
    observe: where set, called in every pass with "scores" and their value (B, H, U, T), which it must not keep.
    """

    observe: Callable[[str, Tensor], None] | None = None

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} is not a multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, x_BUD: Tensor, memory_BTD: Tensor, mask: Tensor) -> Tensor:
        """(B, U, D) from queries (B, U, D), a memory (B, T, D) and a mask of it.

        mask: broadcast to (B, U, T). A query that may look at nothing gets zeros and has no gradient. Masked memory
        must be finite.
        """
        return self.attend(x_BUD, self.project(memory_BTD), mask)

    def project(self, memory_BTD: Tensor) -> KeysValues:
        """Keys and values (B, H, T, D / H) of a memory."""
        return self._split(self.key(memory_BTD)), self._split(self.value(memory_BTD))

    def attend(self, x_BUD: Tensor, keys_values: KeysValues, mask: Tensor) -> Tensor:
        """`forward` over a memory that is projected already."""
        weights = self.dropout(self.weights(x_BUD, keys_values[0], mask).to(keys_values[1].dtype))
        context = (weights @ keys_values[1]).transpose(1, 2).flatten(2)
        return self.output(context).masked_fill(~mask.any(-1, keepdim=True), 0.0)

    def weights(self, x_BUD: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """fp32 attention weights (B, H, U, T)."""
        query = self._split(self.query(x_BUD)) * (1.0 / math.sqrt(self.head_dim))
        scores = query @ keys.to(query.dtype).transpose(-2, -1)
        if self.observe is not None:
            self.observe("scores", scores.detach())
        return masked_softmax(scores, mask.unsqueeze(-3))

    def start(self, batch_size: int, num_steps: int) -> StepState:
        """The state of self-attention before the first of at most `num_steps` steps."""
        keys = self.query.weight.new_zeros(batch_size, self.num_heads, num_steps, self.head_dim)
        return keys, torch.zeros_like(keys), torch.zeros((), dtype=torch.int64)

    def step(self, x_BD: Tensor, state: StepState) -> tuple[Tensor, StepState]:
        """One step of causal self-attention: (B, D) of (B, D), and the state for the next step.

        The free places of the given state are written to: who goes on from one state twice clones it first.
        """
        keys, values, count = state
        number = int(count)
        key, value = self.project(x_BD.unsqueeze(1))
        keys[:, :, number] = key.squeeze(2)
        values[:, :, number] = value.squeeze(2)
        seen = torch.ones(1, 1, number + 1, dtype=torch.bool, device=x_BD.device)
        so_far = keys[:, :, : number + 1], values[:, :, : number + 1]
        return self.attend(x_BD.unsqueeze(1), so_far, seen).squeeze(1), (keys, values, count + 1)

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, H, T, D / H)"""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
