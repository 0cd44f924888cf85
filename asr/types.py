"""The small types that one stage of the pipeline hands to the next.

Shape legend, used as a suffix of tensor names across the project:

    B  utterances in a batch      U  tokens of a transcript
    T  frames                     V  vocabulary size
    F  mel bins                   D  width of a representation

A mask is True on valid positions. Lengths are int64 and count frames or tokens, never padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Skipped(NamedTuple):
    """An utterance that could not be read, with its normalised transcript."""

    id: str
    reason: str
    text: str


@dataclass
class Batch:
    """Utterances as the loader delivers them, in one order across all fields.

    ids: names of the utterances.
    features: (B, T, F) float32 log-mel features, before normalisation and augmentation.
    feature_lens: (B,) valid frames.
    tokens: (B, U) int64 token ids without blank, padded with 0 (which is also blank: use the lengths).
    token_lens: (B,) valid tokens.
    texts: normalised transcripts.
    speakers: who speaks, "" where unknown.
    audio_seconds: seconds of audio in the batch, without padding.
    skipped: utterances that belong here and could not be read.
    """

    ids: list[str]
    features: Tensor
    feature_lens: Tensor
    tokens: Tensor
    token_lens: Tensor
    texts: list[str]
    speakers: list[str] = field(default_factory=list)
    audio_seconds: float = 0.0
    skipped: list[Skipped] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, as a DataLoader asks for it before a copy to a GPU."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        names = ("features", "feature_lens", "tokens", "token_lens")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)


@dataclass
class Encoded:
    """What an encoder makes of a batch: frames (B, T, D) and their valid lengths (B,).

    num_views: 2 where the second half of the rows are other augmented views of the utterances of the first.
    """

    frames: Tensor
    lens: Tensor
    num_views: int = 1


@dataclass
class Hypothesis:
    """One decoded utterance.

    tokens: token ids, no blank, no start or end symbols.
    frames: for every token the encoder frame that emitted it.
    score: log-probability of the hypothesis under the search's own model (higher is better).
    """

    tokens: list[int]
    frames: list[int]
    score: float


# Head and encoder output to one hypothesis per utterance.
Search = Callable[[nn.Module, Encoded], list[Hypothesis]]
