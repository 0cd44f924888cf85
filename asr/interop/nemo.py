"""NeMo's convolutional CTC models, QuartzNet and Citrinet, from a .nemo file: a tar of YAML, weights and tokenizer."""

from __future__ import annotations

import argparse
import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import yaml
from torch import Tensor

from asr.features.slaney import SlaneyFbank
from asr.interop.run_folder import ImportedModel
from asr.text.listed_tokenizer import ListedTokenizer
from asr.text.table import SPACE_MARK

BLANK = "<blank>"
# Settings that change what a model computes, with the values that are understood; what is absent has the first.
PREPROCESSOR: dict[str, tuple[Any, ...]] = {
    "normalize": ("per_feature", None),
    "window": ("hann",),
    "preemph": (0.97,),
    "frame_splicing": (1,),
    "log": (True,),
    "log_zero_guard_type": ("add",),
    "log_zero_guard_value": (2**-24,),
    "mag_power": (2.0,),
    "mel_norm": ("slaney",),
    "exact_pad": (False,),
    "use_torchaudio": (False,),
}
ENCODER: dict[str, tuple[Any, ...]] = {
    "activation": ("relu",),
    "conv_mask": (True,),
    "normalization_mode": ("batch",),
    "frame_splicing": (1,),
}
BLOCK: dict[str, tuple[Any, ...]] = {
    "groups": (1,),
    "heads": (-1,),
    "residual_dense": (False,),
    "residual_mode": ("add", "stride_add"),
    "se_context_size": (-1,),
    "future_context": (-1,),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A .nemo file holds all there is to know."""


def read(args: argparse.Namespace) -> ImportedModel:
    """See `asr.interop.run_folder`. Raises ValueError that names a setting which is not understood."""
    config, weights, proto = _read_file(args.checkpoint)
    wrong = list(_not_understood(config))
    if wrong:
        raise ValueError(f"{args.checkpoint}: {'; '.join(wrong)}")
    blocks = config["encoder"]["jasper"]
    fbank = _fbank(config["preprocessor"])
    _check_front_end(fbank, weights, args.checkpoint)
    names = dict(_names(blocks))
    state = {ours: _in_place_shape(ours, weights[theirs]) for theirs, ours in names.items() if theirs in weights}
    sections = {
        "name": "nemo",
        "features.fbank": fbank,
        "features.normalise": {
            "_target_": "asr.features.normalise.FeatureNorm",
            "mode": config["preprocessor"].get("normalize", "per_feature") or "none",
        },
        "encoder": _encoder(blocks),
        "head": {"_target_": "asr.heads.ctc.CTC", "dropout": 0.0},
    }
    tokenizer = _bpe_tokenizer(proto) if proto else _letter_tokenizer(config)
    known = (*names, "preprocessor.featurizer.window", "preprocessor.featurizer.fb")
    unused = [name for name in weights if name not in known and not name.endswith("num_batches_tracked")]
    return ImportedModel(sections, state, tokenizer, unused)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], bytes]:
    """The settings, the weights, and the SentencePiece model or b"". Nothing is written to disk or executed."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None:
                    found[Path(member.name).name] = file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"{path}: no .nemo file: {error}") from None
    for name in ("model_config.yaml", "model_weights.ckpt"):
        if name not in found:
            raise ValueError(f"{path}: no .nemo file: {name} is missing")
    config = yaml.safe_load(found["model_config.yaml"])
    try:
        weights = torch.load(io.BytesIO(found["model_weights.ckpt"]), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: model_weights.ckpt holds more than weights, or is broken: {reason}") from None
    proto = next((content for name, content in found.items() if name.endswith("tokenizer.model")), b"")
    return config, weights, proto


def _not_understood(config: dict[str, Any]) -> Iterator[str]:
    """What the settings say that this project's parts cannot do."""
    for section, kind in (("preprocessor", "AudioToMelSpectrogramPreprocessor"), ("encoder", "ConvASREncoder"),
                          ("decoder", "ConvASRDecoder")):  # fmt: skip
        of = config.get(section) or {}
        target = str(of.get("_target_", of.get("cls")))
        if target.rpartition(".")[2] != kind:
            yield f"{section}: {target} (understood: {kind})"
            return
    yield from _unlike("preprocessor", config["preprocessor"], PREPROCESSOR)
    yield from _unlike("encoder", config["encoder"], ENCODER)
    blocks = config["encoder"]["jasper"]
    for index, block in enumerate(blocks):
        place = f"encoder.jasper[{index}]"
        yield from _unlike(place, block, BLOCK)
        stride = block["stride"][0]
        if stride > 1 and block["repeat"] > 1 and not block.get("stride_last", False):
            yield f"{place}.stride: {stride} in each of {block['repeat']} convolutions (understood: stride_last)"
        if stride > 1 and block["residual"] and block.get("residual_mode", "add") != "stride_add":
            yield f"{place}.residual_mode: add beside a stride of {stride} (understood: stride_add)"
    if len({_squeeze_ratio(block) for block in blocks}) > 1:
        yield "encoder.jasper: se in some blocks (understood: in all, of one se_reduction_ratio, or in none)"


def _unlike(place: str, section: dict[str, Any], understood: dict[str, tuple[Any, ...]]) -> Iterator[str]:
    for key, values in understood.items():
        if section.get(key, values[0]) not in values:
            yield f"{place}.{key}: {section[key]} (understood: {', '.join(map(str, values))})"


def _fbank(preprocessor: dict[str, Any]) -> dict[str, Any]:
    rate = preprocessor.get("sample_rate", 16000)
    frame_length = 1000 * preprocessor.get("window_size", 0.02)
    return {
        "_target_": "asr.features.slaney.SlaneyFbank",
        "sample_rate": rate,
        "num_mel_bins": preprocessor.get("features", 64),
        "frame_length": frame_length,
        "frame_shift": 1000 * preprocessor.get("window_stride", 0.01),
        "fft_size": preprocessor.get("n_fft") or 1 << (int(rate * frame_length / 1000) - 1).bit_length(),
        "low_freq": float(preprocessor.get("lowfreq", 0)),
        "high_freq": preprocessor.get("highfreq"),
    }


def _check_front_end(fbank: dict[str, Any], weights: dict[str, Tensor], path: Path) -> None:
    """The file's window and filters must be those that its settings give here."""
    made = SlaneyFbank(**{key: value for key, value in fbank.items() if key != "_target_"})
    for name, own in (("window", made.window), ("fb", made.mel.T.unsqueeze(0))):
        theirs = weights.get(f"preprocessor.featurizer.{name}")
        if theirs is not None and not (own.shape == theirs.shape and torch.allclose(own, theirs, atol=1e-5)):
            raise ValueError(f"{path}: preprocessor.featurizer.{name} is not what the settings of the file give")


def _encoder(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "_target_": "asr.encoders.quartznet.QuartzNet",
        "channels": [block["filters"] for block in blocks],
        "kernel_sizes": [_kernel_size(block) for block in blocks],
        "repeats": [block["repeat"] for block in blocks],
        "strides": [block["stride"][0] for block in blocks],
        "dilations": [block["dilation"][0] for block in blocks],
        "residual": [block["residual"] for block in blocks],
        "separable": [block.get("separable", False) for block in blocks],
        "dropout": [block["dropout"] for block in blocks],
        "squeeze_ratio": _squeeze_ratio(blocks[0]),
    }


def _kernel_size(block: dict[str, Any]) -> int:
    """Scaled, and the next odd number where that is even."""
    return max(1, int(block["kernel"][0] * block.get("kernel_size_factor", 1.0))) | 1


def _squeeze_ratio(block: dict[str, Any]) -> int:
    return block.get("se_reduction_ratio", 8) if block.get("se", False) else 0


def _names(blocks: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Every name of NeMo's with the one here. Its lists also count what has no weights: ReLU and dropout."""

    def norm(theirs: str, ours: str) -> Iterator[tuple[str, str]]:
        for part in ("weight", "bias", "running_mean", "running_var"):
            yield f"{theirs}.{part}", f"{ours}.{part}"

    for index, block in enumerate(blocks):
        theirs, ours = f"encoder.encoder.{index}", f"encoder.blocks.{index}"
        convolutions = 1 + block.get("separable", False)
        for repeat in range(block["repeat"]):
            at, layer = repeat * (convolutions + 3), f"{ours}.layers.{repeat}"
            yield f"{theirs}.mconv.{at}.conv.weight", f"{layer}.convolution.weight"
            yield f"{theirs}.mconv.{at + 1}.conv.weight", f"{layer}.pointwise.weight"
            yield from norm(f"{theirs}.mconv.{at + convolutions}", f"{layer}.norm")
        squeeze = f"{theirs}.mconv.{at + convolutions + 1}.fc"
        yield f"{squeeze}.0.weight", f"{ours}.squeeze.squeeze.weight"
        yield f"{squeeze}.2.weight", f"{ours}.squeeze.excite.weight"
        yield f"{theirs}.res.0.0.conv.weight", f"{ours}.shortcut.convolution.weight"
        yield from norm(f"{theirs}.res.0.1", f"{ours}.shortcut.norm")
    yield "decoder.decoder_layers.0.weight", "head.output.weight"
    yield "decoder.decoder_layers.0.bias", "head.output.bias"


def _in_place_shape(name: str, tensor: Tensor) -> Tensor:
    """Convolutions over one frame are linear layers here."""
    return tensor.squeeze(-1) if name.endswith(("pointwise.weight", "head.output.weight")) else tensor


def _letter_tokenizer(config: dict[str, Any]) -> ListedTokenizer:
    """The labels and blank after them; letters of one case take transcripts of any."""
    labels = config["decoder"]["vocabulary"]
    lower = all(label == label.lower() for label in labels)
    tokens = [SPACE_MARK if label == " " else label for label in labels]
    return ListedTokenizer([*tokens, BLANK], blank_id=len(tokens), normaliser={"case": "lower"} if lower else None)


def _bpe_tokenizer(proto: bytes) -> ListedTokenizer:
    """The pieces of a SentencePiece model and blank after them."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
    pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    return ListedTokenizer([*pieces, BLANK], blank_id=len(pieces), unk_id=processor.unk_id(), model=proto)
