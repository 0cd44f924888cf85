"""From settings and training texts to tokenizer and model, with weights of another run where they are asked for."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lhotse.cut import Cut
from torch import Tensor

from asr.build.data import prepared_folder, texts_of
from asr.build.objects import make
from asr.data.cuts import Manifest, load_audio
from asr.data.dataset import NOT_FINITE, one_thread
from asr.data.report import add_tokenizer_section, format_summary, read_report, write_report
from asr.features.normalise import FeatureNorm
from asr.layers.init import initialise
from asr.model import AsrModel
from asr.rules import by_place
from asr.settings import TrainSettings
from asr.targets import accepted, locate
from asr.text.tokenizer import Tokenizer
from asr.training.run_folder import write_json
from asr.training.transfer import Source, read_source, transfer

log = logging.getLogger(__name__)

# Statistics of this many utterances are those of the whole set to three digits.
UTTERANCES_FOR_STATISTICS = 500
MOST_NAMED = 10


def build_tokenizer(settings: TrainSettings, train_cuts: Iterable[Cut]) -> Tokenizer:
    """Train the tokenizer on the training transcripts."""
    return make(settings.tokenizer, texts=texts_of(train_cuts))


def report_tokens(splits: dict[str, Path], tokenizer: Tokenizer, settings: TrainSettings, run_dir: Path) -> None:
    """Complete the data report with the tokenizer's view, store it in the run, print it, warn of unknown text."""
    report = read_report(prepared_folder(settings))
    assert report
    texts = {split: texts_of(Manifest(path)) for split, path in splits.items()}
    add_tokenizer_section(report, texts, tokenizer)
    write_report(report, run_dir)
    log.info("%s", format_summary(report))
    for split, of_split in texts.items():
        unknown, examples = tokenizer.unknown_share(of_split)
        if unknown > 0.01:
            named = ", ".join(f"{unit!r}" for unit, _ in examples.most_common(10))
            told = f"{split}: {100 * unknown:.0f}% unknown to the tokenizer ({named}): do case and script of the texts"
            if unknown > settings.data.max_unknown:
                raise ValueError(f"{told} match it? More than data.max_unknown={settings.data.max_unknown} is refused")
            log.warning("%s match it?", told)


def check_sizes(settings: TrainSettings) -> None:
    """Raise what the encoder's constructor says of sizes that do not fit, at no cost in memory and before any data."""
    num_mel_bins = make(settings.features["fbank"]).output_dim
    try:
        with torch.device("meta"):
            make(settings.encoder, input_dim=num_mel_bins)
    except ValueError as error:
        told = str(error)
        place = "" if told.startswith("encoder") else "encoder." if re.match(r"\w+=", told) else "encoder: "
        raise ValueError(place + told) from error


def build_model(settings: TrainSettings, tokenizer: Tokenizer) -> AsrModel:
    """The model in fp32 on the CPU, initialised from the torch generator; feature statistics are not fitted yet."""
    num_mel_bins = make(settings.features["fbank"]).output_dim
    feature_norm = make(settings.features["normalise"], num_mel_bins=num_mel_bins)
    encoder = make(settings.encoder, input_dim=num_mel_bins)
    head = _build_head(settings, encoder.output_dim, tokenizer, tokenizer.vocab_size)
    model = AsrModel(feature_norm, make(settings.augment), encoder, head)
    initialise(model, settings.init_mode.value if settings.init_mode else None, by_place(settings.init))
    return model


def _build_head(settings: TrainSettings, input_dim: int, tokenizer: Tokenizer, vocab_size: int) -> Any:
    vocabulary = {
        "input_dim": input_dim,
        "vocab_size": vocab_size,
        "blank_id": tokenizer.blank_id,
        "sos_eos_id": tokenizer.sos_eos_id,
    }
    return make(settings.head, **accepted(locate(settings.head["_target_"]), vocabulary))


def load_source(settings: TrainSettings) -> Source | None:
    """What `init_from` names, if anything. Raises ValueError where it cannot be read."""
    wanted = settings.init_from
    return read_source(wanted.run_dir, wanted.checkpoint) if wanted.run_dir or wanted.checkpoint else None


def start_from(
    source: Source, model: AsrModel, settings: TrainSettings, tokenizer: Tokenizer, run_dir: Path | None
) -> None:
    """Take over weights; what became of every tensor is logged and, in `run_dir`, written to transfer.json."""
    # Which axes of a head count tokens is found by building it for one token more: no head needs to tell.
    with torch.random.fork_rng(devices=[]):
        wider = _build_head(settings, model.encoder.output_dim, tokenizer, tokenizer.vocab_size + 1).state_dict()
    axes = {
        f"head.{name}": [axis for axis, size in enumerate(tensor.shape) if wider[name].size(axis) != size]
        for name, tensor in model.head.state_dict().items()
        if wider[name].shape != tensor.shape
    }
    wanted = settings.init_from
    done = transfer(model, source, tokenizer, axes, wanted.include, wanted.exclude)
    done.report()
    there, here = source.config.get("features", {}).get("fbank"), settings.features["fbank"]
    if there is not None and there != here:
        log.warning("%s was trained on other features (%s) than features.fbank=%s", source.where, there, here)
    if run_dir:
        write_json(done.as_dict(), run_dir / "transfer.json")


def fit_feature_norm(model: AsrModel, settings: TrainSettings, cuts: Manifest) -> None:
    """Take the statistics of evenly spread training utterances.

    What training will leave out, because its audio cannot be read or its features are not finite, is left out here too,
    and told. Raises ValueError where nothing is left.
    """
    norm = model.feature_norm
    if not (isinstance(norm, FeatureNorm) and norm.needs_fit):
        return
    fbank = make(settings.features["fbank"])
    chosen = islice(cuts, 0, None, max(1, len(cuts) // UTTERANCES_FOR_STATISTICS))

    skipped: list[str] = []

    def features() -> Iterable[Tensor]:
        for cut in chosen:
            try:
                features_TF = fbank(torch.from_numpy(load_audio(cut)))
            except ValueError as error:
                skipped.append(f"{cut.id}: {error}")
                continue
            if features_TF.isfinite().all():
                yield features_TF
            else:
                skipped.append(f"{cut.id}: {NOT_FINITE}")
        if skipped:
            more = " ..." if len(skipped) > MOST_NAMED else ""
            log.warning(
                "%d utterances are left out of the feature statistics: %s%s",
                len(skipped), "; ".join(skipped[:MOST_NAMED]), more,
            )  # fmt: skip

    with one_thread():
        norm.fit(features())
