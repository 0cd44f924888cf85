"""What the two commands share: where a job's folder goes, and how a user's mistake is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from asr.training.run_folder import safe_name


def in_sweep() -> bool:
    """Whether this job is one of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def job_place(name: str, run_dir: str | None) -> tuple[Path, str | None]:
    """The parent and the name of this job's run folder; the name is None where a new one is to be made.

    A given run_dir is the folder itself, in a sweep the parent of one folder per job, named after its overrides.
    """
    if not in_sweep():
        if run_dir is None:
            return Path("runs") / safe_name(name), None
        folder = Path(run_dir)
        return folder.parent, folder.name
    hydra_cfg = HydraConfig.get()
    parent = Path(run_dir) if run_dir else Path(hydra_cfg.sweep.dir)
    own = [o.lstrip("+~") for o in hydra_cfg.overrides.task]
    own = [o for o in own if not o.startswith(("run_dir=", "experiment=", "debug="))]
    return parent, f"{hydra_cfg.job.num:03d}_{safe_name(','.join(own))}"


@contextmanager
def report_errors() -> Iterator[None]:
    """Tell a user's mistake in its own words and exit with 1; a sweep is told by exception, so that it goes on.

    Set ASR_TRACEBACK=1 to see where the error was raised.
    """
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        if in_sweep() or os.environ.get("ASR_TRACEBACK") or not _is_told(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _is_told(error: Exception) -> bool:
    """Whether the message was written for the user; of PyTorch's many RuntimeErrors none is."""
    if not isinstance(error, RuntimeError):
        return True
    from asr.training.precision import NumericsError  # imports torch, which by now has been

    return isinstance(error, NumericsError)
