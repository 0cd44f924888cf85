"""A training step, the transducer losses, and whether the loader keeps up."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scripts.benches.measuring import (
    common_options,
    composed,
    in_process,
    lattice_options,
    median_seconds,
    now,
    prepared_device,
    search_override,
    tell,
)


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
    figures = measured_steps(arguments, overrides)
    tell({"bench": "train-step", **figures}, prepared_device(arguments))


def free_running_options(parser: argparse.ArgumentParser) -> None:
    train_step_options(parser)
    parser.set_defaults(encoder="fast_conformer_xs", head="ctc_attention", tokens=100, seconds=20.0, repeats=8)


def bench_free_running(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """What training on the decoder's own output costs over teacher forcing: seconds and memory of a step, as a table.

    The mean over --repeats steps, a multiple of head.heads.attention.free_running.every, each mode in its own process.
    """
    from asr.heads.free_running import MODES

    print("| free running | step, s | ratio | memory of a step, MB | ratio |\n|---|---|---|---|---|")
    given = {"buffer_size": 4096, "buffer_tokens": arguments.tokens}  # or the steps between would train on the truth
    plain: dict[str, Any] = {}
    for mode in MODES:
        chosen = [f"head.heads.attention.free_running.{key}={value}" for key, value in (given | {"mode": mode}).items()]
        figures = in_process(measured_steps, arguments, [*chosen, *overrides])
        plain = plain or figures
        cells = [
            f"{figures[name]:.4g} | {figures[name] / plain[name]:.2f}" for name in ("step_mean_s", "step_memory_mb")
        ]
        print(f"| {mode} |", " | ".join(cells), "|", flush=True)


def measured_steps(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """What was measured, of which model and on which shapes. See `bench_train_step`."""
    import torch

    from asr import build
    from asr.layers.schedule import set_batch_count
    from asr.text.listed_tokenizer import ListedTokenizer
    from asr.training.distributed import World
    from asr.training.monitor import peak_memory_bytes
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
    optimizer, adversary = build.build_optimizer(settings, model), build.build_adversary_optimizer(settings, model)
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
    at_start = peak_memory_bytes()
    for _ in range(1 + arguments.repeats):
        started = now(device)
        result = train_step(
            model, [batch], optimizer, precision, settings.trainer.clip_norm, World(), device, adversary
        )
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
    # Where not all steps are alike, as with head.free_running, the mean over a multiple of their period counts.
    medians["step_mean_s"] = statistics.mean(phases["step_s"][1:])
    # At least a page: Linux's count is off by a few dozen, so that a step that needs no more may seem to need less.
    medians["step_memory_mb"] = max(4096, peak_memory_bytes() - at_start) / 2**20
    parameters = sum(parameter.numel() for parameter in model.parameters())
    how = {"precision": precision.mode, "compile": arguments.compile, "batch_count": arguments.batch_count}
    return {**given, **how, "parameters": parameters, **shapes, **medians}


def loss_options(parser: argparse.ArgumentParser) -> None:
    lattice_options(parser)
    parser.add_argument("--tokens", type=int, default=40, help="of each utterance")
    parser.add_argument("--prune-range", type=int, default=5)


def bench_loss(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Forward and backward of the pruned transducer losses, and of torchaudio's over the full lattice.

    The joiner is tanh of a sum, part of both. Memory is what the process holds at most beyond its inputs.
    """
    import torch

    from asr.losses.full_rnnt import full_loss
    from asr.losses.pruned_rnnt import Transcripts, keep_rows, pruned_loss, pruning_ranges, simple_loss
    from asr.training.monitor import peak_memory_bytes

    device = prepared_device(arguments)
    torch.manual_seed(0)
    size, frames, rows = arguments.batch, round(arguments.seconds * arguments.frame_rate), arguments.tokens + 1
    am, lm = (torch.randn(size, n, arguments.vocab, device=device, requires_grad=True) for n in (frames, rows))
    tokens = torch.randint(1, arguments.vocab, (size, arguments.tokens), device=device)
    lens = (torch.full((size,), n, device=device) for n in (arguments.tokens, frames))
    transcripts = Transcripts(tokens, *lens, blank_id=0)

    def pruned() -> None:
        simple_B, *shares = simple_loss(am, lm, transcripts, lm_scale=0.25)
        ranges = pruning_ranges(*shares, transcripts, arguments.prune_range)
        logits_BTRV = torch.tanh(am[:, :, None] + keep_rows(lm, ranges))
        (simple_B + pruned_loss(logits_BTRV, transcripts, ranges)).sum().backward()

    def full() -> None:
        full_loss(torch.tanh(am[:, :, None] + lm[:, None]), transcripts).sum().backward()

    held = peak_memory_bytes()
    figures: dict[str, Any] = {"bench": "loss", "frames": list(am.shape), "tokens": list(tokens.shape)}
    figures["prune_range"] = arguments.prune_range
    for name, work in {"pruned": pruned, "full": full}.items():  # the smaller first: a peak only rises
        figures[f"{name}_s"] = median_seconds(work, arguments.repeats, device)
        figures[f"{name}_memory_mb"] = (peak_memory_bytes() - held) / 2**20
    figures["times_faster"] = figures["full_s"] / figures["pruned_s"]
    tell(figures, device)


def loader_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-batches", type=int, default=10, help="batches to measure (default 10)")


def bench_loader(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Seconds of audio per second that one loader delivers and that one training step takes in, on the same batches."""
    import torch

    from asr import build
    from asr.data.cuts import Manifest
    from asr.training.distributed import connect
    from asr.training.precision import PrecisionMode, resolve_precision
    from asr.training.step import train_step

    settings = build.with_whole_paths(composed(overrides))
    world, device = connect(settings.device)
    splits = build.prepare_data(settings, world)
    tokenizer = build.build_tokenizer(settings, Manifest(splits["train"]))
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
