"""The picture of the initialisation doctor: signals and gradients through depth, histograms of weights."""

from __future__ import annotations

import math

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asr.training.init_reading import GRADIENT, OUTPUT, WEIGHT_GRADIENT, InitReading

LINES = {
    OUTPUT: "output,\nstandard deviation",
    GRADIENT: "gradient by the output,\nroot mean square",
    WEIGHT_GRADIENT: "norm of the gradient by\nthe weight / its norm",
}
HISTOGRAMS = 4  # in a row
NAMES = 48


def picture(readings: dict[str, InitReading]) -> Figure:
    """Lines through depth, one for each initialisation, and below them the weights of every group of layers."""
    groups = list(dict.fromkeys(layer.group for layer in next(iter(readings.values())).layers))
    rows = math.ceil(len(groups) / HISTOGRAMS)
    figure = Figure(figsize=(15, 10.5 + 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1, height_ratios=[10.5, 2.6 * rows])
    above, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    lines = above.subplots(len(LINES), 1, sharex=True)
    for axes, (what, label) in zip(lines, LINES.items(), strict=True):
        _draw_depth(axes, readings, what)
        axes.set_ylabel(label)
    lines[0].legend(ncols=len(readings), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    names = [layer.name for layer in next(iter(readings.values())).layers]
    shown = range(0, len(names), math.ceil(len(names) / NAMES))
    lines[-1].set_xticks(shown, [names[place] for place in shown], rotation=60, ha="right", fontsize=7)
    lines[-1].set_xlabel("layer, in the order of computing; a cross marks one in trouble")
    cells = list(below.subplots(rows, HISTOGRAMS, squeeze=False).flat)
    for axes, group in zip(cells, groups, strict=False):
        _draw_weights(axes, readings, group)
    for axes in cells[len(groups) :]:
        axes.set_axis_off()
    return figure


def _draw_depth(axes: Axes, readings: dict[str, InitReading], what: str) -> None:
    for mode, reading in readings.items():
        values = [layer.number(what) or math.nan for layer in reading.layers]
        (line,) = axes.plot(values, ".-", linewidth=1, label=mode)
        marked = [place for place, layer in enumerate(reading.layers) if layer.remark]
        axes.plot(marked, [values[place] for place in marked], "x", markersize=9, color=line.get_color())
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.margins(x=0.01)


def _draw_weights(axes: Axes, readings: dict[str, InitReading], group: str) -> None:
    for mode, reading in readings.items():
        weights = torch.cat([layer.weights for layer in reading.layers if layer.group == group])
        if bool(weights.isfinite().all()):
            axes.hist(weights.numpy(), bins=60, density=True, histtype="step", label=mode)
    axes.set_ylabel("density", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.set_title(f"weights of {group}", fontsize=9)
