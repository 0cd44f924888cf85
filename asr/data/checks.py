"""The check at the door: every cut is made regular or refused by id and reason before training starts.

| found | done |
|---|---|
| cut ends after its recording | trimmed if by at most one frame (10 ms), else refused |
| duration zero or negative | refused |
| no supervision | refused (there is nothing to train on or to score) |
| supervision of zero length | refused |
| several supervisions | one cut each, named `<id>-<number>`; refused where they overlap |
| supervision sticks out of its cut | refused: part of the text is not in the audio |
| supervision shorter than its cut | the cut is trimmed to it |
| empty transcript | refused for training; an empty reference is legal in a scored set |
| missing file, damaged audio, NaN samples | refused |
| file of another sampling rate than its manifest says | refused: it would be heard too fast or too slow |
| id seen before in the split | refused for training; renamed in a scored set |

A scored set (every split but "train") never shrinks: what would be refused stays as a cut marked unreadable, so that
its words count as deletions.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import soundfile
import torch
from lhotse import SupervisionSegment
from lhotse.cut import Cut, MixedCut
from lhotse.utils import fastcopy

from asr.data.cuts import (
    FRAME_SECONDS,
    SAMPLE_RATE,
    AudioError,
    Rejection,
    audio_identity,
    audio_path,
    load_audio,
    simple_parts,
    source_sampling_rate,
    unreadable_cut,
    unreadable_reason,
    with_supervision,
)

CUTS_PER_JOB = 256
DECODER_SLACK_SECONDS = 0.1


@dataclass(frozen=True)
class _Checked:
    """A cut on its way through the checks, with the first problem found."""

    cut: Cut
    reason: str = ""
    detail: str = ""


def check_cuts(
    cuts: Iterable[Cut],
    split: str,
    normaliser: Callable[[str], str] | None = None,
    num_jobs: int = 1,
) -> tuple[list[Cut], list[Rejection]]:
    """Check all cuts of a split; see `iterate_checked`. Returns the usable cuts and what was found wrong."""
    good: list[Cut] = []
    bad: list[Rejection] = []
    for item in iterate_checked(cuts, split, normaliser, num_jobs):
        if isinstance(item, Rejection):
            bad.append(item)
        else:
            good.append(item)
    return good, bad


def iterate_checked(
    cuts: Iterable[Cut],
    split: str,
    normaliser: Callable[[str], str] | None = None,
    num_jobs: int = 1,
    journal: AudioJournal | None = None,
) -> Iterator[Cut | Rejection]:
    """Check cuts one by one, in order, reading the audio of each once with `num_jobs` processes.

    Yields regular cuts (one supervision spanning the cut, 16 kHz, normalised text) and a Rejection for each problem.
    split: "train" is checked as training data, any other name as a scored set.
    journal: of audio that need not be read again.
    """
    scored = split != "train"
    seen: set[str] = set()
    regular = (checked for cut in cuts for checked in _regularise(cut))
    for checked in _read_audio(regular, num_jobs, journal or AudioJournal()):
        cut = checked.cut
        text = cut.supervisions[0].text or "" if cut.supervisions else ""
        text = normaliser(text) if normaliser else text
        if not checked.reason and not scored and not text.strip():
            checked = replace(checked, reason="empty transcript")
        rejection = Rejection(cut.id, checked.reason, checked.detail, audio_path(cut), split)
        if cut.id in seen and not checked.reason:
            new_id = _free_id(cut.id, seen)
            detail = f"kept as {new_id!r}" if scored else "another utterance has this id"
            yield replace(rejection, reason="duplicate id", detail=detail, kept=scored)
            if not scored:
                continue
            cut = _renamed(cut, new_id)
        elif checked.reason:
            kept = scored and bool(cut.supervisions)
            yield replace(rejection, kept=kept)
            if not kept:
                continue
            cut = _stand_in(checked, cut.id if cut.id not in seen else _free_id(cut.id, seen))
        seen.add(cut.id)
        yield with_supervision(cut, fastcopy(cut.supervisions[0], text=text))


def _regularise(cut: Cut) -> list[_Checked]:
    """One checked cut per utterance in `cut`, from the manifest alone."""
    if reason := unreadable_reason(cut):
        return [_Checked(cut, reason, str((cut.custom or {}).get("detail", "")))]
    if not cut.has_recording:
        return [_Checked(cut, "no recording", "the cut refers to no audio")]
    if cut.duration <= 0 or any(part.start < 0 or part.duration <= 0 for part in simple_parts(cut)):
        return [_Checked(cut, "zero or negative duration", f"duration {cut.duration} s")]
    for part in simple_parts(cut):
        excess = part.end - part.recording.duration
        if excess > FRAME_SECONDS or part.start >= part.recording.duration:
            detail = f"ends at {part.end} s, the recording at {part.recording.duration} s"
            return [_Checked(cut, "cut longer than its recording", detail)]
        if excess > 0 and part is cut:
            cut = _trim(cut, 0.0, cut.duration - excess)
    if not cut.supervisions:
        return [_Checked(cut, "no supervision", "the cut has no transcript to train on or to score")]
    supervisions = sorted(cut.supervisions, key=lambda supervision: supervision.start)
    if len(supervisions) == 1:
        return [_fit(cut, supervisions[0], cut.id)]
    for before, after in pairwise(supervisions):
        if before.end > after.start + FRAME_SECONDS:
            joined = fastcopy(before, text=" ".join(supervision.text or "" for supervision in supervisions))
            detail = f"{before.id!r} and {after.id!r} overlap in time"
            return [_Checked(with_supervision(cut, joined), "overlapping supervisions", detail)]
    return [_fit(cut, supervision, f"{cut.id}-{number}") for number, supervision in enumerate(supervisions)]


def _fit(cut: Cut, supervision: SupervisionSegment, cut_id: str) -> _Checked:
    """The part of a cut under one supervision, at 16 kHz."""
    whole = _renamed(with_supervision(cut, supervision), cut_id)
    if supervision.duration <= 0:
        return _Checked(whole, "zero-length supervision", f"supervision {supervision.id!r}: {supervision.duration} s")
    start, end = supervision.start, supervision.end
    if start < -FRAME_SECONDS or end > cut.duration + FRAME_SECONDS:
        detail = f"supervision {supervision.id!r} from {start} s to {end} s in a cut of {cut.duration} s"
        return _Checked(whole, "supervision exceeds its cut", detail)
    start, end = max(0.0, start), min(cut.duration, end)
    if start > 0 or end < cut.duration:
        try:
            whole = with_supervision(_renamed(_trim(cut, start, end - start), cut_id), supervision)
        except (AssertionError, ValueError) as error:
            return _Checked(whole, "zero-length supervision", f"supervision {supervision.id!r}: {error}")
    return _Checked(whole.resample(SAMPLE_RATE) if whole.sampling_rate != SAMPLE_RATE else whole)


def _trim(cut: Cut, start: float, duration: float) -> Cut:
    """A part of a cut with the supervisions left as they are, clipped where the cut now ends."""
    if isinstance(cut, MixedCut):
        return cut.truncate(offset=start, duration=duration, preserve_id=True)
    kept = [
        fastcopy(supervision, duration=min(supervision.duration, duration - supervision.start))
        if 0 < supervision.end - duration <= FRAME_SECONDS
        else supervision
        for supervision in cut.supervisions
    ]
    return fastcopy(cut, start=round(cut.start + start, 8), duration=round(duration, 8), supervisions=kept)


def _renamed(cut: Cut, cut_id: str) -> Cut:
    return cut if cut.id == cut_id else fastcopy(cut, id=cut_id)


def _free_id(cut_id: str, seen: set[str]) -> str:
    number = 2
    while f"{cut_id}-{number}" in seen:
        number += 1
    return f"{cut_id}-{number}"


def _stand_in(checked: _Checked, cut_id: str) -> Cut:
    """A cut marked unreadable in place of one whose audio cannot be used."""
    cut = checked.cut
    text = " ".join(supervision.text or "" for supervision in cut.supervisions)
    speaker = cut.supervisions[0].speaker
    return unreadable_cut(cut_id, audio_path(cut), text, speaker, checked.reason, checked.detail, cut.duration)


def _audio_problem(cut: Cut) -> tuple[str, str]:
    """Reason and detail of what is wrong with the audio of a cut, two empty strings where nothing is."""
    try:
        for part in simple_parts(cut):
            for path in (str(source.source) for source in part.recording.sources if source.type == "file"):
                if (problem := _problem_of_file(part, path))[0]:
                    return problem
        load_audio(cut)
    except AudioError as error:
        return error.reason, error.detail
    except soundfile.SoundFileError as error:
        return "corrupt audio", str(error)
    return "", ""


def _problem_of_file(cut: Cut, path: str) -> tuple[str, str]:
    """Reason and detail where the file itself is not what the manifest of a cut says, else two empty strings.

    Lhotse never compares the rates, and covers up to half a second that is missing with a mirror image of what is
    there. Decoders of MP3 differ by less than 0.1 s.
    """
    if not os.path.isfile(path):
        return "", ""
    info, stated = soundfile.info(path), source_sampling_rate(cut)
    if info.samplerate != stated:
        return "wrong sampling rate", f"{stated} Hz by its manifest, {info.samplerate} Hz in {path}"
    changes_length = any(_name_of(step) != "Resample" for step in cut.recording.transforms or [])
    missing = cut.end - info.frames / info.samplerate
    if missing > DECODER_SLACK_SECONDS and not changes_length:
        return "cut longer than its recording", f"{missing:.3f} s are missing at the end of {path}"
    return "", ""


def _name_of(transform: Any) -> str:
    return transform["name"] if isinstance(transform, dict) else type(transform).__name__


def _read_audio(checked: Iterable[_Checked], num_jobs: int, journal: AudioJournal) -> Iterator[_Checked]:
    """Read the audio of every cut that has passed so far and is not in the journal; the order is kept."""
    source = iter(checked)
    with _mapping_over(num_jobs) as mapped:
        while block := list(islice(source, CUTS_PER_JOB * num_jobs)):
            unread = [not item.reason and not journal.knows(item.cut) for item in block]
            problems = iter(mapped([item.cut for item, wanted in zip(block, unread, strict=True) if wanted]))
            for item, wanted in zip(block, unread, strict=True):
                problem = next(problems) if wanted else ("", "")
                if wanted and not problem[0]:
                    journal.note(item.cut)
                yield _with_problem(item, problem)
            journal.flush()


@contextmanager
def _mapping_over(num_jobs: int) -> Iterator[Callable[[list[Cut]], Iterable[tuple[str, str]]]]:
    """A function from cuts to what is wrong with the audio of each, in this process or in `num_jobs` others."""
    if num_jobs <= 1:
        yield lambda cuts: map(_audio_problem, cuts)
        return
    # Processes that are copies of this one start at once; elsewhere they import everything anew.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(
        num_jobs, mp_context=multiprocessing.get_context(method), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield lambda cuts: pool.map(_audio_problem, cuts, chunksize=max(1, min(32, len(cuts) // num_jobs)))


class AudioJournal:
    """Which audio was read without a fault, in a file, so that checks that were interrupted go on where they were.

    A cut is known by its id, by what its manifest says of its audio, and by size and time of change of the files.
    Without a path nothing is known or noted.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self._known = set(path.read_text().split()) if path and path.exists() else set()
        self._new: list[str] = []

    def knows(self, cut: Cut) -> bool:
        return bool(self._known) and self._key(cut) in self._known

    def note(self, cut: Cut) -> None:
        if self.path and (key := self._key(cut)):
            self._new.append(key)

    def flush(self) -> None:
        if self.path and self._new:
            with self.path.open("a") as lines:
                lines.writelines(f"{key}\n" for key in self._new)
            self._new = []

    @staticmethod
    def _key(cut: Cut) -> str | None:
        try:
            files = [os.stat(audio_path(part)) for part in simple_parts(cut)]
        except OSError:
            return None
        stamps = [(file.st_size, file.st_mtime_ns) for file in files]
        return hashlib.sha256(repr((cut.id, audio_identity(cut), stamps)).encode()).hexdigest()[:24]


def _with_problem(item: _Checked, problem: tuple[str, str]) -> _Checked:
    return replace(item, reason=problem[0], detail=problem[1]) if problem[0] else item
