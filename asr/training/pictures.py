"""Pictures for people: what the model really saw, and what its CTC output makes of an utterance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from asr.heads.ctc import CTC
from asr.model import AsrModel
from asr.training.loop import EpochLoader
from asr.training.monitor import Monitor
from asr.training.precision import PrecisionMode
from asr.types import Batch

NUM_UTTERANCES = 3


class Pictures:
    """Draws the first utterances that the loader of the dev set gives, at every validation.

    `tokens` are the vocabulary's, which name the peaks of CTC posteriors.
    """

    def __init__(self, monitor: Monitor, loader: EpochLoader, precision: PrecisionMode, tokens: Sequence[str]):
        self.monitor = monitor
        self.tokens = tokens
        self.precision = precision
        batch = next(
            (batch for batch in loader.epoch(0) if len(batch) and batch.feature_lens[:NUM_UTTERANCES].all()), None
        )
        self.batch = _first_utterances(batch).to(precision.device) if batch else None

    @torch.no_grad()
    def draw(self, model: AsrModel, step: int) -> None:
        """Spectrograms after normalisation and augmentation, and posteriors where there is a CTC head."""
        if self.batch is None:
            return
        batch, was_training = self.batch, model.training
        # Masks are drawn for the picture from a generator that training does not see.
        with torch.random.fork_rng(devices=[self.precision.device] if self.precision.device.type == "cuda" else []):
            torch.manual_seed(step)
            model.train()
            seen = model.feature_norm(batch.features, batch.feature_lens)
            if model.augment is not None:
                seen = model.augment(seen, batch.feature_lens)
            model.eval()
        self.monitor.figure("features/seen", spectrograms(seen, batch.feature_lens, batch.texts), step)
        if "ctc_greedy_search" in model.head.searches:
            head = model.head.part_for("ctc_greedy_search")
            assert isinstance(head, CTC)
            with self.precision.autocast():
                encoded = model.encode(batch.features, batch.feature_lens)
                posteriors_TV = head.log_probs(encoded)[0, : int(encoded.lens[0])].exp().cpu()
            if len(posteriors_TV):
                figure = posteriors(posteriors_TV, self.tokens, head.blank_id, batch.texts[0])
                self.monitor.figure("ctc/posteriors", figure, step)
        model.train(was_training)


def _first_utterances(batch: Batch) -> Batch:
    rows = slice(NUM_UTTERANCES)
    lens = batch.feature_lens[rows]
    return replace(
        batch, ids=batch.ids[rows], features=batch.features[rows, : int(lens.max())], feature_lens=lens,
        tokens=batch.tokens[rows], token_lens=batch.token_lens[rows], texts=batch.texts[rows],
    )  # fmt: skip


def spectrograms(features_BTF: Tensor, lens_B: Tensor, texts: list[str]) -> Figure:
    """The utterances of a batch, one above the other; time in frames of 10 ms."""
    count = len(texts)
    figure = Figure(figsize=(10, 2.2 * count), layout="constrained")
    FigureCanvasAgg(figure)
    for index in range(count):
        axes = figure.add_subplot(count, 1, index + 1)
        frames = features_BTF[index, : int(lens_B[index])].float().cpu().numpy()
        axes.imshow(frames.T, origin="lower", aspect="auto", vmin=-3, vmax=3, interpolation="nearest")
        axes.set_title(texts[index][:90], fontsize=9, parse_math=False)
        axes.set_ylabel("mel bin")
    axes.set_xlabel("frame")
    return figure


def posteriors(posteriors_TV: Tensor, tokens: Sequence[str], blank_id: int, text: str) -> Figure:
    """Probability of every token over encoder frames, named where it begins to lead; the dashed line is blank."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(posteriors_TV[:, blank_id].numpy(), "--", color="grey", linewidth=0.8)
    leading_T = posteriors_TV.argmax(dim=1)
    begins_T = leading_T != torch.nn.functional.pad(leading_T, (1, 0), value=blank_id)[:-1]
    for token, name in enumerate(tokens):
        curve_T = posteriors_TV[:, token]
        if token == blank_id or curve_T.max() < 0.05:
            continue
        (line,) = axes.plot(curve_T.numpy(), linewidth=1)
        for frame in torch.nonzero(begins_T & (leading_T == token)).flatten().tolist():
            axes.text(frame, 1.03, name, fontsize=8, color=line.get_color(), parse_math=False)
    axes.set_ylim(0, 1.12)
    axes.set_title(text[:90], fontsize=9, parse_math=False)
    axes.set_xlabel("encoder frame")
    axes.set_ylabel("probability")
    return figure
