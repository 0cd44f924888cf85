"""What all benches share: sizes, settings, device, clock and the line of figures."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import yaml


def common_options(parser: argparse.ArgumentParser, batch: int) -> None:
    """Sizes of synthetic input and how often to measure."""
    parser.add_argument("--batch", type=int, default=batch, help="utterances")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each")
    parser.add_argument("--repeats", type=int, default=5, help="measurements, after one to warm up; the median counts")
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--device", default="auto")


def lattice_options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, batch=8)
    parser.add_argument("--frame-rate", type=float, default=25.0, help="encoder frames a second")
    parser.add_argument("--vocab", type=int, default=500)


def composed(overrides: list[str]) -> Any:
    """Checked settings of conf/train.yaml with these overrides."""
    from asr import config

    return config.check(config.composed("train", overrides))


def search_override(head: str) -> list[str]:
    """The override by which the head's own search takes the place of the default one."""
    from asr.config import CONF
    from asr.rules import searches_of

    path = CONF / "head" / f"{head}.yaml"
    searches = searches_of(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else ()
    return [f"search={searches[0]}"] if searches else []


def prepared_device(arguments: argparse.Namespace) -> Any:
    """The device as train.py would set it up."""
    import torch

    from asr.training.cpu import keep_freed_memory
    from asr.training.distributed import connect

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = connect(arguments.device)[1]
    if device.type == "cpu":
        keep_freed_memory()
    return device


def now(device: Any) -> float:
    """Seconds on a clock, with the device's work done."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_seconds(work: Callable[[], Any], repeats: int, device: Any) -> float:
    """Median duration of `work`, which has run once before."""
    work()
    durations = []
    for _ in range(repeats):
        started = now(device)
        work()
        durations.append(now(device) - started)
    return statistics.median(durations)


def tell(figures: dict[str, Any], device: Any) -> None:
    """One line of JSON, with what is common to all."""
    import torch

    from asr.training.monitor import peak_memory_bytes

    place = {"device": str(device), "threads": torch.get_num_threads(), "peak_memory_mb": peak_memory_bytes() / 2**20}
    print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in (figures | place).items()}))


def in_process(work: Callable[..., Any], *given: Any) -> Any:
    """The result of work in a process of its own, so that peaks of memory are not those of earlier work."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()
