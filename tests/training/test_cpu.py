import os
import subprocess
import sys

import pytest

from asr.training.cpu import threads_to_use

FAULTS = """
import resource, torch
from asr.training.cpu import keep_freed_memory
torch.set_num_threads(1)
kept = keep_freed_memory() if {keep} else None
def use():
    return [torch.ones(3_000_000) for _ in range(4)]
for _ in range(5):  # the heap grows to its size
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


# Without this, glibc may learn from what is freed to map less.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def page_faults(keep):
    code = FAULTS.format(keep=keep)
    kept, faults = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **MAPPED}
    ).stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is what is told")
def test_freed_memory_is_used_again():
    kept, faults = page_faults(True)
    if kept != "True":
        pytest.skip("this C library has no mallopt")
    assert faults < 0.1 * page_faults(False)[1]


def test_data_workers_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    assert [threads_to_use(workers, {}) for workers in (0, 1, 3, 9)] == [4, 3, 1, 1]
    assert threads_to_use(1, {"OMP_NUM_THREADS": "2"}) is None


PEAKS = """
import torch
from asr.training.cpu import keep_freed_memory
from asr.training.monitor import forget_peak_memory, peak_memory_bytes
keep_freed_memory()
at_start = peak_memory_bytes()
torch.ones(100_000_000).sum()  # 400 MB
large = peak_memory_bytes()
forget_peak_memory()
print(large - at_start, peak_memory_bytes() - at_start)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can be told to begin a new peak")
def test_a_job_of_a_sweep_does_not_report_the_peak_of_the_one_before():
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    large, after = map(int, done.stdout.split())
    assert large > 300e6 and after < 100e6
