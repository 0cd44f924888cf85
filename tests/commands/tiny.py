"""A corpus of tones, a model that trains on it in a moment, and the commands as a user types them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import runpy
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

ROOT = Path(__file__).resolve().parents[2]
RATE = 8000

MODEL = [
    "tokenizer=word",
    "encoder.num_layers=1",
    "encoder.output_dim=32",  # oneDNN's depthwise convolution of fp16 on a CPU never returns for 16 channels or fewer
    "encoder.feed_forward_dim=32",
    "encoder.num_heads=2",
    "encoder.subsampling_channels=4",
    "data.num_jobs=1",
    "data.speed_factors=[1.0]",
    "data.num_workers=0",
    "trainer.pictures=false",
    "trainer.num_threads=1",
    "trainer.average_period=1",
]


def write_digits(corpus_dir: Path, digits: int = 3, repetitions: int = 4) -> Path:
    """A tree like that of the spoken digits, of tones: the digit is the pitch."""
    folder = corpus_dir / "recordings"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    time = np.arange(RATE // 2) / RATE
    for speaker in ("ann", "bob"):
        for digit in range(digits):
            for index in [0, *range(5, 4 + repetitions)]:
                tone = 0.3 * np.sin(2 * np.pi * (300 + 450 * digit + 10 * index) * time)
                samples = tone + 0.003 * generator.standard_normal(len(time))
                soundfile.write(folder / f"{digit}_{speaker}_{index}.wav", samples, RATE, subtype="PCM_16")
    return corpus_dir


def digits_data(corpus_dir: Path | str, prepared_dir: Path | str, train_strings: int = 12) -> list[str]:
    """Overrides that prepare and train on `write_digits`."""
    return [
        "data=fsdd",
        f"data.corpus.corpus_dir={corpus_dir}",
        f"data.prepared_dir={prepared_dir}",
        f"data.corpus.train_strings={train_strings}",
        "data.corpus.dev_strings=4",
        "data.corpus.test_strings=5",
        "data.corpus.dev_indices=1",
        "data.max_duration=16",
    ]


@dataclass
class Outcome:
    """How a command ended and what it said."""

    returncode: int
    stdout: str
    stderr: str


def command(script: str, *arguments: str, cwd: Path) -> Outcome:
    """Run `python SCRIPT ARGUMENTS` within this process, which saves the seconds that imports take."""
    root = logging.getLogger()
    handlers, level, argv, here = list(root.handlers), root.level, sys.argv, Path.cwd()
    threads = torch.get_num_threads()
    out, err = io.StringIO(), io.StringIO()
    sys.argv = [script, *arguments]
    os.chdir(cwd)
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            err.write(code)
    finally:
        os.chdir(here)
        sys.argv = argv
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        root.setLevel(level)
        torch.set_num_threads(threads)
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    return Outcome(code if isinstance(code, int) else 1, out.getvalue(), err.getvalue())


def spawn(*line: str | Path, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a command in a process of its own, in a group of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [str(part) for part in line], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str], timeout: float = 200) -> Outcome:
    """Wait for a command that `spawn` started."""
    out, err = process.communicate(timeout=timeout)
    return Outcome(process.returncode, out, err)


def python(script: str, *arguments: str, cwd: Path, **environment: str) -> Outcome:
    """Run `python SCRIPT ARGUMENTS` in a process of its own."""
    return finish(spawn(sys.executable, ROOT / script, *arguments, cwd=cwd, **environment))


def train(*arguments: str, run_dir: Path, cwd: Path | None = None) -> Path:
    """Train with the tiny model into `run_dir`; fails unless the command succeeds."""
    done = command("train.py", *MODEL, *arguments, f"run_dir={run_dir}", cwd=cwd or run_dir.parent)
    assert done.returncode == 0, done.stderr
    return run_dir


def decode(run_dir: Path, *arguments: str, cwd: Path | None = None) -> Outcome:
    """Decode `run_dir`; fails unless the command succeeds."""
    done = command("decode.py", f"run_dir={run_dir}", "data.num_workers=0", *arguments, cwd=cwd or run_dir.parent)
    assert done.returncode == 0, done.stderr
    return done


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def last_checkpoint(run_dir: Path) -> dict:
    """The checkpoint of the highest epoch."""
    newest = max(run_dir.glob("checkpoints/epoch-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))
    return torch.load(newest, weights_only=True)


def assert_same_state(one: dict, other: dict) -> None:
    """Parameters, buffers, running average and optimiser are equal to the last bit."""
    for part in ("model", "average", "optimizer"):
        left, right = _flat(one[part]), _flat(other[part])
        assert left.keys() == right.keys()
        for name, value in left.items():
            same = torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]
            assert same, f"{part}: {name} differs"


def _flat(value: object, prefix: str = "") -> dict:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for index, item in enumerate(value) for k, v in _flat(item, f"{prefix}.{index}").items()}
    return {prefix: value}
