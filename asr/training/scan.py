"""A look at the memory that training will need, before it starts."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from asr.data.packed import PackedCuts
from asr.heads.free_running import TeacherForcing
from asr.heads.head import add_parts
from asr.model import AsrModel
from asr.settings import DataSettings
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

    cuts: PackedCuts

    def plan(self, epoch: int) -> list[list[int]]: ...

    def load(self, indices: list[int], epoch: int) -> Batch: ...


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

    Room for what the optimiser will keep is held meanwhile, and a decoder that is to train on its own output does so on
    every batch. Parameters, gradients, buffers and random generators are afterwards what they were. Raises ValueError,
    with what to lower, when the memory does not suffice.
    """
    batches = largest_batches(loader.plan(epoch), loader.cuts, encode)
    generators = generator_states()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    free_running = [module for module in model.modules() if isinstance(module, TeacherForcing)]
    batch_counts = [module.batch_count for module in free_running]
    was_training = model.training
    model.train()
    described = ""
    try:
        reserve = 0 if optimizer.state else OPTIMISER_BYTES * sum(p.numel() for p in model.parameters())
        held = torch.ones(reserve, dtype=torch.uint8, device=precision.device)  # empty memory would not be held
        for batch in batches:
            for module in free_running:
                module.sample_next()
            described = _described(batch, loader.cuts.durations)
            _forward_and_backward(model, loader.load(batch, epoch).to(precision.device), precision)
            model.zero_grad(set_to_none=True)
        del held
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise ValueError(_advice(described, len(batch) == 1, precision, data)) from None
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
        for module, batch_count in zip(free_running, batch_counts, strict=True):
            module.batch_count = batch_count
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        restore_generators(generators)
    peak = peak_memory_bytes()
    if precision.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    told = "; ".join(_described(batch, loader.cuts.durations) for batch in batches)
    log.info("memory: %.2f GB at most, over %s", peak / 2**30, told)
    return peak


def largest_batches(plan: list[list[int]], cuts: PackedCuts, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Those with the longest utterance, with the most audio and with the most tokens, padding included; each once."""

    def longest(batch: list[int]) -> float:
        return max(cuts.durations[index] for index in batch)

    def most_characters(batch: list[int]) -> int:
        return len(batch) * max(cuts.text_lens[index] for index in batch)

    def most_tokens(batch: list[int]) -> int:
        return len(batch) * max(len(encode(cuts[index].supervisions[0].text or "")) for index in batch)

    chosen = (
        max(plan, key=lambda batch: (longest(batch), len(batch))),
        max(plan, key=lambda batch: len(batch) * longest(batch)),
        max(heapq.nlargest(NUM_LONG_TEXTS, plan, key=most_characters), key=most_tokens),
    )
    return list({tuple(batch): batch for batch in chosen}.values())


def _forward_and_backward(model: AsrModel, batch: Batch, precision: PrecisionMode) -> None:
    if not len(batch):
        return
    with precision.autocast():
        loss = add_parts(model(batch)).mean()
    precision.backward(loss)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _described(batch: list[int], durations: Sequence[float]) -> str:
    longest = max(durations[index] for index in batch)
    return f"{len(batch)} utterance{'' if len(batch) == 1 else 's'} of up to {longest:.1f} s"


def _advice(described: str, single: bool, precision: PrecisionMode, data: DataSettings) -> str:
    remedies = [
        f"data.max_duration={data.max_duration / 2:g} with twice the trainer.accumulate, which trains on as much a step"
    ]
    if single:
        remedies = [f"a data.max_utterance below {data.max_utterance:g}: this utterance is a batch by itself"]
    if precision.mode == "fp32":
        remedies.append("precision=amp_bf16")
    return (
        f"out of memory under precision={precision.mode} with a batch of {described} "
        f"(data.max_duration={data.max_duration:g}). Try {', or '.join(remedies)}, or a smaller encoder."
    )
