"""Searches with an attention decoder against the enumeration of every transcript."""

import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from asr.heads.attention import Attention
from asr.heads.ctc import CTC
from asr.heads.joint import Joint
from asr.search import attention as attention_module
from asr.search.attention import attention, n_best
from asr.search.attention_rescoring import attention_rescoring
from asr.search.ctc_prefix_beam_search import ctc_prefix_beam_search
from asr.types import Encoded

VOCAB_SIZE, WIDTH = 5, 8
SIZES = dict(num_layers=1, num_heads=2, feed_forward_dim=16)


def decoder(seed=0, sos_eos_id=None, sharpness=3.0, **changes):
    torch.manual_seed(seed)
    head = Attention(WIDTH, VOCAB_SIZE, 0, sos_eos_id, **{**SIZES, **changes}).eval()
    with torch.no_grad():
        head.decoder.output.weight.mul_(sharpness)
    return head


def joint(seed=0, **changes):
    torch.manual_seed(seed)
    heads = {"ctc": partial(CTC, dropout=0.0), "attention": partial(Attention, **{**SIZES, **changes})}
    return Joint(heads, {"ctc": 0.3, "attention": 0.7}, WIDTH, VOCAB_SIZE).eval()


def frames(*lens, seed=1):
    torch.manual_seed(seed)
    return Encoded(torch.randn(len(lens), max(lens), WIDTH), torch.tensor(lens))


def transcripts(symbols, longest):
    return [list(row) for length in range(longest + 1) for row in itertools.product(symbols, repeat=length)]


def likelihood(head, encoded, tokens, reverse=False):
    return head.log_likelihood(encoded, torch.tensor([tokens]).long(), torch.tensor([len(tokens)]), reverse).item()


@pytest.mark.parametrize("kind", ["full", "linear"])
@pytest.mark.parametrize("sos_eos_id", [None, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_likeliest_of_all_transcripts(seed, sos_eos_id, kind):
    head, encoded = decoder(seed, sos_eos_id, attention=kind), frames(3, seed=seed)
    symbols = [token for token in range(1, VOCAB_SIZE) if token != sos_eos_id]
    scores = {tuple(row): likelihood(head, encoded, row) for row in transcripts(symbols, 3)}
    (found,) = attention(head, encoded, beam=200)
    best = max(scores, key=scores.get)
    assert tuple(found.tokens) == best and found.score == pytest.approx(scores[best], abs=1e-4)
    assert len(found.frames) == len(found.tokens) and all(0 <= frame < 3 for frame in found.frames)


class Recomputed:
    """The head without steps: every prefix goes through the parallel form from its first token on."""

    def __init__(self, head):
        self.head, self.sos_eos_id, self.blank_id = head, head.sos_eos_id, head.blank_id

    def start(self, encoded, rows, num_steps):
        return Prefixes(encoded, torch.zeros(len(encoded.lens) * rows, 0, dtype=torch.int64))

    def step(self, tokens, state):
        given = torch.cat([state.tokens, tokens.unsqueeze(1)], dim=1)
        logits = self.head.logits(state.encoded, given[:, 1:])  # which puts the start before them
        return logits[:, -1].log_softmax(-1), Prefixes(state.encoded, given)

    def with_room(self, state, num_steps):
        return state


@dataclass
class Prefixes:
    encoded: Encoded
    tokens: torch.Tensor

    def reorder(self, rows):
        return Prefixes(self.encoded, self.tokens[rows])


@pytest.mark.parametrize("kind", ["full", "linear"])
@pytest.mark.parametrize("seed", range(3))
def test_the_n_best_of_steps_are_those_of_recomputation(seed, kind, monkeypatch):
    monkeypatch.setattr(attention_module, "FIRST_ROOM", 2)
    head, encoded = decoder(seed, attention=kind, num_layers=2), frames(7, 4, seed=seed)
    # A norm above 0 lets the search go on until all of the beam have ended.
    by_steps, recomputed = (n_best(scorer, encoded, 5, 1e-6, 1.0) for scorer in (head, Recomputed(head)))
    assert torch.equal(by_steps[0], recomputed[0]) and torch.equal(by_steps[1], recomputed[1])
    torch.testing.assert_close(by_steps[2], recomputed[2], atol=1e-4, rtol=1e-5)
    assert by_steps[2].isfinite().all() and (by_steps[2].diff(dim=1) <= 0).all()
    assert len({tuple(row) for row in by_steps[0][0].tolist()}) == 5


@pytest.mark.parametrize("seed", range(4))
def test_beam_one_takes_the_likeliest_token_each_time_and_its_score_is_that_of_forced_decoding(seed):
    head, encoded = decoder(seed), frames(6, seed=seed)
    (found,) = attention(head, encoded, beam=1)
    tokens, state, newest = [], head.start(encoded, 1, 7), torch.tensor([0])
    with torch.no_grad():
        while len(tokens) < 6:
            log_probs, state = head.step(newest, state)
            newest = log_probs.argmax(1)
            if newest == 0:
                break
            tokens.append(int(newest))
    assert found.tokens == tokens
    assert found.score == pytest.approx(likelihood(head, encoded, tokens), abs=1e-4)


@pytest.mark.parametrize(("bias", "expected"), [(1e4, 0), (-1e4, 6), (-float("inf"), 6)])
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("length_norm", [0.0, 1.0])
def test_a_decoder_that_always_or_never_ends(bias, expected, beam, length_norm):
    head = decoder(sos_eos_id=4)
    with torch.no_grad():
        head.decoder.output.bias[4] = bias
    first, second = attention(head, frames(6, 2), beam, length_norm)
    assert (len(first.tokens), len(second.tokens)) == (expected, min(expected, 2))
    assert not {0, 4} & {*first.tokens, *second.tokens}
    limited = attention(head, frames(6, 2), beam, length_norm, max_tokens_per_frame=0.5)
    assert [len(hypothesis.tokens) for hypothesis in limited] == [min(expected, 3), min(expected, 1)]


def test_batch_mates_beam_room_and_padding_change_nothing(monkeypatch):
    head, encoded = decoder(2), frames(9, 4, 7)
    alone = [
        attention(head, Encoded(encoded.frames[row : row + 1, :length], encoded.lens[row : row + 1]), beam=30)[0]
        for row, length in enumerate((9, 4, 7))
    ]
    for row, length in enumerate((9, 4, 7)):
        encoded.frames[row, length:] = float("nan")
    monkeypatch.setattr(attention_module, "FIRST_ROOM", 1)
    for one, other in zip(attention(head, encoded, beam=30), alone, strict=True):
        assert (one.tokens, one.frames) == (other.tokens, other.frames)
        assert one.score == pytest.approx(other.score, abs=1e-4)


def test_no_frames_give_no_tokens():
    empty, full = attention(decoder(), frames(0, 5), beam=3)
    assert empty.tokens == empty.frames == [] and full.tokens
    assert [hypothesis.tokens for hypothesis in attention_rescoring(joint(), frames(0, 0))] == [[], []]


def test_length_normalisation_prefers_longer_transcripts():
    head, encoded = decoder(1), frames(5)
    with torch.no_grad():
        head.decoder.output.bias[0] += 2.0
    lengths = [len(attention(head, encoded, beam=100, length_norm=norm)[0].tokens) for norm in (0.0, 1.0, 3.0)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    candidates = transcripts(range(1, VOCAB_SIZE), 3)
    best = max(candidates, key=lambda row: likelihood(head, frames(3), row) / (len(row) + 1))
    assert attention(head, frames(3), beam=200, length_norm=1.0)[0].tokens == best


@pytest.mark.parametrize("reverse_weight", [None, 0.0, 0.4])
@pytest.mark.parametrize("ctc_weight", [0.0, 0.5])
def test_rescoring_chooses_by_decoders_and_ctc_among_all_prefixes(ctc_weight, reverse_weight):
    head, encoded = joint(3, reverse_layers=1, reverse_weight=0.3), frames(3)
    (found,) = attention_rescoring(head, encoded, 500, ctc_weight, reverse_weight, tokens_per_frame=5)
    share = 0.3 if reverse_weight is None else reverse_weight
    ctc, attending = head.heads["ctc"], head.heads["attention"]

    def score(row):
        if ctc.min_frames(row) > 3:
            return -float("inf")
        forward, backward = (likelihood(attending, encoded, row, reverse) for reverse in (False, True))
        ctc_loss = ctc.loss(encoded, torch.tensor([row]).long(), torch.tensor([len(row)])).item()
        return (1 - share) * forward + share * backward - ctc_weight * ctc_loss

    best = max(transcripts(range(1, VOCAB_SIZE), 3), key=score)
    assert found.tokens == best and found.score == pytest.approx(score(best), abs=1e-4)
    assert found.frames == sorted(set(found.frames)) and len(found.frames) == len(best)


def test_rescoring_with_ctc_alone_is_the_prefix_beam_and_a_batch_is_its_utterances():
    head, encoded = joint(1), frames(8, 3, 6)
    rescored = attention_rescoring(head, encoded, beam=6, ctc_weight=1e6)
    assert [row.tokens for row in rescored] == [
        row.tokens for row in ctc_prefix_beam_search(head.heads["ctc"], encoded, beam=6)
    ]
    together = attention_rescoring(head, encoded, beam=6)
    for row, length in enumerate((8, 3, 6)):
        alone = Encoded(encoded.frames[row : row + 1, :length], encoded.lens[row : row + 1])
        (one,) = attention_rescoring(head, alone, beam=6)
        assert one.tokens == together[row].tokens and one.score == pytest.approx(together[row].score, abs=1e-4)


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match=r"search\.beam=0"):
        attention(decoder(), frames(2), beam=0)
    for head, weight in ((joint(), 0.5), (joint(reverse_layers=1, reverse_weight=0.3), 1.5)):
        with pytest.raises(ValueError, match=r"search\.reverse_weight=.*reverse_layers"):
            attention_rescoring(head, frames(2), reverse_weight=weight)
