"""What the two commands share: where a job's folder goes, and how a user's mistake is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode

from asr.training.run_folder import safe_name


def in_sweep() -> bool:
    """Whether this job is one of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def job_place(name: str, run_dir: str | None) -> tuple[Path, str | None]:
    """The parent and the name of this job's run folder; the name is None where a new one is to be made.

    A given run_dir is the folder itself, in a sweep the parent of one folder per job, named after what is swept.
    """
    if not in_sweep():
        if run_dir is None:
            return Path("runs") / safe_name(name), None
        folder = Path(run_dir)
        return folder.parent, folder.name
    hydra_cfg = HydraConfig.get()
    parent = Path(run_dir) if run_dir else Path(hydra_cfg.sweep.dir)
    label = ",".join(_swept(list(hydra_cfg.overrides.task), sys.argv[1:]))
    return parent, f"{hydra_cfg.job.num:03d}_{safe_name(label)}"


def _swept(overrides: list[str], arguments: list[str]) -> list[str]:
    """Those of a job's overrides in which it differs from the others; all where the command line does not tell."""
    parser = OverridesParser.create()
    keys = set()
    for argument in arguments:
        try:
            override = parser.parse_override(argument)
        except HydraException:  # a flag
            continue
        if override.is_sweep_override():
            keys.add(override.key_or_group)
    plain = [override.lstrip("+~") for override in overrides]
    return [override for override in plain if override.partition("=")[0].partition("@")[0] in keys] or plain


@contextmanager
def report_errors() -> Iterator[None]:
    """Tell a user's mistake in its own words and exit with 1; a sweep is told by exception, so that it goes on.

    Set ASR_TRACEBACK=1 to see where the error was raised.
    """
    try:
        yield
    except KeyboardInterrupt:
        if in_sweep() or os.environ.get("ASR_TRACEBACK"):
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(130)
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
