"""Loss and word error rate on the dev set, with a few examples to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from asr.model import AsrModel
from asr.scoring.wer import count_errors
from asr.training.distributed import World, gather
from asr.training.precision import PrecisionMode
from asr.types import Batch, Search

NUM_EXAMPLES = 5


@dataclass
class Validation:
    """loss is the mean over feasible utterances, loss_parts those of its weighted parts; wer and cer are percent, None
    without a reference; examples are (id, reference, hypothesis)."""

    loss: float
    loss_parts: dict[str, float]
    wer: float | None
    cer: float | None
    num_utterances: int
    examples: list[tuple[str, str, str]]


@torch.no_grad()
def validate(
    model: AsrModel,
    batches: Iterable[Batch],
    search: Search,
    to_text: Callable[[list[int]], str],
    precision: PrecisionMode,
    world: World,
    device: torch.device,
) -> Validation:
    """Run the dev set, which every rank holds a part of, without leaving a trace in the model."""
    rows: dict[str, tuple[str, str, dict[str, float]]] = {}
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            rows.update((item.id, (item.text, "", {})) for item in batch.skipped)  # its words count as deletions
            if not len(batch):
                continue
            batch = batch.to(device)
            with precision.autocast():
                encoded = model.encode(batch.features, batch.feature_lens)
                parts = model.head.loss_parts(encoded, batch.tokens, batch.token_lens)
                hypotheses = search(model.head, encoded)
            feasible = model.head.feasible(encoded.lens, batch.tokens, batch.token_lens)
            losses = {name: part_B.tolist() for name, part_B in parts.items()}
            columns = (batch.ids, batch.texts, hypotheses, feasible.tolist())
            for row, (utterance, ref, hypothesis, fits) in enumerate(zip(*columns, strict=True)):
                of_parts = {name: values[row] for name, values in losses.items()} if fits else {}
                rows[utterance] = (ref, to_text(hypothesis.tokens), of_parts)
    finally:
        model.train(was_training)
    for other in gather(rows, world):
        rows.update(other)
    rows = dict(sorted(rows.items()))  # so that sums are the same on every rank and in every order of batches
    counted = [of_parts for _, _, of_parts in rows.values() if of_parts]
    loss_parts = {name: sum(row[name] for row in counted) / len(counted) for name in (counted[0] if counted else ())}
    refs, hyps = [row[0] for row in rows.values()], [row[1] for row in rows.values()]
    return Validation(
        loss=sum(loss_parts.values()) if counted else float("nan"),
        loss_parts=loss_parts,
        wer=count_errors(refs, hyps).rate,
        cer=count_errors(refs, hyps, unit="character").rate,
        num_utterances=len(rows),
        examples=[(utterance, rows[utterance][0], rows[utterance][1]) for utterance in list(rows)[:NUM_EXAMPLES]],
    )
