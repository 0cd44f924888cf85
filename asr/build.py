"""From settings to parts, in the order of the pipeline. The only place where `_target_`s become objects."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lhotse import CutSet
from lhotse.cut import Cut
from omegaconf import OmegaConf
from torch import Tensor, nn

from asr.config import (
    PASSED_BY_BUILD,
    ConfigError,
    DecodeSettings,
    Precision,
    TrainerSettings,
    TrainSettings,
    by_place,
    check,
)
from asr.data.augment import NoiseMixer, noise_cuts, random_volume, speed_perturb
from asr.data.corpus import prepared_is_current, prepared_splits, write_prepared
from asr.data.cuts import Manifest, Rejection, load_audio, load_cuts
from asr.data.dataset import SpeechDataset, one_thread
from asr.data.filters import count_reasons, duration_rules, feasibility_rule, filter_cuts
from asr.data.loader import Loader
from asr.data.packed import PackedCuts
from asr.data.report import add_tokenizer_section, format_summary, read_report, write_report
from asr.data.store import FeatureStore
from asr.features.normalise import FeatureNorm
from asr.layers.init import initialise
from asr.model import AsrModel
from asr.scoring.wer import CJK, Utterance
from asr.targets import accepted, locate, target_faults
from asr.text.normalise import Normaliser
from asr.text.tokenizer import Tokenizer
from asr.training.bf16_update import update_bf16
from asr.training.distributed import World, share
from asr.training.optim import adversary_optimizer, parameter_groups
from asr.training.run_folder import changed_keys, safe_name, write_json
from asr.training.schedule import Schedule
from asr.training.transfer import Source, read_source, transfer
from asr.types import Hypothesis

log = logging.getLogger(__name__)

CONF = Path(__file__).resolve().parents[1] / "conf"
# Statistics of this many utterances are those of the whole set to three digits.
UTTERANCES_FOR_STATISTICS = 500


def make(node: dict[str, Any], **arguments: Any) -> Any:
    """The object that a `_target_` section names. Raises what its constructor raises."""
    try:
        return instantiate(OmegaConf.create(node), _convert_="all", **arguments)
    except InstantiationException as error:  # Hydra's own kind would hide a message that was written for the user
        raise error.__cause__ or error from None


def prepared_folder(settings: TrainSettings) -> Path:
    """Where this corpus with these settings lies: one folder each, so that a sweep over them overwrites nothing."""
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


def texts_of(cuts: Iterable[Any]) -> list[str]:
    return [cut.supervisions[0].text or "" for cut in cuts]


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
    with torch.device("meta"):
        make(settings.encoder, input_dim=num_mel_bins)


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
    """Take the statistics of evenly spread training utterances."""
    norm = model.feature_norm
    if not (isinstance(norm, FeatureNorm) and norm.needs_fit):
        return
    fbank = make(settings.features["fbank"])
    chosen = islice(cuts, 0, None, max(1, len(cuts) // UTTERANCES_FOR_STATISTICS))

    def features() -> Iterable[Tensor]:
        for cut in chosen:
            try:
                yield fbank(torch.from_numpy(load_audio(cut)))
            except ValueError:
                continue  # the loader will name it

    with one_thread():
        norm.fit(features())


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


def settings_of_run(checkpoint: dict[str, Any], encoder: dict[str, Any] | None = None) -> TrainSettings:
    """The settings a checkpoint was trained with, with changes to the encoder. Raises ConfigError for wrong ones."""
    config = checkpoint["config"]
    return check(OmegaConf.create({**config, "encoder": {**config["encoder"], **(encoder or {})}}))


def sets_to_decode(settings: DecodeSettings, trained: TrainSettings) -> dict[str, list[Cut]]:
    """Cuts of each set that was asked for. Raises ValueError that names the sets there are."""
    if settings.data.test:
        path = Path(settings.data.test).resolve()
        folder = Path(trained.data.prepared_dir).with_name("decoded") / safe_name(str(path))
        recipe = "recipes.custom.prepare.prepare"
        corpus = make({"_target_": recipe, "test": str(path), "shar_audio_dir": str(folder / "audio")})
        write_prepared(corpus, folder, Normaliser(), {"test": str(path)})
        # Named after the file, so that results of several such sets lie side by side.
        return {safe_name(path.stem.partition(".")[0]): list(load_cuts(folder / "test.jsonl.gz"))}
    splits = prepared_splits(prepared_folder(trained))
    tests = [name for name in splits if name not in ("train", "dev")]
    wanted = settings.data.sets or tests or ["dev"]
    unknown = [name for name in wanted if name not in splits]
    if unknown:
        raise ValueError(f"data.sets={wanted}: {unknown} not prepared; there are {', '.join(splits)}")
    return {name: list(load_cuts(splits[name])) for name in wanted}


def dev_cuts(trained: TrainSettings) -> list[Cut]:
    return list(load_cuts(prepared_splits(prepared_folder(trained))["dev"]))


def averages_to_try(checkpoint: dict[str, Any]) -> list[int]:
    """Numbers of epochs that `avg=auto` compares for a run that has reached `checkpoint`."""
    epochs = max(1, checkpoint["progress"]["epoch"] - 1)
    return sorted({1, *(n for n in (2, 3, 5, 7, 10, 15, 20, 30) if n <= epochs)})


def build_decode_loader(
    trained: TrainSettings, tokenizer: Tokenizer, cuts: list[Cut], max_duration: float, num_workers: int
) -> Loader:
    """A loader over a set that is decoded; nothing is left out."""
    fbank = make(trained.features["fbank"])
    dataset = SpeechDataset(fbank, fbank.output_dim, tokenizer)
    return Loader(cuts, dataset, max_duration, num_workers=num_workers)


def pair_with_references(cuts: list[Cut], hypotheses: dict[str, Hypothesis], tokenizer: Tokenizer) -> list[Utterance]:
    """References and hypotheses under the tokenizer's own normalisation; what was not decoded is empty."""
    utterances = []
    for cut in cuts:
        supervision = cut.supervisions[0]
        found = hypotheses.get(cut.id)
        hyp = tokenizer.normaliser(tokenizer.decode(found.tokens)) if found else ""
        utterances.append(
            Utterance(cut.id, tokenizer.normaliser(supervision.text or ""), hyp, supervision.speaker or "")
        )
    return utterances


def scoring_unit(utterances: list[Utterance]) -> str:
    """Characters where most of the references are Chinese or Japanese, words elsewhere."""
    text = "".join(utterance.ref for utterance in utterances).replace(" ", "")
    return "character" if text and len(CJK.findall(text)) > len(text) / 2 else "word"


def build_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser over groups of parameters; those of one dimension do not decay, parts have their learning rates."""
    weight_decay = float(settings.optim.get("weight_decay", 0.0))
    optimizer = make(settings.optim)(parameter_groups(model, weight_decay, by_place(settings.lr_scale)))
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)
    if settings.precision is Precision.bf16:
        update_bf16(optimizer, settings.bf16_update.value, settings.seed)
    return optimizer


def build_adversary_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimiser of the model's adversaries, where it has any."""
    optimizer = adversary_optimizer(model)
    if optimizer and settings.precision is Precision.bf16:
        update_bf16(optimizer, settings.bf16_update.value, settings.seed)
    return optimizer


def build_schedule(settings: TrainSettings, total_steps: int) -> Schedule:
    """The learning rate schedule; `total_steps` goes to those that ask for it."""
    wanted = accepted(locate(settings.schedule["_target_"]), {"total_steps": total_steps})
    return make(settings.schedule, **wanted)


def build_search(node: dict[str, Any]) -> Any:
    """A search as a function of (head, encoded), where `head` is or holds one that it works on."""
    search = make(node)
    name = node["_target_"].rpartition(".")[2]
    return lambda head, encoded: search(head.part_for(name), encoded)


def search_settings(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """The section of conf/search/METHOD.yaml with `options` over it. Raises ValueError for an unknown method
    or option."""
    path = CONF / "search" / f"{method}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise ValueError(f"method={method}: no such search; known: {known}")
    section = {**yaml.safe_load(path.read_text(encoding="utf-8")), **options}
    faults = target_faults("search", section, PASSED_BY_BUILD["search"])
    if faults:
        raise ConfigError(faults)
    return section


def as_plain(settings: TrainSettings) -> dict[str, Any]:
    """The settings as plain values, ready for YAML and checkpoints. Paths of data become absolute."""
    config = json.loads(json.dumps(dataclasses.asdict(settings)))  # enums become their values
    config["data"]["prepared_dir"] = str(Path(settings.data.prepared_dir).resolve())
    for key in ("run_dir", "checkpoint"):
        if path := config["init_from"][key]:
            config["init_from"][key] = str(Path(path).resolve())
    return config


def store_identity(run_dir: Path, config: dict[str, Any], tokenizer: Tokenizer, versions: dict[str, str]) -> None:
    """Write config, tokenizer and versions into the run folder."""
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    tokenizer.save(run_dir / "tokenizer")
    write_json(versions, run_dir / "versions.json")


def check_resume(checkpoint: dict[str, Any], config: dict[str, Any], mode: str) -> None:
    """Raise ValueError when the run that wrote `checkpoint` was another one than `config` asks for."""
    # What the settings of an older version lack counts as it is now.
    changed = changed_keys(config | checkpoint["config"], config)
    if checkpoint["precision"]["mode"] != mode:
        changed.append(f"precision (was {checkpoint['precision']['mode']}, now {mode})")
    if changed:
        raise ValueError(
            "run_dir holds a run of other settings, which cannot be continued with these: "
            + "; ".join(changed)
            + ". Put them back, or choose another run_dir."
        )


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


def reference_batches(settings: TrainSettings, world: World) -> float:
    """How many batches of `trainer.reference_duration` seconds one optimiser step stands for."""
    trained = settings.data.max_duration * settings.trainer.accumulate * world.size
    return trained / settings.trainer.reference_duration


def count_steps(settings: TrainSettings, data: TrainData) -> tuple[int, int]:
    """Optimiser steps of an epoch, from the plan of the first, and of the whole run."""
    trainer = settings.trainer
    per_epoch = -(-data.train.count_batches() // trainer.accumulate)
    planned = per_epoch * trainer.max_epochs
    return per_epoch, min(planned, trainer.max_steps) if trainer.max_steps else planned


def trainer_settings(settings: TrainSettings, steps_per_epoch: int) -> TrainerSettings:
    """The settings of the loop; short epochs are sampled twice at least, so that each can be averaged and decoded."""
    period = max(1, min(settings.trainer.average_period, steps_per_epoch // 2))
    return dataclasses.replace(settings.trainer, average_period=period)
