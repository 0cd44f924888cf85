"""What the initialisation doctor has to say: layers in trouble with remedies, tables of layers, modes side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from asr.training.init_doctor_picture import picture
from asr.training.init_reading import (
    FLAT,
    GRADIENT,
    INPUT,
    OUTPUT,
    THRESHOLDS,
    WEIGHT_GRADIENT,
    InitReading,
    LayerReading,
)
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
# Layers in trouble that are named in words; the tables name all.
TOLD = 6


def write_init_report(folder: Path, readings: dict[str, InitReading]) -> str:
    """Write init.md, init.json and init.png into `folder`; returns the Markdown.

    readings: by the name of the initialisation; the first is the one that is looked at layer by layer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = next(iter(readings))
    text = "\n\n".join(
        [
            "\n".join(f"- {line}" for line in [*verdict(readings), THRESHOLDS]),
            f"Initialisations side by side, on one batch:\n\n{modes_table(readings)}",
            f"Weights, {own}: standard deviation now, and that of each mode (as a multiple of it):\n\n"
            + weights_table(readings[own]),
            f"Signals and gradients through depth, {own}:\n\n{signals_table(readings[own])}",
            f"Spread of outputs, size of gradients:\n\n{depth_table(readings)}",
        ]
    )
    (folder / "init.md").write_text(text + "\n", encoding="utf-8")
    write_json({mode: _record(reading) for mode, reading in readings.items()}, folder / "init.json")
    picture(readings).savefig(folder / "init.png", dpi=110)
    return text + "\n"


def verdict(readings: dict[str, InitReading]) -> list[str]:
    """Sentences: the layers in trouble under each initialisation, and the keys that mend them."""
    lines = []
    for mode, reading in readings.items():
        told = [
            f"{layer.name}: {layer.remark}{f' (remedy: {remedy})' if (remedy := reading.remedy(layer)) else ''}"
            for layer in sorted(reading.troubled, key=lambda layer: not reading.remedy(layer))
        ]
        more = f"; {len(told) - TOLD} more" if len(told) > TOLD else ""
        lines.append(f"{mode}: {'; '.join(told[:TOLD])}{more}." if told else f"{mode}: no layer is in trouble.")
    return lines


def modes_table(readings: dict[str, InitReading]) -> str:
    """Markdown: the loss, signals and gradients at both ends, and how many layers are in trouble."""
    header = ["init", "loss", "first output", "last output", "first gradient", "last gradient", "layers in trouble"]
    rows = []
    for mode, reading in readings.items():
        used = [layer for layer in reading.layers if layer.number(OUTPUT) is not None]
        ends = [_number(used[place].number(what)) for what in (OUTPUT, GRADIENT) for place in (0, -1)]
        rows.append([mode, f"{reading.loss:.4g}", *ends, f"{len(reading.troubled)} of {len(reading.layers)}"])
    return _table(header, rows)


def weights_table(reading: InitReading) -> str:
    """Markdown: every layer with its fans, and the standard deviation of its weight beside those of all modes."""
    header = ["layer", "kind", "shape", "fan in", "fan out", "std", "like", *COLUMNS]
    rows = [
        [
            layer.name,
            layer.kind,
            "x".join(map(str, layer.shape)),
            *(["-", "-"] if not layer.expected else [str(layer.fan_in), str(layer.fan_out)]),
            _number(layer.std),
            like(layer),
            *(_beside(layer, mode) for mode in COLUMNS.values()),
        ]
        for layer in reading.layers
    ]
    return _table(header, rows)


def signals_table(reading: InitReading) -> str:
    """Markdown: what every layer does to the batch, and what the loss asks of its weight."""
    header = ["layer", "input", "output", "gain", "flat", "gradient", "weight gradient / weight", "remark"]
    rows = [
        [
            layer.name,
            _number(layer.number(INPUT)),
            _number(layer.number(OUTPUT)),
            _number(layer.gain),
            "-" if (flat := layer.number(FLAT)) is None else f"{100 * flat:.0f}%",
            _number(layer.number(GRADIENT)),
            _number(layer.number(WEIGHT_GRADIENT)),
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
        [name, *(_number(layers[name].number(what)) for what in (OUTPUT, GRADIENT) for layers in by_name.values())]
        for name in names
    ]
    return _table(header, rows)


def like(layer: LayerReading) -> str:
    """The mode whose standard deviation a weight has, if any."""
    fitting = (
        column for column, mode in COLUMNS.items()
        if layer.expected and abs(layer.std / layer.expected[mode] - 1) < LIKE
    )  # fmt: skip
    return next(fitting, "-")


def _beside(layer: LayerReading, mode: str) -> str:
    if not layer.expected:
        return "as it is"
    times = f" (x{layer.expected[mode] / layer.std:.2g})" if layer.std > 0 else ""
    return f"{_number(layer.expected[mode])}{times}"


def _record(reading: InitReading) -> dict[str, Any]:
    """Everything but the samples, ready for JSON: what is not finite is written as text."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    kinds = (INPUT, OUTPUT, FLAT, GRADIENT, WEIGHT_GRADIENT)
    kept = ("name", "kind", "shape", "fan_in", "fan_out", "std", "expected", "remark", "gain")
    layers = [
        {key: plain(getattr(layer, key)) for key in kept}
        | {kind.replace(" ", "_"): plain(layer.number(kind)) for kind in kinds}
        | {"remedy": reading.remedy(layer) if layer.remark else ""}
        for layer in reading.layers
    ]
    return {"loss": plain(reading.loss), "layers": layers}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])
