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
    found = [Hypothesis([], [], 0.0) for _ in steps.lens]
    contexts = steps.start(len(found))
    decoded = steps.decode(contexts)
    log_probs_NB: list[Tensor] = []  # of the symbols chosen in every step
    searching_NB: list[list[bool]] = []  # and the utterances that it was a step of
    for frame, frames_BJ in enumerate(steps.frames_BTJ.unbind(1)):
        searching = [frame < length for length in steps.lens]
        for _ in range(max_symbols_per_frame):
            best, symbol = steps.log_probs(frames_BJ, decoded).max(1)
            log_probs_NB.append(best)
            searching_NB.append(searching)
            symbols = symbol.tolist()
            searching = [was and token != head.blank_id for was, token in zip(searching, symbols, strict=True)]
            emitting = [row for row, emits in enumerate(searching) if emits]
            if not emitting:
                break
            for row in emitting:
                found[row].tokens.append(symbols[row])
                found[row].frames.append(frame)
            rows = torch.tensor(emitting, device=decoded.device)
            extended = steps.extend(contexts.index_select(0, rows), symbol.index_select(0, rows))
            contexts.index_copy_(0, rows, extended)
            decoded.index_copy_(0, rows, steps.decode(extended))
    if log_probs_NB:
        counted_NB = torch.tensor(searching_NB, device=decoded.device)
        scores = torch.stack(log_probs_NB).where(counted_NB, 0.0).sum(0).tolist()
        found = [Hypothesis(of.tokens, of.frames, score) for of, score in zip(found, scores, strict=True)]
    return found
