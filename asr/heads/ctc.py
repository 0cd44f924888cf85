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
    """Dropout, linear layers, log-softmax; the loss is -log P(tokens | frames) in nats, summed over an utterance.

    An empty transcript is trained as all blank. An utterance with fewer frames than its tokens need (one for each, one
    more between equal neighbours, and one in any case) has loss 0 and no gradient; `feasible` tells which these are.

    num_layers: linear layers, ReLU between them. hidden_dim: width between them.
    consistency_weight: of the consistency loss between two augmented views of an utterance (CR-CTC, Yao et al., 2024),
        published as 0.2; 0 trains on one view.
    consistency_warmup: reference batches over which that weight rises from 0: views of an untrained model agree best
        where both are all blank, and a run that starts there diverges.
    """

    searches = ("ctc_greedy_search", "ctc_prefix_beam_search")

    def __init__(
        self,
        input_dim: int,
        vocab_size: int,
        blank_id: int = 0,
        dropout: float = 0.1,
        num_layers: int = 1,
        hidden_dim: int = 256,
        consistency_weight: float = 0.0,
        consistency_warmup: float = 2000.0,
    ):
        super().__init__()
        if consistency_weight < 0 or consistency_warmup < 0:
            raise ValueError(
                f"head.consistency_weight={consistency_weight}, consistency_warmup={consistency_warmup}: from 0"
            )
        if num_layers < 1:
            raise ValueError(f"head.num_layers={num_layers}: at least 1")
        self.vocab_size = vocab_size
        self.blank_id = blank_id
        self.dropout = Dropout(dropout)
        dims = [input_dim, *[hidden_dim] * (num_layers - 1)]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(dims))
        self.output = nn.Linear(dims[-1], vocab_size)
        self.consistency_weight = consistency_weight
        self.consistency_warmup = consistency_warmup
        self.batch_count = 0.0
        self.num_views = 2 if consistency_weight else 1

    def log_probs(self, encoded: Encoded) -> Tensor:
        """(B, T, V) log-probabilities, fp32."""
        x = self.dropout(encoded.frames)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return F.log_softmax(self.output(x).float(), dim=-1)

    def loss_parts(self, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        """Parts "ctc" and, of two views, "consistency". Raises ValueError for blank or an unknown id in a text."""
        check_tokens(tokens_BU, token_lens_B, self.vocab_size, self.blank_id)
        feasible = self.feasible(encoded.lens, tokens_BU, token_lens_B)
        # What is infeasible runs as an all-blank utterance of one frame, whose loss and gradient are finite.
        log_probs = self.log_probs(encoded)
        losses = F.ctc_loss(
            log_probs.transpose(0, 1),
            F.pad(tokens_BU, (0, 1)),  # an axis without tokens is refused
            torch.where(feasible, encoded.lens, 1),
            torch.where(feasible, token_lens_B, 0),
            blank=self.blank_id,
            reduction="none",
        )
        parts = {"ctc": torch.where(feasible, losses, 0.0)}
        if self.consistency_weight and encoded.num_views == 2:
            parts["consistency"] = self._consistency_scale * _disagreement(log_probs, encoded.lens * feasible)
        return parts

    @property
    def _consistency_scale(self) -> float:
        share = min(1.0, self.batch_count / self.consistency_warmup) if self.consistency_warmup else 1.0
        return self.consistency_weight * share

    def feasible(self, lens_B: Tensor, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        """(B,) mask: frames >= tokens + equal neighbours, and at least one frame."""
        valid = length_mask(token_lens_B, tokens_BU.size(1))
        repeats = ((tokens_BU[:, 1:] == tokens_BU[:, :-1]) & valid[:, 1:]).sum(1)
        return lens_B >= (token_lens_B + repeats).clamp(min=1)

    def min_frames(self, tokens: list[int]) -> int:
        """Frames that these tokens need: one each, one more between equal neighbours, at least one."""
        repeats = sum(left == right for left, right in pairwise(tokens))
        return max(1, len(tokens) + repeats)


def _disagreement(log_probs: Tensor, lens_B: Tensor) -> Tensor:
    """(B,) divergences, summed over frames, of every row's distributions (B, T, V) from those of its other view.

    The other view is a fixed target, so that each learns from the other; the first half of the rows are the first
    views. Over the two rows of an utterance this is the symmetric Kullback-Leibler divergence.
    """
    target = log_probs.detach().roll(log_probs.size(0) // 2, dims=0)
    divergence_BT = F.kl_div(log_probs, target, reduction="none", log_target=True).sum(2)
    return divergence_BT.masked_fill(~length_mask(lens_B, log_probs.size(1)), 0.0).sum(1)
