"""From settings to optimiser, schedule and what a run stores of itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from asr.build.data import TrainData, whole_paths
from asr.build.objects import make
from asr.rules import by_place
from asr.settings import Precision, TrainerSettings, TrainSettings
from asr.targets import accepted, locate
from asr.text.tokenizer import Tokenizer
from asr.training.bf16_update import update_bf16
from asr.training.distributed import World
from asr.training.optim import adversary_optimizer, parameter_groups
from asr.training.run_folder import changed_keys, write_json
from asr.training.schedule import Schedule


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
    # What the settings of an older version lack counts as it is now, and its relative paths as meant from here.
    before = config | checkpoint["config"]
    changed = changed_keys(before | {"data": whole_paths(before["data"])}, config)
    if checkpoint["precision"]["mode"] != mode:
        changed.append(f"precision (was {checkpoint['precision']['mode']}, now {mode})")
    if changed:
        raise ValueError(
            "run_dir holds a run of other settings, which cannot be continued with these: "
            + "; ".join(changed)
            + ". Put them back, or choose another run_dir."
        )
