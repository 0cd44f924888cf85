"""Multi-head attention without positions (Vaswani et al., 2017), in parallel and step by step.

Every attention, these and the linear ones of `asr.layers.linear_attention`, has two forms over the same parameters:
`forward` over whole sequences, and `step(x_BD, state) -> (y_BD, state)` over one position of each row. A state is a
plain tuple of tensors whose first axis are the rows, which know nothing of each other:

- it stays as good as it was: any number of steps may go on from it, and none changes what another one finds;
- `reorder` gives the state of other rows, for beams; `tensor.clone()` of its parts gives a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.layers.attention import masked_softmax
from asr.layers.dropout import Dropout
from asr.layers.masks import length_mask, zero_padding

State = tuple[Tensor, ...]


def reorder(state: State, rows_N: Tensor) -> State:
    """The state whose row n goes on from row `rows_N[n]`."""
    return tuple(tensor.index_select(0, rows_N.to(tensor.device)) for tensor in state)


class MultiHead(nn.Module):
    """Projections to queries, keys, values of several heads, and from these back to the width D.

    dim: width D. num_heads: divides D. key_bias: full attention has none, for it would move all scores of a query alike
        and leave the softmax as it is.
    """

    def __init__(self, dim: int, num_heads: int, key_bias: bool):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads={num_heads}: must divide the width (output_dim) of {dim}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=key_bias)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, H, T, D / H)"""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _merge(self, x: Tensor) -> Tensor:
        """(B, H, T, D / H) -> (B, T, D), through the output projection."""
        return self.output(x.transpose(1, 2).flatten(2))

    # A step is as fast as its operations are few. Of a single position, splitting and merging move nothing.

    def _split_one(self, x_BD: Tensor) -> Tensor:
        """(B, D) -> (B, H, 1, D / H)"""
        return x_BD.view(-1, self.num_heads, 1, self.head_dim)

    def _merge_one(self, x: Tensor) -> Tensor:
        """(B, H, 1, D / H) -> (B, D), through the output projection."""
        return self.output(x.reshape(-1, self.num_heads * self.head_dim))


class FullAttention(MultiHead):
    """What the attentions by softmax share. 1/sqrt(d_k) goes to the queries, which keeps half precision in range.

    dropout: of the attention weights.
    observe: where set, called in every pass with "scores" and their value (B, H, U, T), which it must not keep.
    """

    observe: Callable[[str, Tensor], None] | None = None

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0):
        super().__init__(dim, num_heads, key_bias=False)
        self.dropout = Dropout(dropout)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """(B, H, U, d) of queries (B, H, U, d), keys and values (B, H, T, d) and their mask (B, 1, 1, T), if any."""
        dropping = self.training and self.dropout.p > 0.0
        # The fused kernel keeps no weights; for a single query, plain products come closer to the memory's speed.
        if self.observe is None and not dropping and query.size(2) > 1:
            return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        if causal:
            mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
        return self.dropout(self._weights(query, key, mask).to(value.dtype)) @ value

    def _weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """fp32 attention weights (B, H, U, T)."""
        scores = (query * (1.0 / math.sqrt(self.head_dim))) @ key.to(query.dtype).transpose(-2, -1)
        if self.observe is not None:
            self.observe("scores", scores.detach())
        return scores.float().softmax(-1) if mask is None else masked_softmax(scores, mask)


class FullSelfAttention(FullAttention):
    """Every position looks at all positions or, if `causal`, at itself and those before it."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0, causal: bool = True):
        super().__init__(dim, num_heads, dropout)
        self.causal = causal

    def forward(self, x_BTD: Tensor, lens_B: Tensor) -> Tensor:
        """(B, T, D) of (B, T, D); positions from `lens_B` on are not seen, whatever they hold, and come out as 0."""
        mask_BT = length_mask(lens_B, x_BTD.size(1))
        x_BTD = zero_padding(x_BTD, mask_BT)
        query, key, value = (self._split(project(x_BTD)) for project in (self.query, self.key, self.value))
        # What comes before a valid position is valid.
        context = self._attend(query, key, value, None if self.causal else _never_empty(mask_BT), self.causal)
        return zero_padding(self._merge(context), mask_BT)

    def start(self, batch_size: int, num_steps: int) -> State:
        """The state before the first of at most `num_steps` steps.

        Keys and values (B, H, num_steps, d) of the positions so far, then two counts (B,) on the CPU, where they steer
        the steps: of these positions, and of those that any state with the same memory has written.
        """
        assert self.causal
        # The type that autocast gives, seen on a projection of nothing.
        like = self.key(self.query.weight[:0])
        keys = like.new_empty(batch_size, self.num_heads, num_steps, self.head_dim)
        count = torch.zeros(batch_size, dtype=torch.int64)
        return keys, torch.empty_like(keys), count, count.clone()

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """(B, D) of one more position (B, D), and the state after it. Raises ValueError where there is no room for it.

        States that follow each other share memory: a step fills the place behind all that its state reads. Where that
        has been filled before, by another step from the same state, the memory is copied first. Steps whose gradients
        are wanted copy always, for they need every state as it was.
        """
        keys, values, count, written = state
        place = count.tolist()[0]
        if place == keys.size(2):
            raise ValueError(f"the state has room for {place} steps: start it with more, or use `with_room`")
        key = self._split_one(self.key(x_BD)).to(keys.dtype)
        value = self._split_one(self.value(x_BD)).to(values.dtype)
        if keys.requires_grad or key.requires_grad:
            keys = torch.slice_scatter(keys, key, dim=2, start=place, end=place + 1)
            values = torch.slice_scatter(values, value, dim=2, start=place, end=place + 1)
            written = count + 1
        else:
            if not torch.equal(count, written):
                keys, values, written = keys.clone(), values.clone(), count.clone()
            keys.narrow(2, place, 1).copy_(key)
            values.narrow(2, place, 1).copy_(value)
            written += 1  # in place, so that all who share the memory know
        so_far = keys.narrow(2, 0, place + 1), values.narrow(2, 0, place + 1)
        context = self._attend(self._split_one(self.query(x_BD)), *so_far, None)
        return self._merge_one(context), (keys, values, count + 1, written)

    def with_room(self, state: State, num_steps: int) -> State:
        """The same state with memory of its own for `num_steps` steps from the first one on."""
        keys, values, count, _ = state
        more = num_steps - keys.size(2)
        return F.pad(keys, (0, 0, 0, more)), F.pad(values, (0, 0, 0, more)), count, count.clone()


class FullCrossAttention(FullAttention):
    """Every position looks at all frames of a memory.

    Several rows may look at one memory: N rows x are B memories times N / B rows each, side by side.
    """

    def forward(self, x_NUD: Tensor, memory_BTD: Tensor, memory_lens_B: Tensor) -> Tensor:
        """(N, U, D) of (N, U, D); frames from `memory_lens_B` on are not seen. Zeros where there are no frames."""
        return self.attend(x_NUD, self.start(memory_BTD, memory_lens_B))

    def start(self, memory_BTD: Tensor, memory_lens_B: Tensor) -> State:
        """Keys and values (B, H, T, d) of a memory, and its mask (B, T)."""
        mask_BT = length_mask(memory_lens_B, memory_BTD.size(1))
        memory_BTD = zero_padding(memory_BTD, mask_BT)
        return self._split(self.key(memory_BTD)), self._split(self.value(memory_BTD)), mask_BT

    def attend(self, x_NUD: Tensor, state: State) -> Tensor:
        """`forward` with the memory's state."""
        keys, values, mask_BT = state
        query = self._split(self.query(beside(x_NUD, len(mask_BT))))
        context = self._attend(query, keys.to(query.dtype), values.to(query.dtype), _never_empty(mask_BT))
        context = self._merge(context).masked_fill(~mask_BT.any(1)[:, None, None], 0.0)
        return apart(context, x_NUD.size(1))

    def step(self, x_ND: Tensor, state: State) -> tuple[Tensor, State]:
        """(N, D) of one position of every row, and the state, which stays what it is."""
        return self.attend(x_ND.unsqueeze(1), state).squeeze(1), state

    def weights(self, x_NUD: Tensor, memory_BTD: Tensor, memory_lens_B: Tensor) -> Tensor:
        """(N, U, T) what each position looks at: the mean over the heads, 0 for frames that are not valid."""
        keys, _, mask_BT = self.start(memory_BTD, memory_lens_B)
        query = self._split(self.query(beside(x_NUD, len(mask_BT))))
        return apart(self._weights(query, keys, mask_BT[:, None, None]).mean(1), x_NUD.size(1))


def beside(x_NUD: Tensor, batch_size: int) -> Tensor:
    """(B, N / B * U, D): what all rows of a memory ask, side by side, so that the memory is not repeated."""
    return x_NUD.unflatten(0, (batch_size, -1)).flatten(1, 2)


def apart(x: Tensor, num_positions: int) -> Tensor:
    """(N, U, ...) again of (B, N / B * U, ...)."""
    return x.unflatten(1, (-1, num_positions)).flatten(0, 1)


def _never_empty(mask_BT: Tensor) -> Tensor:
    """(B, 1, 1, T): where nothing is valid all is, so that the softmax is finite; the caller drops what comes of it."""
    return (mask_BT | ~mask_BT.any(1, keepdim=True))[:, None, None]
