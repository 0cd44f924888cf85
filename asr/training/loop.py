"""The training loop: load, step, average, validate, save, and the exact way back into the middle of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from asr.layers.schedule import set_batch_count
from asr.model import AsrModel
from asr.scoring.files import format_rate
from asr.settings import TrainerSettings
from asr.training.averaging import RunningAverage
from asr.training.checkpoint import CheckpointFolder, generator_states, restore_generators
from asr.training.distributed import World, average_buffers, gather
from asr.training.doctor_report import Checkups
from asr.training.mfu import counting_flops
from asr.training.monitor import Monitor, SkippedItems, clock, part_figures, peak_memory_bytes
from asr.training.precision import NumericsError, PrecisionMode
from asr.training.schedule import Schedule, apply_schedule
from asr.training.step import StepResult, train_step
from asr.training.validate import Validation
from asr.types import Batch

log = logging.getLogger(__name__)


class EpochLoader(Protocol):
    """What the loop needs of a loader."""

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]: ...


@dataclass
class Progress:
    """Where a run stands. epoch is the one in progress, 1-based; batches of it that are done are counted per rank."""

    epoch: int = 1
    batches_done: int = 0
    step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    seconds_in_epoch: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    train_loss: list[dict[str, float]] = field(default_factory=list)
    valid: list[dict[str, Any]] = field(default_factory=list)
    seconds_per_epoch: list[float] = field(default_factory=list)

    def forget_epoch(self) -> None:
        """Set to zero what counts within an epoch."""
        self.batches_done, self.seconds_in_epoch = 0, 0.0
        self.loss_sum, self.loss_count = 0.0, 0

    def best(self, key: str = "wer") -> dict[str, Any] | None:
        """The validation with the lowest `key` of those with a finite loss; the earliest of equals.

        A model that has gone to NaN may well print nothing, and so be 100% wrong where a younger one was worse.
        """
        finite = [entry for entry in self.valid if entry[key] is not None and math.isfinite(entry["loss"])]
        return min(finite, key=lambda entry: entry[key], default=None)

    def outcome(self) -> str:
        """How the run ended, in one line."""
        best = self.best()
        if best is None:
            return "no dev WER: no validation had a finite loss and words to compare"
        last = format_rate(self.valid[-1]["wer"])
        return f"dev WER {last}% after the last epoch, best {best['wer']:.2f}% in epoch {best['epoch']}"


class Trainer:
    """Trains a model; every collaborator is handed in.

    Args:
        run_name: for train.json.
        run_dir: the run's folder.
        reference_batches: what a step counts for in `set_batch_count`.
        identity: what each checkpoint holds beside the state: config, tokenizer, versions, data fingerprint.
        validate: runs the dev set.
        on_validation: called with (model, step) after each validation, for pictures.
        adversary: the optimiser of the model's adversaries, where it has any; its learning rate follows no schedule.
    """

    def __init__(
        self,
        run_name: str,
        run_dir: Path,
        settings: TrainerSettings,
        model: AsrModel,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        loader: EpochLoader,
        validate: Callable[[AsrModel], Validation],
        precision: PrecisionMode,
        monitor: Monitor,
        identity: dict[str, Any],
        world: World,
        reference_batches: float = 1.0,
        on_validation: Callable[[AsrModel, int], None] | None = None,
        adversary: torch.optim.Optimizer | None = None,
    ):
        self.run_name = run_name
        self.settings = settings
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.loader = loader
        self.validate = validate
        self.precision = precision
        self.monitor = monitor
        self.identity = identity
        self.world = world
        self.reference_batches = reference_batches
        self.on_validation = on_validation
        self.adversary = adversary
        self.checkpoints = CheckpointFolder(run_dir / "checkpoints")
        self.average = RunningAverage(model, settings.average_period)
        self.progress = Progress()
        self.skipped_items = SkippedItems()
        self.checkups = Checkups(settings.doctor_every, precision, monitor, world)

    def fit(self) -> Progress:
        """Train to the last epoch or step. Raises NumericsError when non-finite steps do not end."""
        self._summarise("running")
        while not self.finished:
            self._run_epoch()
        if self.progress.batches_done:
            if not self._validated_now:
                self._validate()
            self._save("step", self.progress.step)
        self._summarise("finished")
        return self.progress

    @property
    def finished(self) -> bool:
        limit = self.settings.max_steps
        return self.progress.epoch > self.settings.max_epochs or (limit is not None and self.progress.step >= limit)

    @property
    def _validated_now(self) -> bool:
        return bool(self.progress.valid) and self.progress.valid[-1]["step"] == self.progress.step

    def _run_epoch(self) -> None:
        progress, settings = self.progress, self.settings
        self.model.train()
        batches = self.loader.epoch(progress.epoch, progress.batches_done)
        while not self.finished:
            started = time.perf_counter()
            group = list(islice(batches, settings.accumulate))
            if not group:
                break
            self.monitor.waited(time.perf_counter() - started)
            self._step(group)
            progress.batches_done += len(group)
            progress.seconds_in_epoch += time.perf_counter() - started
            if settings.valid_every and progress.step % settings.valid_every == 0:
                self._validate()
            if settings.save_every and progress.step % settings.save_every == 0:
                self._save("step", progress.step)
        else:
            # A limit on steps was met; an epoch that ends on the same step still counts as whole.
            if next(batches, None) is not None:
                return
        self._end_epoch()

    def _step(self, group: list[Batch]) -> None:
        progress = self.progress
        for batch in group:
            self.skipped_items.take((item.id, item.reason) for item in batch.skipped)
        progress.step += 1
        lr = apply_schedule(self.optimizer, self.schedule, progress.step, progress.epoch)
        set_batch_count(self.model, progress.step * self.reference_batches)
        result = self._train(group)
        if result.finite:
            progress.skipped_in_a_row = 0
            progress.loss_sum += result.loss * result.num_utterances
            progress.loss_count += result.num_utterances
            self.average.update(self.model, progress.step)
        else:
            progress.skipped_steps += 1
            progress.skipped_in_a_row += 1
        self.monitor.step(progress.step, progress.epoch, result, lr, self.precision.scale)
        self.checkups.after_step(self.model, group, progress.step, progress.skipped_in_a_row)
        if self.precision.collapsed or progress.skipped_in_a_row >= self.settings.max_skipped:
            self._summarise("failed")
            raise NumericsError(self._why_stopped())

    def _train(self, group: list[Batch]) -> StepResult:
        def step() -> StepResult:
            return train_step(
                self.model, group, self.optimizer, self.precision, self.settings.clip_norm, self.world,
                self.precision.device, self.adversary,
            )  # fmt: skip

        if not self.monitor.wants_flops:
            return step()
        result, flops = counting_flops(step)
        self.monitor.flops(flops, sum(batch.audio_seconds for batch in group))
        return result

    def _why_stopped(self) -> str:
        good = next((path.name for path in self.checkpoints.newest_first()), None)
        mode = self.precision.mode
        remedy = {
            "amp_fp16": "precision=amp_bf16 or fp32, or a lower optim.lr",
            "fp32": "a lower optim.lr, a smaller trainer.clip_norm, and the utterances named above",
        }.get(mode, "precision=fp32, or a lower optim.lr")
        culprit = f"The first number that was not finite: {self.checkups.culprit}. " if self.checkups.culprit else ""
        return (
            f"training stopped at step {self.progress.step} under precision={mode}: "
            f"{self.progress.skipped_in_a_row} steps in a row were not finite (loss scale {self.precision.scale:g}). "
            f"{culprit}Last good checkpoint: {good or 'none yet'}; its weights are untouched. Try {remedy}."
        )

    def _end_epoch(self) -> None:
        progress = self.progress
        mean_loss = progress.loss_sum / progress.loss_count if progress.loss_count else math.nan
        progress.train_loss.append({"epoch": progress.epoch, "loss": mean_loss})
        progress.seconds_per_epoch.append(progress.seconds_in_epoch)
        log.info("epoch %d done: mean loss %.4f in %s", progress.epoch, mean_loss, clock(progress.seconds_in_epoch))
        if not self._validated_now:
            self._validate()
        done = progress.epoch
        progress.epoch += 1
        progress.forget_epoch()
        self._save("epoch", done)
        self._summarise("running")

    def _share_skipped(self) -> None:
        """Let rank 0 name what other ranks could not read."""
        for of_rank in gather(list(self.skipped_items.seen.items()), self.world)[1:]:
            self.skipped_items.take(of_rank)

    def _validate(self) -> None:
        progress = self.progress
        average_buffers(self.model, self.world)
        result = self.validate(self.model)
        entry = {
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": result.loss,
            **part_figures(result.loss_parts),
            "wer": result.wer,
            "cer": result.cer,
        }
        progress.valid.append(entry)
        wer = "n/a" if result.wer is None else f"{result.wer:.2f}%"
        lines = [f"dev: loss {result.loss:.4f}  WER {wer}  ({result.num_utterances} utterances)"]
        for utterance, ref, hyp in result.examples:
            lines += [f"  {utterance}", f"    ref: {ref}", f"    hyp: {hyp}"]
        self.monitor.text("dev/examples", lines, progress.step)
        self.monitor.write({"kind": "dev", **entry})
        if self.on_validation:
            self.on_validation(self.model, progress.step)

    def _save(self, kind: str, number: int) -> None:
        # A resumed run gives rank 0's buffers to all ranks, so they must be one here as well.
        average_buffers(self.model, self.world)
        self._share_skipped()
        state = self.state_dict()
        if self.world.is_main:
            best = self.progress.best()
            keep = {best["epoch"]} if best and kind == "epoch" else set()
            self.checkpoints.save(state, kind, number, self.settings.keep_last, keep)

    def state_dict(self) -> dict[str, Any]:
        """All that continuing exactly needs, as plain tensors and numbers."""
        return {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "adversary": self.adversary.state_dict() if self.adversary else None,
            "precision": self.precision.state_dict(),
            "progress": dict(vars(self.progress)),
            "world_size": self.world.size,
            "generators": gather(generator_states(), self.world),
            "skipped": dict(self.skipped_items.seen),
            **self.identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. The epoch starts again where its batches are no longer the same ones."""
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.adversary:
            self.adversary.load_state_dict(state["adversary"])
        self.precision.load_state_dict(state["precision"])
        self.progress = Progress(**state["progress"])
        self.skipped_items.seen = dict(state["skipped"])
        if state["world_size"] == self.world.size:
            restore_generators(state["generators"][self.world.rank])
        elif self.progress.batches_done:
            self.restart_epoch(f"{state['world_size']} processes before, {self.world.size} now")

    def restart_epoch(self, reason: str) -> None:
        """Go back to the start of the epoch in progress, keeping the weights."""
        if self.progress.batches_done:
            log.warning("epoch %d starts again from its first batch: %s", self.progress.epoch, reason)
            self.progress.forget_epoch()

    def _summarise(self, status: str) -> None:
        progress = self.progress
        self.monitor.summary(
            {
                "name": self.run_name,
                "status": status,
                "epochs": progress.epoch - 1,
                "steps": progress.step,
                "precision": self.precision.mode,
                "num_parameters": sum(p.numel() for p in self.model.parameters()),
                "peak_memory_bytes": peak_memory_bytes(),
                "seconds_per_epoch": progress.seconds_per_epoch,
                "skipped_steps": progress.skipped_steps,
                "skipped_utterances": len(self.skipped_items.seen),
                "best_valid": progress.best(),
                "valid": progress.valid,
                "train_loss": progress.train_loss,
            }
        )
