"""Self-attention with relative positions, and Transformer layers in parallel and step by step."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

from scripts.benches.measuring import in_process, now, prepared_device

# Seconds per sample that fast-transformers (2023-03, dropout off) took on 2 AMD EPYC cores, within 20%, by length; of
# recurrent full attention with the memory of freed tensors kept in the process, as here.
FAST_TRANSFORMERS: dict[tuple[str, str, int], dict[int, float]] = {
    ("batch", "linear", 8): {250: 0.027, 500: 0.055, 1000: 0.114, 2000: 0.212},
    ("batch", "full", 8): {250: 0.028, 500: 0.087, 1000: 0.248, 2000: 0.777},
    ("recurrent", "linear", 1): {250: 0.60, 500: 1.22, 1000: 2.47, 2000: 4.51},
    ("recurrent", "linear", 8): {250: 0.111, 500: 0.206, 1000: 0.432, 2000: 0.959},
    ("recurrent", "linear", 32): {250: 0.051, 500: 0.096, 1000: 0.219, 2000: 0.483},
    ("recurrent", "linear", 128): {250: 0.044, 500: 0.082, 1000: 0.170, 2000: 0.439},
    ("recurrent", "full", 8): {250: 0.135, 500: 0.346, 1000: 1.12, 2000: 3.42},
    ("recurrent", "full", 32): {250: 0.082, 500: 0.257, 1000: 0.881, 2000: 2.32},
}
FORMS = ("batch", "recurrent", "training", "training by steps")


def attention_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=16, help="utterances")
    parser.add_argument("--frames", type=int, default=400, help="of the longest one; the shortest has half of them")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7, help="of each form, by turns; the best counts")
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--device", default="auto")


def bench_attention(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Forward and backward of relative-position attention: ours, scaled_dot_product_attention, the eager formula."""
    from scripts.benches.attention_variants import VARIANTS

    # First, while this process is small: Linux counts what a parent held as its child's peak.
    megabytes = {name: in_process(attention_memory, arguments, name) for name in VARIANTS}
    device = prepared_device(arguments)
    work = attention_work(arguments, device)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.repeats + 1):
        for name in VARIANTS:  # by turns, so that what else the machine does meets all of them
            started = now(device)
            work(name)
            seconds[name].append(now(device) - started)
    print("| attention | forward and backward, s | peak memory, MB |\n|---|---|---|")
    for name, measured in seconds.items():
        print(f"| {name} | {min(measured[1:]):.4f} | {megabytes[name]:.0f} |")


def attention_memory(arguments: argparse.Namespace, name: str) -> float:
    """By how many MB one forward and backward pass raises the peak of the process or of the GPU."""
    from asr.training.monitor import peak_memory_bytes

    work = attention_work(arguments, prepared_device(arguments))
    before = peak_memory_bytes()
    work(name)
    return (peak_memory_bytes() - before) / 2**20


def attention_work(arguments: argparse.Namespace, device: Any) -> Callable[[str], None]:
    """A function that runs the form of attention of a name forward and backward."""
    import torch

    from asr.layers.attention import RelativeSelfAttention
    from asr.layers.masks import length_mask
    from asr.layers.positional import RelativePositionalEncoding
    from scripts.benches.attention_variants import VARIANTS

    torch.manual_seed(0)
    dim, num_frames = arguments.heads * arguments.head_dim, arguments.frames
    frames = torch.randn(arguments.batch, num_frames, dim, device=device, requires_grad=True)
    lens = torch.linspace(num_frames // 2, num_frames, arguments.batch, device=device).long()
    mask = length_mask(lens, num_frames).unsqueeze(1)
    table = RelativePositionalEncoding(dim)
    places = table.of_distances(num_frames, num_frames, frames), table.of_positions(0, num_frames, frames)

    def work(name: str) -> None:
        variant, shift = VARIANTS[name]
        torch.manual_seed(0)
        attention = RelativeSelfAttention(dim, arguments.heads, shift=shift).to(device)
        variant(attention, frames, *places, mask).sum().backward()

    return work


def recurrent_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS[:2], help="training: with all gradients")
    parser.add_argument("--attentions", nargs="+", choices=["full", "linear"], default=["linear", "full"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[250, 500, 1000, 2000, 4000])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=3, help="measurements, after one to warm up; the median counts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8, help="of 64")
    parser.add_argument("--feed-forward-dim", type=int, default=1024, help="fast-transformers' own default")
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--device", default="auto")


def bench_recurrent(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Seconds per sample and memory of a stack of Transformer layers, in parallel and step by step, as a table."""
    print(
        "| form | attention | batch | length | s per sample | MB | formula, s | ratio | fast-transformers, s | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for form, attention, size in itertools.product(arguments.forms, arguments.attentions, arguments.batches):
        theirs = FAST_TRANSFORMERS.get((form, attention, size), {})
        for length in arguments.lengths:
            seconds, by_formula, megabytes = in_process(recurrent_cell, arguments, form, attention, size, length)
            compared = [
                f"{other:.4g} | {seconds / other:.2f}" if other else "| " for other in (by_formula, theirs.get(length))
            ]
            cell = f"| {form} | {attention} | {size} | {length} | {seconds:.4f} | {megabytes:.0f} |"
            print(cell, " | ".join(compared), "|", flush=True)


def recurrent_cell(
    arguments: argparse.Namespace, form: str, attention: str, size: int, length: int
) -> tuple[float, float | None, float]:
    """Median seconds per sample, those of the formula's steps, and the peak of memory in MB."""
    import torch
    from torch import nn

    from asr.layers.transformer_layer import TransformerLayer
    from asr.training.monitor import peak_memory_bytes
    from scripts.benches.recurrent_formula import formula_step

    device = prepared_device(arguments)
    torch.manual_seed(0)
    dim = 64 * arguments.heads
    layers: Any = nn.ModuleList(
        TransformerLayer(dim, arguments.heads, arguments.feed_forward_dim, 0.0, attention, causal=True, cross=False)
        for _ in range(arguments.layers)
    ).to(device)
    x_BTD, lens_B = torch.randn(size, length, dim, device=device), torch.full((size,), length, device=device)

    def parallel() -> torch.Tensor:
        x = x_BTD
        for layer in layers:
            x = layer(x, lens_B)
        return x

    def stepwise(step: Callable[..., Any], start: Callable[[Any], Any]) -> torch.Tensor:
        states = [start(layer) for layer in layers]
        outputs = []
        for x in x_BTD.unbind(1):
            for index, layer in enumerate(layers):
                x, states[index] = step(layer, x, states[index])
            outputs.append(x)
        return torch.stack(outputs, dim=1)

    def ours() -> torch.Tensor:
        return stepwise(TransformerLayer.step, lambda layer: layer.self_attention.start(size, length))

    def formula() -> torch.Tensor:
        return stepwise(formula_step, lambda layer: ())

    def seconds_of(work: Callable[[], torch.Tensor]) -> float:
        started = now(device)
        with torch.set_grad_enabled(form.startswith("training")):
            outputs = work()
        if outputs.requires_grad:
            outputs.square().mean().backward()
        return now(device) - started

    works = [parallel] if form in ("batch", "training") else [ours, formula]
    seconds_of(works[0])
    megabytes = peak_memory_bytes() / 2**20
    # By turns, so that what else the machine does meets both; the first turn warms up.
    turns = [[seconds_of(work) for work in works] for _ in range(arguments.repeats + 1)][1:]
    medians = [statistics.median(of_work) / size for of_work in zip(*turns, strict=True)]
    return medians[0], medians[1] if len(medians) > 1 else None, megabytes
