"""Error rates on corpora whose figures are known."""

from __future__ import annotations

import random

import kaldialign
import pytest

from asr.scoring.wer import (
    Counts,
    Utterance,
    align,
    characters,
    compare,
    count,
    count_errors,
    pair_up,
    score,
    words,
)


def corpus(*pairs: tuple[str, str]) -> list[Utterance]:
    return [Utterance(f"u{number}", ref, hyp) for number, (ref, hyp) in enumerate(pairs)]


def noisy_corpus(error_share: float, seed: int, num_utterances: int = 150) -> list[Utterance]:
    """References that do not depend on `seed` or `error_share`, hypotheses with that share of words replaced."""
    references, errors = random.Random(0), random.Random(seed)
    utterances = []
    for number in range(num_utterances):
        ref = [references.choice("abcdefgh") for _ in range(references.randint(3, 12))]
        hyp = ["x" if errors.random() < error_share else word for word in ref]
        utterances.append(Utterance(f"u{number:03}", " ".join(ref), " ".join(hyp), f"s{number % 3}"))
    return utterances


def test_empty_references_and_hypotheses_count():
    scored = score(corpus(("", "A B"), ("C D", ""), ("", ""), ("E F", "E F")))
    assert scored.counts == Counts(insertions=2, deletions=2, substitutions=0, ref_units=4)
    assert scored.counts.rate == 100.0


@pytest.mark.parametrize("hyp", ["", "A B"])
def test_without_reference_words_there_is_no_rate(hyp):
    scored = score(corpus(("", hyp), ("", "")))
    assert scored.counts.rate is None and scored.ci95 is None
    assert scored.counts.insertions == len(hyp.split())


def test_an_empty_corpus_has_no_rate():
    scored = score([])
    assert scored.counts == Counts() and scored.counts.rate is None and scored.ci95 is None


def test_rates_pass_100():
    assert score(corpus(("A", "A B C"))).counts.rate == 200.0


def test_the_corpus_rate_is_not_the_mean_of_utterance_rates():
    assert score(corpus(("a", "b"), ("a b c d e f g h i", "a b c d e f g h i"))).counts.rate == 10.0


def test_spaces_do_not_count_in_chinese():
    counts = score(corpus(("今天 天气", "今天天气")), unit="character").counts
    assert counts.rate == 0.0 and counts.ref_units == 4
    assert score(corpus(("今天 天气", "今天天气"))).counts == Counts(ref_units=4)


def test_units_of_mixed_text():
    assert words("我爱 ASR") == words("我爱ASR") == ["我", "爱", "ASR"]
    assert characters("我爱 ASR") == ["我", "爱", "A", "S", "R"]
    assert words("ひらカタ don't 한국어 예") == ["ひ", "ら", "カ", "タ", "don't", "한국어", "예"]
    assert words("\u3000a\u00a0b\t\n") == ["a", "b"]


def test_canonically_equal_text_is_equal():
    assert count_errors(["caf\u00e9"], ["cafe\u0301"], unit="character") == Counts(ref_units=4)


def test_alignment_marks_gaps_and_counts_them():
    alignment = align(["the", "cat", "sat"], ["cat", "sit", "on"])
    assert alignment == [("the", ""), ("cat", "cat"), ("sat", "sit"), ("", "on")]
    assert count(alignment) == Counts(insertions=1, deletions=1, substitutions=1, ref_units=3)


def test_words_that_look_like_marks_are_words():
    assert score(corpus(("* <eps> (a->b)", "* (a->b)"))).counts == Counts(deletions=1, ref_units=3)


def test_order_does_not_matter():
    utterances = noisy_corpus(0.2, seed=1)
    shuffled = random.Random(5).sample(utterances, len(utterances))
    assert score(shuffled) == score(utterances)
    assert list(score(shuffled).alignments) == sorted(utterance.id for utterance in utterances)


def test_speakers_add_up_to_the_corpus():
    scored = score(noisy_corpus(0.2, seed=1))
    assert list(scored.per_speaker) == ["s0", "s1", "s2"]
    assert sum(scored.per_speaker.values(), Counts()) == scored.counts


def test_utterances_of_nobody_known_are_not_dropped_from_the_speakers():
    assert score(corpus(("a", "a"))).per_speaker == {}
    mixed = score([Utterance("a", "x", "y", "ann"), Utterance("b", "x", "x")]).per_speaker
    assert mixed == {"ann": Counts(substitutions=1, ref_units=1), "unknown": Counts(ref_units=1)}


def test_the_interval_agrees_with_another_bootstrap():
    utterances = noisy_corpus(0.1, seed=2)
    low, high = score(utterances).ci95
    other = kaldialign.bootstrap_wer_ci([u.ref.split() for u in utterances], [u.hyp.split() for u in utterances])
    assert low == pytest.approx(100 * other["ci95min"], abs=0.4)
    assert high == pytest.approx(100 * other["ci95max"], abs=0.4)
    assert low < score(utterances).counts.rate < high
    assert score(utterances).ci95 == (low, high)


def test_the_interval_survives_resampled_corpora_without_reference():
    assert score(corpus(("", ""), ("a b", "a c"))).ci95 == (50.0, 50.0)


def test_repeated_ids_are_refused():
    with pytest.raises(ValueError, match="u7"):
        score([Utterance("u7", "a", "a"), Utterance("u7", "b", "b")])


def test_missing_hypotheses_are_deletions():
    utterances = pair_up({"b": "x y", "a": "z"}, {"a": "z"}, speakers={"b": "ann"})
    assert utterances == [Utterance("a", "z", "z"), Utterance("b", "x y", "", "ann")]
    assert score(utterances).counts == Counts(deletions=2, ref_units=3)


def test_extra_hypotheses_are_named():
    with pytest.raises(ValueError, match="stray1, stray2"):
        pair_up({"a": "x"}, {"a": "x", "stray2": "y", "stray1": "y"})


def test_comparison_finds_the_better_system():
    better, worse = noisy_corpus(0.05, seed=1), noisy_corpus(0.2, seed=2)
    comparison = compare(better, worse)
    assert comparison.rate_a == score(better).counts.rate and comparison.rate_b == score(worse).counts.rate
    assert comparison.difference == pytest.approx(comparison.rate_a - comparison.rate_b)
    assert comparison.ci95[0] < comparison.difference < comparison.ci95[1] < 0
    assert comparison.probability_a_better > 0.99
    assert compare(worse, better).probability_a_better == pytest.approx(1 - comparison.probability_a_better)


def test_a_system_is_no_better_than_itself():
    utterances = noisy_corpus(0.1, seed=1)
    comparison = compare(utterances, list(reversed(utterances)))
    assert comparison.difference == 0 and comparison.ci95 == (0, 0) and comparison.probability_a_better == 0.5


def test_pairing_narrows_the_difference():
    """Systems that fail on the same utterances differ by less than their intervals suggest."""
    base = noisy_corpus(0.3, seed=1)
    slightly_better = [Utterance(u.id, u.ref, u.ref if n % 15 == 0 else u.hyp) for n, u in enumerate(base)]
    comparison = compare(slightly_better, base)
    low, high = score(base).ci95
    assert comparison.ci95[1] - comparison.ci95[0] < 0.7 * (high - low)


def test_only_the_same_references_compare():
    with pytest.raises(ValueError, match="u1"):
        compare(corpus(("a", "a")), corpus(("a", "a"), ("b", "b")))
    with pytest.raises(ValueError, match="u0"):
        compare(corpus(("a", "a")), corpus(("b", "a")))
    with pytest.raises(ValueError, match="empty"):
        compare(corpus(("", "a")), corpus(("", "a")))


def test_unknown_units_are_refused_by_name():
    with pytest.raises(ValueError, match="syllable"):
        score(corpus(("a", "a")), unit="syllable")
