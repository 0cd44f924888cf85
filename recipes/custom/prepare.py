"""Bring your own data: each split in any of the forms that `readers` lists."""

from __future__ import annotations

from collections.abc import Iterable

from lhotse.cut import Cut

from asr.data.corpus import Corpus, split_off
from recipes.custom.readers import read


def prepare(
    train: str | None = None,
    dev: str | None = None,
    test: str | None = None,
    dev_share: float = 0.05,
    test_share: float = 0.05,
    seed: int = 0,
    shar_audio_dir: str | None = None,
) -> Corpus:
    """The splits that are given; dev and test are set aside from train where they are not.

    dev_share, test_share: how much of train is set aside: whole speakers where they are known, else utterances.
    shar_audio_dir: where the recordings of Shar folders are unpacked to, each source into a folder of its own.
    Raises ValueError where nothing is given or a path is in no known form.
    """
    given = {name: path for name, path in (("train", train), ("dev", dev), ("test", test)) if path}
    if not given:
        raise ValueError(
            "No data is given: set data.train (and, if you have them, data.dev and data.test) to its path."
        )
    corpus = Corpus(splits={})
    splits: dict[str, Iterable[Cut]] = {name: read(path, corpus, shar_audio_dir) for name, path in given.items()}
    if "train" in splits:
        missing = {name: share for name, share in (("dev", dev_share), ("test", test_share)) if name not in splits}
        if missing:
            splits.update(split_off(splits["train"], missing, seed))
    corpus.splits = {name: splits[name] for name in ("train", "dev", "test") if name in splits}
    return corpus
