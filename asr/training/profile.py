"""A trace of what training spends its time on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)

NUM_ROWS = 20


@contextmanager
def profiled(folder: Path | None) -> Iterator[None]:
    """Profile what runs inside; trace.json.gz (for Perfetto) and operations.txt go to `folder`. None: do nothing."""
    if folder is None:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, profile_memory=True) as profiler:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=NUM_ROWS)
    (folder / "operations.txt").write_text(table, encoding="utf-8")
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    log.info("profile in %s", folder)
