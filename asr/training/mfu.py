"""Model FLOPs utilisation (Chowdhery et al., 2022): how much of a GPU's arithmetic a run makes use of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")

# Dense matrix products per second by name and type, from the makers' data sheets; the first name that fits counts.
PEAK_FLOPS = {
    "B200": {"half": 2250e12, "single": 80e12},
    "H200": {"half": 989e12, "single": 67e12},
    "H100 PCIe": {"half": 756e12, "single": 51e12},
    "H100": {"half": 989e12, "single": 67e12},
    "A100": {"half": 312e12, "single": 19.5e12},
    "L40S": {"half": 362e12, "single": 91.6e12},
    "L4": {"half": 121e12, "single": 30.3e12},
    "A10": {"half": 125e12, "single": 31.2e12},
    "V100": {"half": 125e12, "single": 15.7e12},
    "T4": {"half": 65e12, "single": 8.1e12},
    "RTX 4090": {"half": 165e12, "single": 82.6e12},
    "RTX 3090": {"half": 71e12, "single": 35.6e12},
}


def peak_flops(device: torch.device, mode: str, num_devices: int) -> float | None:
    """Peak of so many GPUs like `device` under a precision mode; None for a CPU and for a GPU that is not listed."""
    one = peak_of(torch.cuda.get_device_name(device), mode) if device.type == "cuda" else None
    return one and one * num_devices


def peak_of(name: str, mode: str) -> float | None:
    """Peak of the GPU that calls itself `name`, such as "NVIDIA H100 80GB HBM3"."""
    kind = "single" if mode == "fp32" else "half"
    return next((peaks[kind] for known, peaks in PEAK_FLOPS.items() if known in name), None)


def counting_flops(work: Callable[[], T]) -> tuple[T, int]:
    """The result of `work` and the floating-point operations of its matrix products, backward passes included."""
    with FlopCounterMode(display=False) as counter:
        result = work()
    return result, counter.get_total_flops()
