"""A corpus on its way to disk: the splits that a recipe found, checked and written as manifests with a report."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lhotse import CutSet
from lhotse.cut import Cut
from tqdm import tqdm

from asr.data.checks import AudioJournal, iterate_checked
from asr.data.cuts import Rejection
from asr.data.filters import count_reasons
from asr.data.report import (
    REPORT_NAME,
    SplitStatistics,
    build_report,
    read_report,
    write_report,
)

logger = logging.getLogger(__name__)


@dataclass
class Corpus:
    """What a recipe makes of the publisher's files.

    splits: "train", "dev", and test sets under any other name; each is read once, in order.
    rejected: utterances refused before they became cuts.
    notes: counts for the report that concern no single utterance, such as {"audio without transcript": 3}.
    sources: transcripts, manifests and folders that were read; when one changes, the data is prepared anew.
    """

    splits: dict[str, Iterable[Cut]]
    rejected: list[Rejection] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    sources: list[Path] = field(default_factory=list)


def manifest_path(prepared_dir: str | Path, split: str) -> Path:
    """Where the checked cuts of a split lie."""
    return Path(prepared_dir) / f"{split}.jsonl.gz"


def prepared_splits(prepared_dir: str | Path) -> dict[str, Path]:
    """Manifests of a prepared folder by split. Raises ValueError where the folder holds no finished preparation."""
    report = read_report(prepared_dir)
    if report is None:
        raise ValueError(f"{prepared_dir}: no {REPORT_NAME}, so no data has been prepared there (completely).")
    return {split: manifest_path(prepared_dir, split) for split in report["splits"]}


def write_prepared(
    corpus: Corpus,
    prepared_dir: str | Path,
    normaliser: Callable[[str], str] | None,
    settings: Mapping[str, Any],
    num_jobs: int = 1,
) -> dict[str, Any]:
    """Check every cut of `corpus`, write one manifest per split and, last, `data_report.json`. Returns the report.

    Texts are written as the normaliser leaves them. Nothing in `prepared_dir` changes before all splits have passed,
    but for a hidden list of audio that has been read, by which a preparation that was interrupted goes on.
    num_jobs: processes that read the audio. Raises ValueError for a split without a single usable utterance.
    """
    prepared_dir = Path(prepared_dir)
    prepared_dir.mkdir(parents=True, exist_ok=True)
    statistics: dict[str, SplitStatistics] = {}
    rejected = list(corpus.rejected)
    temporary: dict[str, Path] = {}
    for leftover in prepared_dir.glob(".*.jsonl.gz"):  # of a preparation that was killed
        leftover.unlink()
    journal = AudioJournal(prepared_dir / ".audio_read")
    try:
        for split, cuts in corpus.splits.items():
            temporary[split] = prepared_dir / f".{os.getpid()}-{split}.jsonl.gz"
            statistics[split] = SplitStatistics()
            refused = _write_split(cuts, split, temporary[split], statistics[split], normaliser, num_jobs, journal)
            rejected += refused
            if not statistics[split].utterances:
                refused += [rejection for rejection in corpus.rejected if rejection.split == split]
                raise ValueError(_nothing_left(split, refused))
        report = build_report(statistics, rejected, corpus.notes, settings, _stamps(corpus.sources))
        _replace_manifests(prepared_dir, temporary)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    write_report(report, prepared_dir)
    (prepared_dir / ".audio_read").unlink(missing_ok=True)
    return report


def _write_split(
    cuts: Iterable[Cut],
    split: str,
    path: Path,
    statistics: SplitStatistics,
    normaliser: Callable[[str], str] | None,
    num_jobs: int,
    journal: AudioJournal,
) -> list[Rejection]:
    total = len(cuts) if isinstance(cuts, Collection) else None
    refused: list[Rejection] = []
    progress = tqdm(cuts, desc=f"checking {split}", total=total, unit="utt", disable=None)
    with CutSet.open_writer(path, overwrite=True) as writer:
        for item in iterate_checked(progress, split, normaliser, num_jobs, journal):
            if isinstance(item, Rejection):
                refused.append(item)
            else:
                writer.write(item, flush=False)
                statistics.add(item)
    return refused


def _nothing_left(split: str, refused: list[Rejection]) -> str:
    if not refused:
        return f"The {split!r} split is empty: no utterance was found. Check the corpus path and its layout."
    reasons = ", ".join(f"{count} x {reason}" for reason, count in count_reasons(refused).items())
    examples = "; ".join(f"{item.id} ({item.path or 'no file'}): {item.reason}: {item.detail}" for item in refused[:10])
    return f"No usable utterance in the {split!r} split: {reasons}. First of them: {examples}"


def _replace_manifests(prepared_dir: Path, temporary: Mapping[str, Path]) -> None:
    """Move new manifests into place and remove those of an earlier preparation that has other splits."""
    before = read_report(prepared_dir)
    (prepared_dir / REPORT_NAME).unlink(missing_ok=True)
    for split, path in temporary.items():
        os.replace(path, manifest_path(prepared_dir, split))
    for split in before["splits"] if before else ():
        if split not in temporary:
            manifest_path(prepared_dir, split).unlink(missing_ok=True)


def _stamps(sources: Iterable[Path]) -> dict[str, list[int]]:
    """Size and time of change of files, so that an edited transcript is noticed; of folders the time only."""
    stamps = {}
    for source in sources:
        status = os.stat(source)
        size = 0 if os.path.isdir(source) else status.st_size
        stamps[os.path.abspath(source)] = [size, status.st_mtime_ns]
    return stamps


def prepared_is_current(prepared_dir: str | Path, settings: Mapping[str, Any]) -> bool:
    """True if the folder holds a finished preparation with these settings and no source has changed since."""
    report = read_report(prepared_dir)
    if report is None or report["settings"] != json.loads(json.dumps(settings)):
        return False
    if not all(manifest_path(prepared_dir, split).is_file() for split in report["splits"]):
        return False
    try:
        return _stamps(Path(source) for source in report["sources"]) == report["sources"]
    except OSError:
        return False


def split_off(cuts: Iterable[Cut], names: Mapping[str, float], seed: int = 0) -> dict[str, list[Cut]]:
    """Set parts of a training set aside: {"train": [...], "dev": [...], ...}.

    names: share of the utterances for each part to set aside. Whole speakers where all utterances name one and there
    are at least three more speakers than parts, otherwise utterances. Who is chosen depends on the seed and on their
    own names only, so that other utterances may come or go. Raises ValueError for fewer utterances than parts + 1.
    """
    cuts = list(cuts)
    if len(cuts) <= len(names):
        raise ValueError(f"{len(cuts)} training utterances are too few to set {' and '.join(names)} aside from them.")
    speakers = [(cut.supervisions[0].speaker if cut.supervisions else None) or "" for cut in cuts]
    by_speaker = all(speakers) and len(set(speakers)) >= len(names) + 3
    groups: dict[str, list[int]] = {}
    for index, cut in enumerate(cuts):
        groups.setdefault(speakers[index] if by_speaker else cut.id, []).append(index)
    order = sorted(groups, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).hexdigest())
    part_of: dict[int, str] = {}
    for part, share in names.items():
        taken = 0
        while order and taken < max(1, round(share * len(cuts))) and len(order) > 1:
            members = groups[order.pop(0)]
            taken += len(members)
            part_of.update(dict.fromkeys(members, part))
    parts: dict[str, list[Cut]] = {name: [] for name in ("train", *names)}
    for index, cut in enumerate(cuts):
        parts[part_of.get(index, "train")].append(cut)
    logger.info("Set aside by %s: %s", "speaker" if by_speaker else "utterance", {k: len(v) for k, v in parts.items()})
    return parts
