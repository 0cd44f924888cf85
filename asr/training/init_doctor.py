"""The initialisation doctor: what a mode makes of every layer, and how signals and gradients get through on real data.

Nothing here changes the model. Layers are found where their weights are used, in linear maps, convolutions and
embeddings, so that it does not matter whether a module calls its layer or only that layer's weight. A layer that is
used inside an autograd function of the model's own has no gradient by its output here, only that by its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asr.heads.head import add_parts
from asr.layers.init import INIT_MODES, PAPER, expected_std, fans
from asr.model import AsrModel
from asr.training.doctor import untouched
from asr.training.init_reading import (
    CONSTANT,
    FLAT,
    FLAT_SLOPE,
    GRADIENT,
    INPUT,
    OUTPUT,
    WEIGHT_GRADIENT,
    InitReading,
    LayerReading,
)
from asr.types import Batch

MODES = tuple(mode for mode in INIT_MODES if mode != PAPER)
SAMPLE_SIZE = 4096
# Passes with other random numbers: what one of them drops is not dead.
DRAWS = 3
# How many axes stand behind that of the channels.
_PRODUCTS: dict[Callable, int] = {
    F.linear: 0, F.embedding: 0, torch.conv1d: 1, F.conv1d: 1, torch.conv2d: 2, F.conv2d: 2,
}  # fmt: skip
_ACTIVATIONS = (F.relu, F.silu, F.elu, F.glu, torch.tanh, torch.sigmoid, Tensor.tanh, Tensor.sigmoid)


class _LayerWatch(TorchFunctionMode):
    """Notes what goes into and comes out of every product with a weight of `readings`, by the memory that the weight
    lies in, and how flat the activation behind it is."""

    def __init__(self, readings: Mapping[int, LayerReading]):
        super().__init__()
        self.readings = readings
        self.order: list[LayerReading] = []
        self.newest: LayerReading | None = None
        self.place = 0

    def __enter__(self) -> _LayerWatch:
        self.place = 0
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ACTIVATIONS and self.newest is not None:  # before the call, which may overwrite its input
            self.newest.note(FLAT, flat_share(func, args[0], kwargs.get("dim", -1)))
            self.newest = None
        output = func(*args, **kwargs)
        if func in _PRODUCTS and len(args) > 1:
            reading = self.readings.get(args[1].untyped_storage().data_ptr())
            if reading is not None:
                self._note(reading, args[0], output, _PRODUCTS[func])
        return output

    def _note(self, reading: LayerReading, entering: Tensor, leaving: Tensor, axes_behind: int) -> None:
        if reading not in self.order:  # in a later pass, too, it belongs behind the layer before it
            self.order.insert(self.place, reading)
        self.place = self.order.index(reading) + 1
        self.newest = reading
        if entering.is_floating_point():
            reading.note(INPUT, spread(entering, axes_behind))
        reading.note(OUTPUT, spread(leaving, axes_behind))
        if leaving.requires_grad:
            leaving.register_hook(lambda grad: reading.note(GRADIENT, grad.double().square().mean().sqrt().item()))


def spread(value: Tensor, axes_behind: int = 0) -> float:
    """Standard deviation about the mean of each channel; 0 where it is less than CONSTANT of the root mean square.

    axes_behind: axes behind that of the channels. A single vector does not vary: its root mean square counts.
    """
    value_ND = value.detach().double().movedim(-1 - axes_behind, -1).flatten(0, -2)
    size = value_ND.square().mean().sqrt()
    if len(value_ND) == 1:
        return size.item()
    found = value_ND.std(0, correction=0).square().mean().sqrt()
    return 0.0 if found < CONSTANT * size else found.item()


def flat_share(activation: Callable, value: Tensor, dim: int = -1) -> float:
    """Share (0 to 1) of inputs at which the activation's slope is below FLAT_SLOPE: a ReLU's zeros, the ends of tanh,
    of a sigmoid, of the gate of a GLU (the second half of axis `dim`)."""
    if activation is F.glu:
        activation, value = torch.sigmoid, value.chunk(2, dim)[1]
    with torch.enable_grad():
        x = value.detach().float().clone().requires_grad_()
        (slope,) = torch.autograd.grad(activation(x).sum(), x)
    return (slope.abs() < FLAT_SLOPE).float().mean().item()


def examine_init(model: AsrModel, batch: Batch, device: torch.device) -> InitReading:
    """Run one batch forward and backward as in training, in fp32, DRAWS times; the model is afterwards as it was."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers: dict[int, tuple[LayerReading, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)):
            reading = _reading_of(name, module, id(module.weight) not in embeddings)
            layers.setdefault(module.weight.untyped_storage().data_ptr(), (reading, module.weight))
    watch = _LayerWatch({place: reading for place, (reading, _) in layers.items()})
    losses = []
    with untouched(model, device):
        model.train()
        for seed in range(DRAWS):
            torch.manual_seed(seed)
            with watch:
                losses_B = add_parts(model(batch.to(device)))
            losses.append(losses_B.detach().mean().item())
            if losses_B.requires_grad:
                losses_B.mean().backward()
        for reading, weight in layers.values():
            if weight.grad is not None:
                reading.note(WEIGHT_GRADIENT, (weight.grad.norm() / DRAWS / weight.norm()).item())
    unused = [reading for reading, _ in layers.values() if reading not in watch.order]
    return InitReading([*watch.order, *unused], fmean(losses))


def _reading_of(name: str, module: Any, touched: bool) -> LayerReading:
    weight = module.weight.detach()
    groups = getattr(module, "groups", 1)
    kind = "depthwise" if groups == weight.size(0) > 1 else "grouped" if groups > 1 else type(module).__name__
    fan_in, fan_out = fans(weight)
    expected = {mode: expected_std(weight, mode) for mode in MODES} if touched else {}
    values = weight.float().flatten()
    sample = values[:: max(1, len(values) // SAMPLE_SIZE)][:SAMPLE_SIZE].cpu().clone()
    return LayerReading(
        name, kind, tuple(weight.shape), fan_in, fan_out, weight.double().std().item(), expected, sample
    )
