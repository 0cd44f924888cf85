"""Word and character error rates: alignment, corpus rates, bootstrap intervals, comparison of two systems.

Units, the same for reference and hypothesis, after Unicode NFC:

- words (WER): every CJK character (Han, Kana, Bopomofo) is a unit by itself; the rest is split at white space.
- characters (CER): every character that is not white space is a unit.

"我爱 ASR" is 3 units in WER and 5 in CER; "今天 天气" is 4 units in both, with or without the space.
Rates are in percent: all errors of the corpus over all its reference units. They may pass 100, and are None where the
references hold no unit at all.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import kaldialign
import numpy as np

# Han with its extensions and compatibility forms, iteration and number signs, Hiragana, Katakana, Bopomofo
CJK = re.compile(
    "[\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)
BOOTSTRAP_REPLICATIONS = 10000
BOOTSTRAP_SEED = 0
NAMED_IDS = 5

Alignment = list[tuple[str, str]]


@dataclass(frozen=True)
class Utterance:
    """A transcript and what was recognised; the speaker is "" where unknown."""

    id: str
    ref: str
    hyp: str
    speaker: str = ""


@dataclass(frozen=True)
class Counts:
    """Errors against a number of reference units."""

    insertions: int = 0
    deletions: int = 0
    substitutions: int = 0
    ref_units: int = 0

    @property
    def errors(self) -> int:
        return self.insertions + self.deletions + self.substitutions

    @property
    def rate(self) -> float | None:
        """Errors per reference unit in percent; None without reference units."""
        return 100.0 * self.errors / self.ref_units if self.ref_units else None

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.substitutions + other.substitutions,
            self.ref_units + other.ref_units,
        )


@dataclass(frozen=True)
class Score:
    """The score of a corpus.

    counts: errors of the whole corpus.
    ci95: 95% bootstrap interval of the rate (low, high) in percent; None without reference units.
    per_speaker: counts by speaker, sorted by name; empty where no speaker is known.
    alignments: id to the pairs (reference unit, hypothesis unit), sorted by id; "" marks an insertion or a deletion.
    """

    counts: Counts
    ci95: tuple[float, float] | None
    per_speaker: dict[str, Counts]
    alignments: dict[str, Alignment]


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same utterances; rates in percent.

    difference: rate of A less rate of B, negative where A is better, with its 95% bootstrap interval.
    probability_a_better: share of the resampled corpora where A has fewer errors; ties count half.
    """

    rate_a: float
    rate_b: float
    difference: float
    ci95: tuple[float, float]
    probability_a_better: float


def words(text: str) -> list[str]:
    """Units of WER."""
    return CJK.sub(r" \g<0> ", unicodedata.normalize("NFC", text)).split()


def characters(text: str) -> list[str]:
    """Units of CER."""
    return list("".join(unicodedata.normalize("NFC", text).split()))


UNITS = {"word": words, "character": characters}


def split_units(text: str, unit: str) -> list[str]:
    """Units of `text`; unit is "word" or "character"."""
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} is not one of {', '.join(UNITS)}")
    return UNITS[unit](text)


def align(ref: Sequence[str], hyp: Sequence[str]) -> Alignment:
    """The alignment with the fewest errors; "" on the left marks an insertion, on the right a deletion."""
    return kaldialign.align(ref, hyp, "")


def count(alignment: Alignment) -> Counts:
    """Errors and reference units of one alignment."""
    insertions = sum(ref == "" for ref, _ in alignment)
    deletions = sum(hyp == "" for _, hyp in alignment)
    substitutions = sum(ref != hyp for ref, hyp in alignment) - insertions - deletions
    return Counts(insertions, deletions, substitutions, len(alignment) - insertions)


def count_errors(refs: Iterable[str], hyps: Iterable[str], unit: str = "word") -> Counts:
    """Errors of a corpus given as texts in the same order."""
    total = Counts()
    for ref, hyp in zip(refs, hyps, strict=True):
        total += count(align(split_units(ref, unit), split_units(hyp, unit)))
    return total


def pair_up(
    refs: Mapping[str, str], hyps: Mapping[str, str], speakers: Mapping[str, str] | None = None
) -> list[Utterance]:
    """Utterances of all references, sorted by id; a missing hypothesis is empty and so counts as deletions.

    Raises ValueError for hypotheses without a reference.
    """
    extra = sorted(hyps.keys() - refs.keys())
    if extra:
        raise ValueError(f"{len(extra)} hypotheses have no reference: {_some(extra)}; remove them or add references")
    speakers = speakers or {}
    return [Utterance(id, refs[id], hyps.get(id, ""), speakers.get(id, "")) for id in sorted(refs)]


def score(utterances: Iterable[Utterance], unit: str = "word") -> Score:
    """Scores a corpus, in whatever order it comes.

    Raises ValueError for an id that occurs twice, naming it.
    """
    ordered = sorted(utterances, key=lambda utterance: utterance.id)
    _refuse_repeats(ordered)
    alignments: dict[str, Alignment] = {}
    per_speaker: dict[str, Counts] = {}
    counts = []
    for utterance in ordered:
        alignment = align(split_units(utterance.ref, unit), split_units(utterance.hyp, unit))
        alignments[utterance.id] = alignment
        counts.append(count(alignment))
        speaker = utterance.speaker or "unknown"
        per_speaker[speaker] = per_speaker.get(speaker, Counts()) + counts[-1]
    if per_speaker.keys() == {"unknown"}:
        per_speaker = {}
    return Score(sum(counts, Counts()), bootstrap_interval(counts), dict(sorted(per_speaker.items())), alignments)


def bootstrap_interval(counts: Sequence[Counts]) -> tuple[float, float] | None:
    """95% interval of the corpus rate in percent over resampled utterances (Bisani & Ney, 2004), with a fixed seed.

    counts: one entry per utterance.
    Percentiles of the resampled rates; a resampled corpus without any reference unit has no rate and is left out.
    """
    ref_units = np.array([entry.ref_units for entry in counts], dtype=np.int64)
    if ref_units.sum() == 0:
        return None
    errors = np.array([entry.errors for entry in counts], dtype=np.int64)
    sums = _resampled_sums(np.stack([errors, ref_units], axis=1))
    return _interval(100.0 * sums[:, 0] / sums[:, 1])


def compare(a: Iterable[Utterance], b: Iterable[Utterance], unit: str = "word") -> Comparison:
    """Paired bootstrap of two systems on the same utterances: both are resampled together (Bisani & Ney, 2004).

    Raises ValueError where ids or references differ, naming some, and where the references hold no unit.
    """
    a_by_id, b_by_id = ({utterance.id: utterance for utterance in _refuse_repeats(list(side))} for side in (a, b))
    unpaired = sorted(a_by_id.keys() ^ b_by_id.keys())
    if unpaired:
        raise ValueError(f"{len(unpaired)} utterances are in one system only: {_some(unpaired)}; decode the same set")
    ids = sorted(a_by_id)
    other = [id for id in ids if split_units(a_by_id[id].ref, unit) != split_units(b_by_id[id].ref, unit)]
    if other:
        raise ValueError(f"{len(other)} references differ: {_some(other)}; decode both with the same normalisation")
    sides = [
        [count(align(split_units(side[id].ref, unit), split_units(side[id].hyp, unit))) for id in ids]
        for side in (a_by_id, b_by_id)
    ]
    rate_a, rate_b = (sum(side, Counts()).rate for side in sides)
    if rate_a is None or rate_b is None:
        raise ValueError("the references are empty: there is no error rate to compare")
    table = np.array([[one.errors, two.errors, one.ref_units] for one, two in zip(*sides, strict=True)], dtype=np.int64)
    sums = _resampled_sums(table)
    fewer = sums[:, 0] - sums[:, 1]
    return Comparison(
        rate_a=rate_a,
        rate_b=rate_b,
        difference=rate_a - rate_b,
        ci95=_interval(100.0 * fewer / sums[:, 2]),
        probability_a_better=float(np.mean(fewer < 0) + 0.5 * np.mean(fewer == 0)),
    )


def _resampled_sums(table: np.ndarray) -> np.ndarray:
    """Column sums of `table` (N, C), reference units last, over N rows drawn with replacement: (replications, C).

    Replications without reference units are left out.
    """
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    num_rows = len(table)
    # Blocks of about a million draws keep memory small for large test sets.
    block = max(1, 2**20 // num_rows)
    sums = []
    for start in range(0, BOOTSTRAP_REPLICATIONS, block):
        size = min(block, BOOTSTRAP_REPLICATIONS - start)
        draws = generator.integers(num_rows, size=(size, num_rows), dtype=np.int32)
        sums.append(np.stack([column[draws].sum(axis=1) for column in table.T], axis=1))
    stacked = np.concatenate(sums)
    return stacked[stacked[:, -1] > 0]


def _interval(rates: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(rates, [2.5, 97.5])
    return float(low), float(high)


def _refuse_repeats(utterances: list[Utterance]) -> list[Utterance]:
    repeated = sorted(id for id, times in Counter(utterance.id for utterance in utterances).items() if times > 1)
    if repeated:
        raise ValueError(f"{len(repeated)} ids occur more than once: {_some(repeated)}; ids must be unique")
    return utterances


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:NAMED_IDS]) + (", ..." if len(ids) > NAMED_IDS else "")
