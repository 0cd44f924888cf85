"""Features on disk, for machines whose processors are slower than their disks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from lhotse.cut import Cut
from torch import Tensor

from asr.data.cuts import audio_identity


class FeatureStore:
    """Features of cuts in `folder`, each computed when it is first asked for.

    They are kept as fp16, and what was just computed is rounded likewise, so that no epoch differs from another. A
    folder belongs to one state of the data and one setting of the features: files are named after cuts and the audio
    behind them alone. Two sets may give one id to different recordings.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, cut: Cut, compute: Callable[[], Tensor]) -> Tensor:
        """(T, F) float32 features of `cut`. Raises what `compute` raises."""
        path = self._path(cut)
        try:
            stored = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            stored = compute().numpy().astype(np.float16)
            self._write(path, stored)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{path} is broken ({error}); delete it, and it is made anew") from None
        return torch.from_numpy(stored.astype(np.float32))

    def _path(self, cut: Cut) -> Path:
        name = hashlib.sha256(repr((cut.id, audio_identity(cut))).encode()).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.npy"

    @staticmethod
    def _write(path: Path, features: np.ndarray) -> None:
        """Whole or not at all, whichever of several workers or runs is first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.partial-{os.getpid()}.npy")
        np.save(partial, features)
        partial.replace(path)
