"""AISHELL-1: the published tree -> cuts.

<corpus_dir>/wav/{train,dev,test}/<speaker>/<id>.wav     or still packed: <corpus_dir>/wav/<speaker>.tar.gz
<corpus_dir>/transcript/aishell_transcript_v0.8.txt      lines of `<id> <words separated by spaces>`
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from filelock import FileLock
from lhotse.cut import Cut
from tqdm import tqdm

from asr.data.corpus import Corpus
from asr.data.cuts import make_cut
from asr.data.lines import read_lines

PARTS = ("train", "dev", "test")
TRANSCRIPT = Path("transcript") / "aishell_transcript_v0.8.txt"


def prepare(corpus_dir: str, keep_spaces: bool = False) -> Corpus:
    """Cuts of train, dev and test.

    The transcripts are split into words by spaces; keep_spaces keeps that, otherwise the text is joined.
    Archives of speakers are unpacked beside themselves first, if nothing has been unpacked yet.
    Recordings without a transcript and transcripts without a recording are counted and left out.
    """
    root = Path(corpus_dir)
    if (root / "data_aishell").is_dir():
        root = root / "data_aishell"
    transcript = root / TRANSCRIPT
    if not transcript.is_file():
        raise ValueError(
            f"{root} is not an AISHELL tree: no {TRANSCRIPT}. Set data.corpus.corpus_dir to the folder data_aishell."
        )
    _unpack(root / "wav")
    texts = _read_transcript(transcript, keep_spaces)
    corpus = Corpus(splits={}, sources=[transcript])
    with_audio: set[str] = set()
    for part in PARTS:
        paths = sorted((root / "wav" / part).glob("*/*.wav"))
        if not paths:
            raise ValueError(f"{root / 'wav' / part} holds no <speaker>/<id>.wav.")
        with_audio.update(path.stem for path in paths)
        known = [path for path in paths if path.stem in texts]
        corpus.notes["audio without transcript"] = (
            corpus.notes.get("audio without transcript", 0) + len(paths) - len(known)
        )
        corpus.sources.append(root / "wav" / part)
        corpus.splits[part] = _cuts(known, texts)
    corpus.notes["transcript without audio"] = len(texts.keys() - with_audio)
    return corpus


def _cuts(paths: Sequence[Path], texts: dict[str, str]) -> Iterator[Cut]:
    for path in paths:
        yield make_cut(path.stem, path, texts[path.stem], speaker=path.parent.name, language="zh")


def _read_transcript(path: Path, keep_spaces: bool) -> dict[str, str]:
    texts = {}
    for _, line in read_lines(path):
        utterance, *words = line.split()
        texts[utterance] = (" " if keep_spaces else "").join(words)
    return texts


def _unpack(folder: Path) -> None:
    """Unpack archives of speakers into <folder>/<part>/<speaker>; names inside them never lead elsewhere.

    All are unpacked beside their place and moved there once they are whole, so that nothing interrupted looks
    finished: the next start begins anew, or goes on moving.
    """
    archives = sorted(folder.glob("*.tar.gz"))
    partial, whole = folder / ".unpacking", folder / ".unpacked"

    def finished() -> bool:
        return not whole.is_dir() and any((folder / part).is_dir() for part in PARTS)

    if not archives or finished():
        return
    with FileLock(f"{partial}.lock"):  # several runs may find the archives at once
        if finished():
            return
        if not whole.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for path in tqdm(archives, desc="unpacking speakers", disable=None):
                _unpack_speaker(path, partial)
            partial.rename(whole)
        for part in sorted(whole.iterdir()):
            part.rename(folder / part.name)
        whole.rmdir()


def _unpack_speaker(path: Path, folder: Path) -> None:
    with tarfile.open(path) as archive:
        for member in archive:
            where = PurePosixPath(member.name).parts[-3:]
            content = archive.extractfile(member) if member.isfile() and member.name.endswith(".wav") else None
            if content is None or len(where) != 3 or where[0] not in PARTS or where[1] == "..":
                continue
            target = folder.joinpath(*where)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())
