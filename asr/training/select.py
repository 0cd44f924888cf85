"""Which weights to decode with: one checkpoint, or an average over a range of them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.training.averaging import difference_of_averages, mean_of_states
from asr.training.checkpoint import CheckpointFolder, load_checkpoint


@dataclass
class Selection:
    """Averaged weights, the checkpoint at the end of their range, and how they are named in folders and tables."""

    weights: dict[str, Tensor]
    checkpoint: dict[str, Any]
    kind: str
    number: int
    avg: int
    how: str

    @property
    def label(self) -> str:
        return f"{'iter' if self.kind == 'step' else 'epoch'}-{self.number}-avg-{self.avg}"

    def checksum(self) -> str:
        """sha256 of names and values of the weights."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(name.encode())
            digest.update(self.weights[name].detach().float().contiguous().numpy().tobytes())
        return digest.hexdigest()


def select_weights(
    run_dir: Path,
    epoch: int | None = None,
    step: int | None = None,
    avg: int = 1,
    use_averaged_model: bool = True,
    best: bool = False,
) -> Selection:
    """Weights after `epoch` (or optimiser step `step`; by default the newest epoch), averaged over `avg` of them.

    use_averaged_model: the mean over all updates of those epochs, as the difference of two running averages; the
        checkpoint before the range must exist, unless the range begins with the run. False: the mean of the
        checkpoints' weights, or, with avg=1, the weights themselves.
    best: the `avg` epochs up to `epoch` with the lowest dev WER instead of the last ones.
    Raises ValueError that names the epochs or steps that are missing.
    """
    folder = CheckpointFolder(run_dir / "checkpoints")
    kind = "epoch" if step is None else "step"
    have = folder.numbers(kind)
    if not have and kind == "epoch" and epoch is None and folder.numbers("step"):
        kind, have = "step", folder.numbers("step")  # a run that ended within its first epoch
    if not have:
        raise ValueError(f"{folder.folder}: there is no {kind} checkpoint here; is run_dir a trained run?")
    end = (epoch if kind == "epoch" else step) or have[-1]
    if end not in have:
        raise ValueError(f"{folder.folder}: {kind} {end} does not exist; there are {_ranges(have)}")
    checkpoint = load_checkpoint(folder.path(kind, end))
    if best:
        chosen = _best_epochs(folder, checkpoint, have, end, avg)
        states = [load_checkpoint(folder.path(kind, number))["model"] for number in chosen]
        return Selection(mean_of_states(states), checkpoint, kind, end, avg, f"best epochs {_ranges(chosen)}")
    wanted, before = _range(kind, have, end, avg, folder, checkpoint)
    if not use_averaged_model:
        missing = [number for number in wanted if number not in have]
        if missing:
            raise ValueError(
                f"{folder.folder}: {kind} {_ranges(missing)} of avg={avg} missing; there are {_ranges(have)}"
            )
        states = [load_checkpoint(folder.path(kind, number))["model"] for number in wanted]
        return Selection(mean_of_states(states), checkpoint, kind, end, avg, f"mean of {kind} {_ranges(wanted)}")
    if "average" not in checkpoint:
        raise ValueError(f"{folder.path(kind, end)}: holds no running average; use use_averaged_model=false")
    if before is None:
        start: dict[str, Any] = {"num_samples": 0, "state": checkpoint["average"]["state"]}
    elif before in have:
        start = load_checkpoint(folder.path(kind, before))["average"]
    else:
        raise ValueError(
            f"{folder.folder}: averaging {avg} up to {kind} {end} starts from {kind} {before}, which does not exist; "
            f"there are {_ranges(have)}. Use a smaller avg, or use_averaged_model=false"
        )
    weights = difference_of_averages(start, checkpoint["average"])
    model = checkpoint["model"]
    # The average lists a tensor of several names once, in fp64; the model wants every name, at least fp32.
    weights = {name: weights[name].to(_at_least_fp32(model[name])) for name in weights}
    for name, tensor in model.items():
        if name not in weights:
            twin = next(n for n in weights if model[n].data_ptr() == tensor.data_ptr())
            weights[name] = weights[twin]
    return Selection(weights, checkpoint, kind, end, avg, f"running average over {kind} {_ranges(wanted)}")


def averages_to_try(
    run_dir: Path, epoch: int | None, step: int | None, use_averaged_model: bool = True, best: bool = False
) -> list[int]:
    """Of 1, 2, 3, 5, 7, 10, 15, 20, 30 those numbers for which `select_weights` finds every checkpoint it needs."""
    newest = select_weights(run_dir, epoch, step, use_averaged_model=False)
    folder, checkpoint = CheckpointFolder(run_dir / "checkpoints"), newest.checkpoint
    have = folder.numbers(newest.kind)
    possible = []
    for avg in (1, 2, 3, 5, 7, 10, 15, 20, 30):
        try:
            if best:
                _best_epochs(folder, checkpoint, have, newest.number, avg)
                possible.append(avg)
                continue
            wanted, before = _range(newest.kind, have, newest.number, avg, folder, checkpoint)
        except ValueError:
            continue
        there = (before is None or before in have) if use_averaged_model else set(wanted) <= set(have)
        if there:
            possible.append(avg)
    return possible or [1]


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def _range(
    kind: str, have: list[int], end: int, avg: int, folder: CheckpointFolder, checkpoint: dict[str, Any]
) -> tuple[list[int], int | None]:
    """Numbers to average, and the one before them (None: the start of the run)."""
    if kind == "epoch":
        if avg > end:
            missing = f"epochs {end - avg + 1} to 0" if end - avg + 1 < 0 else "epoch 0"
            raise ValueError(
                f"{folder.folder}: avg={avg} up to epoch {end} would need {missing}, which cannot exist; "
                f"avg is at most {end} here"
            )
        return list(range(end - avg + 1, end + 1)), end - avg or None
    upto = [number for number in have if number <= end]
    if len(upto) < avg:
        raise ValueError(f"{folder.folder}: avg={avg} needs {avg} step checkpoints; there are {_ranges(upto)}")
    if len(upto) > avg:
        return upto[-avg:], upto[-avg - 1]
    # Earlier ones may have been removed (keep_last) or never written; only the first of a run begins with it.
    first = upto[0]
    spacing = checkpoint["config"]["trainer"]["save_every"] or (first if checkpoint["progress"]["epoch"] == 1 else 1)
    return upto, first - spacing if first > spacing else None


def _best_epochs(folder: CheckpointFolder, checkpoint: dict, have: list[int], end: int, avg: int) -> list[int]:
    finite = (entry for entry in checkpoint["progress"]["valid"] if math.isfinite(entry["loss"]))
    scored = {entry["epoch"]: entry["wer"] for entry in finite if entry["wer"] is not None}
    ranked = sorted((wer, number) for number, wer in scored.items() if number in have and number <= end)
    if len(ranked) < avg:
        raise ValueError(
            f"{folder.folder}: avg={avg} best epochs asked for, {len(ranked)} have a dev WER and a checkpoint"
        )
    return sorted(number for _, number in ranked[:avg])


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 5 as "1-3, 5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "none"
