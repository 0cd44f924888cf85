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
    hashes, lens, contexts: (B, K) of the sequence; contexts as numbers, see `Steps`.
    decoded: (N, J) decoder output of the different contexts that an utterance has; its sequences share it.
    rows: (B, K) where in `decoded` a sequence finds its own. utterances: (N,) whose context it is, rising.
    """

    scores: Tensor
    hashes: Tensor
    lens: Tensor
    contexts: Tensor
    rows: Tensor
    decoded: Tensor
    utterances: Tensor

    def first(self, count: int) -> Beams:
        """Those of the first utterances."""
        num_contexts = int((self.utterances < count).sum())
        ends = {"decoded": num_contexts, "utterances": num_contexts}
        return Beams(**{name: value[: ends.get(name, count)] for name, value in vars(self).items()})


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
            finished.append((beams.scores[searching:], beams.lens[searching:]))
            beams = beams.first(searching)
        beams, slots, symbols = _next_beams(steps, beams, frames_BJ)
        slots_TBK.append(slots)
        symbols_TBK.append(symbols)
    finished.append((beams.scores, beams.lens))

    scores, lens = (torch.cat(parts[::-1]) for parts in zip(*finished, strict=True))
    best = (scores / (lens + steps.context_size) if length_norm else scores).argmax(1, keepdim=True)
    paths = _trace_back(slots_TBK, symbols_TBK, best.squeeze(1).tolist(), [steps.lens[row] for row in order])
    found = {}
    for utterance, path, score in zip(order, paths, scores.gather(1, best).squeeze(1).tolist(), strict=True):
        frames = [frame for frame, symbol in enumerate(path) if symbol != head.blank_id]
        found[utterance] = Hypothesis([path[frame] for frame in frames], frames, score)
    return [found[utterance] for utterance in range(len(order))]


def _start(steps: Steps, batch_size: int, beam: int) -> Beams:
    contexts = steps.start(batch_size, beam)
    scores = torch.full((batch_size, beam), NEVER, device=contexts.device)
    scores[:, 0] = 0.0
    nothing = torch.zeros_like(contexts)
    utterances = torch.arange(batch_size, device=contexts.device)
    rows = utterances[:, None].expand(-1, beam)
    return Beams(scores, nothing, nothing, contexts, rows, steps.decode(contexts[:, 0]), utterances)


def _next_beams(steps: Steps, old: Beams, frames_BJ: Tensor) -> tuple[Beams, Tensor, Tensor]:
    """The beams after one more frame, the slots that theirs come from and the symbols they took (B, K)."""
    beam = old.scores.size(1)
    log_probs_NV = steps.log_probs(frames_BJ.index_select(0, old.utterances), old.decoded)
    # No sequence has more than `beam` extensions among the best `beam`.
    likeliest_NC = log_probs_NV.topk(min(beam, steps.vocab_size), dim=1)
    extended_BKC = likeliest_NC.values[old.rows] + old.scores[:, :, None]
    scores, chosen = extended_BKC.flatten(1).topk(beam, dim=1)
    slots = chosen // extended_BKC.size(2)
    symbols = likeliest_NC.indices[old.rows].flatten(1).gather(1, chosen)

    state_B4K = torch.stack([old.hashes, old.lens, old.contexts, old.rows], dim=1)
    hashes, lens, contexts, rows = state_B4K.gather(2, slots[:, None].expand(-1, 4, -1)).unbind(1)
    emits = symbols != steps.blank_id
    hashes = torch.where(emits, hashes * HASH_FACTOR + symbols + 1, hashes)
    contexts = torch.where(emits, steps.extend(contexts, symbols), contexts)
    decoded = _decode(steps, contexts, old.decoded.index_select(0, rows.flatten()), emits.flatten())
    return Beams(_merged(scores, hashes), hashes, lens + emits, contexts, *decoded), slots, symbols


def _merged(scores: Tensor, hashes: Tensor) -> Tensor:
    """The scores (B, K) when those of equal sequences are added to the first of them, which leaves the others empty."""
    same_BKK = hashes[:, :, None] == hashes[:, None]
    if int(same_BKK.sum()) == hashes.numel():
        return scores
    merged = torch.where(same_BKK, scores[:, None], NEVER).logsumexp(2)
    return merged.masked_fill(same_BKK.tril(-1).any(2), NEVER)


def _decode(steps: Steps, contexts: Tensor, decoded: Tensor, emits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `Beams` holds of the contexts (B, K): `rows`, `decoded`, `utterances`.

    decoded, emits: (B * K, J) output before, and (B * K,) where a token has changed the context since.
    """
    of_utterance = torch.arange(len(contexts), device=contexts.device)[:, None] * steps.num_contexts
    contexts_N, rows = torch.unique(contexts + of_utterance, return_inverse=True)
    # One of the sequences that share a context stands for all of them.
    sequence_N = torch.empty_like(contexts_N).scatter_(0, rows.flatten(), torch.arange(len(emits), device=emits.device))
    decoded = decoded.index_select(0, sequence_N)
    changed = emits[sequence_N].nonzero().squeeze(1)
    if len(changed):
        decoded.index_copy_(0, changed, steps.decode(contexts_N[changed] % steps.num_contexts))
    return rows, decoded, contexts_N // steps.num_contexts


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
