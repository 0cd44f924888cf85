"""Connectionist temporal classification (Graves et al., 2006)."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr.heads.head import Head, check_tokens
from asr.layers.dropout import Dropout
from asr.layers.masks import length_mask
from asr.types import Encoded


class CTC(Head):
    """Dropout, linear, log-softmax; the loss is -log P(tokens | frames) in nats, summed over an utterance.

    An empty transcript is trained as all blank. An utterance with fewer frames than its tokens need (one for each, one
    more between equal neighbours, and one in any case) has loss 0 and no gradient; `feasible` tells which these are.
    """

    searches = ("ctc_greedy_search", "ctc_prefix_beam_search")

    def __init__(self, input_dim: int, vocab_size: int, blank_id: int = 0, dropout: float = 0.1):
        super().__init__()
        self.vocab_size = vocab_size
        self.blank_id = blank_id
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(input_dim, vocab_size)

    def log_probs(self, encoded: Encoded) -> Tensor:
        """(B, T, V) log-probabilities, fp32."""
        return F.log_softmax(self.output(self.dropout(encoded.frames)).float(), dim=-1)

    def loss_parts(self, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        """Raises ValueError where a transcript holds blank or an id outside the vocabulary."""
        check_tokens(tokens_BU, token_lens_B, self.vocab_size, self.blank_id)
        feasible = self.feasible(encoded.lens, tokens_BU, token_lens_B)
        # What is infeasible runs as an all-blank utterance of one frame, whose loss and gradient are finite.
        losses = F.ctc_loss(
            self.log_probs(encoded).transpose(0, 1),
            F.pad(tokens_BU, (0, 1)),  # an axis without tokens is refused
            torch.where(feasible, encoded.lens, 1),
            torch.where(feasible, token_lens_B, 0),
            blank=self.blank_id,
            reduction="none",
        )
        return {"ctc": torch.where(feasible, losses, 0.0)}

    def feasible(self, lens_B: Tensor, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        """(B,) mask: frames >= tokens + equal neighbours, and at least one frame."""
        valid = length_mask(token_lens_B, tokens_BU.size(1))
        repeats = ((tokens_BU[:, 1:] == tokens_BU[:, :-1]) & valid[:, 1:]).sum(1)
        return lens_B >= (token_lens_B + repeats).clamp(min=1)

    def min_frames(self, tokens: list[int]) -> int:
        """Frames that these tokens need: one each, one more between equal neighbours, at least one."""
        repeats = sum(left == right for left, right in pairwise(tokens))
        return max(1, len(tokens) + repeats)
