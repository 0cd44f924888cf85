"""Attention of the Zipformer (Yao et al., 2023, section 3.2): weights computed once a layer, used three times."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.encoders.zipformer.dropout import Skip
from asr.encoders.zipformer.linear import scaled_linear
from asr.encoders.zipformer.whiten import Whiten
from asr.layers.attention import masked_softmax, relative_shift
from asr.layers.balancer import Balancer
from asr.layers.random import chance
from asr.layers.schedule import PiecewiseLinear, Scheduled


class AttentionWeights(Scheduled):
    """Softmax over keys of q_i k_j + r_i p_{i-j}, with a short vector r for positions beside the query.

    Nothing is divided by sqrt(d_k): the initial weights are as much smaller, and training finds the scale (ScaledAdam
    does so by design). Scores beyond 25 are pulled back by a small gradient in a tenth of the steps.

    dim: width D. num_heads: H. query_head_dim, position_head_dim: of query and key, and of r and p, in a head.
    position_dim: width P of the encodings of distances.
    """

    def __init__(self, dim: int, num_heads: int, query_head_dim: int, position_head_dim: int, position_dim: int):
        super().__init__()
        self.num_heads = num_heads
        self.widths = [num_heads * width for width in (query_head_dim, query_head_dim, position_head_dim)]
        self.project = scaled_linear(dim, sum(self.widths), query_head_dim**-0.25)
        self.position = scaled_linear(position_dim, num_heads * position_head_dim, 0.05, bias=False)
        self.skip_positions = Skip(PiecewiseLinear((0.0, 0.5), (4000.0, 0.0)))
        # A mean of the keys moves all scores of a query alike, so no gradient of the loss keeps it from drifting.
        self.balance_keys = Balancer(0.4, 0.6, 0.0, 100.0, probability=0.025)
        self.whiten_keys = Whiten(3.0, 6.0, strength=0.025, num_groups=num_heads)

    def forward(self, frames_BTD: Tensor, positions_RP: Tensor, mask_BT: Tensor) -> Tensor:
        """(H, B, T, T) weights over the frames of the last axis; positions as from `CompactPositions` (R = 2T)."""
        batch_size, num_frames, _ = frames_BTD.shape
        query, key, position_query = self.project(frames_BTD).split(self.widths, dim=-1)
        key = self.whiten_keys(self.balance_keys(key, mask_BT), mask_BT)
        query, key, position_query = (split_heads(x, self.num_heads) for x in (query, key, position_query))
        scores = query @ key.transpose(-2, -1)
        if not self.skip_positions.batch():
            position = split_heads(self.position(positions_RP).unsqueeze(0), self.num_heads).squeeze(1)
            by_distance = position_query.flatten(1, 2) @ position.transpose(-2, -1)
            scores.add_(relative_shift(by_distance.unflatten(1, (batch_size, num_frames))))
        if self.training and scores.requires_grad and chance(0.1):
            scores = _PenaliseLarge.apply(scores, mask_BT)
        return masked_softmax(scores, mask_BT.unsqueeze(1)).to(query.dtype)


class _PenaliseLarge(torch.autograd.Function):
    """The scores, with the gradient of `PENALTY` * relu(|score| - LIMIT), for valid pairs of an average utterance.

    It is added to what comes back: as in icefall, a loss scale makes it weaker beside the gradients of the loss.
    """

    LIMIT = 25.0
    PENALTY = 1e-4

    @staticmethod
    def forward(ctx, scores: Tensor, mask_BT: Tensor) -> Tensor:
        beyond = (scores > _PenaliseLarge.LIMIT).to(torch.int8) - (scores < -_PenaliseLarge.LIMIT).to(torch.int8)
        ctx.save_for_backward(beyond * (mask_BT.unsqueeze(1) & mask_BT.unsqueeze(2)))
        # Not a view, so that the softmax may go on in place.
        ctx.mark_dirty(scores)
        return scores

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (beyond,) = ctx.saved_tensors
        return torch.add(grad, beyond.to(grad.dtype), alpha=_PenaliseLarge.PENALTY / beyond.size(1)), None


class SelfAttention(nn.Module):
    """Values averaged with the weights of each head, and a projection back.

    dim: width D. value_head_dim: of the value in a head.
    """

    def __init__(self, dim: int, num_heads: int, value_head_dim: int):
        super().__init__()
        self.num_heads = num_heads
        self.value = nn.Linear(dim, num_heads * value_head_dim)
        self.output = scaled_linear(num_heads * value_head_dim, dim, 0.05)
        self.whiten = Whiten(7.5, 22.5)

    def forward(self, frames_BTD: Tensor, weights_HBTT: Tensor, mask_BT: Tensor) -> Tensor:
        value = split_heads(self.value(frames_BTD), self.num_heads)
        context = (weights_HBTT @ value).permute(1, 2, 0, 3).flatten(2)
        return self.whiten(self.output(context), mask_BT)


class NonlinAttention(nn.Module):
    """A gated module that mixes frames with the weights of one head where a convolution module has its kernel.

    dim: width D. hidden_dim: width of the gates and of what is mixed.
    """

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.project = nn.Linear(dim, 3 * hidden_dim)
        self.balance_gate = Balancer(
            PiecewiseLinear((0.0, 0.25), (20000.0, 0.05)), PiecewiseLinear((0.0, 0.75), (20000.0, 0.95)), 0.5, 5.0
        )
        self.whiten_hidden = Whiten(5.0, 10.0)
        self.output = scaled_linear(hidden_dim, dim, 0.05)
        self.whiten = Whiten(5.0, 15.0)

    def forward(self, frames_BTD: Tensor, weights_BTT: Tensor, mask_BT: Tensor) -> Tensor:
        """(B, T, D) of frames (B, T, D). weights: (B, T, T), or (B, 1, T) where all queries share theirs."""
        gate, hidden, late_gate = self.project(frames_BTD).chunk(3, dim=-1)
        gate = self.balance_gate(gate, mask_BT).tanh()
        hidden = self.whiten_hidden(hidden, mask_BT) * gate
        hidden = (weights_BTT @ hidden) * late_gate
        return self.whiten(self.output(hidden), mask_BT)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, T, H * D) -> (H, B, T, D)"""
    return x.unflatten(-1, (num_heads, -1)).permute(2, 0, 1, 3)
