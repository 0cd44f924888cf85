"""CTC greedy (best path) search."""

from __future__ import annotations

import torch

from asr.search.ctc_paths import CtcScorer, valid_log_probs
from asr.types import Encoded, Hypothesis


@torch.no_grad()
def ctc_greedy_search(head: CtcScorer, encoded: Encoded) -> list[Hypothesis]:
    """The likeliest symbol of every frame, repeats merged and blanks removed (Graves et al., 2006).

    Returns one hypothesis per utterance. A token's frame is the first of its run; the score is the log-probability
    of the best path, which is one of the many paths of its tokens.
    """
    log_probs = valid_log_probs(head, encoded)
    scores_BT, symbols_BT = log_probs.max(dim=2)
    emits_BT = symbols_BT != head.blank_id
    emits_BT[:, 1:] &= symbols_BT[:, 1:] != symbols_BT[:, :-1]
    scores = scores_BT.sum(dim=1).tolist()
    return [
        Hypothesis(tokens=symbols[emits].tolist(), frames=emits.nonzero().squeeze(1).tolist(), score=score)
        for symbols, emits, score in zip(symbols_BT.cpu(), emits_BT.cpu(), scores, strict=True)
    ]
