"""Readers of the forms in which people keep their data; each yields one cut per utterance.

| given | recognised by |
|---|---|
| Lhotse cuts | .jsonl or .jsonl.gz, lines with `type` or `supervisions` |
| Lhotse Shar | a folder with cuts.*.jsonl.gz |
| Kaldi | a folder with wav.scp and text, perhaps segments and utt2spk |
| NeMo | .json or .jsonl, lines with `audio_filepath` |
| table | .tsv or .txt, tab-separated, or .jsonl: audio path and text, perhaps id, speaker, start, duration |

A relative path is meant from the folder of the file that holds it; where nothing is there, from the working directory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import soundfile
from lhotse import AudioSource, CutSet
from lhotse.cut import Cut, MixedCut
from lhotse.utils import fastcopy

from asr.data.corpus import Corpus
from asr.data.cuts import make_cut, parse_cut, simple_parts, unreadable_cut
from asr.data.lines import read_lines

AUDIO_COLUMNS = ("audio", "path", "audio_path", "audio_filepath", "wav", "file")
SHAR_NOTES = ("shard_origin", "shar_epoch", "dataloading_info")


def read(path: str, corpus: Corpus, audio_dir: str | None) -> Iterator[Cut]:
    """Cuts of whatever `path` is; counts that concern no utterance and the files read go into `corpus`.

    audio_dir: where the recordings inside a Shar folder are unpacked to, those of each source into a folder of its own.
    Raises ValueError, with file and line, for a form that is not known and for lines that do not fit it.
    """
    source = Path(path)
    if not source.exists():
        raise ValueError(f"{path}: there is no such file or folder.")
    if source.is_dir():
        if any(source.glob("cuts.*.jsonl*")):
            corpus.sources.append(source)
            return _read_shar(source, audio_dir)
        if (source / "wav.scp").is_file():
            return _read_kaldi(source, corpus)
        raise ValueError(f"{path}: neither a Kaldi folder (no wav.scp) nor a Shar folder (no cuts.*.jsonl.gz).")
    corpus.sources.append(source)
    if source.suffix in (".tsv", ".txt"):
        return _read_rows(source, _table_rows(source))
    if source.name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz")):
        first = _parse(next(read_lines(source)), source)
        if "type" in first or "supervisions" in first:
            return _read_manifest(source)
        return _read_rows(source, ((line[0], _parse(line, source)) for line in read_lines(source)))
    raise ValueError(
        f"{path}: not a form that is known. Give a .tsv of audio path and text, a .jsonl (Lhotse cuts, NeMo, or audio "
        "and text), a Kaldi folder or a Shar folder."
    )


def _parse(line: tuple[int, str], source: Path) -> dict[str, Any]:
    try:
        row = json.loads(line[1])
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}, line {line[0]}: not valid JSON ({error}); one mapping per line.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{source}, line {line[0]}: expected a mapping, found {type(row).__name__}.")
    return row


def _table_rows(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a tab-separated table. Quotation marks are text. Without a header: audio path, text, perhaps speaker."""
    header: list[str] = []
    number, empty = 0, True
    for number, line in read_lines(source):
        fields = line.split("\t")
        if not header:
            names = [field.strip().lower() for field in fields]
            header = ["audio", "text", "speaker"]
            if "text" in names and any(name in AUDIO_COLUMNS for name in names):
                header = names
                continue
        if not 2 <= len(fields) <= len(header):
            raise ValueError(
                f"{source}, line {number}: {len(fields)} tab-separated fields, expected {' <tab> '.join(header)}."
            )
        empty = False
        yield number, dict(zip(header, fields, strict=False))
    if empty:
        raise ValueError(f"{source}, line {number}: a header with nothing below it; add a line for each utterance.")


def _read_rows(source: Path, rows: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[Cut]:
    """Cuts of mappings with an audio path and a text."""
    entries = []
    for number, row in rows:
        where = f"{source}, line {number}"
        path = next((row[name] for name in AUDIO_COLUMNS if row.get(name)), None)
        if not isinstance(path, str):
            raise ValueError(f"{where}: no audio path; expected one of the keys {AUDIO_COLUMNS}.")
        start = _seconds(row.get("start") or row.get("offset") or 0.0, where)
        duration = _seconds(row["duration"], where) if row.get("duration") not in (None, "") else None
        text = row.get("text")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where}: the text is no string: {text!r}.")
        _check_id(str(row.get("id") or ""), where)
        entries.append((_resolve(path.strip(), source.parent), text, start, duration, row))
    folder = os.path.commonpath([os.path.dirname(path) for path, *_ in entries])
    for path, text, start, duration, row in entries:
        cut_id = str(row.get("id") or "") or _id_of(os.path.relpath(path, folder), start)
        yield make_cut(cut_id, path, text, str(row.get("speaker") or ""), start, duration)


def _seconds(value: Any, where: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"{where}: start and duration must be seconds, found {value!r}; write a finite number.")
    return seconds


def _check_id(cut_id: str, where: str) -> None:
    if any(character in cut_id for character in "\t\n\r"):
        raise ValueError(
            f"{where}: the id {cut_id!r} holds a tab or a line break, which end a field of the result files; rename it."
        )


def _id_of(path: str, start: float) -> str:
    """An id without white space from a path below the folder that all files share, and the start in milliseconds."""
    name = re.sub(r"\s+", "_", os.path.splitext(path)[0].replace(os.sep, "-"))
    return f"{name}-{round(start * 1000):07d}" if start else name


def _resolve(path: str, folder: Path) -> str:
    """Absolute form of a path found in a file in `folder`."""
    beside = os.path.abspath(folder / path)
    return beside if os.path.exists(beside) or not os.path.exists(path) else os.path.abspath(path)


def _read_kaldi(folder: Path, corpus: Corpus) -> Iterator[Cut]:
    """Cuts of a Kaldi data folder, with or without segments."""
    names = [name for name in ("wav.scp", "text", "segments", "utt2spk") if (folder / name).is_file()]
    corpus.sources += [folder / name for name in names]
    texts = _mapping(folder / "text")
    speakers = _mapping(folder / "utt2spk") if "utt2spk" in names else {}
    recordings = {key: _kaldi_path(value, key, folder) for key, value in _mapping(folder / "wav.scp").items()}
    segments: dict[str, tuple[str, float, float]] = {}
    if "segments" in names:
        for key, value in _mapping(folder / "segments").items():
            where, fields = f"{folder / 'segments'}, {key!r}", value.split()
            if len(fields) != 3:
                raise ValueError(f"{where}: expected `<recording> <start> <end>`.")
            segments[key] = (fields[0], _seconds(fields[1], where), _seconds(fields[2], where))
    else:
        segments = {key: (key, 0.0, -1.0) for key in recordings}
    for key, text in texts.items():
        speaker = speakers.get(key, "")
        recording, start, end = segments.get(key, ("", 0.0, -1.0))
        if recording not in recordings:
            _count(corpus, "transcript without audio")
            missing = f"no recording {recording!r} in wav.scp" if recording else "neither in segments nor in wav.scp"
            yield unreadable_cut(key, "", text, speaker, "missing file", missing)
        else:  # an end of -1 is the end of the recording
            yield make_cut(key, recordings[recording], text, speaker, start, end - start if end >= 0 else None)
    _count(corpus, "audio without transcript", len(segments.keys() - texts.keys()))


def _mapping(path: Path) -> dict[str, str]:
    """First word of every line -> the rest. Raises ValueError for a word that comes twice."""
    entries: dict[str, str] = {}
    for number, line in read_lines(path):
        key, *rest = line.split(maxsplit=1)
        if key in entries:
            raise ValueError(f"{path}, line {number}: {key!r} comes twice.")
        entries[key] = rest[0].strip() if rest else ""
    return entries


def _kaldi_path(entry: str, key: str, folder: Path) -> str:
    if entry.endswith("|"):
        raise ValueError(
            f"{folder / 'wav.scp'}, {key!r}: `{entry}` is a command, which is not run here. "
            "Write its output to audio files and name those."
        )
    if re.search(r"\.ark:\d+$", entry):
        raise ValueError(f"{folder / 'wav.scp'}, {key!r}: `{entry}` lies in an archive; name audio files instead.")
    return _resolve(entry, folder)


def _read_manifest(source: Path) -> Iterator[Cut]:
    """Cuts of a Lhotse manifest, with relative paths made absolute."""
    for number, line in read_lines(source):
        where = f"{source}, line {number}"
        cut = parse_cut(line, where)
        _check_cut(cut, where)
        yield _with_sources(cut, lambda audio: _absolute(audio, source.parent))


def _check_cut(cut: Cut, where: str) -> None:
    _check_id(cut.id, where)
    for part in (*simple_parts(cut), *cut.supervisions):
        _seconds(part.start, where)
        _seconds(part.duration, where)


def _absolute(audio: AudioSource, folder: Path) -> AudioSource:
    return fastcopy(audio, source=_resolve(audio.source, folder)) if audio.type == "file" else audio


def _read_shar(folder: Path, audio_dir: str | None) -> Iterator[Cut]:
    """Cuts of a Shar folder; the recordings inside its archives become files, byte for byte."""
    if audio_dir is None:
        raise ValueError(
            f"{folder}: set data.corpus.shar_audio_dir to a folder for the recordings of this Shar folder."
        )
    # A folder for each source: two may give one id to different recordings.
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    own_dir = os.path.join(os.path.abspath(audio_dir), f"{folder.resolve().name}-{digest}")
    os.makedirs(own_dir, exist_ok=True)
    for cut in CutSet.from_shar(in_dir=folder):
        _check_cut(cut, f"{folder}, cut {cut.id!r}")
        name = os.path.join(own_dir, quote(cut.id, safe=""))
        # Lhotse notes where in the Shar folder a cut came from, as objects that no manifest can hold.
        custom = {key: value for key, value in (cut.custom or {}).items() if key not in SHAR_NOTES}
        cut = fastcopy(cut, custom=custom or None)
        yield _with_sources(cut, lambda audio, name=name: _unpacked(audio, name))


def _unpacked(audio: AudioSource, name: str) -> AudioSource:
    if audio.type != "memory":
        return audio
    try:
        kind = soundfile.info(BytesIO(audio.source)).format.lower()
    except soundfile.SoundFileError:
        kind = "damaged"  # found again, and reported with its path, when the audio is checked
    path = f"{name}.{kind}"
    Path(path).write_bytes(audio.source)
    return AudioSource(type="file", channels=audio.channels, source=path)


def _with_sources(cut: Cut, change: Any) -> Cut:
    """The cut with `change` applied to every audio source."""
    if isinstance(cut, MixedCut):
        return fastcopy(cut, tracks=[fastcopy(track, cut=_with_sources(track.cut, change)) for track in cut.tracks])
    if not cut.has_recording:
        return cut
    recording = fastcopy(cut.recording, sources=[change(audio) for audio in cut.recording.sources])
    return fastcopy(cut, recording=recording)


def _count(corpus: Corpus, note: str, number: int = 1) -> None:
    corpus.notes[note] = corpus.notes.get(note, 0) + number
