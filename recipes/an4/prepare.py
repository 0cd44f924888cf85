"""CMU AN4 (census): the published tree -> cuts.

    <corpus_dir>/wav/an4_clstk/<speaker>/<id>.{wav,sph,flac}       etc/an4_train.{fileids,transcription}
    <corpus_dir>/wav/an4test_clstk/<speaker>/<id>.{wav,sph,flac}   etc/an4_test.{fileids,transcription}

The publisher has no development set: `dev_speakers` speakers of the training part, drawn with `dev_seed`, become it.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from lhotse.cut import Cut

from asr.data.corpus import Corpus
from asr.data.cuts import make_cut
from asr.data.lines import read_lines

SUFFIXES = (".wav", ".sph", ".flac", ".WAV", ".SPH", ".FLAC")
# Lines of the training part are `<s> WORDS </s> (id)`, those of the test part `WORDS (id)`.
TRANSCRIPT = re.compile(r"^\s*(?:<s>)?(?P<text>.*?)(?:</s>)?\s*\((?P<id>[^()\s]+)\)\s*$")


def prepare(corpus_dir: str, dev_speakers: int = 10, dev_seed: int = 0) -> Corpus:
    """Training and development cuts, and "test" where the published test part is present.

    Raises ValueError where the tree is not AN4 or `dev_speakers` leaves no training speaker.
    """
    root = Path(corpus_dir)
    if not (root / "etc" / "an4_train.transcription").is_file():
        raise ValueError(
            f"{root} is not an AN4 tree: no etc/an4_train.transcription. "
            "Unpack the publisher's an4 archive and set data.corpus.corpus_dir to the folder that holds etc and wav."
        )
    corpus = Corpus(splits={})
    training = _read_part(root, "an4_train", corpus)
    speakers = sorted({_speaker(cut) for cut in training})
    if not 0 < dev_speakers < len(speakers):
        raise ValueError(
            f"data.corpus.dev_speakers={dev_speakers}: allowed are 1 to {len(speakers) - 1}, "
            f"as {root} has {len(speakers)} training speakers."
        )
    held_out = set(random.Random(dev_seed).sample(speakers, dev_speakers))
    corpus.splits["train"] = [cut for cut in training if _speaker(cut) not in held_out]
    corpus.splits["dev"] = [cut for cut in training if _speaker(cut) in held_out]
    if (root / "etc" / "an4_test.transcription").is_file():
        corpus.splits["test"] = _read_part(root, "an4_test", corpus)
    return corpus


def _speaker(cut: Cut) -> str:
    return cut.supervisions[0].speaker or ""


def _read_part(root: Path, part: str, corpus: Corpus) -> list[Cut]:
    """Cuts of one part in the order of its file list; what lacks a transcript or a place in the list is counted."""
    transcription, fileids = root / "etc" / f"{part}.transcription", root / "etc" / f"{part}.fileids"
    corpus.sources += [transcription, fileids]
    texts: dict[str, str] = {}
    for number, line in read_lines(transcription):
        match = TRANSCRIPT.match(line)
        if match is None:
            raise ValueError(f"{transcription}, line {number}: expected `WORDS (id)`, found {line!r}.")
        texts[match["id"]] = match["text"].strip()
    cuts = []
    unused = dict(texts)
    for name in (line.strip() for _, line in read_lines(fileids)):
        utterance = Path(name).name
        if utterance not in texts:
            _count(corpus, "audio without transcript")
            continue
        unused.pop(utterance, None)
        base = root / "wav" / name
        path = next((path for suffix in SUFFIXES if (path := Path(f"{base}{suffix}")).is_file()), Path(f"{base}.wav"))
        cuts.append(make_cut(utterance, path, texts[utterance], speaker=Path(name).parent.name, language="en"))
    _count(corpus, "transcript without audio", len(unused))
    return cuts


def _count(corpus: Corpus, note: str, number: int = 1) -> None:
    corpus.notes[note] = corpus.notes.get(note, 0) + number
