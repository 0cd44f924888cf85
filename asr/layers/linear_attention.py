"""Linear attention (Katharopoulos et al., 2020): a kernel instead of the softmax, in time linear in the length.

A query q looks at a key k with the weight phi(q) phi(k) / sum_k' phi(q) phi(k'), phi(x) = elu(x) + 1. Of all keys and
values two sums suffice, sum phi(k) v and sum phi(k), which are the state of the recurrent form. All of it is fp32 in
every precision mode. The two forms and their states: see `asr.layers.multi_head`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.layers.masks import length_mask, zero_padding
from asr.layers.multi_head import MultiHead, State, apart, beside

EPS = 1e-6
CHUNK = 64  # about where a chunk's own products and those with the state cost the same


class LinearAttention(MultiHead):
    """What the linear attentions share.

    dropout: must be 0: there are no attention weights to drop.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0):
        if dropout:
            raise ValueError(f"attention dropout {dropout}: linear attention has no weights to drop; set it to 0")
        super().__init__(dim, num_heads, key_bias=True)

    def _queries(self, x_BTD: Tensor) -> Tensor:
        return _feature_map(self._split(self.query(x_BTD)))

    def _keys_values(self, x_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Mapped keys and values (B, H, T, d), 0 for positions that are not valid."""
        key, value = _feature_map(self._split(self.key(x_BTD))), self._split(self.value(x_BTD)).float()
        invalid = ~mask_BT[:, None, :, None]
        return key.masked_fill(invalid, 0.0), value.masked_fill(invalid, 0.0)


class LinearSelfAttention(LinearAttention):
    """Every position looks at all positions or, if `causal`, at itself and those before it."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0, causal: bool = True):
        super().__init__(dim, num_heads, dropout)
        self.causal = causal

    def forward(self, x_BTD: Tensor, lens_B: Tensor) -> Tensor:
        """(B, T, D) of (B, T, D); positions from `lens_B` on are not seen, whatever they hold, and come out as 0."""
        mask_BT = length_mask(lens_B, x_BTD.size(1))
        x_BTD = zero_padding(x_BTD, mask_BT)
        query, (key, value) = self._queries(x_BTD), self._keys_values(x_BTD, mask_BT)
        with _fp32(x_BTD):
            context = causal_linear(query, key, value) if self.causal else _look(query, *_sums(key, value))
        return zero_padding(self._merge(context.to(x_BTD.dtype)), mask_BT)

    def start(self, batch_size: int, num_steps: int) -> State:
        """The state before the first step: the sums of phi(k) v (B, H, d, d) and phi(k) (B, H, d).

        It is as large for one step as for many.
        """
        assert self.causal
        sums = torch.zeros(batch_size, self.num_heads, self.head_dim, self.head_dim, device=self.query.weight.device)
        return sums, torch.zeros_like(sums[..., 0])

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """(B, D) of one more position (B, D), and the state after it."""
        sums, norms = state
        query, key = (_feature_map(self._split_one(project(x_BD))) for project in (self.query, self.key))
        value = self._split_one(self.value(x_BD)).float()
        with _fp32(x_BD):
            norms = norms + key.squeeze(2)
            sums = torch.addcmul(sums, key.transpose(-2, -1), value)
            context = _look(query, sums, norms)
        return self._merge_one(context.to(x_BD.dtype)), (sums, norms)

    def with_room(self, state: State, num_steps: int) -> State:
        """The state itself, which has room for any number of steps."""
        return state


class LinearCrossAttention(LinearAttention):
    """Every position looks at all frames of a memory, through sums over them.

    Several rows may look at one memory: N rows x are B memories times N / B rows each, side by side.
    """

    def forward(self, x_NUD: Tensor, memory_BTD: Tensor, memory_lens_B: Tensor) -> Tensor:
        """(N, U, D) of (N, U, D); frames from `memory_lens_B` on are not seen. Zeros where there are no frames."""
        return self.attend(x_NUD, self.start(memory_BTD, memory_lens_B))

    def start(self, memory_BTD: Tensor, memory_lens_B: Tensor) -> State:
        """The sums of phi(k) v (B, H, d, d) and phi(k) (B, H, d) over a memory, and whether it has frames (B,)."""
        key, value = self._of_memory(memory_BTD, memory_lens_B)
        with _fp32(memory_BTD):
            return *_sums(key, value), memory_lens_B > 0

    def attend(self, x_NUD: Tensor, state: State) -> Tensor:
        """`forward` with the memory's state."""
        sums, norms, any_B = state
        query = self._queries(beside(x_NUD, len(any_B)))
        with _fp32(x_NUD):
            context = _look(query, sums, norms)
        context = self._merge(context.to(x_NUD.dtype)).masked_fill(~any_B[:, None, None], 0.0)
        return apart(context, x_NUD.size(1))

    def step(self, x_ND: Tensor, state: State) -> tuple[Tensor, State]:
        """(N, D) of one position of every row, and the state, which stays what it is."""
        return self.attend(x_ND.unsqueeze(1), state).squeeze(1), state

    def weights(self, x_NUD: Tensor, memory_BTD: Tensor, memory_lens_B: Tensor) -> Tensor:
        """(N, U, T) what each position looks at: the mean over the heads, 0 for frames that are not valid."""
        key, _ = self._of_memory(memory_BTD, memory_lens_B)
        query = self._queries(beside(x_NUD, len(memory_lens_B)))
        with _fp32(x_NUD):
            scores = query @ key.transpose(-2, -1)
            return apart((scores / (scores.sum(-1, keepdim=True) + EPS)).mean(1), x_NUD.size(1))

    def _of_memory(self, memory_BTD: Tensor, memory_lens_B: Tensor) -> tuple[Tensor, Tensor]:
        mask_BT = length_mask(memory_lens_B, memory_BTD.size(1))
        return self._keys_values(zero_padding(memory_BTD, mask_BT), mask_BT)


def causal_linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(B, H, T, d) causal linear attention of mapped queries and keys and of values (B, H, T, d), fp32.

    Memory is linear in T, gradients are exact.
    """
    num_positions = query.size(2)
    # A value that is always 1 sums up the weights.
    inputs = (query, key, F.pad(value, (0, 1), value=1.0))
    size = min(CHUNK, max(1, num_positions))
    num_chunks = -(-num_positions // size)
    room = (0, 0, 0, num_chunks * size - num_positions)
    chunks = (F.pad(x, room).contiguous().unflatten(2, (num_chunks, size)) for x in inputs)
    sums = _CausalProduct.apply(*chunks).flatten(2, 3)[:, :, :num_positions]
    return sums[..., :-1] / (sums[..., -1:] + EPS)


class _CausalProduct(torch.autograd.Function):
    """sum_{j <= i} (a_i b_j) c_j for all i. Only a, b and c are kept for the gradients, which are such sums as well."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c)
        return _product(a, b, c, backwards=False)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        a, b, c = ctx.saved_tensors
        with _fp32(grad):
            return (
                _product(grad, c, b, backwards=False),
                _product(c, grad, a, backwards=True),
                _product(b, a, grad, backwards=True),
            )


def _product(a: Tensor, b: Tensor, c: Tensor, backwards: bool) -> Tensor:
    """The sums over j <= i, or j >= i if `backwards`, of (B, H, chunks, size, ...): in parallel inside a chunk, and
    from one to the next through the sum of b_j c_j over all chunks so far."""
    scores = a @ b.transpose(-2, -1)
    out = (scores.triu_() if backwards else scores.tril_()) @ c
    sums = b.transpose(-2, -1) @ c
    order = range(sums.size(2) - 1, 0, -1) if backwards else range(sums.size(2) - 1)
    for chunk in order:
        sums[:, :, chunk + (-1 if backwards else 1)] += sums[:, :, chunk]
    if backwards:
        out[:, :, :-1] += a[:, :, :-1] @ sums[:, :, 1:]
    else:
        out[:, :, 1:] += a[:, :, 1:] @ sums[:, :, :-1]
    return out


def _feature_map(x: Tensor) -> Tensor:
    return F.elu(x.float()).add_(1.0)


def _sums(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key.transpose(-2, -1) @ value, key.sum(2)


def _look(query: Tensor, sums: Tensor, norms: Tensor) -> Tensor:
    return (query @ sums) / ((query * norms.unsqueeze(2)).sum(-1, keepdim=True) + EPS)


def _fp32(like: Tensor) -> AbstractContextManager:
    kind = like.device.type
    # Entering a context that changes nothing would be a tenth of a small step.
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
