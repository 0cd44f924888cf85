"""Everything that a command line may set, as dataclasses and enums.

A misspelt key of theirs is found before any data is touched; parts of the model are dictionaries with a `_target_`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


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
    shar_dir: str | None = None


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
