"""Audio in a few large files instead of many small ones, for the file systems of clusters (Lhotse Shar).

A Shar folder holds pairs of cuts.000000.jsonl.gz and recording.000000.tar with 1,000 utterances each. Other tools read
it from front to back; here a cut names its bytes in the tar, so batches, resuming and all else stay as they are.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from lhotse import AudioSource, CutSet
from lhotse.cut import Cut, MixedCut
from lhotse.utils import fastcopy

from asr.data.cuts import Manifest, byte_range, iterate_cuts

UTTERANCES_PER_SHARD = 1000


def store_in_shar(manifest: Path, folder: Path, num_jobs: int = 1) -> None:
    """Write the audio of a manifest's cuts into the Shar folder, as FLAC, and let the manifest refer to it there.

    Raises ValueError for a cut that is mixed from several recordings: it has no audio of its own.
    """
    if mixed := next((cut.id for cut in Manifest(manifest) if isinstance(cut, MixedCut)), None):
        raise ValueError(f"data.shar_dir: {mixed!r} is mixed from several recordings, which Shar cannot store")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("cuts.*.jsonl.gz"), *folder.glob("recording.*.tar")):
        old.unlink()
    CutSet(Manifest(manifest)).to_shar(
        folder, fields={"recording": "flac"}, shard_size=UTTERANCES_PER_SHARD, num_jobs=num_jobs
    )
    stored = manifest.with_name(f"{manifest.name.partition('.')[0]}.stored.jsonl.gz")
    try:
        with CutSet.open_writer(stored, overwrite=True) as writer:
            for cut in stored_cuts(folder):
                writer.write(cut, flush=False)
        os.replace(stored, manifest)
    finally:
        stored.unlink(missing_ok=True)


def stored_cuts(folder: Path) -> Iterator[Cut]:
    """Cuts of a Shar folder, whose recordings are byte ranges of its tar files."""
    for shard in sorted(folder.glob("cuts.*.jsonl.gz")):
        archive = folder / shard.name.replace("cuts.", "recording.", 1).replace(".jsonl.gz", ".tar")
        with tarfile.open(archive) as members:
            audio = (member for member in members if not member.name.endswith(".json"))
            for cut, member in zip(iterate_cuts(shard), audio, strict=True):
                source = byte_range(archive, member.offset_data, member.size)
                channels = cut.recording.sources[0].channels
                sources = [AudioSource(type="file", channels=channels, source=source)]
                yield fastcopy(cut, recording=fastcopy(cut.recording, sources=sources))
