"""Checkpoint files: written whole or not at all, found by number, loaded without executing anything.

A checkpoint is one dict of tensors, numbers, strings, lists and dicts:

    model, average          parameters and the running fp64 average
    optimizer, precision    their states
    adversary               that of the second optimiser, where the model has an adversary, else None
    progress                epoch, batches of it that are done, step, skipped steps, history of results
    skipped                 utterances that could not be read, with reasons
    generators              one dict of random generator states per rank
    config                  the resolved configuration
    tokenizer               its whole state, with its hash
    versions                of Python, torch and the rest, with the git commit
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import random
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

NAME = re.compile(r"(epoch|step)-(\d+)\.pt")


def save_atomically(value: dict, path: Path) -> None:
    """Write `value` to `path` so that a crash or a full disk leaves the previous file as it was.

    Raises OSError that names the file when it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, (OSError, RuntimeError)):
            raise OSError(
                f"{path}: the checkpoint could not be written ({error}); earlier ones are untouched"
            ) from error
        raise


def load_checkpoint(path: Path, map_location: str = "cpu") -> dict:
    """Read a checkpoint. Raises ValueError that names the file when it is missing or broken."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such checkpoint") from None
    except Exception as error:  # broken bytes raise errors of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: this checkpoint cannot be read ({reason})") from error


class CheckpointFolder:
    """The checkpoints of one run: `epoch-N.pt` after epoch N, `step-N.pt` after optimiser step N."""

    def __init__(self, folder: Path):
        self.folder = folder

    def numbers(self, kind: str) -> list[int]:
        """Numbers of the checkpoints of a kind ("epoch" or "step"), ascending."""
        matches = (NAME.fullmatch(path.name) for path in self.folder.glob(f"{kind}-*.pt"))
        return sorted(int(match[2]) for match in matches if match)

    def path(self, kind: str, number: int) -> Path:
        return self.folder / f"{kind}-{number}.pt"

    def save(
        self, value: dict, kind: str, number: int, keep_last: int | None = None, keep: Collection[int] = ()
    ) -> Path:
        """Write a checkpoint, then remove leftovers of a crash and, of its kind, all but the newest `keep_last`.

        keep: numbers that stay however old they are.
        """
        path = self.path(kind, number)
        save_atomically(value, path)
        if keep_last:
            for old in self.numbers(kind)[:-keep_last]:
                if old not in keep:
                    self.path(kind, old).unlink(missing_ok=True)
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        return path

    def newest_first(self) -> Iterator[Path]:
        """Every checkpoint, the one furthest in training first; dates of files do not outlive a copy.

        Of an epoch and a step checkpoint after the same step, the epoch's comes first: it has been validated.
        """
        kinds = ([self.path(kind, number) for number in reversed(self.numbers(kind))] for kind in ("epoch", "step"))
        return heapq.merge(*kinds, key=_steps_done, reverse=True)

    def load_newest(self) -> tuple[Path, dict] | None:
        """The newest checkpoint that can be read, with a warning for each newer one that cannot; None where none is.

        Raises ValueError when there are checkpoints and none can be read.
        """
        broken = []
        for path in self.newest_first():
            try:
                return path, load_checkpoint(path)
            except ValueError as error:
                log.warning("%s; falling back to the one before it", error)
                broken.append(path.name)
        if broken:
            raise ValueError(
                f"{self.folder}: none of its checkpoints can be read ({', '.join(broken)}); "
                "remove them or choose another run_dir to start anew"
            )
        return None


def _steps_done(path: Path) -> float:
    """Optimiser steps behind a checkpoint; infinite where it is broken, so that its turn comes at once."""
    kind, number = path.stem.split("-")
    if kind == "step":
        return int(number)
    try:
        return torch.load(path, mmap=True, weights_only=True)["progress"]["step"]
    except Exception:  # load_checkpoint tells what is wrong with it
        return math.inf


def generator_states() -> dict:
    """The states of every random generator of this process, as plain tensors and lists."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    states: dict = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [numpy_state[0], torch.from_numpy(numpy_state[1].astype(np.int64)), *map(float, numpy_state[2:])],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: dict) -> None:
    """Put back what `generator_states` returned."""
    torch.set_rng_state(states["torch"].cpu())
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Copy `weights` into `model`. Raises ValueError that names the first tensors and both shapes where they differ."""
    own = model.state_dict()
    faults = [f"{name}: missing in the file" for name in own if name not in weights]
    faults += [f"{name}: unknown to the model" for name in weights if name not in own]
    for name in own.keys() & weights.keys():
        if own[name].shape != weights[name].shape:
            faults.append(f"{name}: {tuple(weights[name].shape)} in the file, {tuple(own[name].shape)} in the model")
    if faults:
        raise ValueError(f"{source}: does not fit the model: " + "; ".join(sorted(faults)[:5]))
    model.load_state_dict(weights)
