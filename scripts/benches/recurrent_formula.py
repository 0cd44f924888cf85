"""A Transformer layer's step as the formula has it, with the parameters of our own: what `bench.py recurrent` measures
ours against in one run. fast-transformers steps so: products by einsum, the sums of linear attention changed in place
unless gradients are wanted, the keys and values of full attention concatenated anew at every step."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.layers.linear_attention import EPS, LinearSelfAttention
from asr.layers.multi_head import State
from asr.layers.transformer_layer import TransformerLayer


def formula_step(layer: TransformerLayer, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
    """What `layer.step` gives. The first state is ()."""
    normed = layer.self_norm(x_BD)
    attention: Any = layer.self_attention
    query, key, value = (
        project(normed).unflatten(-1, (attention.num_heads, attention.head_dim))
        for project in (attention.query, attention.key, attention.value)
    )
    look = _look_linearly if isinstance(attention, LinearSelfAttention) else _look
    context, state = look(query, key, value, state)
    x_BD = x_BD + attention.output(context.flatten(1))
    return x_BD + layer.feed_forward(layer.feed_forward_norm(x_BD)), state


def _look(query: Tensor, key: Tensor, value: Tensor, state: State) -> tuple[Tensor, State]:
    keys, values = key.unsqueeze(2), value.unsqueeze(2)
    if state:
        keys, values = torch.cat([state[0], keys], dim=2), torch.cat([state[1], values], dim=2)
    scores = torch.einsum("bhd,bhtd->bht", query, keys)
    weights = torch.softmax(scores * (1.0 / math.sqrt(query.size(-1))), dim=-1)
    return torch.einsum("bht,bhtd->bhd", weights, values), (keys, values)


def _look_linearly(query: Tensor, key: Tensor, value: Tensor, state: State) -> tuple[Tensor, State]:
    query, key = F.elu(query) + 1, F.elu(key) + 1
    added = torch.einsum("bhd,bhe->bhde", key, value)
    if not state:
        sums, norms = added, key
    elif torch.is_grad_enabled():
        sums, norms = state[0] + added, state[1] + key
    else:
        sums, norms = state[0].add_(added), state[1].add_(key)
    scale = 1.0 / (torch.einsum("bhd,bhd->bh", query, norms) + EPS)
    return torch.einsum("bhd,bhde,bh->bhe", query, sums, scale), (sums, norms)
