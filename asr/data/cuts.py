"""Cuts: reading manifests, making cuts from audio files, loading their audio.

One utterance is one Lhotse cut with exactly one supervision that spans it. One rule turns every recording into what the
features see, whatever its format, rate and channels: decode with libsndfile, resample to 16 kHz, take the mean of the
channels.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import soundfile
from lhotse import AudioSource, CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.audio.backend import LibsndfileBackend, set_current_audio_backend
from lhotse.cut import Cut, MixedCut, PaddingCut
from lhotse.serialization import deserialize_item
from lhotse.utils import fastcopy

from asr.data.lines import read_lines

SAMPLE_RATE = 16000
FRAME_SECONDS = 0.01
UNREADABLE = "unreadable"

_BYTE_RANGE = re.compile(r"(?P<file>.+)@(?P<start>\d+)\+(?P<size>\d+)")


def byte_range(file: str | Path, start: int, size: int) -> str:
    """A path that stands for a part of a file, wherever the path of an audio file may stand."""
    return f"{os.path.abspath(file)}@{start}+{size}"


class _Libsndfile(LibsndfileBackend):
    """Reads audio files and audio inside of other files.

    Lhotse's default decoder guesses: it runs external programs for some formats and reports the failures of all its
    candidates at once. One decoder gives the same samples and a short message on every machine.
    """

    def read_audio(self, path_or_fd: Any, *arguments: Any, **options: Any) -> Any:
        part = _BYTE_RANGE.fullmatch(path_or_fd) if isinstance(path_or_fd, str) else None
        if part and not os.path.exists(path_or_fd):
            with open(part["file"], "rb") as file:
                file.seek(int(part["start"]))
                path_or_fd = BytesIO(file.read(int(part["size"])))
        try:
            return super().read_audio(path_or_fd, *arguments, **options)
        except soundfile.LibsndfileError as error:
            # Lhotse raises every error again as its own kind made of a text, which this kind cannot be made of.
            raise soundfile.SoundFileRuntimeError(str(error)) from error


set_current_audio_backend(_Libsndfile())


@dataclass(frozen=True)
class Rejection:
    """An utterance that was refused or could not be used as it was, and why.

    kept: the utterance stays in its manifest all the same: one of a scored set whose audio cannot be used is scored as
        deletions, one with a duplicate id is renamed.
    """

    id: str
    reason: str
    detail: str = ""
    path: str = ""
    split: str = ""
    kept: bool = False


class AudioError(ValueError):
    """Audio that cannot be used; `reason` is one of a few fixed phrases, `detail` says what happened."""

    def __init__(self, message: str, reason: str, detail: str):
        super().__init__(message)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:  # so that it crosses the border of a worker process whole
        return (AudioError, (str(self), self.reason, self.detail))


def iterate_cuts(path: str | Path) -> Iterator[Cut]:
    """Read a cuts manifest (.jsonl or .jsonl.gz) one cut at a time.

    Raises ValueError that names file and line for a missing, empty or truncated file and for a line that is not a cut.
    """
    for number, line in read_lines(path):
        yield parse_cut(line, f"{path}, line {number}")


class Manifest:
    """The cuts of a manifest, read from the file whenever they are iterated over; never all of them in memory.

    Raises as `iterate_cuts` does.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __iter__(self) -> Iterator[Cut]:
        return iterate_cuts(self.path)

    def __len__(self) -> int:
        return sum(1 for _ in read_lines(self.path))


def load_cuts(path: str | Path) -> CutSet:
    """All cuts of a manifest in memory; raises as `iterate_cuts` does."""
    return CutSet.from_cuts(iterate_cuts(path))


def parse_cut(line: str, where: str) -> Cut:
    """The cut on one line of a manifest. Raises ValueError that names the place, `where`, for a line that is none."""
    try:
        item = deserialize_item(json.loads(line))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error}).") from error
    except Exception as error:  # Lhotse raises many kinds for a mapping that is no cut
        raise ValueError(f"{where}: not a Lhotse cut ({type(error).__name__}: {error}).") from error
    if not isinstance(item, Cut):
        raise ValueError(
            f"{where}: a {type(item).__name__}, not a cut. Give a cuts manifest, not recordings or supervisions."
        )
    return item


def open_recording(path: str | Path) -> Recording:
    """The recording in an audio file, from its header. Raises AudioError that names the path."""
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise AudioError(f"{path}: no such file", "missing file", "no such file")
    try:
        recording = Recording.from_file(path)
    except Exception as error:  # libsndfile and Lhotse raise several unrelated kinds
        detail = _short(error)
        raise AudioError(f"{path}: cannot be read as audio: {detail}", "corrupt audio", detail) from error
    if recording.num_samples == 0:
        raise AudioError(f"{path}: holds no samples", "corrupt audio", "holds no samples")
    return recording


def make_cut(
    cut_id: str,
    path: str | Path,
    text: str | None,
    speaker: str = "",
    start: float = 0.0,
    duration: float | None = None,
    language: str | None = None,
) -> Cut:
    """The cut of one utterance in an audio file, from `start` for `duration` seconds (default: to the end).

    Never raises for the audio: a file that is missing or damaged gives a cut marked unreadable, which the check at the
    door rejects from training and keeps in a scored set.
    """
    try:
        recording = open_recording(path)
    except AudioError as error:
        return unreadable_cut(cut_id, path, text, speaker, error.reason, error.detail, duration)
    cut = recording.to_cut()
    if duration is None:
        duration = round(recording.duration - start, 8)
    supervision = SupervisionSegment(
        id=cut_id,
        recording_id=recording.id,
        start=0.0,
        duration=duration,
        channel=cut.channel,
        text=text,
        speaker=speaker or None,
        language=language,
    )
    return fastcopy(cut, id=cut_id, start=start, duration=duration, supervisions=[supervision])


def unreadable_cut(
    cut_id: str,
    path: str | Path,
    text: str | None,
    speaker: str | None,
    reason: str,
    detail: str = "",
    duration: float | None = None,
) -> MonoCut:
    """A cut that stands for an utterance without usable audio, so that its words count when the set is scored.

    Its length is nominal (1 s unless known); `unreadable_reason` tells it from a real cut.
    """
    seconds = duration if duration is not None and duration > 0 else 1.0
    samples = max(1, round(seconds * SAMPLE_RATE))
    source = AudioSource(type="file", channels=[0], source=os.path.abspath(path) if str(path) else "")
    recording = Recording(
        id=cut_id, sources=[source], sampling_rate=SAMPLE_RATE, num_samples=samples, duration=samples / SAMPLE_RATE
    )
    supervision = SupervisionSegment(
        id=cut_id, recording_id=cut_id, start=0.0, duration=recording.duration, text=text, speaker=speaker or None
    )
    return MonoCut(
        id=cut_id,
        start=0.0,
        duration=recording.duration,
        channel=0,
        supervisions=[supervision],
        recording=recording,
        custom={UNREADABLE: reason, "detail": detail},
    )


def unreadable_reason(cut: Cut) -> str | None:
    """Why the audio of a cut in a scored set cannot be used; None for a cut with audio."""
    return (getattr(cut, "custom", None) or {}).get(UNREADABLE)


def load_audio(cut: Cut) -> np.ndarray:
    """Samples (N,) of a cut: float32, 16 kHz, mean of the channels.

    Raises AudioError (a ValueError) naming the id and the path when the audio is missing, damaged, empty or not finite:
    of a mixed cut the path that is to blame, such as that of the noise.
    """
    where = _named(cut, audio_path(cut))
    if reason := unreadable_reason(cut):
        raise AudioError(f"{where} is marked unreadable: {reason}", reason, str((cut.custom or {}).get("detail", "")))
    try:
        if cut.sampling_rate != SAMPLE_RATE:
            cut = cut.resample(SAMPLE_RATE)
        channels = cut.load_audio()
    except Exception as error:  # libsndfile, Lhotse and the file system raise many unrelated kinds
        path = audio_path(_faulty_part(cut))
        found = ("missing file", "no such file") if _is_missing(path) else ("corrupt audio", _short(error))
        raise _audio_error(cut, path, *found) from error
    if channels is None:
        raise AudioError(f"{where}: has no recording", "no recording", "the cut refers to no audio")
    samples = np.ascontiguousarray(channels.mean(axis=0) if channels.shape[0] > 1 else channels[0], dtype=np.float32)
    if len(samples) == 0:
        raise AudioError(f"{where}: holds no samples", "corrupt audio", "holds no samples")
    if not np.isfinite(samples).all():
        raise _audio_error(cut, audio_path(_faulty_part(cut)), "non-finite samples", "NaN or infinite samples")
    return samples


def _audio_error(cut: Cut, path: str, reason: str, detail: str) -> AudioError:
    """The error of a cut for what is wrong with the file at `path`; the detail names it where it is not the first."""
    told = detail if path == audio_path(cut) else f"{path}: {detail}"
    return AudioError(f"{_named(cut, path)}: {reason}: {detail}", reason, told)


def _named(cut: Cut, path: str) -> str:
    return f"Utterance {cut.id!r} ({path or 'no audio file'})"


def _is_missing(path: str) -> bool:
    """Whether a path is that of a file which is not there; no URL is."""
    part = _BYTE_RANGE.fullmatch(path)
    there = os.path.exists(path) or bool(part and os.path.exists(part["file"]))
    return bool(path) and "://" not in path and not there


def _faulty_part(cut: Cut) -> Cut:
    """The first part of a cut that by itself cannot be loaded or is not finite; the cut where none is such."""
    for part in simple_parts(cut):
        try:
            channels = part.load_audio()
        except Exception:
            return part
        if channels is not None and not np.isfinite(channels).all():
            return part
    return cut


def simple_parts(cut: Cut) -> list[Cut]:
    """The cuts that refer to audio: the cut itself, or the tracks of a mixed cut without its padding."""
    if isinstance(cut, MixedCut):
        return [cast(Cut, track.cut) for track in cut.tracks if track.type != "PaddingCut"]
    return [cut]


def audio_path(cut: Cut) -> str:
    """Path of the first audio file behind a cut, "" where the audio is not in a file."""
    for part in simple_parts(cut):
        if getattr(part, "has_recording", False):
            for source in part.recording.sources:
                if source.type in ("file", "url"):
                    return str(source.source)
    return ""


def audio_identity(cut: Cut) -> tuple:
    """All that decides the samples of a cut: which channels of which files, from where, how changed and how mixed."""
    if isinstance(cut, MixedCut):
        tracks = [(track.offset, track.snr, track.mute, audio_identity(track.cut)) for track in cut.tracks]
        return (tracks, [transform.to_dict() for transform in cut.transforms or []])
    if isinstance(cut, PaddingCut):
        return (cut.duration,)
    return (cut.start, cut.duration, cut.channel, cut.recording.to_dict() if cut.has_recording else None)


def source_sampling_rate(cut: Cut) -> int:
    """Sampling rate in Hz of the audio as stored, before any resampling."""
    recording = simple_parts(cut)[0].recording
    for transform in recording.transforms or []:
        settings = transform if isinstance(transform, dict) else transform.to_dict()
        if settings["name"] == "Resample":
            return int(settings["kwargs"]["source_sampling_rate"])
    return int(recording.sampling_rate)


def with_supervision(cut: Cut, supervision: SupervisionSegment) -> Cut:
    """The cut with this as its only supervision, stretched to span the cut exactly."""
    if not isinstance(cut, MixedCut):
        return fastcopy(cut, supervisions=[fastcopy(supervision, start=0.0, duration=cut.duration)])
    tracks = []
    placed = False
    for track in cut.tracks:
        if track.type != "PaddingCut":
            spanning = fastcopy(supervision, start=-track.offset, duration=cut.duration)
            track = fastcopy(track, cut=fastcopy(track.cut, supervisions=[] if placed else [spanning]))
            placed = True
        tracks.append(track)
    return fastcopy(cut, tracks=tracks)


def _short(error: Exception) -> str:
    """The first line of an error with its type: Lhotse appends whole manifests to its messages."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
