"""Transducer beam search with one symbol a frame."""

from __future__ import annotations

import math
from operator import itemgetter

from asr.heads.transducer import Transducer
from asr.search.transducer_steps import Context, Looks, UtteranceSearch, search_batch
from asr.types import Encoded, Hypothesis

Tokens = tuple[int, ...]
# Of a token sequence its log-probability, over all paths that stayed in the beam, and the frames of its tokens on the
# likeliest of the ways that met.
Beam = dict[Tokens, tuple[float, tuple[int, ...]]]


def modified_beam_search(
    head: Transducer,
    encoded: Encoded,
    beam: int = 4,
    length_norm: bool = True,
    blank_penalty: float = 0.0,
    temperature: float = 1.0,
) -> list[Hypothesis]:
    """The token sequences with the largest sums over paths of one symbol a frame.

    beam: sequences kept after every frame; may exceed the vocabulary.
    length_norm: choose at the end by log-probability per token (the context at the start counts as tokens).
    blank_penalty: subtracted from the logit of blank. temperature: divides the logits.

    Returns one hypothesis per utterance. Where equal sequences met, a token's frame is that of the likelier one; the
    score is the log-probability without length norm. As in icefall, the `beam` best extensions are chosen before equal
    sequences among them are merged, so that a beam may hold fewer.
    """
    if beam < 1:
        raise ValueError(f"beam={beam}: must be at least 1")

    def search(looks: Looks, num_frames: int, start: Context, found: Hypothesis) -> UtteranceSearch:
        size = len(start)
        sequences: Beam = {start: (0.0, ())}
        for frame in range(num_frames):
            while None in (known := [looks.get(tokens[-size:], frame) for tokens in sequences]):
                yield frame, {tokens[-size:] for tokens, look in zip(sequences, known, strict=True) if look is None}
            extended = [
                (score + log_prob, tokens, frames, symbol)
                for (tokens, (score, frames)), look in zip(sequences.items(), known, strict=True)
                if look
                for log_prob, symbol in zip(*look, strict=True)
            ]
            extended.sort(key=itemgetter(0), reverse=True)
            sequences = _merged(extended[:beam], frame, head.blank_id)

        def rank(tokens: Tokens) -> float:
            return sequences[tokens][0] / (len(tokens) if length_norm else 1)

        best = max(sequences, key=rank)
        found.score, frames = sequences[best]
        found.tokens, found.frames = list(best[size:]), list(frames)

    # No sequence has more than `beam` extensions among the best `beam`.
    return search_batch(head, encoded, search, min(beam, head.vocab_size), blank_penalty, temperature)


def _merged(extended: list[tuple[float, Tokens, tuple[int, ...], int]], frame: int, blank_id: int) -> Beam:
    """The sequences that come of these, best first; the probabilities of equal ones add up."""
    sequences: Beam = {}
    for score, tokens, frames, symbol in extended:
        if symbol != blank_id:
            tokens, frames = (*tokens, symbol), (*frames, frame)
        if tokens in sequences:
            larger, frames = sequences[tokens]
            score = larger + math.log1p(math.exp(score - larger))
        sequences[tokens] = score, frames
    return sequences
