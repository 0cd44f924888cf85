"""Speed and memory, measured: `python scripts/bench.py loader [+experiment=NAME] [key=value ...]`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def bench_loader(overrides: list[str], num_batches: int) -> None:
    """Seconds of audio per second that one loader delivers and that one training step takes in, on the same batches."""
    import torch
    from hydra import compose, initialize_config_dir

    from asr import build
    from asr.config import check
    from asr.training.distributed import connect
    from asr.training.precision import PrecisionMode, resolve_precision
    from asr.training.step import train_step

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = check(compose("train", overrides))
    world, device = connect(settings.device)
    splits = build.prepare_data(settings, world)
    tokenizer = build.build_tokenizer(settings, build.load_cuts(splits["train"]))
    model = build.build_model(settings, tokenizer)
    loader = build.build_train_data(settings, splits, tokenizer, model, world, device.type == "cuda").train
    precision = PrecisionMode(resolve_precision(settings.precision.value, device), device)
    model = precision.prepare(model.to(device)).train()
    optimizer = build.build_optimizer(settings, model)

    batches = iter(loader.epoch(1))
    kept = [next(batches)]  # the first one waits for the workers to start
    started = time.perf_counter()
    kept += [batch for batch, _ in zip(batches, range(num_batches), strict=False)]
    load_rate = sum(batch.audio_seconds for batch in kept[1:]) / (time.perf_counter() - started)
    train_step(model, kept[:1], optimizer, precision, 5.0, world, device)  # warm-up
    started = time.perf_counter()
    for batch in kept[1:]:
        train_step(model, [batch], optimizer, precision, 5.0, world, device)
    step_rate = sum(batch.audio_seconds for batch in kept[1:]) / (time.perf_counter() - started)

    workers = settings.data.num_workers
    print("| part | s of audio per s |")
    print("|---|---|")
    print(f"| loader, {workers} worker{'' if workers == 1 else 's'}, nothing else running | {load_rate:.0f} |")
    print(f"| training step, {device}, {torch.get_num_threads()} threads, {precision.mode} | {step_rate:.0f} |")
    print(f"\nThe loader is {load_rate / step_rate:.1f} times as fast as the step over {len(kept) - 1} batches.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["loader"])
    parser.add_argument("--num-batches", type=int, default=10, help="batches to measure (default 10)")
    arguments, overrides = parser.parse_known_args()
    bench_loader(overrides, arguments.num_batches)


if __name__ == "__main__":
    main()
