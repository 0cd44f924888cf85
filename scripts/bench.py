"""Speed and memory, measured. Each subcommand prints its figures; all but `loader` need no data.

python scripts/bench.py train-step --encoder conformer_s --head ctc --precision amp_bf16 [key=value ...]
python scripts/bench.py loss --batch 8 --tokens 40 --vocab 500
python scripts/bench.py search --head transducer --batch 8
python scripts/bench.py features --batch 16 --seconds 10
python scripts/bench.py attention --batch 16 --frames 400 --heads 4 --head-dim 64
python scripts/bench.py loader [+experiment=NAME] [key=value ...]
python scripts/bench.py recurrent --lengths 250 500 --batches 1 8
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
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
    from asr.rules import searches_of

    path = ROOT / "conf" / "head" / f"{head}.yaml"
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
    medians["step_memory_mb"] = (peak_memory_bytes() - at_start) / 2**20
    parameters = sum(parameter.numel() for parameter in model.parameters())
    how = {"precision": precision.mode, "compile": arguments.compile, "batch_count": arguments.batch_count}
    tell({"bench": "train-step", **given, **how, "parameters": parameters, **shapes, **medians}, device)


def lattice_options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, batch=8)
    parser.add_argument("--frame-rate", type=float, default=25.0, help="encoder frames a second")
    parser.add_argument("--vocab", type=int, default=500)


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


def search_options(parser: argparse.ArgumentParser) -> None:
    lattice_options(parser)
    parser.add_argument("--head", default="transducer")
    parser.add_argument("--encoder-dim", type=int, default=256, help="width of the encoder's frames")
    parser.add_argument("--tokens", type=int, default=40, help="that greedy search finds, about, in an utterance")


def bench_search(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Seconds of every search over random frames, of a head with random weights that emits at the rate of speech."""
    import torch

    from asr import build
    from asr.targets import accepted, locate
    from asr.types import Encoded

    settings = composed([f"head={arguments.head}", *search_override(arguments.head), *overrides])
    device = prepared_device(arguments)
    torch.manual_seed(0)
    given = {"input_dim": arguments.encoder_dim, "vocab_size": arguments.vocab, "blank_id": 0, "sos_eos_id": 1}
    head = build.make(settings.head, **accepted(locate(settings.head["_target_"]), given)).to(device).eval()
    size, frames = arguments.batch, round(arguments.seconds * arguments.frame_rate)
    lens = torch.full((size,), frames, device=device)
    encoded = Encoded(torch.randn(size, frames, arguments.encoder_dim, device=device), lens)
    figures: dict[str, Any] = {"bench": "search", "head": arguments.head, "frames": list(encoded.frames.shape)}
    figures["vocab"] = arguments.vocab
    searches = {name: build.build_search(build.search_settings(name, {})) for name in head.searches}
    for name, search in searches.items():
        if name in ("greedy_search", "ctc_greedy_search"):
            set_token_rate(head.part_for(name), lambda search=search: search(head, encoded), arguments.tokens)
    for name, search in searches.items():
        figures[f"{name}_s"] = median_seconds(lambda search=search: search(head, encoded), arguments.repeats, device)
        found = sum(len(hypothesis.tokens) for hypothesis in search(head, encoded))
        figures[f"{name}_tokens_per_s"] = found / (size * arguments.seconds)
    tell(figures, device)


def set_token_rate(head: Any, search: Callable[[], list[Any]], tokens: int) -> None:
    """Let a head with random weights be as sure as a trained one, and find about `tokens` in an utterance.

    As they are drawn, all symbols are about equally likely, and blank wins at one frame in `vocab`. Trained heads are
    nearly certain at most frames, mostly of blank: icefall's on LibriSpeech have a loss of 0.025 a frame (its pull
    request 672). With logits of a standard deviation of 24 and blank's bias found by bisection it is about as much.
    """
    import torch

    layer = head.output if hasattr(head, "output") else head.joiner.output_linear
    logits: list[torch.Tensor] = []
    watched = layer.register_forward_hook(lambda _, inputs, output: logits.append(output))
    search()
    watched.remove()
    low, high = -200.0, 200.0
    with torch.no_grad():
        layer.weight *= 24 / torch.cat([part.flatten() for part in logits]).std()
        for _ in range(12):
            layer.bias[head.blank_id] = (low + high) / 2
            found = search()
            if sum(len(hypothesis.tokens) for hypothesis in found) > tokens * len(found):
                low = (low + high) / 2
            else:
                high = (low + high) / 2


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
    from asr.data.cuts import Manifest
    from asr.training.distributed import connect
    from asr.training.precision import PrecisionMode, resolve_precision
    from asr.training.step import train_step

    settings = composed(overrides)
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
    from scripts.attention_variants import VARIANTS

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
    from scripts.attention_variants import VARIANTS

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
    print("| form | attention | batch | length | s per sample | MB | fast-transformers, s | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for form, attention, size in itertools.product(arguments.forms, arguments.attentions, arguments.batches):
        theirs = FAST_TRANSFORMERS.get((form, attention, size), {})
        for length in arguments.lengths:
            seconds, megabytes = in_process(recurrent_cell, arguments, form, attention, size, length)
            peer = theirs.get(length)
            compared = f"{peer:g} | {seconds / peer:.2f}" if peer else "| "
            cell = f"| {form} | {attention} | {size} | {length} | {seconds:.4f} | {megabytes:.0f} | {compared} |"
            print(cell, flush=True)


def in_process(work: Callable[..., Any], *given: Any) -> Any:
    """The result of work in a process of its own, so that peaks of memory are not those of earlier work."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def recurrent_cell(
    arguments: argparse.Namespace, form: str, attention: str, size: int, length: int
) -> tuple[float, float]:
    """Median seconds per sample, and the peak of the process's memory, or of the GPU's, in MB."""
    import torch
    from torch import nn

    from asr.layers.transformer_layer import TransformerLayer
    from asr.training.monitor import peak_memory_bytes

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

    def stepwise() -> torch.Tensor:
        states = [layer.self_attention.start(size, length) for layer in layers]
        outputs = []
        for x in x_BTD.unbind(1):
            for index, layer in enumerate(layers):
                x, states[index] = layer.step(x, states[index])
            outputs.append(x)
        return torch.stack(outputs, dim=1)

    def work() -> None:
        with torch.set_grad_enabled(form.startswith("training")):
            outputs = parallel() if form in ("batch", "training") else stepwise()
        if outputs.requires_grad:
            outputs.square().mean().backward()

    return median_seconds(work, arguments.repeats, device) / size, peak_memory_bytes() / 2**20


COMMANDS: dict[str, tuple[Callable[..., None], Callable[[argparse.ArgumentParser], None]]] = {
    "attention": (bench_attention, attention_options),
    "features": (bench_features, features_options),
    "loader": (bench_loader, loader_options),
    "loss": (bench_loss, loss_options),
    "search": (bench_search, search_options),
    "recurrent": (bench_recurrent, recurrent_options),
    "train-step": (bench_train_step, train_step_options),
}


if __name__ == "__main__":
    main()
