"""Transducer greedy search."""

from __future__ import annotations

import torch
from torch import Tensor

from asr.heads.transducer import Transducer
from asr.search.transducer_steps import Steps
from asr.types import Encoded, Hypothesis


@torch.no_grad()
def greedy_search(
    head: Transducer, encoded: Encoded, max_symbols_per_frame: int = 1, blank_penalty: float = 0.0
) -> list[Hypothesis]:
    """The likeliest symbol at every step; a blank, or the last symbol that a frame may emit, moves on by a frame.

    max_symbols_per_frame: more than 1 suits heads that were trained in the regular topology and emit in bursts.
    blank_penalty: subtracted from the logit of blank; above 0 it trades deletions for insertions.

    Returns one hypothesis per utterance. The score is the log-probability of the symbols chosen, blanks included.
    """
    if max_symbols_per_frame < 1:
        raise ValueError(f"max_symbols_per_frame={max_symbols_per_frame}: must be at least 1")
    steps = Steps(head, encoded, blank_penalty)
    contexts = steps.start(len(steps.lens))
    decoded = steps.decode(contexts)
    # Of every step the frame, the symbols (B,), and their log-probabilities. Utterances are cut to their lengths at the
    # end: what a step makes of one that has ended is no other's business.
    frame_N: list[int] = []
    symbols_NB: list[Tensor] = []
    log_probs_NB: list[Tensor] = []
    for frame, frames_BJ in enumerate(steps.frames_BTJ.unbind(1)):
        still_emits = None
        for _ in range(max_symbols_per_frame):
            best, symbol = steps.log_probs(frames_BJ, decoded).max(1)
            if still_emits is not None:  # the others have moved on
                best, symbol = best * still_emits, symbol.where(still_emits, head.blank_id)
            frame_N.append(frame)
            symbols_NB.append(symbol)
            log_probs_NB.append(best)
            still_emits = symbol != head.blank_id
            rows = still_emits.nonzero().squeeze(1)
            if not len(rows):
                break
            extended = steps.extend(contexts[rows], symbol[rows])
            contexts.index_copy_(0, rows, extended)
            decoded.index_copy_(0, rows, steps.decode(extended))
    return _cut(frame_N, symbols_NB, log_probs_NB, steps.lens, head.blank_id)


def _cut(
    frame_N: list[int], symbols_NB: list[Tensor], log_probs_NB: list[Tensor], lens: list[int], blank_id: int
) -> list[Hypothesis]:
    """What the steps say of every utterance up to its length."""
    if not frame_N:
        return [Hypothesis([], [], 0.0) for _ in lens]
    frames = torch.tensor(frame_N)
    symbols_BN, log_probs_BN = torch.stack(symbols_NB, 1).cpu(), torch.stack(log_probs_NB, 1).cpu()
    valid_BN = frames < torch.tensor(lens)[:, None]
    scores = log_probs_BN.where(valid_BN, 0.0).sum(1).tolist()
    emits_BN = valid_BN & (symbols_BN != blank_id)
    return [
        Hypothesis(symbols[emits].tolist(), frames[emits].tolist(), score)
        for symbols, emits, score in zip(symbols_BN, emits_BN, scores, strict=True)
    ]
