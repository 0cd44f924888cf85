"""A run's folder: made once, never shared by two runs, and holding all that the run leaves behind.

config.yaml  versions.json  train.log  train.json  metrics.jsonl
tokenizer/   data_report.json   checkpoints/   tensorboard/   pictures/   decode/
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock, Timeout

# A value that a run may change when it continues: none of these is part of what is being trained.
FREE_ON_RESUME = {
    "run_dir", "resume", "device", "name",
    "trainer.max_epochs", "trainer.max_steps", "trainer.log_every", "trainer.valid_every", "trainer.save_every",
    "trainer.keep_last", "trainer.num_threads", "trainer.progress", "trainer.pictures", "trainer.max_skipped",
    "trainer.scan_memory",
    "data.max_duration", "data.num_workers", "data.num_jobs", "data.num_buckets",
}  # fmt: skip


def new_run_dir(parent: Path, label: str = "") -> Path:
    """Make a folder that no other run has, also when several start in the same second."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{stamp}_{label}" if label else stamp
    parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 10_000):
        folder = parent / (name if attempt == 1 else f"{name}_{attempt}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise OSError(f"{parent}: no free name for a run folder could be found")


def open_run_dir(parent: Path, name: str | None, resume: str) -> Path:
    """The folder of a run that starts or continues; a new one where `name` is None.

    Raises ValueError where `resume` and what the folder holds do not agree.
    """
    if name is None:
        if resume == "true":
            raise ValueError("resume=true: say which run to continue, as in run_dir=runs/demo/2026-01-31_12-00-00")
        return new_run_dir(parent)
    folder = parent / name
    trained = any(folder.glob("checkpoints/*.pt"))
    if resume == "true" and not trained:
        raise ValueError(f"resume=true: {folder} holds no checkpoint to continue from")
    if resume == "false" and trained:
        raise ValueError(f"resume=false: {folder} holds the checkpoints of a run; give another run_dir or resume=auto")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Keep other processes from training in the folder. Raises ValueError where one does already."""
    lock = FileLock(run_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"run_dir={run_dir}: another process is training in this folder; give another one") from None
    try:
        yield
    finally:
        lock.release()


def safe_name(text: str, limit: int = 100) -> str:
    """`text` as a folder name on any file system, which a command line may give as a value without quotes."""
    return re.sub(r"[^\w.+-]+", "_", text)[:limit].strip("_.")


def versions() -> dict[str, str]:
    """Versions of Python and the libraries that decide results, and the git commit of the code."""
    found = {"python": platform.python_version(), "command": " ".join(sys.argv)}
    for package in ("torch", "torchaudio", "lhotse", "hydra-core", "omegaconf", "sentencepiece", "kaldialign"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["commit"] = git_commit()
    return found


def git_commit() -> str:
    """The commit of the code, with a mark where files differ from it; "unknown" outside a checkout."""
    code = Path(__file__).resolve().parents[2]
    try:
        run = subprocess.run(
            ["git", "-C", str(code), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        return run.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def changed_keys(before: dict, now: dict, prefix: str = "") -> list[str]:
    """Dotted keys that differ between two configurations and may not change when a run continues."""
    changed = []
    for key in sorted(before.keys() | now.keys()):
        full = f"{prefix}{key}"
        if full in FREE_ON_RESUME:
            continue
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changed_keys(old, new, f"{full}.")
        elif old != new:
            changed.append(f"{full} (was {old!r}, now {new!r})")
    return changed


def write_json(value: dict | list, path: Path) -> None:
    """Write JSON so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
