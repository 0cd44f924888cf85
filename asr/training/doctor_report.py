"""What the precision doctor has to say, to a user and during training: verdict with remedies, table, picture."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asr.model import AsrModel
from asr.training.distributed import World, gather
from asr.training.doctor import AFTER, BEFORE, FP16_MAX, Reading, examine, name_first_non_finite
from asr.training.monitor import Monitor
from asr.training.precision import PrecisionMode
from asr.training.run_folder import write_json
from asr.types import Batch

# The smallest number that fp16 holds besides 0.
FP16_MIN = 2.0**-24
ROWS = 20


class Checkups:
    """What a training asks of the doctor: a report every so many steps, and the culprit of a step that failed.

    every: steps between reports; None for none.
    """

    def __init__(self, every: int | None, precision: PrecisionMode, monitor: Monitor, world: World):
        self.every = every
        self.precision = precision
        self.monitor = monitor
        self.world = world
        self.culprit: str | None = None

    def after_step(self, model: AsrModel, batches: list[Batch], step: int, failures_in_a_row: int) -> None:
        """Look at the batches of `step` where that is due; of failures in a row the first one is looked into."""
        batches = [batch for batch in batches if len(batch)]
        if failures_in_a_row == 1:
            found = gather(name_first_non_finite(model, batches, self.precision), self.world)
            self.culprit = next(filter(None, found), None)
            again = "everything is finite when the batch is run again; dropout and augmentation draw anew"
            self.monitor.event(step, "first_non_finite", self.culprit or again)
        elif self.every and step % self.every == 0 and self.monitor.folder is not None and batches:
            readings = examine(model, batches, self.precision)
            lines = verdict(readings, {}, model, self.precision.mode, self.precision.scale)
            write_report(self.monitor.folder / "doctor", f"step-{step}", lines, readings, {})
            self.monitor.text("doctor/precision", lines, step)
            self.monitor.figure("doctor/precision", picture(readings), step)


def write_report(folder: Path, name: str, lines: list[str], readings: list[Reading], lost: dict[str, float]) -> str:
    """Write NAME.md, NAME.json and NAME.png into `folder`; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*(f"- {line}" for line in lines), "", table(readings), ""])
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    write_json(as_records(readings, lost), folder / f"{name}.json")
    picture(readings).savefig(folder / f"{name}.png", dpi=110)
    return text


def verdict(
    readings: list[Reading], lost: dict[str, float], model: AsrModel, mode: str, loss_scale: float
) -> list[str]:
    """Sentences: what overflows first in fp16, what the loss scale does to gradients, what bf16 weights lose."""
    forward = [reading for reading in readings if reading.operation != "gradient"]
    held = [reading for reading in forward if reading.half]
    lines = []
    if over := first_overflow(readings):
        lines.append(
            f"fp16 overflows first at {over}: {over.largest:,.0f} of {FP16_MAX:,.0f}. Remedy: {remedy(over, model)}."
        )
    elif held:
        least = min(held, key=lambda reading: reading.headroom)
        lines.append(f"fp16 overflows nowhere; least room at {least}: {least.largest:,.4g}, x {least.headroom:,.3g}.")
    if mode != "fp32":
        broken = [r for r in forward if r.in_mode is not None and not math.isfinite(r.in_mode) and r.half]
        lines += [f"Under {mode} the first numbers that are not finite come from {broken[0]}."] if broken else []
    lines += _of_gradients(readings, mode, loss_scale)
    if lost:
        name, share = max(lost.items(), key=lambda item: item[1])
        mean = sum(lost.values()) / len(lost)
        lines.append(
            f"bf16 weights, plainly rounded, lose {100 * mean:.0f}% of the updates of a mean parameter at the full "
            f"learning rate, {100 * share:.0f}% of {name}. Remedy: bf16_update=kahan or stochastic, or "
            "precision=amp_bf16."
        )
    return lines


def first_overflow(readings: list[Reading]) -> Reading | None:
    """The first reading of the forward pass, in the order of computing, that half precision holds and fp16 cannot."""
    return next((r for r in readings if r.operation != "gradient" and r.half and r.headroom < 1), None)


def _of_gradients(readings: list[Reading], mode: str, loss_scale: float) -> list[str]:
    gradients = [r for r in readings if r.operation == "gradient" and r.half and 0 < r.largest < math.inf]
    if not gradients:
        return []
    steepest = max(gradients, key=lambda reading: reading.largest)
    fits = 2.0 ** math.floor(math.log2(steepest.headroom))
    told = f"The largest gradient is {steepest.largest:.2g}, at {steepest.module}: a loss scale of {fits:g} fits."
    if mode == "amp_fp16" and loss_scale > fits:
        told += f" The present one, {loss_scale:g}, will be halved until it does; trainer.initial_grad_scale={fits:g}"
        told += " saves these steps."
    weakest = min(gradients, key=lambda reading: reading.largest)
    if weakest.largest * fits < FP16_MIN:
        told += f" Even so fp16 loses all of the gradient at {weakest.module}. Remedy: precision=amp_bf16."
    return [told]


def remedy(reading: Reading, model: AsrModel) -> str:
    """Config keys that give the numbers of this reading more room."""
    of_encoder = reading.module.startswith("encoder.")
    module: Any = model.get_submodule(reading.module) if reading.operation != "gradient" else None
    scaled_input = getattr(getattr(model.encoder, "positions", None), "input_scale", 1.0) != 1.0
    smaller_input = "encoder.scale_input=false (another model, to be trained anew)"
    if "scores" in reading.operation and getattr(module, "scale", "query") == "scores":
        same_model = "encoder.attention_scale=query (the same model, no training needed)"
        return f"{same_model}, or {smaller_input}" if scaled_input else same_model
    if of_encoder and scaled_input:
        return f"{smaller_input}, or precision=amp_bf16"
    return "precision=amp_bf16, whose range is that of fp32"


def table(readings: list[Reading], rows: int | None = ROWS) -> str:
    """Markdown: readings by headroom, the least first; those that half precision never holds come last."""
    ordered = sorted(readings, key=lambda reading: (not reading.half, reading.headroom))
    lines = ["| module | numbers | largest in fp32 | room in fp16 | in the mode |", "|---|---|---|---|---|"]
    for reading in ordered[:rows]:
        room = f"{reading.headroom:,.3g}" if reading.half else f"{reading.headroom:,.3g}, not held in it"
        found = "not formed" if reading.in_mode is None else f"{reading.in_mode:,.4g}"
        lines.append(f"| {reading.module} | {reading.operation} | {reading.largest:,.4g} | {room} | {found} |")
    left = len(ordered) - len(ordered[:rows])
    return "\n".join(lines) + (f"\n\n{left} more in the JSON file." if left else "")


def as_records(readings: list[Reading], lost: dict[str, float]) -> dict[str, Any]:
    """Everything, ready for JSON: what is not finite is written as text."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    records = [asdict(reading) | {"headroom": reading.headroom} for reading in readings]
    return {
        "readings": [{key: plain(value) for key, value in record.items()} for record in records],
        "lost_bf16_updates": lost,
    }


def picture(readings: list[Reading]) -> Figure:
    """Magnitudes of outputs, attention scores and gradients in the order of computing, with the range of fp16."""
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    modules = dict.fromkeys(reading.module for reading in readings if reading.operation == "output")
    places = {name: place for place, name in enumerate(modules)}

    def place(reading: Reading) -> int:
        """That of its module; of a parameter's gradient that of the module which owns it."""
        return places.get(reading.module, places.get(reading.module.rpartition(".")[0], 0))

    kinds = {"output": "o", BEFORE: "^", AFTER: "v", "gradient": "."}
    for operation, marker in kinds.items():
        chosen = [r for r in readings if r.operation == operation and 0 < r.largest < math.inf]
        points = [place(reading) for reading in chosen], [reading.largest for reading in chosen]
        axes.plot(*points, marker, markersize=4, label=operation)
    for limit, text in ((FP16_MAX, "largest of fp16"), (FP16_MIN, "smallest of fp16")):
        axes.axhline(limit, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(text, (0.0, limit), fontsize=8, color="grey", xytext=(2, 2), textcoords="offset points")
    axes.set_yscale("log")
    axes.margins(y=0.12)
    shown = list(places)[:: max(1, len(places) // 30)]
    axes.set_xticks([places[name] for name in shown], shown, rotation=75, ha="right", fontsize=6)
    axes.set_ylabel("largest magnitude in fp32")
    axes.legend(fontsize=8, ncols=4, loc="upper right", bbox_to_anchor=(1, 1.12))
    return figure
