"""Self-attention with relative positions in the forms that one finds elsewhere, with the parameters of our own.

Each is a function (attention, frames (B, T, D), distances (2T, D), positions (T, D), mask (B, 1, T)) -> (B, T, D). They
give what `RelativeSelfAttention` gives; `bench.py attention` measures them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.layers.attention import RelativeSelfAttention as Attention
from asr.layers.attention import relative_shift


def ours(attention: Attention, frames: Tensor, distances: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """The module itself."""
    return attention(frames, distances if attention.shift else positions, mask)


def eager(attention: Attention, frames: Tensor, distances: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """The formula as it is written down, op by op: two products, the shift by padding and viewing (Transformer-XL's
    appendix; without it as in WeNet), their sum divided by sqrt(d_k), masked with -inf and with 0 around a softmax."""
    batch_size, num_frames, _ = frames.shape
    query, key, value = (
        layer(frames).view(batch_size, num_frames, attention.num_heads, attention.head_dim).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    place = attention.position(distances[:-1] if attention.shift else positions)
    place = place.view(1, -1, attention.num_heads, attention.head_dim).transpose(1, 2)
    biases = (attention.content_bias.transpose(0, 1), attention.position_bias.transpose(0, 1))
    content = (query + biases[0]) @ key.transpose(-2, -1)
    position = (query + biases[1]) @ place.transpose(-2, -1)
    if attention.shift:
        padded = torch.cat([position.new_zeros(*position.shape[:-1], 1), position], dim=-1)
        turned = padded.view(batch_size, attention.num_heads, 2 * num_frames, num_frames)[:, :, 1:]
        position = turned.reshape(position.shape)[..., :num_frames]
    scores = (content + position) / math.sqrt(attention.head_dim)
    hidden = ~mask.unsqueeze(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0)
    context = (attention.dropout(weights) @ value).transpose(1, 2).reshape(batch_size, num_frames, -1)
    return attention.output(context)


def sdpa(attention: Attention, frames: Tensor, distances: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """`scaled_dot_product_attention` with the position scores, which need a gradient, as its bias."""
    batch_size, num_frames, _ = frames.shape
    shape = batch_size, num_frames, attention.num_heads, attention.head_dim
    query, key, value = (
        layer(frames).view(shape).permute(2, 0, 1, 3) for layer in (attention.query, attention.key, attention.value)
    )
    place = attention.position(distances if attention.shift else positions)
    place = place.view(-1, attention.num_heads, attention.head_dim).transpose(0, 1)
    biased = (query + attention.position_bias) * (1 / math.sqrt(attention.head_dim))
    bias = (biased.flatten(1, 2) @ place.transpose(-2, -1)).unflatten(1, (batch_size, num_frames))
    bias = relative_shift(bias) if attention.shift else bias
    fill = torch.zeros(mask.shape, dtype=bias.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    context = F.scaled_dot_product_attention(query + attention.content_bias, key, value, attn_mask=bias + fill)
    return attention.output(context.permute(1, 2, 0, 3).flatten(2))


# name -> (function, whether positions are shifted to distances)
VARIANTS = {
    "ours": (ours, True),
    "sdpa": (sdpa, True),
    "eager": (eager, True),
    "ours, unshifted": (ours, False),
    "sdpa, unshifted": (sdpa, False),
    "eager, unshifted": (eager, False),
}
