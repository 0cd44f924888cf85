import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from asr.heads.transducer import Transducer
from asr.search.greedy_search import greedy_search
from asr.search.modified_beam_search import modified_beam_search
from asr.search.transducer_steps import Steps
from asr.types import Encoded

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden" / "icefall_transducer.npz")
SEARCHES = [greedy_search, modified_beam_search]


def make_head(vocab_size=5, blank_bias=1.0, seed=0, sharpness=3.0, **options):
    """A random head whose decoder matters as much as its encoder, and that emits at about half of the frames."""
    torch.manual_seed(seed)
    head = Transducer(6, vocab_size, **({"decoder_dim": 8, "joiner_dim": 8} | options)).eval()
    with torch.no_grad():
        for projection in (head.joiner.encoder_proj, head.joiner.decoder_proj):
            projection.weight *= 4 * sharpness
        head.joiner.output_linear.weight *= sharpness
        head.joiner.output_linear.bias[head.blank_id] += blank_bias
    return head


def frames_of(*lens, seed=0):
    torch.manual_seed(seed)
    return Encoded(torch.randn(len(lens), max(lens, default=0), 6), torch.tensor(lens, dtype=torch.int64))


@torch.no_grad()
def log_probs_after(head, frame, tokens):
    """(V,) log-probabilities after a token sequence, by the decoder as it is trained."""
    rows, lens = torch.tensor([tokens], dtype=torch.int64), torch.tensor([len(tokens)])
    decoded = head.joiner.decoder_proj(head.decoder(rows, lens)[:, -1])
    return head.joiner(head.joiner.encoder_proj(frame)[None], decoded).log_softmax(-1)[0]


def reference_greedy(head, frames, max_symbols_per_frame):
    tokens, times, score = [], [], 0.0
    for time, frame in enumerate(frames):
        for _ in range(max_symbols_per_frame):
            best, symbol = log_probs_after(head, frame, tokens).max(0)
            score += best.item()
            if symbol == head.blank_id:
                break
            tokens.append(int(symbol))
            times.append(time)
    return tokens, times, score


def reference_beam(head, frames, beam, length_norm):
    """With a dictionary of sequences."""
    beams = {(): (0.0, [])}
    for time, frame in enumerate(frames):
        extended = []
        for tokens, (score, times) in beams.items():
            for symbol, log_prob in enumerate(log_probs_after(head, frame, list(tokens)).tolist()):
                emits = symbol != head.blank_id
                new = (*tokens, symbol) if emits else tokens
                extended.append((score + log_prob, new, [*times, time] if emits else times))
        beams = {}
        for score, tokens, times in sorted(extended, key=lambda item: -item[0])[:beam]:
            before = beams.get(tokens)
            beams[tokens] = (float(np.logaddexp(before[0], score)), before[1]) if before else (score, times)
    context_size = head.decoder.context_size

    def rank(item):
        return item[1][0] / (len(item[0]) + context_size) if length_norm else item[1][0]

    tokens, (score, times) = max(beams.items(), key=rank)
    return list(tokens), times, score


@pytest.mark.parametrize(
    ("search", "name"), [(greedy_search, "greedy"), (modified_beam_search, "modified_beam_search_beam4")]
)
def test_tokens_are_icefalls(search, name):
    head = Transducer(48, 30, decoder_dim=40, joiner_dim=40).eval()
    head.load_state_dict({parameter: torch.from_numpy(GOLDEN[f"model/{parameter}"]) for parameter in head.state_dict()})
    encoded = Encoded(*(torch.from_numpy(GOLDEN[f"io.encoder_{part}"]) for part in ("out", "lens")))
    expected = [GOLDEN[f"{name}/{row}"].tolist() for row in range(3)]
    assert [hypothesis.tokens for hypothesis in search(head, encoded)] == expected


@pytest.mark.parametrize("max_symbols_per_frame", [1, 2, 5])
@pytest.mark.parametrize(("context_size", "blank_id"), [(1, 0), (2, 0), (3, 4)])
def test_greedy_equals_the_loop_over_symbols(max_symbols_per_frame, context_size, blank_id):
    head = make_head(context_size=context_size, blank_id=blank_id)
    encoded = frames_of(25, 11, 25, 3)
    found = greedy_search(head, encoded, max_symbols_per_frame=max_symbols_per_frame)
    for row, length, hypothesis in zip(encoded.frames, encoded.lens, found, strict=True):
        tokens, times, score = reference_greedy(head, row[:length], max_symbols_per_frame)
        assert (hypothesis.tokens, hypothesis.frames) == (tokens, times)
        assert hypothesis.score == pytest.approx(score, abs=1e-4)
    if max_symbols_per_frame > 1:
        assert any(early == late for early, late in itertools.pairwise(found[0].frames)), "a frame emits several"


@pytest.mark.parametrize("beam", [1, 2, 4, 16])
@pytest.mark.parametrize("length_norm", [True, False])
@pytest.mark.parametrize(("context_size", "blank_id"), [(1, 0), (2, 0), (3, 4)])
def test_beam_search_equals_the_dictionary_form(beam, length_norm, context_size, blank_id):
    head = make_head(context_size=context_size, blank_id=blank_id, seed=beam)
    encoded = frames_of(25, 11, 25, 3, seed=context_size)
    found = modified_beam_search(head, encoded, beam=beam, length_norm=length_norm)
    for row, length, hypothesis in zip(encoded.frames, encoded.lens, found, strict=True):
        tokens, times, score = reference_beam(head, row[:length], beam, length_norm)
        assert (hypothesis.tokens, hypothesis.frames) == (tokens, times)
        assert hypothesis.score == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_is_exhaustive(seed):
    head, encoded = make_head(vocab_size=3, seed=seed, sharpness=1.0), frames_of(5, seed=seed)
    sums = {}
    for path in itertools.product(range(3), repeat=5):
        score, tokens = 0.0, []
        for frame, symbol in zip(encoded.frames[0], path, strict=True):
            score += log_probs_after(head, frame, tokens)[symbol].item()
            tokens += [symbol] if symbol else []
        sums[tuple(tokens)] = sums.get(tuple(tokens), 0.0) + math.exp(score)
    (hypothesis,) = modified_beam_search(head, encoded, beam=200, length_norm=False)
    best = max(sums, key=sums.__getitem__)
    assert tuple(hypothesis.tokens) == best and hypothesis.score == pytest.approx(math.log(sums[best]), abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_greedy(seed):
    head, encoded = make_head(vocab_size=20, seed=seed), frames_of(40, 30, 40, seed=seed)
    for greedy, beam in zip(greedy_search(head, encoded), modified_beam_search(head, encoded, beam=1), strict=True):
        assert (greedy.tokens, greedy.frames) == (beam.tokens, beam.frames)
        assert greedy.score == pytest.approx(beam.score, abs=1e-4)


@pytest.mark.parametrize("search", SEARCHES)
def test_an_utterance_is_decoded_alike_alone_and_beside_others(search):
    head, lens = make_head(), [7, 12, 0, 1, 12]
    encoded = frames_of(*lens)
    alone = [
        search(head, Encoded(encoded.frames[row : row + 1, :length], encoded.lens[row : row + 1]))[0]
        for row, length in enumerate(lens)
    ]
    for row, length in enumerate(lens):
        encoded.frames[row, length:] = torch.nan if row % 2 else 100.0
    for single, beside in zip(alone, search(head, encoded), strict=True):
        assert (single.tokens, single.frames) == (beside.tokens, beside.frames)
        assert single.score == pytest.approx(beside.score, abs=1e-4)
    assert alone[2].tokens == [] and alone[2].score == 0.0


@pytest.mark.parametrize("search", SEARCHES)
def test_a_model_that_never_emits_blank_ends(search):
    head = make_head(blank_bias=-1e4)
    assert [len(found.tokens) for found in search(head, frames_of(20, 5))] == [20, 5]
    assert [len(found.tokens) for found in greedy_search(head, frames_of(20, 5), max_symbols_per_frame=3)] == [60, 15]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_penalty_on_blank_gives_more_tokens(search):
    head, encoded = make_head(blank_bias=3.0), frames_of(30, 30)
    few, many = (sum(len(found.tokens) for found in search(head, encoded, blank_penalty=p)) for p in (0.0, 4.0))
    assert few < many
    lifted = make_head(blank_bias=-1.0)
    tokens = [found.tokens for found in search(lifted, encoded)]
    assert tokens == [found.tokens for found in search(head, encoded, blank_penalty=4.0)]


def test_temperature_divides_the_logits():
    head, encoded = make_head(), frames_of(20)
    (warm,) = modified_beam_search(head, encoded, temperature=2.5)
    with torch.no_grad():
        head.joiner.output_linear.weight /= 2.5
        head.joiner.output_linear.bias /= 2.5
    (divided,) = modified_beam_search(head, encoded)
    assert warm.tokens == divided.tokens and warm.score == pytest.approx(divided.score, abs=1e-4)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_decoder_is_asked_once_for_a_context(search, monkeypatch):
    asked = []
    original = Steps.decode
    monkeypatch.setattr(Steps, "decode", lambda self, contexts: asked.extend(contexts) or original(self, contexts))
    found = search(make_head(), frames_of(40, 30))
    needed = {pair for tokens in (of.tokens for of in found) for pair in itertools.pairwise([5, 0, *tokens])}
    assert len(asked) == len(set(asked)) and needed <= set(asked)
    assert search is modified_beam_search or needed == set(asked)


@pytest.mark.parametrize("search", SEARCHES)
def test_batches_without_frames_or_utterances(search):
    head = make_head()
    assert [found.tokens for found in search(head, frames_of(0, 0))] == [[], []]
    assert search(head, frames_of()) == []


@pytest.mark.parametrize("search", SEARCHES)
def test_a_vocabulary_of_blank_alone_gives_empty_text(search):
    (found,) = search(make_head(vocab_size=1), frames_of(4))
    assert found.tokens == [] and found.score == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("search", SEARCHES)
def test_searches_run_under_autocast(search):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = search(make_head(), frames_of(10, 6))
    assert all(math.isfinite(hypothesis.score) for hypothesis in found)


@pytest.mark.parametrize(
    ("search", "options", "message"),
    [
        (greedy_search, {"max_symbols_per_frame": 0}, "max_symbols_per_frame=0"),
        (modified_beam_search, {"beam": 0}, "beam=0"),
        (modified_beam_search, {"temperature": 0.0}, r"temperature=0\.0"),
    ],
)
def test_useless_options_are_refused_by_name(search, options, message):
    with pytest.raises(ValueError, match=message):
        search(make_head(), frames_of(3), **options)
