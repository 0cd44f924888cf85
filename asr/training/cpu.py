"""Threads and memory of a training on a CPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of mallopt, in glibc's malloc.h


def threads_to_use(num_workers: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """The cores that the loader's workers leave; None where OMP_NUM_THREADS has decided.

    Threads of one operation wait for one another. Where a worker takes the core of one of them, all wait for it: on two
    cores, two threads beside a worker train at half the speed of one.
    """
    if environ.get("OMP_NUM_THREADS"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - num_workers)


def keep_freed_memory() -> bool:
    """Let the process keep the memory of freed tensors for the next ones; whether the C library can be told so.

    glibc maps every large tensor anew and gives it back when it is freed, so that each training step pays for fresh,
    zeroed pages: a fifth of the step of a small model. Peak memory stays what it is.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return all(mallopt(*setting) == 1 for setting in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20)))
