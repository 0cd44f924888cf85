"""What every head promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce

import torch
from torch import Tensor, nn

from asr.layers.masks import length_mask
from asr.types import Encoded


class Head(nn.Module, ABC):
    """A module from frames to losses; its constructor takes `input_dim` (the encoder's width), `vocab_size` and
    `blank_id` (the tokenizer's) from the build.

    searches: names of the searches that decode with it, as in conf/search; the first is the default.
    num_views: augmented views of every utterance that its loss compares in training, one after the other in the batch
        (see `Encoded.num_views`); 1 where it compares none.
    """

    vocab_size: int
    blank_id: int
    searches: tuple[str, ...]
    num_views: int = 1

    @abstractmethod
    def loss_parts(self, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        """Named parts (B,) of the losses per utterance, weighted so that their sum is what is minimised.

        fp32 in every precision mode; 0 and without gradient where infeasible.
        """

    @abstractmethod
    def feasible(self, lens_B: Tensor, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        """(B,) mask of the utterances whose frames suffice for their tokens."""

    @abstractmethod
    def min_frames(self, tokens: list[int]) -> int:
        """The least number of encoder frames for which these tokens are feasible."""

    def loss(self, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        """Losses (B,) per utterance: the sum of the parts."""
        return add_parts(self.loss_parts(encoded, tokens_BU, token_lens_B))

    def part_for(self, search: str) -> Head:
        """The head that `search` works on: this one, or one inside it. Raises ValueError when there is none."""
        if search not in self.searches:
            raise ValueError(f"search={search}: {type(self).__name__} offers {', '.join(self.searches)}")
        return self


def add_parts(parts: dict[str, Tensor]) -> Tensor:
    """The losses (B,) that weighted parts (B,) make together."""
    return reduce(torch.add, parts.values())


def check_tokens(tokens_BU: Tensor, token_lens_B: Tensor, vocab_size: int, blank_id: int) -> None:
    """Raise ValueError where a transcript holds blank or an id outside the vocabulary."""
    wrong = (tokens_BU == blank_id) | (tokens_BU < 0) | (tokens_BU >= vocab_size)
    wrong &= length_mask(token_lens_B, tokens_BU.size(1))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        token = int(tokens_BU[row, column])
        reason = "which is blank" if token == blank_id else f"outside the vocabulary of {vocab_size}"
        raise ValueError(
            f"token {column} of utterance {row} of the batch is {token}, {reason}; "
            "encode transcripts with the tokenizer that the model was built with"
        )
