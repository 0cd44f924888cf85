"""Memory of the process on a CPU."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of mallopt, in glibc's malloc.h


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
