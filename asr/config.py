"""The run's settings as dataclasses, and the check that stands before every run.

Parts of the model are chosen by `_target_` in YAML and checked against the signature of what they name.
Everything else is a key of the dataclasses below, so a misspelt key is found before any data is touched.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asr.targets import foreign_targets, locate, nearest, target_faults


class Precision(str, Enum):
    """How numbers are held; `auto` is amp_bf16 on a GPU and fp32 on a CPU."""

    auto = "auto"
    fp32 = "fp32"
    amp_fp16 = "amp_fp16"
    amp_bf16 = "amp_bf16"
    bf16 = "bf16"


class Bf16Update(str, Enum):
    """How a bf16 parameter takes an update, see asr/training/bf16_update.py."""

    kahan = "kahan"
    stochastic = "stochastic"
    plain = "plain"


class Resume(str, Enum):
    """auto: continue when `run_dir` holds checkpoints; true: insist on it; false: refuse such a folder."""

    auto = "auto"
    true = "true"
    false = "false"


class InitMode(str, Enum):
    """Initialisation of the weights, see asr/layers/init.py; null is PyTorch's own."""

    paper = "paper"
    xavier_uniform = "xavier_uniform"
    xavier_normal = "xavier_normal"
    kaiming_uniform = "kaiming_uniform"
    kaiming_normal = "kaiming_normal"
    tds_uniform = "tds_uniform"
    tds_normal = "tds_normal"
    trunc_normal = "trunc_normal"


class CheckpointChoice(str, Enum):
    """Which epochs are averaged: the last ones before `epoch`, or the best on the dev set."""

    last = "last"
    best = "best"


@dataclass
class TrainerSettings:
    """Knobs of the training loop. Steps are optimiser steps; intervals of null mean once an epoch."""

    max_epochs: int = 30
    max_steps: int | None = None
    accumulate: int = 1
    clip_norm: float | None = 5.0
    log_every: int = 10
    valid_every: int | None = None
    save_every: int | None = None
    keep_last: int = 30
    average_period: int = 10
    max_skipped: int = 30
    initial_grad_scale: float = 65536.0
    reference_duration: float = 600.0
    num_threads: int | None = None
    progress: bool = True
    pictures: bool = True
    doctor_every: int | None = None
    scan_memory: bool | None = None
    profile: bool = False
    detect_anomaly: bool = False


@dataclass
class DataSettings:
    """Where utterances come from and how they are put into batches. Durations are seconds of audio."""

    name: str = "custom"
    prepared_dir: str = "data/prepared/custom"
    corpus: dict[str, Any] = field(default_factory=dict)
    train: str | None = None
    dev: str | None = None
    test: str | None = None
    max_unknown: float = 0.5
    min_duration: float = 0.3
    max_utterance: float = 20.0
    max_duration: float = 100.0
    num_buckets: int = 30
    num_workers: int = 1
    num_jobs: int = 2
    speed_factors: list[float] = field(default_factory=lambda: [1.0])
    volume_range: list[float] | None = None
    noise: str | None = None
    noise_snr: list[float] = field(default_factory=lambda: [10.0, 20.0])
    noise_probability: float = 0.5
    stored_features: str | None = None
    limit: int | None = None


@dataclass
class InitFromSettings:
    """What training starts from: a run, or a checkpoint file, and which parts of it."""

    run_dir: str | None = None
    checkpoint: str | None = None
    include: list[str] | None = None
    exclude: list[str] | None = None


@dataclass
class TrainSettings:
    """Everything that `python train.py key=value` may set."""

    name: str = "run"
    seed: int = 42
    precision: Precision = Precision.auto
    bf16_update: Bf16Update = Bf16Update.kahan
    device: str = "auto"
    init_mode: InitMode | None = InitMode.paper
    init: dict[str, Any] = field(default_factory=dict)
    init_from: InitFromSettings = field(default_factory=InitFromSettings)
    freeze: list[str] = field(default_factory=list)
    lr_scale: dict[str, Any] = field(default_factory=dict)
    run_dir: str | None = None
    resume: Resume = Resume.auto
    data: DataSettings = field(default_factory=DataSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)
    augment: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)


@dataclass
class DecodeDataSettings:
    """What to decode: by default every test set of the run; `test` names another one."""

    test: str | None = None
    sets: list[str] | None = None
    max_duration: float = 200.0
    num_workers: int = 1


@dataclass
class DecodeSettings:
    """Everything that `python decode.py key=value` may set. `avg` is a number or `auto` (best on dev)."""

    run_dir: str = "???"
    epoch: int | None = None
    iter: int | None = None
    avg: Any = 1
    use_averaged_model: bool = True
    select: CheckpointChoice = CheckpointChoice.last
    method: str | None = None
    search: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)
    precision: Precision = Precision.fp32
    device: str = "auto"
    data: DecodeDataSettings = field(default_factory=DecodeDataSettings)


class ConfigError(ValueError):
    """Every fault of a configuration, one a line."""

    def __init__(self, faults: list[str]):
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {fault}" for fault in faults))
        self.faults = faults


# Groups that stand in no defaults list and come with a plus, as in +experiment=NAME.
ADDED_GROUPS = ("experiment", "debug")

# What build passes to a part itself, so YAML need not (and must not) give it.
PASSED_BY_BUILD = {
    "tokenizer": {"texts"},
    "features.normalise": {"num_mel_bins"},
    "features.fbank": set(),
    "augment": set(),
    "encoder": {"input_dim"},
    "head": {"input_dim", "vocab_size", "blank_id", "sos_eos_id"},
    "optim": {"params"},
    "schedule": {"total_steps"},
    "search": {"head", "encoded"},
    "data.corpus": set(),
}


def check(cfg: DictConfig, schema: type = TrainSettings) -> Any:
    """Resolve `cfg` and hold it against `schema`, an instance of which is returned.

    Raises ConfigError that names every fault at once: the key, its value, what is allowed, the nearest right key.
    """
    faults: list[str] = []
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError([f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}"]) from None
    assert isinstance(plain, dict)
    settings = _fill(schema, plain, "", faults)
    if schema is TrainSettings:
        _check_parts(plain, faults)
    # Rules look at values that may have a fault of their own, which is told already.
    told = {_key_of(fault) for fault in faults}
    faults += [fault for fault in _RULES[schema](settings) if _key_of(fault) not in told]
    if faults:
        raise ConfigError(faults)
    return settings


def check_overrides(overrides: list[str], schema: type) -> None:
    """Find misspelt keys among command line overrides before anything heavy is imported; all are told at once.

    Overrides of groups and of the arguments of parts pass, as do those with a prefix: Hydra and `check` see to them.
    Raises ConfigError.
    """
    faults = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_][\w.]*", key) and key.partition(".")[0] not in ("hydra", *ADDED_GROUPS):
            faults += _unknown_key(key, value, schema)
    if faults:
        raise ConfigError(faults)


def _unknown_key(key: str, value: str, schema: Any) -> list[str]:
    node = schema()
    for part in key.split("."):
        if not dataclasses.is_dataclass(node):
            break
        known = [f.name for f in dataclasses.fields(node)]
        if part not in known:
            return [f"{key}={value}: no such key as {part}{nearest(part, known)}"]
        node = getattr(node, part)
    return []


def _key_of(fault: str) -> str:
    return re.split("[=:]", fault, maxsplit=1)[0]


def _fill(schema: type, values: dict, prefix: str, faults: list[str]) -> Any:
    """An instance of the dataclass `schema` from a plain dict, with faults collected instead of raised."""
    typed = OmegaConf.structured(schema)
    defaults = schema()
    known = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(schema)}
    filled = {}
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in known:
            faults.append(f"{full}={value!r}: no such key{nearest(str(key), known)}")
        elif value == "???":
            faults.append(f"{full}: a value is required, as in {full}=...")
        elif dataclasses.is_dataclass(known[key]):
            if isinstance(value, dict):
                filled[key] = _fill(type(known[key]), value, f"{full}.", faults)
            else:
                faults.append(f"{full}={value!r}: a group of keys is expected here")
        else:
            try:
                typed[key] = _spelled(key, value)
                filled[key] = _plain(typed[key])
            except OmegaConfBaseException as error:
                faults.append(f"{full}={value!r}: {str(error).splitlines()[0]}")
    return schema(**filled)


def _spelled(key: str, value: Any) -> Any:
    """The value as the schema spells it: Hydra turns `true` into a bool and leaves `None` a word."""
    if key == "resume" and isinstance(value, bool):
        return str(value).lower()
    if key == "init" and isinstance(value, dict):
        return {place: _spelled(key, mode) for place, mode in value.items()}
    return None if key in ("init_mode", "init") and value in ("none", "None", "null") else value


def by_place(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a section by dotted name of the part they are for, however deep the section is nested."""
    values: dict[str, Any] = {}
    for key, value in section.items():
        values |= by_place(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _check_parts(plain: dict, faults: list[str]) -> None:
    for place, passed in PASSED_BY_BUILD.items():
        node: Any = plain
        for key in place.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        if place == "data.corpus" and not node:
            continue
        if not isinstance(node, dict) or "_target_" not in node:
            faults.append(f"{place}: choose one, as in {place.split('.')[0]}=NAME (it needs a _target_)")
            continue
        faults += target_faults(place, node, passed)
    for key, value in (plain.get("features") or {}).items():
        if f"features.{key}" not in PASSED_BY_BUILD:
            faults.append(f"features.{key}={value!r}: no such key{nearest(str(key), ('fbank', 'normalise'))}")


def _train_faults(settings: TrainSettings) -> list[str]:
    trainer, data = settings.trainer, settings.data
    positive = {
        "trainer.max_epochs": trainer.max_epochs,
        "trainer.max_steps": trainer.max_steps,
        "trainer.accumulate": trainer.accumulate,
        "trainer.clip_norm": trainer.clip_norm,
        "trainer.log_every": trainer.log_every,
        "trainer.valid_every": trainer.valid_every,
        "trainer.save_every": trainer.save_every,
        "trainer.keep_last": trainer.keep_last,
        "trainer.average_period": trainer.average_period,
        "trainer.max_skipped": trainer.max_skipped,
        "trainer.doctor_every": trainer.doctor_every,
        "trainer.reference_duration": trainer.reference_duration,
        "data.max_duration": data.max_duration,
        "data.max_utterance": data.max_utterance,
        "data.num_buckets": data.num_buckets,
        "data.num_jobs": data.num_jobs,
        "data.limit": data.limit,
    }
    faults = [f"{key}={value}: must be above 0" for key, value in positive.items() if value is not None and value <= 0]
    if data.num_workers < 0:
        faults.append(f"data.num_workers={data.num_workers}: must be 0 or more")
    if data.min_duration >= data.max_utterance:
        faults.append(f"data.min_duration={data.min_duration}: must be below data.max_utterance={data.max_utterance}")
    if not 0 <= data.max_unknown <= 1:
        faults.append(f"data.max_unknown={data.max_unknown}: a share between 0 and 1 is expected")
    if not data.speed_factors or any(not 0.5 <= factor <= 2.0 for factor in data.speed_factors):
        faults.append(
            f"data.speed_factors={data.speed_factors}: factors between 0.5 and 2 are expected, as in [0.9,1.0,1.1]"
        )
    for key, pair in (("data.volume_range", data.volume_range), ("data.noise_snr", data.noise_snr)):
        if pair is not None and (len(pair) != 2 or pair[0] > pair[1]):
            faults.append(f"{key}={pair}: a pair [low,high] is expected")
    if trainer.save_every and trainer.save_every < trainer.average_period:
        faults.append(
            f"trainer.save_every={trainer.save_every}: must be at least trainer.average_period={trainer.average_period}"
        )
    if data.stored_features and (data.volume_range or data.noise):
        faults.append(
            f"data.stored_features={data.stored_features}: features can be stored only where data.volume_range and "
            "data.noise, which change them in every epoch, are null"
        )
    if data.corpus.get("train", "found by the recipe") is None:
        faults.append("data.train: give your training data, as in data=custom data.train=my.tsv")
    return faults + _part_faults(settings) + _search_faults(settings) + _device_faults(settings.device)


def _part_faults(settings: TrainSettings) -> list[str]:
    """What is wrong with the settings of parts; whether the parts exist is known when the model is built."""
    modes = [mode.value for mode in InitMode]
    faults = [
        f"init.{place}={mode!r}: null, {', '.join(modes)} are allowed"
        for place, mode in by_place(settings.init).items()
        if mode is not None and mode not in modes
    ]
    faults += [
        f"lr_scale.{place}={scale!r}: a factor above 0 is expected; freeze=[{place}] keeps a part as it is"
        for place, scale in by_place(settings.lr_scale).items()
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or scale <= 0
    ]
    source = settings.init_from
    if source.run_dir and source.checkpoint:
        faults.append(f"init_from.checkpoint={source.checkpoint}: give it or init_from.run_dir, not both")
    if (source.include or source.exclude) and not (source.run_dir or source.checkpoint):
        faults.append("init_from.run_dir: include and exclude are of a run or checkpoint, and none is given")
    return faults


def _search_faults(settings: TrainSettings) -> list[str]:
    name = str(settings.search.get("_target_", "")).rpartition(".")[2]
    if foreign_targets("head", settings.head):
        return []
    searches = searches_of(settings.head)
    if not searches or name in searches:
        return []
    return [f"search={name}: head {settings.head['_target_']} offers {', '.join(searches)}"]


def searches_of(head: dict[str, Any]) -> tuple[str, ...]:
    """Names of the searches of a head's section, of the heads inside it, and of these together."""
    try:
        callee = locate(str(head.get("_target_")))
    except (ImportError, AttributeError, ValueError):
        return ()
    inside = head.get("heads")
    inside = inside if isinstance(inside, dict) else {}
    of_parts = [name for part in inside.values() for name in searches_of(part)]
    together = [name for name, needed in getattr(callee, "combined", {}).items() if set(needed) <= set(inside)]
    return (*getattr(callee, "searches", ()), *of_parts, *together)


def _device_faults(device: str) -> list[str]:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        return []
    return [f"device={device}: auto, cpu, cuda or cuda:N is expected"]


def _decode_faults(settings: DecodeSettings) -> list[str]:
    avg = settings.avg
    faults = _device_faults(settings.device)
    if avg != "auto" and not (isinstance(avg, int) and not isinstance(avg, bool) and avg >= 1):
        faults.append(f"avg={avg!r}: a whole number from 1, or auto (the best on the dev set)")
    if settings.epoch is not None and settings.iter is not None:
        faults.append(f"iter={settings.iter}: give epoch or iter, not both")
    faults += [
        f"{key}={value}: numbers start at 1"
        for key, value in (("epoch", settings.epoch), ("iter", settings.iter))
        if value is not None and value < 1
    ]
    if settings.precision not in (Precision.fp32, Precision.amp_bf16, Precision.amp_fp16):
        faults.append(f"precision={settings.precision.value}: decoding knows fp32, amp_fp16 and amp_bf16")
    if settings.data.max_duration <= 0:
        faults.append(f"data.max_duration={settings.data.max_duration}: must be above 0")
    if settings.data.num_workers < 0:
        faults.append(f"data.num_workers={settings.data.num_workers}: must be 0 or more")
    return faults


_RULES: dict[type, Any] = {TrainSettings: _train_faults, DecodeSettings: _decode_faults}
