"""CTC searches against the enumeration of every path."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from asr.search.ctc_greedy_search import ctc_greedy_search
from asr.search.ctc_prefix_beam_search import ctc_prefix_beam_search
from asr.types import Encoded


class FixedHead:
    """Gives the same log-probabilities whatever the encoder says."""

    def __init__(self, log_probs: Tensor, blank_id: int = 0) -> None:
        self.fixed = log_probs
        self.blank_id = blank_id

    def log_probs(self, encoded: Encoded) -> Tensor:
        return self.fixed


def encoded(lens: list[int]) -> Encoded:
    return Encoded(frames=torch.zeros(len(lens), max(lens, default=0), 1), lens=torch.tensor(lens, dtype=torch.int64))


def random_log_probs(batch_size: int, num_frames: int, vocab_size: int, seed: int, sharpness: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(batch_size, num_frames, vocab_size, generator=generator)).log_softmax(-1)


def one_hot(symbols: list[int], vocab_size: int) -> Tensor:
    """Log-probabilities (1, T, V) that are nearly certain of `symbols`."""
    logits = torch.zeros(1, len(symbols), vocab_size)
    logits[0, torch.arange(len(symbols)), torch.tensor(symbols, dtype=torch.int64)] = 20.0
    return logits.log_softmax(-1)


def collapse(path: tuple[int, ...], blank_id: int) -> tuple[tuple[int, ...], list[int]]:
    tokens, frames, previous = [], [], blank_id
    for frame, symbol in enumerate(path):
        if symbol not in (blank_id, previous):
            tokens.append(symbol)
            frames.append(frame)
        previous = symbol
    return tuple(tokens), frames


def enumerate_paths(log_probs: Tensor, blank_id: int = 0) -> tuple[dict, dict]:
    """Summed log-probability of every token sequence of log_probs (T, V), and (log-prob, frames) of its best path."""
    num_frames, vocab_size = log_probs.shape
    sums: dict[tuple[int, ...], float] = {}
    best: dict[tuple[int, ...], tuple[float, list[int]]] = {}
    rows = log_probs.double().tolist()
    for path in itertools.product(range(vocab_size), repeat=num_frames):
        log_prob = sum(row[symbol] for row, symbol in zip(rows, path, strict=True))
        tokens, frames = collapse(path, blank_id)
        sums[tokens] = sums.get(tokens, 0.0) + math.exp(log_prob)
        if tokens not in best or log_prob > best[tokens][0]:
            best[tokens] = (log_prob, frames)
    return sums, best


def test_greedy_merges_repeats_and_keeps_tokens_across_a_blank():
    (hypothesis,) = ctc_greedy_search(FixedHead(one_hot([1, 1, 0, 1, 1], 3)), encoded([5]))
    assert hypothesis.tokens == [1, 1]
    assert hypothesis.frames == [0, 3]


@pytest.mark.parametrize("beam", [1, 2, 4, 50])
def test_prefix_beam_collapses_like_ctc(beam):
    (hypothesis,) = ctc_prefix_beam_search(FixedHead(one_hot([1, 1, 0, 1, 1], 3)), encoded([5]), beam=beam)
    assert hypothesis.tokens == [1, 1]
    assert hypothesis.frames == [0, 3]


def test_two_flat_frames_tell_greedy_from_prefix_beam():
    head = FixedHead(torch.tensor([[[0.4, 0.35, 0.25]] * 2]).log())
    (greedy,) = ctc_greedy_search(head, encoded([2]))
    assert greedy.tokens == []
    assert greedy.score == pytest.approx(math.log(0.16), abs=1e-6)
    (summed,) = ctc_prefix_beam_search(head, encoded([2]), beam=10)
    assert summed.tokens == [1]
    assert math.exp(summed.score) == pytest.approx(0.4025, abs=1e-6)


@pytest.mark.parametrize(
    ("num_frames", "vocab_size", "blank_id"), [(1, 3, 0), (4, 3, 0), (6, 3, 1), (7, 2, 0), (5, 4, 3), (5, 4, 0)]
)
@pytest.mark.parametrize("sharpness", [0.3, 2.0])
def test_wide_beam_equals_enumeration(num_frames, vocab_size, blank_id, sharpness):
    log_probs = random_log_probs(6, num_frames, vocab_size, seed=num_frames, sharpness=sharpness)
    hypotheses = ctc_prefix_beam_search(FixedHead(log_probs, blank_id), encoded([num_frames] * 6), beam=400)
    for rows, hypothesis in zip(log_probs, hypotheses, strict=True):
        sums, best = enumerate_paths(rows, blank_id)
        tokens = max(sums, key=sums.__getitem__)
        assert tuple(hypothesis.tokens) == tokens
        assert hypothesis.score == pytest.approx(math.log(sums[tokens]), abs=1e-4)
        assert hypothesis.frames == best[tokens][1]


def reference_prefix_beam(log_probs: Tensor, beam: int, tokens_per_frame: int) -> tuple[tuple[int, ...], float]:
    """Prefix beam search of log_probs (T, V) with a dictionary of prefixes, in float64."""
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 0.0)}
    for row in log_probs.double().exp().tolist():
        extensions = sorted(range(1, len(row)), key=lambda token: -row[token])[:tokens_per_frame]
        merged: dict[tuple[int, ...], list[float]] = {}
        for prefix, (blank, token_end) in beams.items():
            stay = merged.setdefault(prefix, [0.0, 0.0])
            stay[0] += (blank + token_end) * row[0]
            if prefix:
                stay[1] += token_end * row[prefix[-1]]
            children = {longer[-1] for longer in beams if longer[:-1] == prefix and longer}
            for token in {*extensions, *children}:
                mass = blank if prefix and prefix[-1] == token else blank + token_end
                merged.setdefault((*prefix, token), [0.0, 0.0])[1] += mass * row[token]
        kept = sorted(merged.items(), key=lambda item: -sum(item[1]))[:beam]
        beams = {prefix: (mass[0], mass[1]) for prefix, mass in kept if sum(mass) > 0}
    prefix, mass = max(beams.items(), key=lambda item: sum(item[1]))
    return prefix, math.log(sum(mass))


@pytest.mark.parametrize(("beam", "tokens_per_frame"), [(1, 5), (2, 2), (3, 20), (4, 1), (8, 3), (16, 5)])
@pytest.mark.parametrize("sharpness", [0.5, 1.5, 4.0])
def test_pruned_search_equals_the_dictionary_form(beam, tokens_per_frame, sharpness):
    """Also over prefixes that leave the beam and come back."""
    log_probs = random_log_probs(8, 40, 6, seed=beam, sharpness=sharpness)
    hypotheses = ctc_prefix_beam_search(
        FixedHead(log_probs), encoded([40] * 8), beam=beam, tokens_per_frame=tokens_per_frame
    )
    for rows, hypothesis in zip(log_probs, hypotheses, strict=True):
        tokens, score = reference_prefix_beam(rows, beam, tokens_per_frame)
        assert tuple(hypothesis.tokens) == tokens
        assert hypothesis.score == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("search", [ctc_greedy_search, ctc_prefix_beam_search])
def test_frames_past_the_end_change_nothing(search):
    lens = [7, 12, 0, 1, 12]
    log_probs = random_log_probs(5, 12, 5, seed=3, sharpness=2.0)
    expected = [
        search(FixedHead(log_probs[row : row + 1, :length]), encoded([length]))[0] for row, length in enumerate(lens)
    ]
    for row, length in enumerate(lens):
        log_probs[row, length:] = one_hot([4] * (12 - length), 5)[0] if row % 2 == 0 else torch.nan
    together = search(FixedHead(log_probs), encoded(lens))
    for alone, beside in zip(expected, together, strict=True):
        assert alone.tokens == beside.tokens
        assert alone.frames == beside.frames
        assert alone.score == pytest.approx(beside.score, abs=1e-4)
    assert together[2].tokens == [] and together[2].score == 0.0


@pytest.mark.parametrize("search", [ctc_greedy_search, ctc_prefix_beam_search])
def test_hypotheses_hold_their_promises(search):
    log_probs = random_log_probs(16, 30, 4, seed=5)
    for hypothesis in search(FixedHead(log_probs, blank_id=2), encoded([30] * 16)):
        assert 2 not in hypothesis.tokens
        assert len(hypothesis.frames) == len(hypothesis.tokens)
        assert all(early < late for early, late in itertools.pairwise(hypothesis.frames))
        assert not hypothesis.frames or (hypothesis.frames[0] >= 0 and hypothesis.frames[-1] < 30)
        assert isinstance(hypothesis.score, float) and hypothesis.score <= 0


@pytest.mark.parametrize("search", [ctc_greedy_search, ctc_prefix_beam_search])
def test_batches_without_frames_or_utterances(search):
    assert [hyp.tokens for hyp in search(FixedHead(torch.zeros(2, 0, 5)), encoded([0, 0]))] == [[], []]
    assert search(FixedHead(torch.zeros(0, 0, 5)), encoded([])) == []


@pytest.mark.parametrize("search", [ctc_greedy_search, ctc_prefix_beam_search])
def test_a_vocabulary_of_blank_alone_gives_empty_text(search):
    (hypothesis,) = search(FixedHead(torch.zeros(1, 4, 1)), encoded([4]))
    assert hypothesis.tokens == [] and hypothesis.score == 0.0


def test_impossible_tokens_are_never_chosen():
    log_probs = torch.full((1, 3, 5), -torch.inf)
    log_probs[0, :, 3] = 0.0
    (hypothesis,) = ctc_prefix_beam_search(FixedHead(log_probs), encoded([3]), beam=8)
    assert hypothesis.tokens == [3] and hypothesis.score == 0.0


def test_frames_follow_the_likeliest_path_not_the_first_chance():
    log_probs = torch.tensor([[[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.9, 0.1]]]).log()
    (hypothesis,) = ctc_prefix_beam_search(FixedHead(log_probs), encoded([4]))
    assert hypothesis.tokens == [1] and hypothesis.frames == [2]


def test_a_useless_beam_is_refused_by_name():
    with pytest.raises(ValueError, match="beam=0"):
        ctc_prefix_beam_search(FixedHead(torch.zeros(1, 2, 3)), encoded([2]), beam=0)
