"""Free Spoken Digit Dataset -> connected digits: seeded strings of one speaker's recordings, as mixed cuts.

    <corpus_dir>/recordings/<digit>_<speaker>_<index>.{wav,flac}

No audio is copied: a string is a cut whose tracks are the recordings, one after another with short silences.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from lhotse import Recording, SupervisionSegment
from lhotse.cut import Cut, MixedCut, MixTrack, MonoCut

from asr.data.corpus import Corpus
from asr.data.cuts import AudioError, Rejection, open_recording

WORDS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
NAME = re.compile(r"^(?P<digit>\d)_(?P<speaker>[^_]+)_(?P<index>\d+)\.(?:wav|flac)$")
PUBLISHED_TEST_INDICES = 5  # the publisher's test split is index 0-4, training is 5-49


class Digit:
    """One recording of one digit."""

    def __init__(self, path: Path, digit: int, speaker: str, index: int, recording: Recording):
        self.path, self.digit, self.speaker, self.index, self.recording = path, digit, speaker, index, recording


def prepare(
    corpus_dir: str,
    train_strings: int = 4000,
    dev_strings: int = 250,
    test_strings: int = 500,
    max_digits: int = 7,
    max_gap: float = 0.2,
    dev_indices: int = 5,
    test_speakers: list[str] | None = None,
    seed: int = 0,
) -> Corpus:
    """Strings of 1 to max_digits digits as "train", "dev" and "test", and single recordings as "test_single".

    max_gap: longest silence between digits in seconds; dev_indices: how many recordings of each digit and speaker,
    drawn with the seed, are set aside for dev; test_speakers: None for the published split, or the speakers of whom
    nothing is trained or developed on. No recording is used by two splits.
    Raises ValueError where there are no recordings or a speaker is unknown.
    """
    recordings = Path(corpus_dir) / "recordings"
    if not recordings.is_dir():
        raise ValueError(
            f"{corpus_dir} has no folder `recordings`. Clone the Free Spoken Digit Dataset and set "
            "data.corpus.corpus_dir to the clone."
        )
    corpus = Corpus(splits={}, sources=[recordings])
    digits = _read_digits(recordings, corpus)
    speakers = sorted({digit.speaker for digit in digits})
    for speaker in test_speakers or ():
        if speaker not in speakers:
            raise ValueError(f"data.corpus.test_speakers: {speaker!r} is not in {recordings}; there are {speakers}.")
    parts = _split(digits, test_speakers, dev_indices, seed)
    for split, number in (("train", train_strings), ("dev", dev_strings), ("test", test_strings)):
        if not parts[split]:
            raise ValueError(f"No recordings are left for the {split!r} split; test_speakers={test_speakers}.")
        corpus.splits[split] = _strings(parts[split], split, number, max_digits, max_gap, seed)
    corpus.splits["test_single"] = [_string(digit.path.stem, [digit], [0.0]) for digit in parts["test"]]
    return corpus


def _read_digits(folder: Path, corpus: Corpus) -> list[Digit]:
    digits = []
    for path in sorted(folder.iterdir()):
        match = NAME.match(path.name)
        if match is None:
            continue
        try:
            recording = open_recording(path)
        except AudioError as error:
            corpus.rejected.append(Rejection(path.stem, error.reason, error.detail, str(path), "recordings"))
            continue
        digits.append(Digit(path, int(match["digit"]), match["speaker"], int(match["index"]), recording))
    if not digits:
        raise ValueError(f"{folder} holds no recording named <digit>_<speaker>_<index>.wav or .flac.")
    return digits


def _split(digits: list[Digit], test_speakers: list[str] | None, dev_indices: int, seed: int) -> dict[str, list[Digit]]:
    """Recordings of each split; the same numbers of a speaker's recordings are set aside for every digit."""
    if test_speakers:
        test = [digit for digit in digits if digit.speaker in test_speakers]
        rest = [digit for digit in digits if digit.speaker not in test_speakers]
    else:
        test = [digit for digit in digits if digit.index < PUBLISHED_TEST_INDICES]
        rest = [digit for digit in digits if digit.index >= PUBLISHED_TEST_INDICES]
    indices = sorted({digit.index for digit in rest})
    held_out = set(random.Random(f"{seed} dev").sample(indices, min(dev_indices, max(0, len(indices) - 1))))
    return {
        "train": [digit for digit in rest if digit.index not in held_out],
        "dev": [digit for digit in rest if digit.index in held_out],
        "test": test,
    }


def _strings(digits: list[Digit], split: str, number: int, max_digits: int, max_gap: float, seed: int) -> list[Cut]:
    """Seeded strings, each of one speaker."""
    generator = random.Random(f"{seed} {split}")
    by_speaker: dict[str, list[Digit]] = {}
    for digit in digits:
        by_speaker.setdefault(digit.speaker, []).append(digit)
    speakers = sorted(by_speaker)
    cuts = []
    for count in range(number):
        speaker = generator.choice(speakers)
        chosen = [generator.choice(by_speaker[speaker]) for _ in range(generator.randint(1, max_digits))]
        gaps = [0.0] + [generator.uniform(0.0, max_gap) for _ in chosen[1:]]
        cuts.append(_string(f"{split}-{speaker}-{count:05d}", chosen, gaps))
    return cuts


def _string(cut_id: str, digits: list[Digit], gaps: list[float]) -> Cut:
    """A cut that plays the recordings one after another, gaps[i] seconds of silence before the i-th."""
    tracks: list[MixTrack] = []
    samples = 0
    rate = digits[0].recording.sampling_rate
    for number, (digit, gap) in enumerate(zip(digits, gaps, strict=True)):
        recording = digit.recording
        samples += round(gap * rate)
        cut = MonoCut(f"{cut_id}-{number}", 0.0, recording.duration, 0, recording=recording)
        tracks.append(MixTrack(cut=cut, offset=samples / rate))
        samples += recording.num_samples
    duration = samples / rate
    text = " ".join(WORDS[digit.digit] for digit in digits)
    tracks[0].cut.supervisions = [
        SupervisionSegment(cut_id, cut_id, 0.0, duration, 0, text=text, speaker=digits[0].speaker, language="en")
    ]
    if len(tracks) == 1:
        return tracks[0].cut.with_id(cut_id)
    return MixedCut(id=cut_id, tracks=tracks)
