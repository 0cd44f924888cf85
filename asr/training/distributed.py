"""Data-parallel training over processes started by torchrun: gloo on CPU, nccl on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_NUMEL = 8 * 1024 * 1024
TIMEOUT = timedelta(minutes=float(os.environ.get("ASR_DIST_TIMEOUT_MINUTES", "30")))


@dataclass(frozen=True)
class World:
    """This process among the others. Rank 0 alone writes files."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def connect(device: str) -> tuple[World, torch.device]:
    """Join the process group that torchrun described in the environment, if any, and choose this rank's device.

    Raises ValueError when `device` names a GPU that this machine lacks.
    """
    world = World(*(int(os.environ.get(name, default)) for name, default in _ENVIRONMENT))
    wants_gpu = device == "cuda" or device.startswith("cuda:") or (device == "auto" and torch.cuda.is_available())
    if wants_gpu and not torch.cuda.is_available():
        raise ValueError(f"device={device}: this machine has no CUDA device; use device=cpu")
    if wants_gpu:
        chosen = torch.device(device if ":" in device else f"cuda:{world.local_rank}")
        count = torch.cuda.device_count()
        if (chosen.index or 0) >= count:
            raise ValueError(f"device={device}: {chosen} was asked for, and this machine has {count} CUDA device(s)")
        torch.cuda.set_device(chosen)
    else:
        chosen = torch.device("cpu" if device == "auto" else device)
    if world.size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if wants_gpu else "gloo", timeout=TIMEOUT)
    return world, chosen


_ENVIRONMENT = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def disconnect() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def share(value: Any, world: World) -> Any:
    """Rank 0's `value`, on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any, world: World) -> list[Any]:
    """Every rank's `value`, in order of rank, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def totals(values: Sequence[float], world: World, device: torch.device) -> list[float]:
    """The sum of each value over ranks, in one message."""
    if world.size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def sum_gradients(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Sum gradients over ranks in place, in a few large messages.

    Done once per optimiser step, after accumulation, so a rank whose batch was empty takes part with zeros and
    no rank waits for another's backward hooks.
    """
    if world.size == 1:
        return
    bucket: list[Tensor] = []
    numel = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        numel += parameter.numel()
        if numel >= BUCKET_NUMEL:
            _sum_bucket(bucket)
            bucket, numel = [], 0
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def average_buffers(model: nn.Module, world: World) -> None:
    """Let all ranks hold one model: floating-point buffers (batch norm statistics) become the mean over ranks, others
    (counters, samples) those of rank 0."""
    if world.size == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            # In fp64, so that a buffer that is equal on all ranks stays exactly as it is.
            mean = buffer.double()
            dist.all_reduce(mean)
            buffer.copy_(mean / world.size)
        else:
            dist.broadcast(buffer, src=0)
