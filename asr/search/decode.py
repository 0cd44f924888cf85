"""A whole set through the model and a search: every utterance gets a hypothesis, whatever its audio is like."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from tqdm import tqdm

from asr.model import AsrModel
from asr.types import Batch, Hypothesis, Search

log = logging.getLogger(__name__)


@dataclass
class DecodedSet:
    """hypotheses by utterance id; ids that could not be read by reason; seconds of audio and of decoding."""

    hypotheses: dict[str, Hypothesis]
    unreadable: dict[str, str]
    audio_seconds: float
    decode_seconds: float

    @property
    def real_time_factor(self) -> float | None:
        return self.decode_seconds / self.audio_seconds if self.audio_seconds else None


@torch.no_grad()
def decode_set(
    model: AsrModel,
    batches: Iterable[Batch],
    search: Search,
    autocast: Callable[[], AbstractContextManager],
    device: torch.device,
    num_utterances: int,
    name: str = "",
) -> DecodedSet:
    """Encode and search every batch. An utterance whose audio cannot be read has no hypothesis but a reason."""
    decoded = DecodedSet({}, {}, 0.0, 0.0)
    model.eval()
    with tqdm(total=num_utterances, desc=name, unit="utt", disable=None) as bar:
        for batch in batches:
            for utterance, reason, _ in batch.skipped:
                log.warning("%s: not decoded, its words count as deletions: %s", utterance, reason)
                decoded.unreadable[utterance] = reason
            started = time.perf_counter()
            if len(batch):
                batch = batch.to(device)
                with autocast():
                    hypotheses = search(model.head, model.encode(batch.features, batch.feature_lens))
                decoded.hypotheses.update(zip(batch.ids, hypotheses, strict=True))
            decoded.decode_seconds += time.perf_counter() - started
            decoded.audio_seconds += batch.audio_seconds
            bar.update(len(batch) + len(batch.skipped))
    return decoded
