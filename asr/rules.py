"""What the values of settings must fulfil, alone and together: each rule returns the faults that it finds."""

from __future__ import annotations

import math
import re
from typing import Any

from asr.settings import CheckpointChoice, DecodeSettings, InitMode, Precision, TrainSettings
from asr.targets import foreign_targets, locate


def train_faults(settings: TrainSettings) -> list[str]:
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
        "trainer.num_threads": trainer.num_threads,
        "trainer.initial_grad_scale": trainer.initial_grad_scale,
        "data.max_duration": data.max_duration,
        "data.max_utterance": data.max_utterance,
        "data.num_buckets": data.num_buckets,
        "data.num_jobs": data.num_jobs,
        "data.limit": data.limit,
    }
    faults = [
        f"{key}={value}: must be above 0" for key, value in positive.items() if value is not None and not value > 0
    ]
    if data.num_workers < 0:
        faults.append(f"data.num_workers={data.num_workers}: must be 0 or more")
    if not data.min_duration < data.max_utterance:
        faults.append(f"data.min_duration={data.min_duration}: must be below data.max_utterance={data.max_utterance}")
    faults += [
        f"{key}={value}: a share between 0 and 1 is expected"
        for key, value in (
            ("data.max_unknown", data.max_unknown),
            ("data.noise_probability", data.noise_probability),
        )
        if not 0 <= value <= 1
    ]
    if len(set(data.speed_factors)) < len(data.speed_factors):
        faults.append(f"data.speed_factors={data.speed_factors}: a factor is given twice")
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
    faults += [
        f"data.{split}={path}: unused by data={data.name}, whose data.corpus does not take it; data=custom takes a path"
        for split, path in (("train", data.train), ("dev", data.dev), ("test", data.test))
        if path is not None and data.corpus.get(split) != path
    ]
    return faults + _part_faults(settings) + _search_faults(settings) + _device_faults(settings.device)


def _part_faults(settings: TrainSettings) -> list[str]:
    """What is wrong with the settings of parts; whether the parts exist is known when the model is built."""
    modes = [mode.value for mode in InitMode]
    faults = [
        f"init.{place}={mode!r}: null, {', '.join(modes)} are allowed"
        for place, mode in by_place(settings.init).items()
        if mode is not None and mode not in modes
    ]
    lr = settings.optim.get("lr")
    if lr is not None and not _is_above_zero(lr):
        faults.append(f"optim.lr={lr}: a learning rate above 0 is expected")
    faults += [
        f"lr_scale.{place}={scale!r}: a factor above 0 is expected; freeze=[{place}] keeps a part as it is"
        for place, scale in by_place(settings.lr_scale).items()
        if not _is_above_zero(scale)
    ]
    source = settings.init_from
    if source.run_dir and source.checkpoint:
        faults.append(f"init_from.checkpoint={source.checkpoint}: give it or init_from.run_dir, not both")
    if (source.include or source.exclude) and not (source.run_dir or source.checkpoint):
        faults.append("init_from.run_dir: include and exclude are of a run or checkpoint, and none is given")
    return faults


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _search_faults(settings: TrainSettings) -> list[str]:
    name = str(settings.search.get("_target_", "")).rpartition(".")[2]
    faults = search_option_faults(settings.search)
    if foreign_targets("head", settings.head):
        return faults
    searches = searches_of(settings.head)
    if searches and name not in searches:
        faults.append(f"search={name}: head {settings.head['_target_']} offers {', '.join(searches)}")
    return faults


def search_option_faults(section: dict[str, Any]) -> list[str]:
    """Options of a search with values that it would refuse, in training after a whole epoch."""
    faults = []
    for key in ("beam", "tokens_per_frame", "max_symbols_per_frame"):
        value = section.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            faults.append(f"search.{key}={value}: a whole number from 1 is expected")
    faults += [
        f"search.{key}={section[key]}: a number above 0 is expected"
        for key in ("max_tokens_per_frame", "temperature")
        if key in section and not _is_above_zero(section[key])
    ]
    for key in ("length_norm", "ctc_weight"):
        value = section.get(key, 0.0)
        if not isinstance(value, (int, float)) or value < 0:
            faults.append(f"search.{key}={value}: must be at least 0")
    return faults


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


def decode_faults(settings: DecodeSettings) -> list[str]:
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
    if settings.iter is not None and settings.select == CheckpointChoice.best:
        faults.append("select=best: chooses among epochs; give epoch instead of iter")
    if settings.data.test and settings.data.sets:
        faults.append(f"data.sets={settings.data.sets}: names sets of the run, and data.test another; give one of them")
    if settings.data.max_duration <= 0:
        faults.append(f"data.max_duration={settings.data.max_duration}: must be above 0")
    if settings.data.num_workers < 0:
        faults.append(f"data.num_workers={settings.data.num_workers}: must be 0 or more")
    return faults


def by_place(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a section by dotted name of the part they are for, however deep the section is nested."""
    values: dict[str, Any] = {}
    for key, value in section.items():
        values |= by_place(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values
