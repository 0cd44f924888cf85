"""Weights as icefall publishes them."""

from __future__ import annotations

import re

import torch
from torch import Tensor

# Of the last convolution of its front end, in all its models.
FRONT_END_CHANNELS = 128

# icefall's names, with the groups that are kept, and the names here.
_ENCODER_NAMES = [
    (r"encoder_embed\.conv\.0\.(\w+)", r"subsampling.conv1.\1"),
    (r"encoder_embed\.conv\.4\.(\w+)", r"subsampling.conv2.\1"),
    (r"encoder_embed\.conv\.7\.(\w+)", r"subsampling.conv3.\1"),
    (r"encoder_embed\.convnext\.depthwise_conv\.(\w+)", r"subsampling.convnext.depthwise.\1"),
    (r"encoder_embed\.convnext\.pointwise_conv1\.(\w+)", r"subsampling.convnext.expand.\1"),
    (r"encoder_embed\.convnext\.pointwise_conv2\.(\w+)", r"subsampling.convnext.contract.\1"),
    (r"encoder_embed\.out\.(\w+)", r"subsampling.project.\1"),
    (r"encoder_embed\.out_norm\.(\w+)", r"subsampling.norm.\1"),
    (r"encoder\.downsample_output\.bias", r"downsample.bias"),
    (r"encoder\.encoders\.(\d+)\.downsample\.bias", r"stacks.\1.downsample.bias"),
    (r"encoder\.encoders\.(\d+)\.out_combiner\.bypass_scale", r"stacks.\1.combine.scale"),
    (r"encoder\.encoders\.(\d+)\.(?:encoder\.)?layers\.(\d+)\.(.+)", r"stacks.\1.layers.\2.\3"),
]
_LAYER_NAMES = [
    (r"self_attn_weights\.in_proj\.(\w+)", r"attention_weights.project.\1"),
    (r"self_attn_weights\.linear_pos\.(\w+)", r"attention_weights.position.\1"),
    (r"self_attn([12])\.in_proj\.(\w+)", r"attention\1.value.\2"),
    (r"self_attn([12])\.out_proj\.(\w+)", r"attention\1.output.\2"),
    (r"nonlin_attention\.in_proj\.(\w+)", r"nonlin_attention.project.\1"),
    (r"nonlin_attention\.out_proj\.(\w+)", r"nonlin_attention.output.\1"),
    (r"conv_module([12])\.in_proj\.(\w+)", r"convolution\1.project.\2"),
    (r"conv_module([12])\.depthwise_conv\.(\w+)", r"convolution\1.depthwise.\2"),
    (r"conv_module([12])\.out_proj\.(\w+)", r"convolution\1.output.\2"),
    (r"feed_forward([123])\.in_proj\.(\w+)", r"feed_forward\1.expand.\2"),
    (r"feed_forward([123])\.out_proj\.(\w+)", r"feed_forward\1.contract.\2"),
    (r"bypass_mid\.bypass_scale", r"bypass_middle.scale"),
    (r"bypass\.bypass_scale", r"bypass.scale"),
    (r"norm\.(\w+)", r"norm.\1"),
]
# What regularises training here and remembers what it last saw; icefall does not store it.
_WHITENED_IN_LAYER = (
    "attention_weights.whiten_keys", "nonlin_attention.whiten_hidden", "nonlin_attention.whiten", "attention1.whiten",
    "attention2.whiten", "convolution1.whiten", "convolution2.whiten", "feed_forward1.whiten", "feed_forward2.whiten",
    "feed_forward3.whiten", "whiten",
)  # fmt: skip
# A parameter of every layer that icefall's own forward pass never reads.
_UNUSED = re.compile(r"encoder\.encoders\.\d+\.(?:encoder\.)?layers\.\d+\.bypass_scale")


def encoder_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of `asr.encoders.zipformer.Zipformer` for that of icefall's non-streaming zipformer.

    Takes what is called `encoder_embed.` and `encoder.`, and leaves decoder, joiner and CTC output to others. Raises
    ValueError that names a tensor that has no place here, such as those of a streaming model.
    """
    weights = {}
    whitened = {"subsampling.whiten", "subsampling.convnext.whiten"}
    for name, tensor in state.items():
        if not name.startswith(("encoder_embed.", "encoder.")) or _UNUSED.fullmatch(name):
            continue
        renamed = _encoder_name(name)
        weights[renamed] = _in_place_order(name, tensor)
        if layer := re.match(r"stacks\.\d+\.layers\.\d+\.", renamed):
            whitened.update(layer[0] + place for place in _WHITENED_IN_LAYER)
    return weights | {f"{place}.above": torch.tensor(1.0) for place in whitened}


def _encoder_name(name: str) -> str:
    renamed = _translated(name, _ENCODER_NAMES)
    if renamed and (layer := re.fullmatch(r"(stacks\.\d+\.layers\.\d+\.)(.+)", renamed)):
        inner = _translated(layer[2], _LAYER_NAMES)
        renamed = inner and layer[1] + inner
    if not renamed:
        raise ValueError(f"{name}: no such tensor in a non-streaming zipformer; only such models can be taken over")
    return renamed


def _translated(name: str, table: list[tuple[str, str]]) -> str | None:
    for pattern, replacement in table:
        if match := re.fullmatch(pattern, name):
            return match.expand(replacement)
    return None


def _in_place_order(name: str, tensor: Tensor) -> Tensor:
    """The tensor as the layers here want it: 1x1 convolutions as matrices, images flattened bin by bin."""
    if re.fullmatch(r"encoder_embed\.convnext\.pointwise_conv[12]\.weight", name):
        return tensor.flatten(1)
    if name == "encoder_embed.out.weight":
        return tensor.unflatten(1, (FRONT_END_CHANNELS, -1)).transpose(1, 2).flatten(1)
    return tensor
