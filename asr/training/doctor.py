"""The precision doctor: how large every number of a step becomes, and which module was the first to leave the range.

Nothing here runs unless asked. Modules are watched by hooks, attention products by the callback that attention offers;
what was watched is as it was before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asr.heads.head import add_parts
from asr.layers.dropout import Dropout
from asr.model import AsrModel
from asr.training.precision import PrecisionMode
from asr.types import Batch, Encoded

FP16_MAX = 65504.0
HALF = (torch.float16, torch.bfloat16)
BEFORE, AFTER = "scores before scaling", "scores after scaling"


@dataclass
class Reading:
    """One kind of number of a module.

    operation: "output", "gradient" (of the loss by the output) or a step inside attention.
    largest: magnitude in fp32. half: whether a half-precision mode holds these numbers in its format.
    in_mode: magnitude in the mode that was examined, infinite or NaN where it left the range; None where not formed.
    """

    module: str
    operation: str
    largest: float
    half: bool = False
    in_mode: float | None = None

    @property
    def headroom(self) -> float:
        """How many times larger the numbers could be in fp16; below 1 they overflow."""
        return FP16_MAX / self.largest if self.largest > 0 else math.inf

    def __str__(self) -> str:
        return f"{self.module}, {self.operation}"


class Watch:
    """Context in which `model` notes the largest magnitude of all that its modules put out, in the order of computing.

    seen: (module, operation) -> magnitude () and whether it was held in half precision.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.seen: dict[tuple[str, str], tuple[Tensor, bool]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        for name, module in self.model.named_modules():
            if not name or isinstance(module, (Dropout, nn.Dropout, nn.Identity)):
                continue  # these pass on what they are given
            self._handles.append(module.register_forward_hook(self._outputs_of(name)))
            if hasattr(module, "observe"):
                setattr(module, "observe", partial(self._note, name))  # noqa: B010
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._gradient_of(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self.model.modules():
            if hasattr(module, "observe"):
                setattr(module, "observe", None)  # noqa: B010

    def first_non_finite(self) -> tuple[str, str] | None:
        """The first module and operation whose numbers were not all finite."""
        return next((key for key, (value, _) in self.seen.items() if not math.isfinite(float(value))), None)

    def _outputs_of(self, name: str) -> Callable:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                self._note(name, "output", tensor.detach())
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_of(name))

        return hook

    def _gradient_of(self, name: str) -> Callable:
        return partial(self._note, name, "gradient")

    @torch.no_grad()
    def _note(self, name: str, operation: str, value: Tensor) -> None:
        if not value.numel():
            return
        largest, half = value.abs().amax().float(), value.dtype in HALF
        if before := self.seen.get((name, operation)):
            largest, half = torch.maximum(before[0], largest), before[1] or half  # NaN stays
        self.seen[name, operation] = largest, half


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of what a module returns."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Encoded):
        yield output.frames
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)


def examine(model: AsrModel, batches: Iterable[Batch], precision: PrecisionMode) -> list[Reading]:
    """Readings of forward and backward over the batches, in the order of computing; the model stays as it is.

    Each batch is run in fp32 for the magnitudes and in the mode of `precision` (amp_bf16 where that is fp32) for what
    is held in half precision and whether it left the range. Gradients are those of the mean loss, without loss scale.
    """
    exact = model if all(p.dtype == torch.float32 for p in model.parameters()) else copy.deepcopy(model).float()
    plain = PrecisionMode("fp32", precision.device)
    mode = precision if precision.mode != "fp32" else PrecisionMode("amp_bf16", precision.device)
    in_fp32, in_mode = Watch(exact), Watch(model)
    for batch in batches:
        _run(exact, batch, plain, in_fp32, 1.0)
        _run(model, batch, mode, in_mode, mode.scale)
    readings = []
    for (name, operation), (largest, _) in in_fp32.seen.items():
        found, half = in_mode.seen.get((name, operation), (torch.tensor(math.nan), False))
        # Autocast computes a parameter's gradient in the format of the module's output and converts it afterwards.
        half |= operation == "gradient" and in_mode.seen.get((name.rpartition(".")[0], "output"), (found, False))[1]
        # The loss scale is a power of two: infinite and NaN stay what they are.
        unscaled = float(found) / (mode.scale if operation == "gradient" else 1.0)
        readings.append(Reading(name, operation, float(largest), half, unscaled))
    return [reading for one in readings for reading in _with_scaling(one, exact.get_submodule)]


def _with_scaling(reading: Reading, module_of: Callable[[str], nn.Module]) -> list[Reading]:
    """Scores of an attention under the names of before and after scaling; before, where it scales the query instead,
    they are never formed."""
    if reading.operation not in ("scores", "scaled_scores"):
        reading.operation = reading.operation.replace("_", " ")
        return [reading]
    module: Any = module_of(reading.module)
    if getattr(module, "scale", "query") == "scores":
        reading.operation = BEFORE if reading.operation == "scores" else AFTER
        return [reading]
    before = Reading(reading.module, BEFORE, reading.largest * math.sqrt(module.head_dim))
    reading.operation = AFTER
    return [before, reading]


def name_first_non_finite(model: AsrModel, batches: Iterable[Batch], precision: PrecisionMode) -> str | None:
    """Which module and operation first left the range of the mode in a step that has just failed, run once more.

    None where everything is finite this time: dropout and augmentation draw anew.
    """
    # The failure has lowered the loss scale already.
    loss_scale = precision.scale / (precision.scaler.get_backoff_factor() if precision.scaler.is_enabled() else 1.0)
    for batch in batches:
        watch = Watch(model)
        _run(model, batch, precision, watch, loss_scale)
        if first := watch.first_non_finite():
            module, operation = first
            scaled = f" under the loss scale {loss_scale:g}" if operation == "gradient" and loss_scale != 1.0 else ""
            return f"{module}, {operation.replace('_', ' ')}{scaled}"
    return None


def lost_updates(
    model: AsrModel, batch: Batch, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, float]:
    """Share (0 to 1) of the elements of each parameter that one update at the full learning rate leaves as they are
    where weights are held in bf16 and plainly rounded. The parameters stay as they are; the optimiser is used up.
    """
    with untouched(model, device):
        model.train()
        losses_B = add_parts(model(batch.to(device)))
        (losses_B.sum() / max(1, len(batch))).backward()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        shares = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                held = before[name].bfloat16()
                update = parameter - before[name]
                lost = (held.float() + update).bfloat16() == held
                wanted = update != 0
                shares[name] = float((lost & wanted).sum() / wanted.sum().clamp(min=1))
                parameter.copy_(before[name])
    return shares


def _run(model: AsrModel, batch: Batch, precision: PrecisionMode, watch: Watch, loss_scale: float) -> None:
    """Forward and backward of one batch as in training, with one and the same dropout in every mode."""
    with untouched(model, precision.device), watch:
        torch.manual_seed(0)
        model.train()
        batch = batch.to(precision.device)
        with precision.autocast():
            losses_B = add_parts(model(batch))
        (losses_B.sum() / max(1, len(batch)) * loss_scale).backward()


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers, gradients (to none), mode and random generators afterwards as they were before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    was_training = model.training
    model.zero_grad(set_to_none=True)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        model.train(was_training)
        model.zero_grad(set_to_none=True)
