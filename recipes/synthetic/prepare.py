"""The synthetic corpus: generated where it is absent, then prepared by the recipe whose layout it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asr.data.corpus import Corpus
from recipes.aishell import prepare as aishell
from recipes.librispeech import prepare as librispeech
from recipes.synthetic.generate import STAMP, generate


def prepare(
    corpus_dir: str,
    language: str = "en",
    num_train: int = 1500,
    num_dev: int = 100,
    num_test: int = 200,
    seed: int = 0,
    snr: Sequence[float] = (12.0, 35.0),
    reverberated: float = 0.5,
) -> Corpus:
    """Splits train, dev and test; see `generate` for the arguments.

    Raises ValueError where `corpus_dir` holds something else, or espeak-ng is missing.
    """
    low, high = snr
    generate(corpus_dir, language, num_train, num_dev, num_test, seed, (low, high), reverberated)
    if language == "en":
        corpus = librispeech.prepare(corpus_dir, train=["train"], dev=["dev"], tests=["test"])
    else:
        corpus = aishell.prepare(corpus_dir)
    corpus.sources.append(Path(corpus_dir) / STAMP)
    return corpus
