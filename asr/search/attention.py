"""Beam search with an attention decoder, batched over utterances and beams."""

from __future__ import annotations

import torch
from torch import Tensor

from asr.heads.attention import Attention
from asr.types import Encoded, Hypothesis

NEVER = -torch.inf
# Where only the end is allowed, it may cost no more: a model that never ends still has a hypothesis.
LEAST_END = -1e4
FIRST_ROOM = 32


@torch.no_grad()
def attention(
    head: Attention, encoded: Encoded, beam: int = 10, length_norm: float = 0.0, max_tokens_per_frame: float = 1.0
) -> list[Hypothesis]:
    """The likeliest transcript by the decoder that reads from the left; its end is part of the score.

    beam: transcripts kept after every token; may exceed the vocabulary.
    length_norm: finished transcripts are ranked by score / (tokens + 1) ** length_norm; 0 ranks by score and lets the
        search end as soon as the best one has ended.
    max_tokens_per_frame: where a transcript must end, whatever the decoder says.

    Returns one hypothesis per utterance, without tokens where there are no frames. A token's frame is the one that the
    decoder's last layer looks at most for it.
    """
    if not len(encoded.lens):
        return []
    tokens, lens, scores = n_best(head, encoded, beam, length_norm, max_tokens_per_frame)
    tokens_BU, lens_B = tokens[:, 0], lens[:, 0]
    frames_BU = head.attended_frames(encoded, tokens_BU)
    rows = zip(tokens_BU.tolist(), frames_BU.tolist(), lens_B.tolist(), scores[:, 0].tolist(), strict=True)
    return [Hypothesis(row[:length], frames[:length], score) for row, frames, length, score in rows]


@torch.no_grad()
def n_best(
    head: Attention, encoded: Encoded, beam: int, length_norm: float, max_tokens_per_frame: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, K, U), padded with 0, their lengths (B, K) and scores (B, K) of all in the beam, the best first.

    Those that had not ended when the search was over come last, with a score of -inf.
    """
    if beam < 1 or length_norm < 0 or max_tokens_per_frame <= 0:
        raise ValueError(
            f"search.beam={beam}, search.length_norm={length_norm}, search.max_tokens_per_frame={max_tokens_per_frame}:"
            " at least 1, at least 0 and above 0 are wanted"
        )
    limit_B = (encoded.lens * max_tokens_per_frame).long()
    num_utterances, longest = len(limit_B), int(limit_B.max())
    tokens = limit_B.new_zeros(num_utterances, beam, longest + 1)
    lens, finished = limit_B.new_zeros(num_utterances, beam), (limit_B == 0).unsqueeze(1).repeat(1, beam)
    scores = torch.full(lens.shape, NEVER, device=lens.device)
    scores[:, 0] = 0.0
    first_row = torch.arange(num_utterances, device=lens.device).unsqueeze(1) * beam
    newest = torch.full_like(lens, head.sos_eos_id)
    state, room = head.start(encoded, beam, FIRST_ROOM), FIRST_ROOM

    for number in range(longest + 1):
        if _decided(scores, finished, length_norm):
            break
        if number == room:
            room = 2 * room
            state = head.with_room(state, room)
        log_probs, state = head.step(newest.flatten(), state)
        log_probs = log_probs.unflatten(0, (num_utterances, beam))
        _restrict(log_probs, finished, (lens >= limit_B.unsqueeze(1)), head)
        scores, chosen = (scores.unsqueeze(2) + log_probs).flatten(1).topk(beam, dim=1)
        parents, newest = chosen // log_probs.size(2), chosen % log_probs.size(2)
        finished = finished.gather(1, parents) | (newest == head.sos_eos_id)
        lens = lens.gather(1, parents) + ~finished
        tokens = tokens.gather(1, parents.unsqueeze(2).expand_as(tokens))
        tokens[:, :, number] = newest.masked_fill(finished, 0)
        state = state.reorder((first_row + parents).flatten())

    scores = scores.masked_fill(~finished, NEVER)
    order = (scores / (lens + 1) ** length_norm).argsort(dim=1, descending=True, stable=True)
    lens, scores = lens.gather(1, order), scores.gather(1, order)
    tokens = tokens.gather(1, order.unsqueeze(2).expand_as(tokens))
    valid = torch.arange(tokens.size(2), device=tokens.device) < lens.unsqueeze(2)
    return tokens.masked_fill(~valid, 0), lens, scores


def _restrict(log_probs_BKV: Tensor, finished: Tensor, at_limit: Tensor, head: Attention) -> None:
    """Leave, in place, what may follow: after the end only the end, at no cost; at the limit the end; never blank."""
    end = head.sos_eos_id
    if head.blank_id != end:
        log_probs_BKV[:, :, head.blank_id] = NEVER
    end_costs = log_probs_BKV[:, :, end].clamp(min=LEAST_END).masked_fill(finished, 0.0)
    ends = finished | at_limit
    log_probs_BKV.masked_fill_(ends.unsqueeze(2), NEVER)
    log_probs_BKV[:, :, end] = torch.where(ends, end_costs, log_probs_BKV[:, :, end])


def _decided(scores: Tensor, finished: Tensor, length_norm: float) -> bool:
    """Whether nothing that is still open can win: a score only falls."""
    if length_norm == 0.0:
        return bool(finished[:, 0].all())
    return bool((finished | (scores == NEVER)).all())
