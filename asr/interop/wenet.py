"""WeNet's Conformers with CTC and attention decoders (Yao et al., 2021; U2 and U2++ among them).

What changes on the way, none of which changes a result: biases of keys move all scores of a query alike and are left
out; the bias of a convolution before batch norm goes into that norm's running mean; the columns of the projection after
subsampling are put in this project's order. In WeNet the batch mates of a longer utterance see its padding through
convolutions that look ahead; here, as there for one utterance at a time, they do not.
"""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from asr.interop.run_folder import ImportedModel
from asr.text.listed_tokenizer import ListedTokenizer
from asr.text.table import read_tokens

# What the file may hold beside parameters: tables of positions, counters, and what goes elsewhere or nowhere.
WITHOUT_USE = (".pe", ".num_batches_tracked", ".linear_k.bias", "global_cmvn.mean", "global_cmvn.istd")
# The one value of a setting that is understood here, by section; it is also WeNet's default.
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "encoder_conf": {
        "input_layer": "conv2d", "pos_enc_layer_type": "rel_pos", "selfattention_layer_type": "rel_selfattn",
        "normalize_before": True, "activation_type": "swish", "macaron_style": True, "use_cnn_module": True,
        "positionwise_conv_kernel_size": 1, "static_chunk_size": 0, "layer_norm_type": "layer_norm",
        "mlp_type": "position_wise_feed_forward", "conv_inner_factor": 2, "n_kv_head": None, "head_dim": None,
        "final_norm": True, "query_bias": True, "key_bias": True, "value_bias": True, "conv_bias": True,
        "mlp_bias": True,
    },
    "decoder_conf": {
        "input_layer": "embed", "normalize_before": True, "activation_type": "relu", "use_output_layer": True,
        "layer_norm_type": "layer_norm", "mlp_type": "position_wise_feed_forward", "src_attention": True,
        "n_kv_head": None, "head_dim": None,
    },
    "model_conf": {"apply_non_blank_embedding": False},
    "dataset_conf": {"feats_type": "fbank"},
}  # fmt: skip

CONFORMER_BLOCK = {
    "macaron_norm": "norm_ff_macaron",
    "macaron.expand": "feed_forward_macaron.w_1",
    "macaron.contract": "feed_forward_macaron.w_2",
    "attention_norm": "norm_mha",
    "attention.query": "self_attn.linear_q",
    "attention.key": "self_attn.linear_k",
    "attention.value": "self_attn.linear_v",
    "attention.output": "self_attn.linear_out",
    "attention.position": "self_attn.linear_pos",
    "convolution_norm": "norm_conv",
    "convolution.pointwise_in": "conv_module.pointwise_conv1",
    "convolution.depthwise": "conv_module.depthwise_conv",
    "convolution.norm": "conv_module.norm",
    "convolution.pointwise_out": "conv_module.pointwise_conv2",
    "feed_forward_norm": "norm_ff",
    "feed_forward.expand": "feed_forward.w_1",
    "feed_forward.contract": "feed_forward.w_2",
    "norm": "norm_final",
}
DECODER_LAYER = {
    "self_norm": "norm1", "cross_norm": "norm2", "feed_forward_norm": "norm3",
    "feed_forward.expand": "feed_forward.w_1", "feed_forward.contract": "feed_forward.w_2",
} | {
    f"{own}_attention.{part}": f"{theirs}_attn.linear_{letter}"
    for own, theirs in (("self", "self"), ("cross", "src"))
    for part, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "out"))
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="TRAIN_YAML", help="its train.yaml")
    parser.add_argument("--symbols", type=Path, required=True, metavar="UNITS_TXT", help="its units.txt")
    parser.add_argument("--cmvn", type=Path, metavar="FILE", help="its global_cmvn (JSON), where the weights lack it")


def read(args: argparse.Namespace) -> ImportedModel:
    """See `asr.interop.run_folder`. Raises ValueError that names a setting which is not understood."""
    config = _read_config(args.config)
    tokens = read_tokens(args.symbols)
    try:
        weights = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{args.checkpoint}: no file of weights alone: {str(error).splitlines()[0]}") from error
    if "ctc.ctc_lo.weight" not in weights or "encoder.embed.conv.0.weight" not in weights:
        raise ValueError(f"{args.checkpoint}: no weights of a WeNet Conformer with CTC")
    if len(weights["ctc.ctc_lo.weight"]) != len(tokens):
        raise ValueError(f"{args.symbols}: {len(tokens)} symbols, the weights have {len(weights['ctc.ctc_lo.weight'])}")
    cmvn = _cmvn(weights, args.cmvn)
    two_sided = _section(config, "decoder_conf").get("r_num_blocks", 0) > 0 and _reverse_weight(config) > 0
    state, unused = _convert(dict(weights), two_sided)
    if cmvn is not None:
        mean, istd = cmvn
        state |= {"feature_norm.mean": mean, "feature_norm.std": 1 / istd, "feature_norm.num_frames": torch.tensor(1)}
    sections = _sections(config, weights, two_sided) | {
        "features.normalise": {
            "_target_": "asr.features.normalise.FeatureNorm",
            "mode": "none" if cmvn is None else "global",
        },
    }
    return ImportedModel(sections, state, _tokenizer(config, tokens), unused)


def _read_config(path: Path) -> dict[str, Any]:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "encoder_conf" not in config:
        raise ValueError(f"{path}: no train.yaml of WeNet: it has no encoder_conf")
    wrong = []
    for key, understood in (("encoder", ("conformer",)), ("decoder", ("transformer", "bitransformer"))):
        if config.get(key, understood[0]) not in understood:
            wrong.append(f"{key}: {config[key]} (understood: {', '.join(understood)})")
    for section, settings in UNDERSTOOD.items():
        given = _section(config, section)
        wrong += [
            f"{section}.{key}: {given[key]} (understood: {value})"
            for key, value in settings.items()
            if given.get(key, value) != value
        ]
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    return config


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    return config.get(name) or {}


def _reverse_weight(config: dict[str, Any]) -> float:
    return _section(config, "model_conf").get("reverse_weight", 0.0)


def _sections(config: dict[str, Any], weights: dict[str, Tensor], two_sided: bool) -> dict[str, Any]:
    """The settings in this project's terms."""
    encoder, decoder, model = (_section(config, name) for name in ("encoder_conf", "decoder_conf", "model_conf"))
    ctc_weight = model.get("ctc_weight", 0.5)
    if not 0 < ctc_weight < 1:
        raise ValueError(f"model_conf.ctc_weight: {ctc_weight} leaves CTC or the decoder untrained")
    width = encoder.get("output_size", 256)
    attention = {
        "_target_": "asr.heads.attention.Attention",
        "_partial_": True,
        "num_layers": decoder.get("num_blocks", 6),
        "num_heads": decoder.get("attention_heads", 4),
        "feed_forward_dim": decoder.get("linear_units", 2048),
        "dropout": decoder.get("dropout_rate", 0.1),
        "self_attention_dropout": decoder.get("self_attention_dropout_rate", 0.0),
        "cross_attention_dropout": decoder.get("src_attention_dropout_rate", 0.0),
        "label_smoothing": model.get("lsm_weight", 0.0),
    }
    if two_sided:
        attention |= {"reverse_layers": decoder["r_num_blocks"], "reverse_weight": _reverse_weight(config)}
    return {
        "name": "wenet",
        "features.fbank": _fbank(config),
        "encoder": {
            "_target_": "asr.encoders.conformer.Conformer",
            "output_dim": width,
            "num_layers": encoder.get("num_blocks", 6),
            "num_heads": encoder.get("attention_heads", 4),
            "feed_forward_dim": encoder.get("linear_units", 2048),
            "kernel_size": encoder.get("cnn_module_kernel", 15),
            "conv_norm": encoder.get("cnn_module_norm", "batch_norm"),
            "subsampling_channels": width,
            "dropout": encoder.get("dropout_rate", 0.1),
            "attention_dropout": encoder.get("attention_dropout_rate", 0.0),
            "scale_input": True,
            "relative_shift": False,
            "final_norm": True,
            "causal": encoder.get("causal", False),
            "chunk_probability": 0.5 if encoder.get("use_dynamic_chunk", False) else 0.0,
        },
        "head": {
            "_target_": "asr.heads.joint.Joint",
            "weights": {"ctc": ctc_weight, "attention": 1 - ctc_weight},
            "heads": {
                "ctc": {"_target_": "asr.heads.ctc.CTC", "_partial_": True, "dropout": 0.0},
                "attention": attention,
            },
        },
        "search": {"_target_": "asr.search.attention_rescoring.attention_rescoring", "_partial_": True},
    }


def _fbank(config: dict[str, Any]) -> dict[str, Any]:
    """Its features are torchaudio's of samples in 16-bit scale: no mirrored ends, filters up to half the rate."""
    dataset = _section(config, "dataset_conf")
    collate = _section(config, "collate_conf").get("feature_extraction_conf") or {}  # of 2020 and 2021
    given = dataset.get("fbank_conf") or {}
    return {
        "_target_": "asr.features.fbank.Fbank",
        "sample_rate": (dataset.get("resample_conf") or {}).get("resample_rate", 16000),
        "num_mel_bins": given.get("num_mel_bins", collate.get("mel_bins", config.get("input_dim", 80))),
        "frame_length": given.get("frame_length", 25),
        "frame_shift": given.get("frame_shift", 10),
        "high_freq": 0.0,
        "snip_edges": True,
        "sample_scale": 32768.0,
        "dither": 0.0,  # which is for training
    }


def _tokenizer(config: dict[str, Any], tokens: list[str]) -> ListedTokenizer:
    if config.get("tokenizer", "char") != "char":
        raise ValueError(f"tokenizer: {config['tokenizer']} (understood: char)")
    special = _section(config, "tokenizer_conf").get("special_tokens") or {}
    start, end = (special.get(name, len(tokens) - 1) for name in ("<sos>", "<eos>"))
    if start != end:
        raise ValueError(f"tokenizer_conf.special_tokens: <sos> {start} and <eos> {end} must be one symbol")
    blank = _section(config, "ctc_conf").get("ctc_blank_id", special.get("<blank>", 0))
    unk = special.get("<unk>", tokens.index("<unk>") if "<unk>" in tokens else None)
    return ListedTokenizer(tokens, blank, unk, start)


def _cmvn(weights: dict[str, Tensor], path: Path | None) -> tuple[Tensor, Tensor] | None:
    """Mean and inverse standard deviation of the features; the weights' own and those of the file must agree."""
    stored = weights.get("encoder.global_cmvn.mean"), weights.get("encoder.global_cmvn.istd")
    own = None if stored[0] is None or stored[1] is None else (stored[0], stored[1])
    if path is None:
        return own
    try:
        sums = json.loads(path.read_text(encoding="utf-8"))
        mean = torch.tensor(sums["mean_stat"], dtype=torch.float64) / sums["frame_num"]
        square = torch.tensor(sums["var_stat"], dtype=torch.float64) / sums["frame_num"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no JSON of mean_stat, var_stat and frame_num ({error})") from error
    found = mean.float(), (square - mean.square()).clamp(min=1e-20).rsqrt().float()
    if own is not None and not all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(own, found, strict=True)):
        raise ValueError(f"{path}: not the statistics that lie in the weights; leave --cmvn out to take those")
    return found if own is None else own


def _convert(weights: dict[str, Tensor], two_sided: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by this project's names, and the names of those that are left."""
    state: dict[str, Tensor] = {}
    left = dict(weights)

    def move(own: str, theirs: str) -> None:
        for kind in ("weight", "bias", "running_mean", "running_var"):
            if f"{theirs}.{kind}" in left and not f"{theirs}.{kind}".endswith("linear_k.bias"):
                state[f"{own}.{kind}"] = left.pop(f"{theirs}.{kind}")

    for number, part in ((0, "conv1"), (2, "conv2")):
        move(f"encoder.subsampling.{part}", f"encoder.embed.conv.{number}")
    move("encoder.subsampling.project", "encoder.embed.out.0")
    project = state["encoder.subsampling.project.weight"]
    # Its columns are channel by channel, ours bin by bin.
    by_channel = project.unflatten(1, (len(state["encoder.subsampling.conv2.weight"]), -1))
    state["encoder.subsampling.project.weight"] = by_channel.transpose(1, 2).flatten(1).contiguous()
    move("encoder.final_norm", "encoder.after_norm")
    for number in range(_count(weights, "encoder.encoders.")):
        block, theirs = f"encoder.blocks.{number}", f"encoder.encoders.{number}"
        for own, name in CONFORMER_BLOCK.items():
            move(f"{block}.{own}", f"{theirs}.{name}")
        for own, name in (("content_bias", "pos_bias_u"), ("position_bias", "pos_bias_v")):
            bias = left.pop(f"{theirs}.self_attn.{name}")
            state[f"{block}.attention.{own}"] = bias.view(bias.size(0), 1, 1, bias.size(1))
        for part in ("pointwise_in", "pointwise_out"):
            name = f"{block}.convolution.{part}.weight"
            state[name] = state[name].squeeze(-1)
        if f"{block}.convolution.norm.running_mean" in state:
            state[f"{block}.convolution.norm.running_mean"] -= state.pop(f"{block}.convolution.depthwise.bias")
    move("head.heads.ctc.output", "ctc.ctc_lo")
    sides = [("decoder", "decoder.left_decoder" if _count(weights, "decoder.left_decoder.decoders.") else "decoder")]
    if two_sided:
        sides.append(("reverse_decoder", "decoder.right_decoder"))
    for own_name, name in sides:
        side = f"head.heads.attention.{own_name}"
        move(f"{side}.embedding", f"{name}.embed.0")
        move(f"{side}.norm", f"{name}.after_norm")
        move(f"{side}.output", f"{name}.output_layer")
        for number in range(_count(weights, f"{name}.decoders.")):
            for own, theirs in DECODER_LAYER.items():
                move(f"{side}.layers.{number}.{own}", f"{name}.decoders.{number}.{theirs}")
    return state, sorted(name for name in left if not name.endswith(WITHOUT_USE))


def _count(weights: dict[str, Tensor], prefix: str) -> int:
    """How many numbered parts there are under `prefix`."""
    return len({name.removeprefix(prefix).partition(".")[0] for name in weights if name.startswith(prefix)})
