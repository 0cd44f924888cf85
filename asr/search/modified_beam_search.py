"""Transducer beam search with one symbol a frame, batched over utterances and beams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asr.heads.transducer import Transducer
from asr.search.transducer_steps import Steps
from asr.types import Encoded, Hypothesis

NEVER = -torch.inf
# Sequences are told apart by a polynomial hash modulo 2^64, on which two of them agree about once in 10^19 pairs.
HASH_FACTOR = 6364136223846793005


@dataclass
class Beams:
    """K token sequences of every utterance. One with the score -inf is an empty slot.

    scores: (B, K) log-probability of the sequence, over all paths that stayed in the beam.
    state: (4, B, K) of the sequence: its hash, its length, its context as a number (see `Steps`), and the row of
        `decoded` that belongs to this context.
    decoded: (N, J) decoder output of the different contexts that an utterance has; its sequences share it.
    utterances: (N,) whose context it is, rising.
    """

    scores: Tensor
    state: Tensor
    decoded: Tensor
    utterances: Tensor

    def first(self, count: int) -> Beams:
        """Those of the first utterances."""
        num_contexts = int((self.utterances < count).sum())
        return Beams(
            self.scores[:count], self.state[:, :count], self.decoded[:num_contexts], self.utterances[:num_contexts]
        )


@torch.no_grad()
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

    Returns one hypothesis per utterance. A token's frame is that of the likeliest path; the score is the
    log-probability without length norm. As in icefall, the `beam` best extensions are chosen before equal sequences
    among them are merged, so that a beam may hold fewer.
    """
    if beam < 1:
        raise ValueError(f"beam={beam}: must be at least 1")
    steps = Steps(head, encoded, blank_penalty, temperature)
    # Longest first, so that those still searching are the first rows.
    order = sorted(range(len(steps.lens)), key=lambda utterance: -steps.lens[utterance])
    beams = _start(steps, len(order), beam)
    finished: list[tuple[Tensor, Tensor]] = []  # scores and lengths
    slots_TBK: list[Tensor] = []  # where the sequences of every frame come from
    symbols_TBK: list[Tensor] = []  # and the symbols that they took
    for frame, frames_BJ in enumerate(steps.frames_BTJ[order].unbind(1)):
        searching = sum(length > frame for length in steps.lens)
        if searching < len(beams.scores):
            finished.append((beams.scores[searching:], beams.state[1, searching:]))
            beams = beams.first(searching)
        beams, slots, symbols = _next_beams(steps, beams, frames_BJ)
        slots_TBK.append(slots)
        symbols_TBK.append(symbols)
    finished.append((beams.scores, beams.state[1]))

    scores, lens = (torch.cat(parts[::-1]) for parts in zip(*finished, strict=True))
    best = (scores / (lens + steps.context_size) if length_norm else scores).argmax(1, keepdim=True)
    paths = _trace_back(slots_TBK, symbols_TBK, best.squeeze(1).tolist(), [steps.lens[row] for row in order])
    found = {}
    for utterance, path, score in zip(order, paths, scores.gather(1, best).squeeze(1).tolist(), strict=True):
        frames = [frame for frame, symbol in enumerate(path) if symbol != head.blank_id]
        found[utterance] = Hypothesis([path[frame] for frame in frames], frames, score)
    return [found[utterance] for utterance in range(len(order))]


def _start(steps: Steps, batch_size: int, beam: int) -> Beams:
    contexts = steps.start(batch_size)
    scores = torch.full((batch_size, beam), NEVER, device=contexts.device)
    scores[:, 0] = 0.0
    utterances = torch.arange(batch_size, device=contexts.device)
    nothing = torch.zeros_like(contexts)
    state = torch.stack([nothing, nothing, contexts, utterances])[:, :, None].expand(-1, -1, beam)
    return Beams(scores, state, steps.decode(contexts), utterances)


def _next_beams(steps: Steps, old: Beams, frames_BJ: Tensor) -> tuple[Beams, Tensor, Tensor]:
    """The beams after one more frame, the slots that theirs come from and the symbols they took (B, K)."""
    beam = old.scores.size(1)
    log_probs_NV = steps.log_probs(frames_BJ.index_select(0, old.utterances), old.decoded)
    # No sequence has more than `beam` extensions among the best `beam`.
    likeliest_NC = log_probs_NV.topk(min(beam, steps.vocab_size), dim=1)
    rows = old.state[3]
    extended_BKC = likeliest_NC.values[rows].add_(old.scores[:, :, None])
    scores, chosen = extended_BKC.flatten(1).topk(beam, dim=1)
    slots = chosen // extended_BKC.size(2)
    symbols = likeliest_NC.indices[rows].flatten(1).gather(1, chosen)

    state = old.state.gather(2, slots.expand(4, -1, -1))
    hashes, lens, contexts, rows = state
    emits = symbols != steps.blank_id
    state[0] = torch.where(emits, hashes * HASH_FACTOR + symbols + 1, hashes)
    lens += emits
    state[2] = torch.where(emits, steps.extend(contexts, symbols), contexts)
    beams = Beams(_merged(scores, hashes), state, old.decoded, old.utterances)
    return _decoded(steps, beams, emits), slots, symbols


def _merged(scores: Tensor, hashes: Tensor) -> Tensor:
    """The scores (B, K) when those of equal sequences are added to the first of them, which leaves the others empty."""
    same_BKK = hashes[:, :, None] == hashes[:, None]
    if int(same_BKK.sum()) == hashes.numel():
        return scores
    merged = torch.where(same_BKK, scores[:, None], NEVER).logsumexp(2)
    return merged.masked_fill(same_BKK.tril(-1).any(2), NEVER)


def _decoded(steps: Steps, beams: Beams, emits: Tensor) -> Beams:
    """`beams` with the rows and the decoder output of their contexts, which are new where a token was emitted."""
    _, _, contexts, rows = beams.state
    of_utterances, new_rows = torch.unique(steps.with_utterance(contexts), return_inverse=True)
    # One of the sequences that share a context stands for all of them.
    sequences = torch.arange(rows.numel(), device=rows.device)
    chosen = torch.empty_like(of_utterances).scatter_(0, new_rows.flatten(), sequences)
    decoded = beams.decoded.index_select(0, rows.flatten()[chosen])
    changed = emits.flatten()[chosen].nonzero().squeeze(1)
    if len(changed):
        decoded.index_copy_(0, changed, steps.decode(of_utterances[changed] % steps.num_contexts))
    rows.copy_(new_rows)
    return Beams(beams.scores, beams.state, decoded, of_utterances // steps.num_contexts)


def _trace_back(
    slots_TBK: list[Tensor], symbols_TBK: list[Tensor], last_slots: list[int], lens: list[int]
) -> list[list[int]]:
    """The symbol of every frame on the way to the sequences that are in `last_slots` at the end."""
    paths: list[list[int]] = [[] for _ in lens]
    slots_now = last_slots
    for slots, symbols in zip(reversed(slots_TBK), reversed(symbols_TBK), strict=True):
        for row, (slots_before, symbols_taken) in enumerate(zip(slots.tolist(), symbols.tolist(), strict=True)):
            slot = slots_now[row]
            paths[row].append(symbols_taken[slot])
            slots_now[row] = slots_before[slot]
    return [path[::-1] for path in paths]
