"""LibriSpeech: the published tree -> cuts.

<corpus_dir>/<part>/<speaker>/<chapter>/<speaker>-<chapter>-<number>.flac
<corpus_dir>/<part>/<speaker>/<chapter>/<speaker>-<chapter>.trans.txt      lines of `<id> TEXT`
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from lhotse.cut import Cut

from asr.data.corpus import Corpus
from asr.data.cuts import make_cut
from asr.data.lines import read_lines

logger = logging.getLogger(__name__)

TRAIN_PARTS = ("train-clean-100", "train-clean-360", "train-other-500")
DEV_PARTS = ("dev-clean", "dev-other")
TEST_PARTS = ("test-clean", "test-other")


def prepare(
    corpus_dir: str,
    train: Sequence[str] = TRAIN_PARTS,
    dev: Sequence[str] = DEV_PARTS,
    tests: Sequence[str] = TEST_PARTS,
) -> Corpus:
    """Cuts of the parts that are there: those of `train` together, those of `dev` together, `tests` each by its name.

    Parts that are not there are named in the log and the report. Raises ValueError where none of `train` or none of
    `dev` is found, or a folder is no LibriSpeech part.
    """
    root = Path(corpus_dir)
    if (root / "LibriSpeech").is_dir():
        root = root / "LibriSpeech"
    corpus = Corpus(splits={})
    for split, parts in (("train", train), ("dev", dev), *((part, [part]) for part in tests)):
        found = [part for part in parts if (root / part).is_dir()]
        for part in sorted(set(parts) - set(found)):
            logger.warning("%s has no part %s; going on without it.", root, part)
            corpus.notes[f"part {part} not found"] = 1
        if found:
            chapters = [path for part in found for path in _transcripts(root / part)]
            corpus.sources += chapters
            corpus.splits[split] = _read(chapters, corpus)
        elif split in ("train", "dev"):
            raise ValueError(
                f"{root} has none of the parts {list(parts)} for {split!r}. Set data.corpus.corpus_dir to the folder "
                f"that holds them, or data.corpus.{split} to the parts that you have; "
                "`lhotse download librispeech --full FOLDER`, or --mini, gets them."
            )
    return corpus


def _transcripts(part: Path) -> list[Path]:
    found = sorted(part.glob("*/*/*.trans.txt"))
    if not found:
        raise ValueError(f"{part} holds no <speaker>/<chapter>/*.trans.txt, so it is no part of LibriSpeech.")
    return found


def _read(transcripts: Sequence[Path], corpus: Corpus) -> Iterator[Cut]:
    for transcript in transcripts:
        folder = transcript.parent
        audio = {path.stem: path for path in folder.iterdir() if path.suffix.lower() in (".flac", ".wav")}
        for number, line in read_lines(transcript):
            utterance, _, text = line.strip().partition(" ")
            speaker = utterance.split("-")[0]
            if speaker != folder.parent.name:
                raise ValueError(f"{transcript}, line {number}: {utterance!r} is not of speaker {folder.parent.name}.")
            path = audio.pop(utterance, None)
            if path is None:
                corpus.notes["transcript without audio"] = corpus.notes.get("transcript without audio", 0) + 1
                path = folder / f"{utterance}.flac"
            yield make_cut(utterance, path, text.strip(), speaker=speaker, language="en")
        if audio:
            corpus.notes["audio without transcript"] = corpus.notes.get("audio without transcript", 0) + len(audio)
