"""Speed and memory, measured. Each subcommand prints its figures; all but `loader` need no data.

python scripts/bench.py train-step --encoder conformer_s --head ctc --precision amp_bf16 [key=value ...]
python scripts/bench.py features --batch 16 --seconds 10
python scripts/bench.py loader [+experiment=NAME] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from asr.command import report_errors

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run, add_options) in COMMANDS.items():
        command = commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
        add_options(command)
        command.set_defaults(run=run)
    arguments, overrides = parser.parse_known_args()
    with report_errors():
        arguments.run(arguments, overrides)


def common_options(parser: argparse.ArgumentParser, batch: int) -> None:
    """Sizes of synthetic input and how often to measure."""
    parser.add_argument("--batch", type=int, default=batch, help="utterances")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each")
    parser.add_argument("--repeats", type=int, default=5, help="measurements, after one to warm up; the median counts")
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--device", default="auto")


def composed(overrides: list[str]) -> Any:
    """Checked settings of conf/train.yaml with these overrides."""
    from hydra import compose, initialize_config_dir

    from asr.config import check

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return check(compose("train", overrides))


def search_override(head: str) -> list[str]:
    """The override by which the head's own search takes the place of the default one."""
    from asr.config import searches_of

    path = ROOT / "conf" / "head" / f"{head}.yaml"
    searches = searches_of(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else ()
    return [f"search={searches[0]}"] if searches else []


def prepared_device(arguments: argparse.Namespace) -> Any:
    """The device as train.py would set it up."""
    import torch

    from asr.training.distributed import connect
    from asr.training.memory import keep_freed_memory

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


def train_step_options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, batch=4)
    parser.add_argument("--encoder", default="conformer_s")
    parser.add_argument("--head", default="ctc")
    parser.add_argument("--optim", default="adamw")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--tokens", type=int, default=40, help="of each utterance")
    parser.add_argument("--vocab", type=int, default=500)
    parser.add_argument("--batch-count", type=float, default=0.0, help="reference batches that were trained on before")
    parser.add_argument("--compile", action="store_true", help="the encoder, by torch.compile")


def bench_train_step(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Seconds of a training step, forward, backward and optimiser apart, on synthetic utterances of one length."""
    import torch

    from asr import build
    from asr.layers.schedule import set_batch_count
    from asr.text.listed_tokenizer import ListedTokenizer
    from asr.training.distributed import World
    from asr.training.precision import PrecisionMode, resolve_precision
    from asr.training.step import train_step
    from asr.types import Batch

    class Timed(PrecisionMode):
        """Notes when the last forward and backward pass ended."""

        forward_seconds = backward_seconds = backward_ended = 0.0

        @contextmanager
        def autocast(self) -> Iterator[None]:
            started = now(device)
            with super().autocast():
                yield
            self.forward_seconds = now(device) - started

        def backward(self, loss: torch.Tensor) -> None:
            started = now(device)
            super().backward(loss)
            self.backward_ended = now(device)
            self.backward_seconds = self.backward_ended - started

    given = {name: getattr(arguments, name) for name in ("encoder", "head", "optim", "precision")}
    chosen = [f"{key}={value}" for key, value in given.items()]
    settings = composed([*chosen, *search_override(arguments.head), *overrides])
    device = prepared_device(arguments)
    torch.manual_seed(0)
    tokenizer = ListedTokenizer([f"token{index}" for index in range(arguments.vocab)], sos_eos_id=1)
    precision = Timed(resolve_precision(settings.precision.value, device), device, initial_scale=1024.0)
    model = precision.prepare(build.build_model(settings, tokenizer).to(device)).train()
    set_batch_count(model, arguments.batch_count)
    optimizer = build.build_optimizer(settings, model)
    if arguments.compile:
        model.encoder.compile()

    frames, size = round(100 * arguments.seconds), arguments.batch
    batch = Batch(
        ids=[str(index) for index in range(size)],
        features=torch.randn(size, frames, model.feature_norm.mean.numel()),
        feature_lens=torch.full((size,), frames),
        tokens=torch.randint(2, arguments.vocab, (size, arguments.tokens)),
        token_lens=torch.full((size,), arguments.tokens),
        texts=[""] * size,
    ).to(device)
    phases: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "optimiser_s": [], "step_s": []}
    for _ in range(1 + arguments.repeats):
        started = now(device)
        result = train_step(model, [batch], optimizer, precision, settings.trainer.clip_norm, World(), device)
        ended = now(device)
        optimiser_seconds = ended - precision.backward_ended
        times = (precision.forward_seconds, precision.backward_seconds, optimiser_seconds, ended - started)
        for measured, seconds in zip(phases.values(), times, strict=True):
            measured.append(seconds)
    if not result.num_utterances:
        raise ValueError(
            f"--tokens {arguments.tokens} do not fit into --seconds {arguments.seconds}: no loss to train on"
        )
    shapes = {
        "features": list(batch.features.shape),
        "encoder_frames": int(model.encoder.output_lens(batch.feature_lens)[0]),
        "tokens": list(batch.tokens.shape),
        "vocab": arguments.vocab,
    }
    medians = {name: statistics.median(measured[1:]) for name, measured in phases.items()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    how = {"precision": precision.mode, "compile": arguments.compile, "batch_count": arguments.batch_count}
    tell({"bench": "train-step", **given, **how, "parameters": parameters, **shapes, **medians}, device)


def features_options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, batch=16)


def bench_features(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Seconds of filter bank (on one thread, as in a loader's worker), normalisation and augmentation."""
    import torch

    from asr import build
    from asr.data.dataset import one_thread

    settings = composed(overrides)
    device = prepared_device(arguments)
    torch.manual_seed(0)
    fbank = build.make(settings.features["fbank"])
    normalise = build.make(settings.features["normalise"], num_mel_bins=fbank.output_dim).to(device)
    augment = build.make(settings.augment).to(device).train()
    samples = 0.1 * torch.randn(arguments.batch, round(16000 * arguments.seconds))
    with one_thread():
        fbank_seconds = median_seconds(lambda: [fbank(row) for row in samples], arguments.repeats, device)
    features = torch.stack([fbank(row) for row in samples]).to(device)
    lens = torch.full((len(features),), features.shape[1], device=device)
    figures = {"bench": "features", "features": list(features.shape), "fbank_s": fbank_seconds}
    figures["normalise_s"] = median_seconds(lambda: normalise(features, lens), arguments.repeats, device)
    figures["augment_s"] = median_seconds(lambda: augment(features, lens), arguments.repeats, device)
    figures["fbank_audio_s_per_s"] = arguments.batch * arguments.seconds / fbank_seconds
    tell(figures, device)


def loader_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-batches", type=int, default=10, help="batches to measure (default 10)")


def bench_loader(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Seconds of audio per second that one loader delivers and that one training step takes in, on the same batches."""
    import torch

    from asr import build
    from asr.training.distributed import connect
    from asr.training.precision import PrecisionMode, resolve_precision
    from asr.training.step import train_step

    settings = composed(overrides)
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
    kept += [batch for batch, _ in zip(batches, range(arguments.num_batches), strict=False)]
    load_rate = sum(batch.audio_seconds for batch in kept[1:]) / (time.perf_counter() - started)
    clip_norm = settings.trainer.clip_norm
    train_step(model, kept[:1], optimizer, precision, clip_norm, world, device)  # warm-up
    started = time.perf_counter()
    for batch in kept[1:]:
        train_step(model, [batch], optimizer, precision, clip_norm, world, device)
    step_rate = sum(batch.audio_seconds for batch in kept[1:]) / (time.perf_counter() - started)

    workers = settings.data.num_workers
    print("| part | s of audio per s |")
    print("|---|---|")
    print(f"| loader, {workers} worker{'' if workers == 1 else 's'}, nothing else running | {load_rate:.0f} |")
    print(f"| training step, {device}, {torch.get_num_threads()} threads, {precision.mode} | {step_rate:.0f} |")
    print(f"\nThe loader is {load_rate / step_rate:.1f} times as fast as the step over {len(kept) - 1} batches.")


COMMANDS: dict[str, tuple[Callable[..., None], Callable[[argparse.ArgumentParser], None]]] = {
    "features": (bench_features, features_options),
    "loader": (bench_loader, loader_options),
    "train-step": (bench_train_step, train_step_options),
}


if __name__ == "__main__":
    main()
