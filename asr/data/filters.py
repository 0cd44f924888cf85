"""Filters of the training set: what a run cannot or should not learn from, counted by reason.

They depend on the run (limits, tokenizer, encoder), so they are applied when it starts, not when the data is prepared.
Scored sets are never filtered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lhotse.cut import Cut

from asr.data.cuts import Rejection, audio_path


@dataclass(frozen=True)
class FilterRule:
    """keeps: True for a cut that may stay; reason: what is reported for one that may not."""

    reason: str
    keeps: Callable[[Cut], bool]


def duration_rules(min_duration: float, max_duration: float) -> list[FilterRule]:
    """Keep cuts of min_duration to max_duration seconds, both included."""
    return [
        FilterRule(f"shorter than {min_duration} s", lambda cut: cut.duration >= min_duration),
        FilterRule(f"longer than {max_duration} s", lambda cut: cut.duration <= max_duration),
    ]


def feasibility_rule(
    num_frames: Callable[[int], int],
    frames_after_encoder: Callable[[int], int],
    encode: Callable[[str], list[int]],
    min_frames: Callable[[list[int]], int],
) -> FilterRule:
    """Keep cuts with enough encoder frames for their transcript.

    num_frames: feature frames for a number of samples; frames_after_encoder: encoder frames for a number of feature
    frames; encode: tokens of a text; min_frames: encoder frames that the head needs for these tokens.
    """

    def keeps(cut: Cut) -> bool:
        frames = frames_after_encoder(num_frames(cut.num_samples))
        return frames >= max(1, min_frames(encode(cut.supervisions[0].text or "")))

    return FilterRule("too few frames for the transcript", keeps)


def filter_cuts(cuts: Iterable[Cut], rules: list[FilterRule], rejected: list[Rejection]) -> Iterator[Cut]:
    """The cuts that pass all rules; for each other a Rejection, by the first rule that fails, goes to `rejected`."""
    for cut in cuts:
        failed = next((rule for rule in rules if not rule.keeps(cut)), None)
        if failed is None:
            yield cut
        else:
            rejected.append(Rejection(cut.id, failed.reason, f"{cut.duration:.2f} s", audio_path(cut), "train"))


def count_reasons(rejections: Iterable[Rejection]) -> dict[str, int]:
    """How many utterances were rejected for each reason, most frequent first."""
    return dict(Counter(rejection.reason for rejection in rejections).most_common())
