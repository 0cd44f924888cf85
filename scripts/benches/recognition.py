"""Features and searches."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from scripts.benches.measuring import (
    common_options,
    composed,
    lattice_options,
    median_seconds,
    prepared_device,
    search_override,
    tell,
)


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
