"""One layer of the Zipformer (Yao et al., 2023, figure 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.encoders.zipformer.activation import swoosh_l
from asr.encoders.zipformer.attention import AttentionWeights, NonlinAttention, SelfAttention
from asr.encoders.zipformer.convolution import ConvolutionModule
from asr.encoders.zipformer.dropout import ChannelDropout, Skip, add_kept
from asr.encoders.zipformer.linear import scaled_linear
from asr.encoders.zipformer.norm import BiasNorm, limited
from asr.encoders.zipformer.whiten import Whiten
from asr.layers.balancer import Balancer
from asr.layers.schedule import PiecewiseLinear, Schedulable, Scheduled


class ZipformerLayer(nn.Module):
    """Twice the modules of a Conformer block, around one set of attention weights, with two learned bypasses.

    In training utterances pass modules by at random, mostly early on: attention (all of it together), either
    convolution, either of the last two feed-forward modules, the whole layer. In some steps the first of the
    attentions, the non-linear one, averages over all frames alike, so that it learns to.

    dim: width D. feed_forward_dim: of the second of three; the first has 3/4 and the last 5/4 of it.
    layer_drop: probability that an utterance passes the layer by.

    `unused_scale` is a left-over of the published layer, which no forward pass reads. It is here, frozen, so that
    parameter counts are the published ones and icefall's checkpoints are held whole.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        query_head_dim: int,
        value_head_dim: int,
        position_head_dim: int,
        position_dim: int,
        feed_forward_dim: int,
        kernel_size: int,
        dropout: Schedulable,
        layer_drop: Schedulable,
    ):
        super().__init__()
        self.attention_weights = AttentionWeights(dim, num_heads, query_head_dim, position_head_dim, position_dim)
        self.feed_forward1 = FeedForward(dim, feed_forward_dim * 3 // 4, dropout)
        self.nonlin_attention = NonlinAttention(dim, 3 * dim // 4)
        self.attention1 = SelfAttention(dim, num_heads, value_head_dim)
        self.convolution1 = ConvolutionModule(dim, kernel_size)
        self.feed_forward2 = FeedForward(dim, feed_forward_dim, dropout)
        self.bypass_middle = Bypass(dim)
        self.attention2 = SelfAttention(dim, num_heads, value_head_dim)
        self.convolution2 = ConvolutionModule(dim, kernel_size)
        self.feed_forward3 = FeedForward(dim, feed_forward_dim * 5 // 4, dropout)
        self.norm = BiasNorm(dim)
        self.bypass = Bypass(dim, layer_drop)
        self.unused_scale = nn.Parameter(torch.full((dim,), 0.5), requires_grad=False)

        module_drop = PiecewiseLinear((0.0, 0.2), (4000.0, 0.05), (16000.0, 0.0))
        feed_forward_drop = PiecewiseLinear((0.0, 0.1), (4000.0, 0.01), (50000.0, 0.0))
        self.skip_attention = Skip(module_drop)
        self.mix_evenly = Skip(PiecewiseLinear((0.0, 0.25), (4000.0, 0.025)))
        self.skip_convolution = Skip(module_drop)
        self.skip_feed_forward = Skip(feed_forward_drop)

        self.balance_nonlin = Balancer(0.3, 0.7, PiecewiseLinear((0.0, 0.004), (4000.0, 0.02)), probability=0.05)
        self.balance_feed_forward2 = Balancer(
            0.3, 0.7, PiecewiseLinear((0.0, 0.0), (4000.0, 0.1)), 2.0, probability=0.05
        )
        self.balance_feed_forward3 = Balancer(
            0.3, 0.7, PiecewiseLinear((0.0, 0.0), (4000.0, 0.2)), 4.0, probability=0.05
        )
        self.balance_before_norm = Balancer(0.45, 0.55, 0.2, 4.0)
        self.balance_output = Balancer(0.45, 0.55, 0.1, 4.0)
        self.whiten = Whiten(4.0, 12.0)

    def forward(self, frames_BTD: Tensor, positions_RP: Tensor, mask_BT: Tensor) -> Tensor:
        x = frames_BTD
        weights = self.attention_weights(x, positions_RP, mask_BT)
        attended = self.skip_attention.kept(x)

        mixing = _evenly(mask_BT, weights.dtype) if self.mix_evenly.batch() else weights[0]

        x = x + self.feed_forward1(x, mask_BT)
        x = add_kept(x, self.balance_nonlin(self.nonlin_attention(x, mixing, mask_BT), mask_BT), attended)
        x = add_kept(x, self.attention1(x, weights, mask_BT), attended)
        x = add_kept(x, self.convolution1(x, mask_BT), self.skip_convolution.kept(x))
        change = self.balance_feed_forward2(self.feed_forward2(x, mask_BT), mask_BT)
        x = add_kept(x, change, self.skip_feed_forward.kept(x))
        x = self.bypass_middle(frames_BTD, x)

        x = add_kept(x, self.attention2(x, weights, mask_BT), attended)
        x = add_kept(x, self.convolution2(x, mask_BT), self.skip_convolution.kept(x))
        change = self.balance_feed_forward3(self.feed_forward3(x, mask_BT), mask_BT)
        x = add_kept(x, change, self.skip_feed_forward.kept(x))
        x = self.norm(self.balance_before_norm(x, mask_BT))
        x = self.bypass(frames_BTD, x)
        return self.whiten(self.balance_output(x, mask_BT), mask_BT)


def _evenly(mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, T) attention weights by which every query sees the mean of the valid frames."""
    return (mask_BT / mask_BT.sum(1, keepdim=True).clamp(min=1)).to(dtype).unsqueeze(1)


class FeedForward(nn.Module):
    """Linear, SwooshL, dropout of channels, linear.

    dim: width D. hidden_dim: width between the two linear layers.
    """

    def __init__(self, dim: int, hidden_dim: int, dropout: Schedulable):
        super().__init__()
        self.expand = nn.Linear(dim, hidden_dim)
        self.balance = Balancer(0.3, 1.0, 0.75, 5.0)
        self.dropout = ChannelDropout(dropout)
        self.contract = scaled_linear(hidden_dim, dim, 0.1)
        self.whiten = Whiten(7.5, 15.0)

    def forward(self, frames_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        hidden = self.balance(self.expand(frames_BTD), mask_BT)
        return self.whiten(self.contract(self.dropout(swoosh_l(hidden))), mask_BT)


class Bypass(Scheduled):
    """The way from an earlier to a later value, by a learned share for each channel.

    The share is kept at 1 or below, and above a limit that begins at 0.9, so that all modules learn something.

    dim: width D. skip: probability in training that an utterance keeps the earlier value.
    """

    def __init__(self, dim: int, skip: Schedulable = 0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.full((dim,), 0.5))
        self.lowest = PiecewiseLinear((0.0, 0.9), (20000.0, 0.2))
        self.skip = Skip(skip)

    def forward(self, earlier: Tensor, later: Tensor) -> Tensor:
        scale = limited(self.scale, self.now(self.lowest), 1.0) if self.training else self.scale
        kept = self.skip.kept(later)
        return torch.lerp(earlier, later, scale if kept is None else scale * kept)
