"""The four precision modes: what runs in which number format, and the gradient scale's guards."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

MODES = ("fp32", "amp_fp16", "amp_bf16", "bf16")
AUTOCAST = {"amp_fp16": torch.float16, "amp_bf16": torch.bfloat16}

# A loss scaled by less than this has nothing left that a half-precision gradient could hold.
SMALLEST_SCALE = 1e-5


class NumericsError(RuntimeError):
    """Training cannot recover; the message says mode, step, last good checkpoint and what to try."""


def resolve_precision(mode: str, device: torch.device) -> str:
    """The mode that `auto` stands for on this device, with a warning where a mode is slow there."""
    if mode == "auto":
        return "amp_bf16" if device.type == "cuda" else "fp32"
    if mode not in MODES:
        raise ValueError(f"precision={mode!r}: choose one of auto, {', '.join(MODES)}")
    if mode == "amp_fp16" and device.type == "cpu":
        warnings.warn(
            "precision=amp_fp16 on a CPU is emulated where the processor lacks AVX512-FP16, "
            "8 to 30 times slower than fp32; amp_bf16 is the faster choice there.",
            stacklevel=2,
        )
    return mode


class PrecisionMode:
    """Autocast, gradient scale and parameter format of one mode.

    Args:
        mode: fp32, amp_fp16, amp_bf16 or bf16.
        device: where the model runs.
        initial_scale: first loss scale under amp_fp16.
    """

    def __init__(self, mode: str, device: torch.device, initial_scale: float = 65536.0):
        self.mode = mode
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, init_scale=initial_scale, enabled=mode == "amp_fp16")

    def prepare(self, model: nn.Module) -> nn.Module:
        """Convert the parameters under `bf16`; buffers (statistics) stay fp32."""
        if self.mode == "bf16":
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def autocast(self) -> AbstractContextManager:
        """The context of every forward pass."""
        if self.mode == "bf16":
            # Operands of both formats meet where fp32 statistics touch bf16 weights; autocast settles which wins.
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        dtype = AUTOCAST.get(self.mode)
        return torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Backpropagate the scaled loss."""
        self.scaler.scale(loss).backward()

    def unscale(self, *optimizers: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale, so that norms and clipping see true values."""
        for optimizer in filter(_has_gradients, optimizers):
            self.scaler.unscale_(optimizer)

    def step(self, *optimizers: torch.optim.Optimizer, finite: bool) -> None:
        """Update the parameters when the gradients are finite, and adapt the loss scale."""
        for optimizer in filter(_has_gradients, optimizers if finite else ()):
            self.scaler.step(optimizer)
        # The scaler learns of the overflow from unscale_, also where the step itself was left out.
        self.scaler.update()

    @property
    def scale(self) -> float:
        """The loss scale; 1 where the mode has none."""
        return float(self.scaler.get_scale())

    @property
    def collapsed(self) -> bool:
        """Whether the loss scale has fallen to nothing."""
        return self.scaler.is_enabled() and self.scale < SMALLEST_SCALE

    def state_dict(self) -> dict:
        return {"mode": self.mode, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """False in steps that an optimiser has no part in, which GradScaler would take for a mistake."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
