"""Transducer greedy search."""

from __future__ import annotations

from asr.heads.transducer import Transducer
from asr.search.transducer_steps import Context, Looks, UtteranceSearch, search_batch
from asr.types import Encoded, Hypothesis


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

    def search(looks: Looks, num_frames: int, context: Context, found: Hypothesis) -> UtteranceSearch:
        for frame in range(num_frames):
            for _ in range(max_symbols_per_frame):
                while (look := looks.get(context, frame)) is None:
                    yield frame, [context]
                (log_prob,), (symbol,) = look
                found.score += log_prob
                if symbol == head.blank_id:
                    break
                found.tokens.append(symbol)
                found.frames.append(frame)
                context = (*context[1:], symbol)

    return search_batch(head, encoded, search, 1, blank_penalty)
