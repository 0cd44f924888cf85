"""Generate a corpus of synthetic speech in a publisher's layout.

English becomes a LibriSpeech tree (parts train, dev, test), Mandarin an AISHELL tree, so that everything after this
file is the real recipe's code. The voices of the three parts are disjoint. One process makes all in a fixed order from
one seed, so that every machine of a kind gets the same samples; their fingerprint is in `synthetic.json`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torchaudio
from tqdm import tqdm

from recipes.synthetic.espeak import Espeak, synthesizer
from recipes.synthetic.texts import SENTENCES, sentence

SAMPLE_RATE = 16000
STAMP = "synthetic.json"
VERSION = 2  # raised when the same settings begin to give other samples
LANGUAGE_VOICES = {"en": "gmw/en-US", "zh": "cmn"}  # as the wheel's data names them; its short names are not found

# Those of espeak-ng's variants that speak clearly: no whispers, robots, croaks and jokes, and none for training
# that is nearly a copy of one for testing (gustave of Michael, Mike of m3, adam of Reed).
VARIANTS = {
    "train": (
        "Alex Alicia Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Nguyen RicishayMax Storm Tweaky "
        "antonio benjamin boris david ed edward f1 f2 f3 f5 grandma iven john kaukovalta klatt4 m1 m2 m4 m5 m7 "
        "m8 marcelo max michel miguel mike2 norbert pablo pedro rob robert shelby steph victor"
    ),
    "dev": "Mario Reed belinda m6 quincy",
    "test": "Andrea Lee Michael aunty f4 linda m3 paul sandro travis",
}
SPEAKERS_PER_VARIANT = {"train": 2, "dev": 1, "test": 1}
FIRST_SPEAKER = {"train": 1000, "dev": 2000, "test": 3000}


@dataclass(frozen=True)
class Speaker:
    """A voice: a variant of espeak-ng with its own pitch and liveliness (0 to 100) and rate (words per minute)."""

    number: int
    voice: str
    pitch: int
    pitch_range: int
    rate: int


@dataclass(frozen=True)
class Utterance:
    """One sentence of a part, with its samples (N,) int16 at 16 kHz."""

    speaker: int
    number: int
    text: str
    samples: np.ndarray


def generate(
    output_dir: str,
    language: str = "en",
    num_train: int = 1500,
    num_dev: int = 100,
    num_test: int = 200,
    seed: int = 0,
    snr: tuple[float, float] = (12.0, 35.0),
    reverberated: float = 0.5,
) -> dict[str, Any]:
    """Write the tree to `output_dir` unless it is there; return its stamp {"settings", "fingerprint", "hours"}.

    language: "en" or "zh"; snr: range of the signal-to-noise ratio in dB; reverberated: share of utterances in a room.
    Raises ValueError where `output_dir` holds anything else than a corpus of these very settings.
    """
    if language not in SENTENCES:
        raise ValueError(f"data.corpus.language={language!r}: allowed are {', '.join(SENTENCES)}.")
    numbers = {"train": num_train, "dev": num_dev, "test": num_test}
    settings = {"version": VERSION, "language": language, **numbers, "seed": seed, "snr": list(snr)}
    settings["reverberated"] = reverberated
    output = Path(output_dir)
    if stamp := _existing(output, settings):
        return stamp
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        arguments = (partial, language, numbers, seed, snr, reverberated)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            fingerprint, hours = pool.submit(_make_tree, *arguments).result()
        stamp = {"settings": settings, "fingerprint": fingerprint, "hours": hours}
        (partial / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        try:
            partial.rename(output)
        except OSError:  # another run has put the same corpus there in the meantime
            stamp = _existing(output, settings) or stamp
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return stamp


def _make_tree(
    root: Path, language: str, numbers: dict[str, int], seed: int, snr: tuple[float, float], reverberated: float
) -> tuple[str, float]:
    """Write all parts; returns the fingerprint and the hours. Runs in a process of its own, see `Espeak.speak`."""
    torch.set_num_threads(1)
    digest = hashlib.sha256()
    seconds = 0.0
    write = _write_librispeech if language == "en" else _write_aishell
    espeak = synthesizer()
    for part, number in numbers.items():
        utterances = _speak(espeak, part, number, language, seed, snr, reverberated)
        for utterance in write(root, part, tqdm(utterances, f"speaking {part}", number, disable=None)):
            digest.update(f"{utterance.speaker} {utterance.number} {utterance.text}\n".encode())
            digest.update(utterance.samples.tobytes())
            seconds += len(utterance.samples) / SAMPLE_RATE
    return digest.hexdigest(), round(seconds / 3600, 4)


def _existing(output: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The stamp of a finished corpus of these settings, None where there is nothing."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    try:
        stamp = json.loads((output / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(
            f"{output} is not a synthetic corpus (it has no {STAMP}). Set data.corpus.corpus_dir to another folder."
        ) from None
    if stamp["settings"] == settings:
        return stamp
    different = sorted(key for key in settings if stamp["settings"].get(key) != settings[key])
    found = ", ".join(f"{key}={stamp['settings'].get(key)}" for key in different)
    wanted = ", ".join(f"{key}={settings[key]}" for key in different)
    raise ValueError(
        f"{output} holds a synthetic corpus with {found}, but {wanted} is asked for. Delete that folder or set "
        "data.corpus.corpus_dir to another."
    )


def speakers_of(part: str, language: str, seed: int) -> list[Speaker]:
    """The speakers of a part; no variant of espeak-ng is in two parts."""
    speakers: list[Speaker] = []
    for variant in VARIANTS[part].split():
        for copy in range(SPEAKERS_PER_VARIANT[part]):
            pick = random.Random(f"{seed} {variant} {copy}")
            speakers.append(
                Speaker(
                    number=FIRST_SPEAKER[part] + len(speakers),
                    voice=f"{LANGUAGE_VOICES[language]}+{variant}",
                    pitch=pick.randint(35, 65),
                    pitch_range=pick.randint(35, 65),
                    rate=pick.randint(140, 195),
                )
            )
    return speakers


def _speak(
    espeak: Espeak, part: str, number: int, language: str, seed: int, snr: tuple[float, float], reverberated: float
) -> Iterator[Utterance]:
    speakers = speakers_of(part, language, seed)
    resample = torchaudio.transforms.Resample(espeak.sample_rate, SAMPLE_RATE)
    for index in range(number):
        speaker = speakers[index % len(speakers)]
        pick = random.Random(f"{seed} {part} {index}")
        generator = np.random.default_rng(pick.getrandbits(64))
        text = sentence(language, pick)
        rate = round(speaker.rate * pick.uniform(0.93, 1.07))
        pitch = min(99, max(0, speaker.pitch + pick.randint(-5, 5)))
        spoken = espeak.speak(text, speaker.voice, rate, pitch, speaker.pitch_range)
        speech = resample(torch.from_numpy(spoken.astype(np.float32) / 32768.0)).numpy()
        speech = np.pad(speech, (pick.randint(800, 3200), pick.randint(800, 3200)))
        if pick.random() < reverberated:
            speech = _in_room(speech, pick.uniform(0.05, 0.35), pick.uniform(0.1, 0.5), generator)
        speech = _with_noise(speech, pick.uniform(*snr), pick.uniform(0.0, 1.0), generator)
        peak = 10 ** (pick.uniform(-12.0, -1.0) / 20)
        samples = np.round(speech / np.abs(speech).max() * peak * 32767).astype(np.int16)
        yield Utterance(speaker.number, index // len(speakers), text, samples)


def _in_room(speech: np.ndarray, decay: float, amount: float, generator: np.random.Generator) -> np.ndarray:
    """Speech with reverberation: the direct sound, then noise that falls by 60 dB in `decay` seconds.

    amount: energy of the reverberation relative to the direct sound.
    """
    times = np.arange(int(decay * SAMPLE_RATE)) / SAMPLE_RATE
    tail = generator.standard_normal(len(times)) * 10 ** (-3 * times / decay)
    tail[: SAMPLE_RATE // 500] = 0.0  # the first echo comes after 2 ms
    response = tail * np.sqrt(amount / np.sum(tail**2))
    response[0] = 1.0
    size = _fast_size(len(speech) + len(response) - 1)
    return np.fft.irfft(np.fft.rfft(speech, size) * np.fft.rfft(response, size), size)[: len(speech)]


def _with_noise(speech: np.ndarray, snr: float, tilt: float, generator: np.random.Generator) -> np.ndarray:
    """Speech with noise at `snr` dB; tilt 0 is white noise, 1 is pink noise."""
    size = _fast_size(len(speech))
    spectrum = np.fft.rfft(generator.standard_normal(size))
    spectrum[1:] /= np.arange(1, len(spectrum)) ** (tilt / 2)
    noise = np.fft.irfft(spectrum, size)[: len(speech)]
    return speech + noise * np.sqrt(np.mean(speech**2) / np.mean(noise**2) / 10 ** (snr / 10))


def _fast_size(size: int) -> int:
    """The next power of two: a transform of a prime length is ten times slower."""
    return 1 << (size - 1).bit_length()


def _write_librispeech(root: Path, part: str, utterances: Iterator[Utterance]) -> Iterator[Utterance]:
    """<root>/<part>/<speaker>/1/<speaker>-1-<number>.flac with transcripts in upper case."""
    for utterance in utterances:
        folder = root / part / str(utterance.speaker) / "1"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{utterance.speaker}-1-{utterance.number:04d}"
        soundfile.write(folder / f"{name}.flac", utterance.samples, SAMPLE_RATE)
        with (folder / f"{utterance.speaker}-1.trans.txt").open("a", encoding="utf-8") as transcripts:
            transcripts.write(f"{name} {utterance.text.upper()}\n")
        yield utterance


def _write_aishell(root: Path, part: str, utterances: Iterator[Utterance]) -> Iterator[Utterance]:
    """<root>/wav/<part>/S<speaker>/*.wav with one file of transcripts."""
    transcript = root / "transcript" / "aishell_transcript_v0.8.txt"
    transcript.parent.mkdir(parents=True, exist_ok=True)
    for utterance in utterances:
        folder = root / "wav" / part / f"S{utterance.speaker}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"SYN001S{utterance.speaker}W{utterance.number:04d}"
        soundfile.write(folder / f"{name}.wav", utterance.samples, SAMPLE_RATE)
        with transcript.open("a", encoding="utf-8") as transcripts:
            transcripts.write(f"{name} {' '.join(utterance.text)}\n")
        yield utterance
