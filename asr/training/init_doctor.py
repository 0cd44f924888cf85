"""The initialisation doctor: what a mode makes of every layer, and how signals and gradients get through on real data.

Nothing here changes the model. Layers are found where their weights are used, in linear maps and convolutions, so that
it does not matter whether a module calls its layer or only that layer's weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asr.heads.head import add_parts
from asr.layers.init import INIT_MODES, PAPER, expected_std, fans
from asr.model import AsrModel
from asr.training.doctor import untouched
from asr.types import Batch

MODES = tuple(mode for mode in INIT_MODES if mode != PAPER)
WEIGHT, OUTPUT, GRADIENT = "weight", "output", "gradient"
# So many times the median of all layers is too much, its inverse too little.
FAR = 1000.0
SAMPLE_SIZE = 4096
_PRODUCTS = (F.linear, torch.conv1d, torch.conv2d, F.conv1d, F.conv2d)


@dataclass
class LayerReading:
    """One linear or convolution layer, in the order of computing.

    expected: standard deviation of the weight under every mode.
    rms: root mean squares of the weight, the output, and the gradient of the mean loss by the output, where there are.
    samples: values of these, for histograms.
    remark: what is wrong, if anything.
    """

    name: str
    kind: str
    fan_in: int
    fan_out: int
    std: float
    expected: dict[str, float]
    rms: dict[str, float] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)
    remark: str = ""

    def note(self, what: str, value: Tensor) -> None:
        """Take in numbers of a kind; those of several uses of one layer count together."""
        value = value.detach().float().flatten().cpu()
        square = value.square().mean().item()
        self.rms[what] = math.sqrt((square + self.rms[what] ** 2) / 2 if what in self.rms else square)
        self.samples[what] = value[:: max(1, value.numel() // SAMPLE_SIZE)][:SAMPLE_SIZE].clone()


@dataclass
class InitReading:
    """A model as initialised: its layers in the order of computing, and the mean loss of an utterance."""

    layers: list[LayerReading]
    loss: float

    @property
    def troubled(self) -> list[LayerReading]:
        return [layer for layer in self.layers if layer.remark]


class _LayerWatch(TorchFunctionMode):
    """Notes what every product with a weight of `readings` gives, by the memory that the weight lies in."""

    def __init__(self, readings: Mapping[int, LayerReading]):
        super().__init__()
        self.readings = readings
        self.order: dict[str, LayerReading] = {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and len(args) > 1:
            reading = self.readings.get(args[1].untyped_storage().data_ptr())
            if reading is not None:
                self.order.setdefault(reading.name, reading)
                reading.note(OUTPUT, output)
                if output.requires_grad:
                    output.register_hook(lambda grad: reading.note(GRADIENT, grad))
        return output


def examine_init(model: AsrModel, batch: Batch, device: torch.device) -> InitReading:
    """Run one batch forward and backward as in training, in fp32; the model is afterwards as it was."""
    by_memory: dict[int, LayerReading] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            weight = module.weight.detach()
            fan_in, fan_out = fans(weight)
            kind = "depthwise" if getattr(module, "groups", 1) > 1 else type(module).__name__
            expected = {mode: expected_std(weight, mode) for mode in MODES}
            reading = LayerReading(name, kind, fan_in, fan_out, weight.std().item(), expected)
            reading.note(WEIGHT, weight)
            by_memory.setdefault(weight.untyped_storage().data_ptr(), reading)
    watch = _LayerWatch(by_memory)
    with untouched(model, device):
        torch.manual_seed(0)
        model.train()
        with watch:
            losses_B = add_parts(model(batch.to(device)))
        loss = losses_B.mean()
        if loss.requires_grad:
            loss.backward()
    unused = [reading for reading in by_memory.values() if reading.name not in watch.order]
    layers = [*watch.order.values(), *unused]
    _remark(layers)
    return InitReading(layers, float(loss.detach()))


def _remark(layers: list[LayerReading]) -> None:
    """Say which layers are dead or not finite, and which explode or fade beside the median of all."""
    for what in (OUTPUT, GRADIENT):
        found = {layer.name: layer.rms[what] for layer in layers if what in layer.rms}
        middle = median([value for value in found.values() if 0 < value < math.inf] or [1.0])
        for layer in layers:
            remark = _judge(found.get(layer.name, middle), middle)
            if remark:
                layer.remark += f"{', ' if layer.remark else ''}{what} {remark}"


def _judge(value: float, middle: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    if value == 0.0:
        return "dead"
    return "explodes" if value > FAR * middle else "fades" if value < middle / FAR else ""
