"""Threads and memory of a training on a CPU."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Mapping
from typing import Any

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
    mallopt = _from_glibc("mallopt")
    if mallopt is None:
        return False
    return all(mallopt(*setting) == 1 for setting in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20)))


def give_back_freed_memory() -> None:
    """Return to the system what `keep_freed_memory` has kept so far, where the C library can be told so."""
    gc.collect()
    trim = _from_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _from_glibc(name: str) -> Any:
    """A function of glibc; None on other systems and beside other C libraries, such as musl."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
