"""What every head promises."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from asr.types import Encoded


class Head(Protocol):
    """A module from frames to losses; its constructor takes `input_dim` (the encoder's width), `vocab_size` and
    `blank_id` (the tokenizer's) from the build.

    searches: names of the searches that decode with it, as in conf/search.
    """

    vocab_size: int
    blank_id: int
    searches: tuple[str, ...]

    def loss(self, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        """Losses (B,) per utterance, fp32 in every precision mode; 0 and without gradient where infeasible."""
        ...

    def feasible(self, lens_B: Tensor, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        """(B,) mask of the utterances whose frames suffice for their tokens."""
        ...

    def min_frames(self, tokens: list[int]) -> int:
        """The least number of encoder frames for which these tokens are feasible."""
        ...
