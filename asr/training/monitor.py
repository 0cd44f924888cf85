"""What a run tells: log file, progress bar, TensorBoard, metrics.jsonl and train.json. Only rank 0 writes."""

from __future__ import annotations

import json
import logging
import math
import re
import resource
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from asr.training.cpu import give_back_freed_memory
from asr.training.run_folder import write_json
from asr.training.step import StepResult

log = logging.getLogger(__name__)


class Monitor:
    """Collects figures of steps and hands them to every place where people look.

    Args:
        folder: the run's; None on ranks that do not write.
        log_every: steps between log lines.
        total_steps: expected, for the time left.
        progress: whether to draw a bar (on a terminal only).
        peak_flops: of all GPUs of the run together, for the utilisation; None leaves it out.
    """

    def __init__(
        self, folder: Path | None, log_every: int, total_steps: int, progress: bool, peak_flops: float | None = None
    ):
        self.folder = folder
        self.log_every = log_every
        self.total_steps = total_steps
        self.peak_flops = peak_flops
        self._flops_per_audio_second: float | None = None
        self.writer = SummaryWriter(str(folder / "tensorboard")) if folder else None
        self.bar = (
            tqdm(total=total_steps, unit="step", dynamic_ncols=True, disable=None) if folder and progress else None
        )
        self._first_step: int | None = None
        self._start_window()
        self._started = time.perf_counter()

    def _start_window(self) -> None:
        self._window: list[StepResult] = []
        self._window_start = time.perf_counter()
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """Time that a step spent waiting for data."""
        self._waited += seconds

    @property
    def wants_flops(self) -> bool:
        """Whether the next step is to be counted."""
        return self.folder is not None and self.peak_flops is not None and self._flops_per_audio_second is None

    def flops(self, flops: int, audio_seconds: float) -> None:
        """What one step on so many seconds of audio came to; the steps after it are taken to be like it."""
        if audio_seconds:
            self._flops_per_audio_second = flops / audio_seconds

    def step(self, step: int, epoch: int, result: StepResult, lr: float, scale: float) -> None:
        """Take in one step; every `log_every`-th writes a line of means."""
        if self.folder is None:
            return
        self._first_step = step if self._first_step is None else self._first_step
        self._window.append(result)
        if not result.finite:
            self.event(
                step,
                "non_finite_step",
                f"loss {result.loss}, gradient norm {result.grad_norm}; skipped",
                result.suspects,
            )
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix(epoch=epoch, loss=f"{result.loss:.3g}", refresh=False)
        if step % self.log_every == 0 or step == 1:
            self._write_window(step, epoch, lr, scale)

    def _write_window(self, step: int, epoch: int, lr: float, scale: float) -> None:
        window, seconds = self._window, time.perf_counter() - self._window_start
        finite = [r for r in window if r.finite and r.num_utterances]
        elapsed = time.perf_counter() - self._started
        done = step - (self._first_step or step) + 1
        figures = {
            "loss": _mean([r.loss for r in finite]),
            **part_figures(_mean_parts([r.loss_parts for r in finite])),
            "grad_norm": _mean([r.grad_norm for r in finite]),
            "clipped_share": _mean([float(r.clipped) for r in finite]),
            "lr": lr,
            "audio_hours_per_second": sum(r.audio_seconds for r in window) / 3600 / seconds,
            "padding_share": _mean([r.padding_share for r in window]),
            "data_wait_share": min(1.0, self._waited / seconds),
            "non_finite_steps": sum(not r.finite for r in window),
            "infeasible_utterances": sum(r.num_infeasible for r in window),
            "peak_memory_mb": peak_memory_bytes() / 2**20,
            "steps_per_second": len(window) / seconds,
        }
        if self._flops_per_audio_second and self.peak_flops:
            audio_per_second = sum(r.audio_seconds for r in window) / seconds
            figures["mfu"] = self._flops_per_audio_second * audio_per_second / self.peak_flops
        if scale != 1.0:
            figures["loss_scale"] = scale
        self.write({"kind": "train", "step": step, "epoch": epoch, **figures})
        left = max(0, self.total_steps - step) * elapsed / done
        log.info(
            "epoch %d step %d  loss %.4f  |grad| %.2f (clipped %.0f%%)  lr %.2e  %.0f s audio/s  padding %.0f%%  "
            "waiting for data %.0f%%  %.0f MB  %sleft %s",
            epoch, step, figures["loss"], figures["grad_norm"], 100 * figures["clipped_share"], lr,
            3600 * figures["audio_hours_per_second"], 100 * figures["padding_share"],
            100 * figures["data_wait_share"], figures["peak_memory_mb"],
            f"MFU {100 * figures['mfu']:.0f}%  " if "mfu" in figures else "", clock(left),
        )  # fmt: skip
        self._start_window()

    def event(self, step: int, kind: str, text: str, ids: list[str] | None = None) -> None:
        """Something that should not pass unseen, such as a skipped step, with the utterances it concerns."""
        if self.folder is None:
            return
        named = f" (utterances: {', '.join(ids[:10])})" if ids else ""
        log.warning("step %d: %s: %s%s", step, kind.replace("_", " "), text, named)
        self.write({"kind": kind, "step": step, "text": text, "ids": ids or []})

    def write(self, record: dict[str, Any]) -> None:
        """One record to metrics.jsonl and its finite numbers to TensorBoard."""
        if self.folder is None:
            return
        clean = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean, ensure_ascii=False) + "\n")
        assert self.writer
        for key, value in clean.items():
            if isinstance(value, (int, float)) and key not in ("step", "epoch"):
                self.writer.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    def figure(self, name: str, figure: Any, step: int) -> None:
        """A picture to TensorBoard and to pictures/NAME.png (the newest one stays)."""
        if self.folder is None:
            return
        path = self.folder / "pictures" / f"{name.replace('/', '_')}.png"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=100)
        assert self.writer
        self.writer.add_figure(name, figure, step)

    def text(self, name: str, lines: list[str], step: int) -> None:
        """Lines to the log and to TensorBoard."""
        if self.folder is None:
            return
        for line in lines:
            log.info("%s", line)
        assert self.writer
        self.writer.add_text(name, "\n\n".join(lines), step)

    def summary(self, record: dict[str, Any]) -> None:
        """Write train.json, which the report reads. Its peak of memory is the largest of all parts of a run."""
        if self.folder is not None:
            path = self.folder / "train.json"
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            peak = max(record.get("peak_memory_bytes", 0), before.get("peak_memory_bytes", 0))
            write_json({**record, "peak_memory_bytes": peak}, path)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.writer is not None:
            self.writer.close()


class SkippedItems:
    """Utterances that could not be read, each told once."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    def take(self, skipped: Iterable[tuple[str, str]]) -> None:
        for utterance, reason in skipped:
            if utterance not in self.seen:
                log.warning("skipped %s: %s", utterance, reason)
                self.seen[utterance] = reason


def peak_memory_bytes() -> int:
    """The most memory held since `forget_peak_memory`: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with suppress(OSError):  # Linux, whose getrusage also counts what the parent held when it started this process
        held = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if held:
            return int(held[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak_memory() -> None:
    """Begin a new peak, so that a job of a sweep does not report that of the jobs before it.

    Of a process only Linux can be told to; elsewhere its peak stays that of its whole life.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    give_back_freed_memory()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def start_logging(folder: Path | None, name: str = "train.log") -> None:
    """Send the log to the terminal and to `folder`/`name`, in place of whatever a run before this one set up."""
    stop_logging()
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.setLevel(logging.INFO)
    handlers: list[logging.Handler] = [_ScreenHandler()]
    if folder is not None:
        handlers.append(logging.FileHandler(folder / name, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
    logging.captureWarnings(True)
    if folder is None:
        root.setLevel(logging.ERROR)


def stop_logging() -> None:
    """Close log files, so that nothing said after a run, of the next job of a sweep say, ends up in them."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
            handler.close()


class _ScreenHandler(logging.StreamHandler):
    """Writes above the progress bar instead of through it; leaves out what is marked as `only_in_file`."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "only_in_file", False):
            tqdm.write(self.format(record), file=sys.stderr)


def part_figures(parts: dict[str, float]) -> dict[str, float]:
    """Parts of a loss under the names of their figures; none where the loss has but one part."""
    return {f"loss/{name}": value for name, value in parts.items()} if len(parts) > 1 else {}


def _mean_parts(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: _mean([row[name] for row in rows if name in row]) for name in (rows[0] if rows else ())}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
