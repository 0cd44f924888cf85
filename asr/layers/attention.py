"""Self-attention with relative positions (Transformer-XL, Dai et al., 2019; Conformer, Gulati et al., 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from asr.layers.dropout import Dropout

SCALES = ("query", "scores")


def relative_shift(scores: Tensor) -> Tensor:
    """From scores per distance (..., T, 2T), distances T-1 ... -T, to scores per key (..., T, T), without a copy.

    Entry (i, j) is the score of query i with distance i - j, in column T - 1 - i + j.
    """
    return _RelativeShift.apply(scores)


class _RelativeShift(torch.autograd.Function):
    """The view, with a gradient that fills memory once where autograd's own would do it for each slice."""

    @staticmethod
    def forward(ctx, scores: Tensor) -> Tensor:
        return _shifted_view(scores)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        num_frames = grad.size(-1)
        full = grad.new_empty(*grad.shape[:-1], 2 * num_frames)
        full[..., 0, : num_frames - 1] = 0.0
        full[..., -1, -1] = 0.0
        rows = _shifted_rows(full)
        rows[..., :num_frames] = grad
        rows[..., num_frames:] = 0.0
        return full


def _shifted_view(scores: Tensor) -> Tensor:
    return _shifted_rows(scores)[..., : scores.size(-2)]


def _shifted_rows(scores: Tensor) -> Tensor:
    # Each row starts one column earlier than the row above: in memory the rows lie 2T - 1 numbers apart, from T - 1 on.
    num_frames = scores.size(-2)
    return scores.flatten(-2)[..., num_frames - 1 : -1].unflatten(-1, (num_frames, 2 * num_frames - 1))


class RelativeSelfAttention(nn.Module):
    """Self-attention whose score of query i and key j is ((q_i + u) k_j + (q_i + v) p_{i-j}) / sqrt(d_k).

    u and v are the learned content and position biases, p a projection of the distance's encoding. Keys have no bias
    of their own: it would move all scores of a query alike and leave the softmax as it is.

    dim: width D. num_heads: divides D. dropout: of the attention weights.
    scale: where 1/sqrt(d_k) is applied: "query" before both products, which keeps half precision in range, or "scores"
        after their sum, as older toolkits do and overflow (there to reproduce their results).
    """

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0, scale: str = "query"):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} is not a multiple of num_heads {num_heads}")
        if scale not in SCALES:
            raise ValueError(f"attention scale {scale!r} is none of {', '.join(SCALES)}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = scale
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim)
        self.position = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, 1, 1, self.head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, 1, 1, self.head_dim))
        self.dropout = Dropout(dropout)

    def forward(self, frames_BTD: Tensor, positions_RD: Tensor, mask: Tensor) -> Tensor:
        """(B, T, D) from frames (B, T, D), encodings of the distances T-1 ... -T (R = 2T) and a mask of keys.

        mask: (B, 1, T), or (B, T, T) with a row for each query. A query that may look at nothing gives zeros and no
        gradient. Masked frames must be finite.
        """
        batch_size, num_frames, _ = frames_BTD.shape
        # Heads come first, so that one product with the positions serves the whole batch.
        query = self._split(self.query(frames_BTD))
        key = self._split(self.key(frames_BTD))
        value = self._split(self.value(frames_BTD))
        position = self._split(self.position(positions_RD).unsqueeze(0)).squeeze(1)

        early, late = 1.0, 1.0 / math.sqrt(self.head_dim)
        if self.scale == "query":
            early, late = late, early
        content_query = (query + self.content_bias.to(query.dtype)) * early
        position_query = (query + self.position_bias.to(query.dtype)) * early
        by_distance = position_query.flatten(1, 2) @ position.transpose(-2, -1)
        scores = content_query @ key.transpose(-2, -1)
        scores.add_(relative_shift(by_distance.unflatten(1, (batch_size, num_frames))))
        if late != 1.0:
            scores = scores * late

        weights = self.dropout(masked_softmax(scores, mask).to(value.dtype))
        context = (weights @ value).permute(1, 2, 0, 3).flatten(2)
        return self.output(context).masked_fill(~mask.any(-1, keepdim=True), 0.0)

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (H, B, T, D / H)"""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(2, 0, 1, 3)


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """fp32 softmax over the last axis with weight 0 where the mask is False, and finite on a row that has no True.

    The mask is added, and in place: these are the largest tensors of the model, and each pass over them counts.
    """
    fill = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return scores.float().add_(fill).softmax(-1)
