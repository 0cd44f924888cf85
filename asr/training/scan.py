"""A look at the memory that training will need, before it starts."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from typing import Protocol

import torch
from lhotse.cut import Cut

from asr.config import DataSettings
from asr.heads.head import add_parts
from asr.model import AsrModel
from asr.training.checkpoint import generator_states, restore_generators
from asr.training.monitor import peak_memory_bytes
from asr.training.precision import PrecisionMode
from asr.types import Batch

log = logging.getLogger(__name__)

# Batches with the most characters, of which the one with the most tokens is looked for.
NUM_LONG_TEXTS = 5
# What most optimisers keep for each parameter: two means in fp32.
OPTIMISER_BYTES = 8


class PlannedLoader(Protocol):
    """What the scan needs of a loader."""

    def batches(self, epoch: int) -> list[list[Cut]]: ...

    def load(self, cuts: list[Cut], epoch: int) -> Batch: ...


def scan_memory(
    model: AsrModel,
    optimizer: torch.optim.Optimizer,
    loader: PlannedLoader,
    epoch: int,
    encode: Callable[[str], list[int]],
    precision: PrecisionMode,
    data: DataSettings,
) -> int:
    """Forward and backward over the batches of `epoch` that need most; the peak in bytes, which is told as well.

    Room for what the optimiser will keep is held meanwhile. Parameters, gradients, buffers and random generators are
    afterwards what they were. Raises ValueError, with what to lower, when the memory does not suffice.
    """
    batches = largest_batches(loader.batches(epoch), encode)
    generators = generator_states()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    was_training = model.training
    model.train()
    cuts: list[Cut] = []
    try:
        reserve = 0 if optimizer.state else OPTIMISER_BYTES * sum(p.numel() for p in model.parameters())
        held = torch.empty(reserve, dtype=torch.uint8, device=precision.device)
        for cuts in batches:
            _forward_and_backward(model, loader.load(cuts, epoch).to(precision.device), precision)
            optimizer.zero_grad(set_to_none=True)
        del held
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise ValueError(_advice(cuts, precision, data)) from None
    finally:
        optimizer.zero_grad(set_to_none=True)
        model.train(was_training)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        restore_generators(generators)
    peak = peak_memory_bytes()
    if precision.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    log.info("memory: %.2f GB at most, over %s", peak / 2**30, "; ".join(map(_described, batches)))
    return peak


def largest_batches(batches: list[list[Cut]], encode: Callable[[str], list[int]]) -> list[list[Cut]]:
    """Those with the longest utterance, with the most audio and with the most tokens, padding included; each once."""

    def texts(cuts: list[Cut]) -> list[str]:
        return [cut.supervisions[0].text or "" for cut in cuts]

    long_texts = heapq.nlargest(NUM_LONG_TEXTS, batches, key=lambda cuts: len(cuts) * max(map(len, texts(cuts))))
    chosen = (
        max(batches, key=lambda cuts: (_longest(cuts), len(cuts))),
        max(batches, key=lambda cuts: len(cuts) * _longest(cuts)),
        max(long_texts, key=lambda cuts: len(cuts) * max(len(encode(text)) for text in texts(cuts))),
    )
    return list({id(cuts): cuts for cuts in chosen}.values())


def _forward_and_backward(model: AsrModel, batch: Batch, precision: PrecisionMode) -> None:
    if not len(batch):
        return
    with precision.autocast():
        loss = add_parts(model(batch)).mean()
    precision.backward(loss)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _longest(cuts: list[Cut]) -> float:
    return max(cut.duration for cut in cuts)


def _described(cuts: list[Cut]) -> str:
    return f"{len(cuts)} utterance{'' if len(cuts) == 1 else 's'} of up to {_longest(cuts):.1f} s"


def _advice(cuts: list[Cut], precision: PrecisionMode, data: DataSettings) -> str:
    remedies = [
        f"data.max_duration={data.max_duration / 2:g} with twice the trainer.accumulate, which trains on as much a step"
    ]
    if len(cuts) == 1:
        remedies = [f"data.max_utterance below {_longest(cuts):.0f}: this utterance is a batch by itself"]
    if precision.mode == "fp32":
        remedies.append("precision=amp_bf16")
    return (
        f"out of memory under precision={precision.mode} with a batch of {_described(cuts)} "
        f"(data.max_duration={data.max_duration:g}). Try {', or '.join(remedies)}, or a smaller encoder."
    )
