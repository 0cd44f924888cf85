"""icefall's non-streaming zipformers, with a transducer, CTC or both (Yao et al., 2023).

Sizes are read from the weights. What is left are training's own options and the size of the position heads, from
which follow the number of heads and the sizes of the others; all may be given by `--set`, in icefall's names. As in
icefall, utterances of a batch see the padding behind them; `--set mask_padding=true` makes each of them independent.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.interop.run_folder import ImportedModel
from asr.targets import nearest
from asr.text.listed_tokenizer import ListedTokenizer
from asr.text.table import read_tokens

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
    (r"bypass_scale", r"unused_scale"),
    (r"norm\.(\w+)", r"norm.\1"),
]
# What regularises training here and remembers what it last saw; icefall does not store it.
_WHITENED_IN_LAYER = (
    "attention_weights.whiten_keys", "nonlin_attention.whiten_hidden", "nonlin_attention.whiten", "attention1.whiten",
    "attention2.whiten", "convolution1.whiten", "convolution2.whiten", "feed_forward1.whiten", "feed_forward2.whiten",
    "feed_forward3.whiten", "whiten",
)  # fmt: skip
# Channels that training never leaves out, by the widths of the stacks, in the three published sizes.
_UNMASKED = {
    (192, 256, 256, 256, 256, 256): [192] * 6,
    (192, 256, 384, 512, 384, 256): [192, 192, 256, 256, 256, 192],
    (192, 256, 512, 768, 512, 256): [192, 192, 256, 320, 256, 192],
}


def _size(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def _sizes(text: str) -> list[int]:
    return [_size(number) for number in text.strip("()[]").split(",")]


def _flag(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


# icefall's options that may be given, and how their values are read.
_OPTIONS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(
        ("num_encoder_layers", "downsampling_factor", "feedforward_dim", "num_heads", "encoder_dim",
         "encoder_unmasked_dim", "cnn_module_kernel"), _sizes,
    ),
    **dict.fromkeys(
        ("query_head_dim", "value_head_dim", "pos_head_dim", "pos_dim", "decoder_dim", "joiner_dim", "context_size",
         "prune_range"), _size,
    ),
    "warm_step": int,
    **dict.fromkeys(("lm_scale", "am_scale", "simple_loss_scale", "ctc_loss_scale"), float),
    **dict.fromkeys(("use_transducer", "use_ctc", "causal", "mask_padding"), _flag),
}  # fmt: skip


# Heads, as in its options use_transducer and use_ctc, and the weights that have a row for every token.
_ROWS = {"transducer": "joiner.output_linear.weight", "ctc": "ctc_output.1.weight"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=Path, required=True, metavar="TOKENS_TXT", help="its tokens.txt")
    parser.add_argument(
        "--bpe", type=Path, metavar="BPE_MODEL", help="its bpe.model, to encode text as in its training"
    )


def read(args: argparse.Namespace) -> ImportedModel:
    """See `asr.interop.run_folder`. Raises ValueError that names a file, an option or a tensor in fault."""
    options = _read_options(args.set)
    weights = _read_weights(args.checkpoint)
    heads = [name for name, rows in _ROWS.items() if options.get(f"use_{name}", rows in weights)]
    missing = [_ROWS[name] for name in heads if _ROWS[name] not in weights] if heads else list(_ROWS.values())
    if missing:
        raise ValueError(f"{args.checkpoint}: no tensor {' and no '.join(missing)}")
    try:
        state = {f"encoder.{name}": tensor for name, tensor in encoder_weights(weights).items()}
    except ValueError as error:
        raise ValueError(f"{args.checkpoint}: {error}") from error
    unused = {name for name in weights if not name.startswith(("encoder.", "encoder_embed."))}
    for name in heads:
        place = f"head.heads.{name}." if len(heads) > 1 else "head."
        renamed = _head_weights(weights, name)
        state |= {place + own: weights[theirs] for theirs, own in renamed.items()}
        unused -= renamed.keys()
    tokenizer = _tokenizer(args.tokens, args.bpe, len(weights[_ROWS[heads[0]]]))
    sections = {
        "name": "icefall",
        "encoder": _encoder_section(weights, options),
        "head": _head_section(weights, options, heads),
        "search": _search_section(heads),
        "features.normalise": {"_target_": "asr.features.normalise.FeatureNorm", "mode": "raw"},
    }
    return ImportedModel(sections, state, tokenizer, sorted(unused))


def _read_options(pairs: list[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        key = key.replace("-", "_")
        if key not in _OPTIONS:
            raise ValueError(
                f"--set {pair}: no such option of icefall's zipformer is understood{nearest(key, _OPTIONS)}"
            )
        try:
            options[key] = _OPTIONS[key](value)
        except (ValueError, KeyError):
            kinds: dict[Any, str] = {
                _sizes: "whole numbers above 0 as in 4,4,4,8,4,4",
                _size: "a whole number above 0",
                _flag: "0 or 1",
            }
            raise ValueError(f"--set {pair}: {kinds.get(_OPTIONS[key], 'a number')} expected") from None
    if options.get("causal"):
        raise ValueError("--set causal=1: streaming models cannot be taken over")
    return options


def _read_weights(path: Path) -> _Weights:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path}: no file of weights alone ({str(error).splitlines()[0]}); give its pretrained.pt"
        ) from error
    weights = loaded.get("model", loaded) if isinstance(loaded, dict) else {}
    weights = {str(name).removeprefix("module."): tensor for name, tensor in weights.items()}
    if "encoder_embed.conv.0.weight" not in weights or not all(isinstance(t, Tensor) for t in weights.values()):
        raise ValueError(f"{path}: no weights of an icefall zipformer: there is no encoder_embed.conv.0.weight")
    return _Weights(path, weights)


class _Weights(dict[str, Tensor]):
    """Tensors by name; where one is wanted that is not there, ValueError tells its name and the file."""

    def __init__(self, path: Path, tensors: dict[str, Tensor], prefix: str = ""):
        super().__init__(tensors)
        self.path = path
        self.prefix = prefix

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"{self.path}: no tensor {self.prefix}{name}, which icefall's non-streaming zipformer has")

    def first_layers(self) -> list[tuple[int, int, _Weights]]:
        """Of every stack its number, how many layers it has, and the weights of the first one by names within it."""
        layers: dict[int, set[int]] = {}
        prefixes = {}
        for name in self:
            if match := re.match(r"(encoder\.encoders\.(\d+)\.(?:encoder\.)?layers\.)(\d+)\.", name):
                layers.setdefault(int(match[2]), set()).add(int(match[3]))
                prefixes[int(match[2])] = f"{match[1]}0."
        if not layers:
            return [(0, 0, self._below("encoder.encoders.0.layers.0."))]
        return [(stack, len(layers[stack]), self._below(prefixes[stack])) for stack in sorted(layers)]

    def _below(self, prefix: str) -> _Weights:
        inside = {name.removeprefix(prefix): tensor for name, tensor in self.items() if name.startswith(prefix)}
        return _Weights(self.path, inside, prefix)


def _encoder_section(weights: _Weights, options: dict[str, Any]) -> dict[str, Any]:
    """Sizes as the weights have them, under the options that were given."""
    stacks, num_layers, first = zip(*weights.first_layers(), strict=True)
    dims = options.get("encoder_dim", [len(layer["norm.bias"]) for layer in first])
    position_head_dim = options.get("pos_head_dim", 4)
    num_heads = options.get(
        "num_heads", [len(layer["self_attn_weights.linear_pos.weight"]) // position_head_dim for layer in first]
    )
    of_head = len(first[0]["self_attn_weights.in_proj.weight"]) // num_heads[0]
    return {
        "_target_": "asr.encoders.zipformer.Zipformer",
        "downsampling": options.get(
            "downsampling_factor",
            [_length(weights, f"encoder.encoders.{stack}.downsample.bias") for stack in stacks],
        ),
        "num_layers": options.get("num_encoder_layers", list(num_layers)),
        "dims": dims,
        "unmasked_dims": options.get("encoder_unmasked_dim", _UNMASKED.get(tuple(dims), [min(dims)] * len(dims))),
        "feed_forward_dims": options.get(
            "feedforward_dim", [len(layer["feed_forward2.in_proj.weight"]) for layer in first]
        ),
        "num_heads": num_heads,
        "kernel_sizes": options.get(
            "cnn_module_kernel", [layer["conv_module1.depthwise_conv.weight"].size(-1) for layer in first]
        ),
        "query_head_dim": options.get("query_head_dim", (of_head - position_head_dim) // 2),
        "value_head_dim": options.get("value_head_dim", len(first[0]["self_attn1.in_proj.weight"]) // num_heads[0]),
        "position_head_dim": position_head_dim,
        "position_dim": options.get("pos_dim", first[0]["self_attn_weights.linear_pos.weight"].size(1)),
        "output_downsampling": _length(weights, "encoder.downsample_output.bias"),
        "mask_padding": options.get("mask_padding", False),
    }


def _length(weights: dict[str, Tensor], name: str) -> int:
    """Frames that a downsampling joins: as many as it has weights; without any it does nothing."""
    return len(weights[name]) if name in weights else 1


def _head_section(weights: dict[str, Tensor], options: dict[str, Any], heads: list[str]) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {}
    if "transducer" in heads:
        kernel = weights.get("decoder.conv.weight")
        joiner = weights["joiner.encoder_proj.weight"]
        sections["transducer"] = {
            "_target_": "asr.heads.transducer.Transducer",
            "decoder_dim": options.get("decoder_dim", weights["decoder.embedding.weight"].size(1)),
            "joiner_dim": options.get("joiner_dim", len(joiner)),
            "context_size": options.get("context_size", 1 if kernel is None else kernel.size(-1)),
            "loss": "pruned" if "simple_am_proj.weight" in weights else "full",
            "prune_range": options.get("prune_range", 5),
            "lm_scale": options.get("lm_scale", 0.25),
            "am_scale": options.get("am_scale", 0.0),
            "simple_loss_scale": options.get("simple_loss_scale", 0.5),
            "warmup_batches": options.get("warm_step", 2000),
        }
    if "ctc" in heads:
        sections["ctc"] = {"_target_": "asr.heads.ctc.CTC", "dropout": 0.1}
    if len(sections) == 1:
        return sections[heads[0]]
    parts = {name: {**section, "_partial_": True} for name, section in sections.items()}
    scale = options.get("ctc_loss_scale", 0.2)
    return {"_target_": "asr.heads.joint.Joint", "heads": parts, "weights": {"transducer": 1.0, "ctc": scale}}


def _search_section(heads: list[str]) -> dict[str, Any]:
    name = "greedy_search" if "transducer" in heads else "ctc_greedy_search"
    return {"_target_": f"asr.search.{name}.{name}", "_partial_": True}


def _head_weights(weights: dict[str, Tensor], head: str) -> dict[str, str]:
    """icefall's names of a head's weights -> their names within the head here."""
    if head == "ctc":
        return {f"ctc_output.1.{kind}": f"output.{kind}" for kind in ("weight", "bias")}
    return {
        name: name for name in weights if name.startswith(("decoder.", "joiner.", "simple_am_proj.", "simple_lm_proj."))
    }


def _tokenizer(tokens_txt: Path, bpe_model: Path | None, vocab_size: int) -> ListedTokenizer:
    tokens = read_tokens(tokens_txt)
    # Symbols of its decoding graphs stand behind the tokens of the model.
    while len(tokens) > vocab_size and re.fullmatch(r"#\d+", tokens[-1]):
        tokens.pop()
    if len(tokens) != vocab_size:
        raise ValueError(f"{tokens_txt}: {len(tokens)} tokens, the weights have {vocab_size}")
    ids = {name: tokens.index(name) if name in tokens else None for name in ("<blk>", "<unk>", "<sos/eos>")}
    if ids["<blk>"] is None:
        raise ValueError(f"{tokens_txt}: there is no <blk> among its tokens")
    letters = "".join(token for token in tokens if token not in ids)
    case = "upper" if letters.isupper() else "lower" if letters.islower() else "keep"
    model = bpe_model.read_bytes() if bpe_model else b""
    return ListedTokenizer(tokens, ids["<blk>"], ids["<unk>"], ids["<sos/eos>"], model, {"case": case})


def encoder_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of `asr.encoders.zipformer.Zipformer` for that of icefall's non-streaming zipformer.

    Takes what is called `encoder_embed.` and `encoder.`, and leaves decoder, joiner and CTC output to others. Raises
    ValueError that names a tensor that has no place here, such as those of a streaming model.
    """
    weights = {}
    whitened = {"subsampling.whiten", "subsampling.convnext.whiten"}
    for name, tensor in state.items():
        if not name.startswith(("encoder_embed.", "encoder.")):
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
        if tensor.dim() != 2 or tensor.size(1) % FRONT_END_CHANNELS:
            raise ValueError(f"{name}: {tuple(tensor.shape)}, not (width, {FRONT_END_CHANNELS} channels * bins)")
        return tensor.unflatten(1, (FRONT_END_CHANNELS, -1)).transpose(1, 2).flatten(1)
    return tensor
