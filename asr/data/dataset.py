"""Cuts -> Batch: audio is read, perturbed and turned into features here, in the loader's workers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Protocol

import torch
from lhotse.cut import Cut
from torch import Tensor

from asr.data.augment import cut_rng
from asr.data.cuts import load_audio
from asr.data.store import FeatureStore
from asr.types import Batch, Skipped


class TextEncoder(Protocol):
    """What the dataset needs of a tokenizer."""

    @property
    def normaliser(self) -> Callable[[str], str]: ...

    def encode(self, text: str) -> list[int]: ...


# Log-mel features of nothing, as Lhotse and icefall pad: models that see their padding were trained to hear it as this.
SILENCE = math.log(1e-10)

NOT_FINITE = "its audio gives features that are not finite"

# A change of a cut's audio: (cut, generator of this cut and epoch) -> cut.
CutAugment = Callable[[Cut, random.Random], Cut]


class SpeechDataset(torch.utils.data.Dataset):
    """Maps (cuts, epoch) to a Batch.

    What is random depends on the seed, the epoch and the cut's id alone, so neither the number of workers nor a
    resumed run changes it. A cut that cannot be read is left out and named in `Batch.skipped`.

    Args:
        extract: samples (N,) in [-1, 1] at 16 kHz -> (T, F) features.
        num_mel_bins: F, needed for a batch of which nothing could be read.
        tokenizer: text -> token ids.
        seed: of the augmentation.
        cut_augments: applied in order; empty outside training.
        store: where features are kept; only without `cut_augments`, which change with every epoch.
    """

    def __init__(
        self,
        extract: Callable[[Tensor], Tensor],
        num_mel_bins: int,
        tokenizer: TextEncoder,
        seed: int = 0,
        cut_augments: tuple[CutAugment, ...] = (),
        store: FeatureStore | None = None,
    ):
        self.extract = extract
        self.num_mel_bins = num_mel_bins
        self.tokenizer = tokenizer
        self.seed = seed
        self.cut_augments = cut_augments
        self.store = store

    def __getitem__(self, item: tuple[list[Cut], int]) -> Batch:
        cuts, epoch = item
        with one_thread():
            return self._batch(cuts, epoch)

    def _batch(self, cuts: list[Cut], epoch: int) -> Batch:
        read: list[tuple[Cut, Tensor]] = []
        skipped: list[Skipped] = []

        def skip(cut: Cut, reason: str) -> None:
            skipped.append(Skipped(cut.id, reason, self.tokenizer.normaliser(_text(cut))))

        for cut in cuts:
            try:
                features = self._features(cut, epoch)
            except ValueError as error:
                skip(cut, str(error))
                continue
            if features.isfinite().all():
                read.append((cut, features))
            else:
                skip(cut, NOT_FINITE)
        texts = [self.tokenizer.normaliser(_text(cut)) for cut, _ in read]
        tokens = [torch.tensor(self.tokenizer.encode(text), dtype=torch.int64) for text in texts]
        features_BTF, feature_lens_B = _pad([f for _, f in read], (self.num_mel_bins,), SILENCE)
        tokens_BU, token_lens_B = _pad(tokens, (), 0)
        return Batch(
            ids=[cut.id for cut, _ in read],
            features=features_BTF,
            feature_lens=feature_lens_B,
            tokens=tokens_BU.long(),
            token_lens=token_lens_B,
            texts=texts,
            speakers=[cut.supervisions[0].speaker or "" for cut, _ in read],
            audio_seconds=float(sum(cut.duration for cut, _ in read)),
            skipped=skipped,
        )

    def _features(self, cut: Cut, epoch: int) -> Tensor:
        if self.store and not self.cut_augments:
            return self.store.get(cut, lambda: self._compute(cut, epoch))
        return self._compute(cut, epoch)

    def _compute(self, cut: Cut, epoch: int) -> Tensor:
        if self.cut_augments:
            generator = cut_rng(self.seed, epoch, cut.id)
            for augment in self.cut_augments:
                cut = augment(cut, generator)
        samples = torch.from_numpy(load_audio(cut))
        # Dither draws from torch's generator, which in a worker is another one than in this process.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(cut_rng(self.seed, epoch, cut.id).getrandbits(63))
            return self.extract(samples)


def _text(cut: Cut) -> str:
    return cut.supervisions[0].text or ""


def _pad(items: list[Tensor], tail: tuple[int, ...], value: float) -> tuple[Tensor, Tensor]:
    """Items (L, *tail) of different lengths -> (B, max L, *tail) with `value` after them, and their lengths (B,)."""
    lens = torch.tensor([len(item) for item in items], dtype=torch.int64)
    longest = int(lens.max()) if items else 0
    dtype = items[0].dtype if items else torch.float32
    padded = torch.full((len(items), longest, *tail), value, dtype=dtype)
    for row, item in zip(padded, items, strict=True):
        row[: len(item)] = item
    return padded, lens


@contextmanager
def one_thread():
    """Feature extraction on several threads of a busy machine is many times slower than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
