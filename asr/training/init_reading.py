"""What the initialisation doctor found of every layer, and which layers that puts in trouble."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median

from torch import Tensor

INPUT, OUTPUT, GRADIENT, WEIGHT_GRADIENT, FLAT = "input", "output", "gradient", "weight gradient", "flat"
# A number that varies over a batch by less than this share of its size is constant.
CONSTANT = 1e-4
# An activation whose slope is below FLAT_SLOPE is flat there; at more than MOSTLY_FLAT of its inputs it is dead.
FLAT_SLOPE, MOSTLY_FLAT = 0.01, 0.999
# Of the spread of a layer's output to that of its input.
SMALLEST_GAIN, LARGEST_GAIN = 1e-3, 100.0
# Of outputs, where many layers add up to it.
SMALLEST_OUTPUT, LARGEST_OUTPUT = 1e-8, 1e4
# Times the median gradient of so many layers before and as many after.
FAR, NEIGHBOURS = 1e5, 4

THRESHOLDS = (
    f"Dead: an output or input that varies by less than {CONSTANT:g} of its size, an activation with slope below "
    f"{FLAT_SLOPE:g} at over {100 * MOSTLY_FLAT:g}% of its inputs, a gradient of 0. "
    f"Explodes or fades: an output over {LARGEST_GAIN:g} or under {SMALLEST_GAIN:g} times the spread of its input, a "
    f"signal that leaves {SMALLEST_OUTPUT:g} ... {LARGEST_OUTPUT:g}, a gradient over {FAR:g} times or under "
    f"1/{FAR:g} of the median of the {NEIGHBOURS} layers before and the {NEIGHBOURS} after."
)


@dataclass(eq=False)
class LayerReading:
    """One layer, in the order of computing.

    expected: standard deviation of the weight under every mode; empty where `init_mode` leaves the layer as it is.
    uses: what was found in each use of the layer, by kind: spread (standard deviation about the mean of each channel)
        of INPUT and OUTPUT, root mean square of the GRADIENT of the mean loss by the output, WEIGHT_GRADIENT as the
        norm of the loss's gradient by the weight relative to the weight's, FLAT as the share (0 to 1) of inputs of the
        activation behind the layer at which its slope is almost none.
    weights: some of its weights, for histograms. remark: what is wrong, if anything.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    fan_in: int
    fan_out: int
    std: float
    expected: dict[str, float]
    weights: Tensor
    uses: dict[str, list[float]] = field(default_factory=dict)
    remark: str = ""

    def note(self, what: str, value: float) -> None:
        self.uses.setdefault(what, []).append(value)

    def number(self, what: str) -> float | None:
        """The mean over all uses; None where there was none."""
        return fmean(self.uses[what]) if what in self.uses else None

    @property
    def gain(self) -> float | None:
        """How many times wider the output is than the input."""
        entering, leaving = self.number(INPUT), self.number(OUTPUT)
        return leaving / entering if entering and leaving is not None else None

    @property
    def group(self) -> str:
        """Part of the model and kind of layer."""
        return f"{self.name.partition('.')[0]}, {self.kind}"


@dataclass
class InitReading:
    """A model before its first step: its layers in the order of computing, and the mean loss of an utterance."""

    layers: list[LayerReading]
    loss: float

    def __post_init__(self) -> None:
        for layer in self.layers:
            layer.remark = _of_output(layer)
        if not self.troubled:
            _remark_first_out_of_range(self.layers)
        _remark_gradients(self.layers)

    @property
    def troubled(self) -> list[LayerReading]:
        return [layer for layer in self.layers if layer.remark]

    def remedy(self, layer: LayerReading) -> str:
        """The key that would mend a layer in trouble; empty where the trouble comes from another layer, or from a layer
        that `init_mode` leaves alone."""
        causes = [one for one in self.troubled if one.remark.startswith(("output", "activation", "signal"))]
        if not layer.expected or (causes and layer not in causes):
            return ""
        mode = min(layer.expected, key=lambda mode: abs(math.log(layer.expected[mode] * math.sqrt(layer.fan_in))))
        alone = layer.remark.startswith(("output", "activation"))
        return f"+init.{layer.name}={mode}" if alone else f"init.{layer.name.partition('.')[0]}={mode}"


def _of_output(layer: LayerReading) -> str:
    output, gain, flat = layer.number(OUTPUT), layer.gain, layer.number(FLAT)
    if output is None:
        return ""
    if not math.isfinite(output):
        return "output not finite"
    if layer.number(INPUT) == 0.0:
        return "input dead"
    if output == 0.0:
        return "output dead"
    if gain is not None and not SMALLEST_GAIN <= gain <= LARGEST_GAIN:
        return "output explodes" if gain > LARGEST_GAIN else "output fades"
    return "activation dead" if flat is not None and flat > MOSTLY_FLAT else ""


def _remark_first_out_of_range(layers: list[LayerReading]) -> None:
    """Where every layer widens or narrows its input a little, name the one at which that has become too much."""
    for layer in layers:
        output = layer.number(OUTPUT)
        if output is not None and not SMALLEST_OUTPUT <= output <= LARGEST_OUTPUT:
            layer.remark = "signal explodes" if output > LARGEST_OUTPUT else "signal fades"
            return


def _remark_gradients(layers: list[LayerReading]) -> None:
    found = [(layer, value) for layer in layers if (value := layer.number(GRADIENT)) is not None]
    for place, (layer, value) in enumerate(found):
        around = found[max(0, place - NEIGHBOURS) : place] + found[place + 1 : place + 1 + NEIGHBOURS]
        usual = [other for _, other in around if 0.0 < other < math.inf]
        remark = _judge_gradient(value, median(usual) if usual else value)
        if remark:
            layer.remark += f"{', ' if layer.remark else ''}gradient {remark}"


def _judge_gradient(value: float, usual: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    if value == 0.0:
        return "dead"
    return "explodes" if value > FAR * usual else "fades" if value < usual / FAR else ""
