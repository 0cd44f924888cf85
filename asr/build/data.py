"""From settings to checked cuts and loaders."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from lhotse import CutSet

from asr.build.objects import make
from asr.data.augment import NoiseMixer, noise_cuts, random_volume, speed_perturb
from asr.data.corpus import prepared_is_current, prepared_splits, write_prepared
from asr.data.cuts import Manifest, Rejection
from asr.data.dataset import SpeechDataset
from asr.data.filters import count_reasons, duration_rules, feasibility_rule, filter_cuts
from asr.data.loader import Loader
from asr.data.packed import PackedCuts
from asr.data.report import read_report
from asr.data.store import FeatureStore
from asr.model import AsrModel
from asr.settings import TrainSettings
from asr.text.normalise import Normaliser
from asr.text.tokenizer import Tokenizer
from asr.training.distributed import World, share

log = logging.getLogger(__name__)

# Keys that name a split, each by a file or folder where it is a path.
SPLIT_KEYS = ("train", "dev", "test")


def with_whole_paths(settings: TrainSettings) -> TrainSettings:
    """The settings of a command with absolute paths of data, so that one corpus has one name wherever it is named.

    The settings of a run that is there stay as they were stored: the folder of its data is named after them.
    """
    return replace(settings, data=replace(settings.data, **whole_paths(vars(settings.data))))


def whole_paths(section: dict[str, Any]) -> dict[str, Any]:
    """`section`, at any depth, with absolute paths.

    A path stands behind a key that ends in _dir, whether it is there or not, and behind the name of a split where
    something is there: a recipe may have a name of its own for a part of its corpus.
    """

    def whole(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return whole_paths(value)
        is_path = isinstance(value, str) and (key.endswith("_dir") or (key in SPLIT_KEYS and os.path.exists(value)))
        return os.path.abspath(value) if is_path else value

    return {key: whole(key, value) for key, value in section.items()}


def as_begun(settings: TrainSettings, checkpoint: dict[str, Any]) -> TrainSettings:
    """The settings with the corpus as the run that wrote `checkpoint` named it, by which its data is found again."""
    before = checkpoint["config"]["data"]
    named = {key: before[key] for key in ("corpus", "shar_dir", *SPLIT_KEYS) if key in before}
    return replace(settings, data=replace(settings.data, **named))


def prepared_folder(settings: TrainSettings) -> Path:
    """Where this corpus with these settings lies: one folder each, so that a sweep over them overwrites nothing.

    Relative paths count as they are written; `with_whole_paths` leaves none.
    """
    identity: Any = _prepared_as(settings) if settings.data.shar_dir else settings.data.corpus
    stamp = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    folder = Path(settings.data.prepared_dir)
    return folder.with_name(f"{folder.name}-{stamp}")


def _prepared_as(settings: TrainSettings) -> dict[str, Any]:
    """The settings that decide what lies in the prepared folder."""
    data = settings.data
    return {"corpus": data.corpus} | ({"shar_dir": data.shar_dir} if data.shar_dir else {})


def prepare_data(settings: TrainSettings, world: World) -> dict[str, Path]:
    """Manifests of the checked cuts by split, prepared now unless they are there already.

    Raises ValueError before anything is read where the noise that training will mix in is not there.
    """
    noise = settings.data.noise
    if noise and not Path(noise).exists():
        raise ValueError(f"data.noise={noise}: there is no such file or folder; data.noise=null trains without noise")
    folder = prepared_folder(settings)
    if world.is_main:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stamp = _prepared_as(settings)
        shar_dir = Path(settings.data.shar_dir) / folder.name / "train" if settings.data.shar_dir else None
        with FileLock(str(folder) + ".lock"):  # several runs may want the same corpus at once
            if not prepared_is_current(folder, stamp):
                log.info("preparing %s in %s", settings.data.name, folder)
                # Texts are stored as they are but for white space; what a run wants of them is its tokenizer's matter.
                corpus = make(settings.data.corpus)
                write_prepared(corpus, folder, Normaliser(), stamp, settings.data.num_jobs, shar_dir)
    share(None, world)
    return prepared_splits(folder)


@dataclass
class TrainData:
    """Loaders of a run, with what was left out of training and why."""

    train: Loader
    dev: Loader
    num_train: int
    filtered: dict[str, int]


def build_train_data(
    settings: TrainSettings, splits: dict[str, Path], tokenizer: Tokenizer, model: AsrModel, world: World, gpu: bool
) -> TrainData:
    """Loaders of the training and dev sets. Raises ValueError when the filters leave nothing to train on."""
    data = settings.data
    fbank = make(settings.features["fbank"])
    cuts = speed_perturb(CutSet(Manifest(splits["train"])), data.speed_factors)
    rules = [
        *duration_rules(data.min_duration, data.max_utterance),
        feasibility_rule(
            fbank.num_frames,
            lambda frames: int(model.encoder.output_lens(torch.tensor([frames]))[0]),
            tokenizer.encode,
            model.head.min_frames,
        ),
    ]
    rejected: list[Rejection] = []
    kept = PackedCuts(islice(filter_cuts(cuts, rules, rejected), data.limit))
    filtered = count_reasons(rejected)
    if filtered:
        log.info("left out of training: %s", ", ".join(f"{count} {reason}" for reason, count in filtered.items()))
    if not kept:
        raise ValueError(
            f"{splits['train']}: no utterance is left to train on ({filtered}); "
            "look at data.min_duration, data.max_utterance and the transcripts"
        )
    augments: list[Any] = []
    if data.volume_range:
        augments.append(partial(random_volume, min_db=data.volume_range[0], max_db=data.volume_range[1]))
    if data.noise:
        low, high = data.noise_snr
        augments.append(NoiseMixer(noise_cuts(data.noise), low, high, data.noise_probability))

    store = feature_store(settings)

    def loader(of: PackedCuts, seed: int, cut_augments: tuple[Any, ...], training: bool) -> Loader:
        dataset = SpeechDataset(fbank, fbank.output_dim, tokenizer, seed, cut_augments, store)
        return Loader(
            of, dataset, data.max_duration, data.num_buckets, data.num_workers,
            shuffle=training, seed=seed, rank=world.rank, world_size=world.size, pin_memory=gpu,
        )  # fmt: skip

    if data.limit:
        log.warning("data.limit=%d: dev is these training utterances too; decode.py takes the real one", data.limit)
    dev = kept if data.limit else PackedCuts(Manifest(splits["dev"]))
    log.info("training on %d utterances, the longest of %.1f s; dev %d", len(kept), max(kept.durations), len(dev))
    return TrainData(loader(kept, settings.seed, tuple(augments), True), loader(dev, 0, (), False), len(kept), filtered)


def feature_store(settings: TrainSettings) -> FeatureStore | None:
    """Where this run's features are kept, if anywhere: a folder for each state of the data and kind of features."""
    if not settings.data.stored_features:
        return None
    identity = json.dumps([data_fingerprint(settings), settings.features["fbank"]], sort_keys=True)
    stamp = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return FeatureStore(Path(settings.data.stored_features) / stamp)


def texts_of(cuts: Iterable[Any]) -> list[str]:
    return [cut.supervisions[0].text or "" for cut in cuts]


def data_fingerprint(settings: TrainSettings) -> str:
    """What tells one state of the prepared data from another. Raises ValueError where none has been prepared."""
    report = read_report(prepared_folder(settings))
    if report is None:
        raise ValueError(
            f"{prepared_folder(settings)}: no data is prepared there; name a set to decode by data.test=PATH"
        )
    return report["fingerprint"]


def data_has_changed(checkpoint: dict[str, Any], settings: TrainSettings) -> bool:
    """Whether the prepared data is no longer what the checkpoint was trained on."""
    return checkpoint["data_fingerprint"] != data_fingerprint(settings)


def check_same_data(checkpoint: dict[str, Any] | None, settings: TrainSettings) -> None:
    """Raise ValueError when a run would continue on other data than it began with."""
    if checkpoint and data_has_changed(checkpoint, settings):
        raise ValueError(
            f"{prepared_folder(settings)}: the prepared data has changed since this run began; "
            "start a new run, or put the data back"
        )
