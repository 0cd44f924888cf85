"""What the initialisation doctor has to say: tables of layers, modes side by side, a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asr.training.init_doctor import GRADIENT, OUTPUT, WEIGHT, InitReading, LayerReading
from asr.training.run_folder import write_json

# Modes of one standard deviation share a column.
COLUMNS = {
    "null": "none",
    "xavier": "xavier_uniform",
    "kaiming": "kaiming_uniform",
    "tds uniform": "tds_uniform",
    "tds normal": "tds_normal",
    "trunc normal": "trunc_normal",
}
# A weight whose standard deviation is within this share of a mode's is like it.
LIKE = 0.05


def write_init_report(folder: Path, readings: dict[str, InitReading]) -> str:
    """Write init.md, init.json and init.png into `folder`; returns the Markdown.

    readings: by the name of the initialisation; the first is the one that is looked at layer by layer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = next(iter(readings))
    sections = [
        f"Modes side by side, on one batch before training:\n\n{modes_table(readings)}",
        f"Layers under {own}; standard deviation of the weight, and what each mode would give:\n\n"
        + layers_table(readings[own]),
        f"Signals and gradients through depth, root mean squares:\n\n{depth_table(readings)}",
    ]
    troubled = [f"- {mode}: {_told(reading)}" for mode, reading in readings.items() if reading.troubled]
    sections.append("\n".join(["Layers in trouble:", "", *troubled]) if troubled else "No layer is in trouble.")
    text = "\n\n".join(sections) + "\n"
    (folder / "init.md").write_text(text, encoding="utf-8")
    write_json({mode: _record(reading) for mode, reading in readings.items()}, folder / "init.json")
    picture(readings).savefig(folder / "init.png", dpi=110)
    return text


def modes_table(readings: dict[str, InitReading]) -> str:
    """Markdown: the loss at the start, signals and gradients at both ends, and how many layers are in trouble."""
    header = ["init", "loss", "first output", "last output", "first gradient", "last gradient", "layers in trouble"]
    rows = [
        [
            mode,
            f"{reading.loss:.4g}",
            *(_number(reading.layers[place].rms.get(what)) for what in (OUTPUT, GRADIENT) for place in (0, -1)),
            f"{len(reading.troubled)} of {len(reading.layers)}",
        ]
        for mode, reading in readings.items()
    ]
    return _table(header, rows)


def layers_table(reading: InitReading) -> str:
    """Markdown: every layer with its fan-in, the standard deviation of its weight beside those of all modes, and what
    it does to the batch."""
    header = ["layer", "kind", "fan in", "std", "like", *COLUMNS, "output", "gradient", "remark"]
    rows = [
        [
            layer.name,
            layer.kind,
            str(layer.fan_in),
            _number(layer.std),
            like(layer),
            *(_number(layer.expected[mode]) for mode in COLUMNS.values()),
            _number(layer.rms.get(OUTPUT)),
            _number(layer.rms.get(GRADIENT)),
            layer.remark,
        ]
        for layer in reading.layers
    ]
    return _table(header, rows)


def depth_table(readings: dict[str, InitReading]) -> str:
    """Markdown: outputs and gradients of every layer under all initialisations."""
    header = ["layer", *(f"{what}: {mode}" for what in (OUTPUT, GRADIENT) for mode in readings)]
    by_name = {mode: {layer.name: layer for layer in reading.layers} for mode, reading in readings.items()}
    names = [layer.name for layer in next(iter(readings.values())).layers]
    rows = [
        [name, *(_number(layers[name].rms.get(what)) for what in (OUTPUT, GRADIENT) for layers in by_name.values())]
        for name in names
    ]
    return _table(header, rows)


def like(layer: LayerReading) -> str:
    """The mode whose standard deviation a weight has, if any."""
    return next((column for column, mode in COLUMNS.items() if abs(layer.std / layer.expected[mode] - 1) < LIKE), "-")


def picture(readings: dict[str, InitReading]) -> Figure:
    """Outputs and gradients through depth, and histograms of weights, outputs and gradients of four layers."""
    figure = Figure(figsize=(15, 13), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(5, 4)
    for row, what in enumerate((OUTPUT, GRADIENT)):
        axes = figure.add_subplot(grid[row, :])
        for mode, reading in readings.items():
            axes.plot([layer.rms.get(what, math.nan) for layer in reading.layers], ".-", linewidth=0.8, label=mode)
        axes.set_yscale("log")
        axes.set_ylabel(f"{what}, root mean square")
        axes.set_xlabel("layer, in the order of computing")
        axes.legend(fontsize=8)
    layers = next(iter(readings.values())).layers
    chosen = sorted({round(share * (len(layers) - 1)) for share in (0, 1 / 3, 2 / 3, 1)})
    for column, place in enumerate(chosen):
        for row, what in enumerate((WEIGHT, OUTPUT, GRADIENT), start=2):
            axes = figure.add_subplot(grid[row, column])
            for mode, reading in readings.items():
                sample = reading.layers[place].samples.get(what)
                if sample is not None and bool(sample.isfinite().all()):
                    axes.hist(sample.numpy(), bins=60, density=True, histtype="step", label=mode)
            axes.set_yscale("log")
            axes.set_xlabel(what, fontsize=8)
            if row == 2:
                axes.set_title(layers[place].name, fontsize=8)
    return figure


def _told(reading: InitReading) -> str:
    return "; ".join(f"{layer.name} ({layer.remark})" for layer in reading.troubled)


def _record(reading: InitReading) -> dict[str, Any]:
    kept = ("name", "kind", "fan_in", "fan_out", "std", "expected", "rms", "remark")
    layers = [{key: getattr(layer, key) for key in kept} for layer in reading.layers]
    return {"loss": reading.loss, "layers": layers}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])
