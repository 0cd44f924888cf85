"""scripts/report.py as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from asr.scoring.files import write_results
from asr.scoring.wer import Utterance

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "report.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True, encoding="utf-8"
    )


def make_runs(folder: Path) -> None:
    for seed, hyp in ((1, "a b"), (2, "a x")):
        path = folder / "runs" / f"seed{seed}"
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(f"precision: fp32\nseed: {seed}\n")
        valid = [{"epoch": epoch, "step": epoch, "loss": 1 / epoch, "wer": None} for epoch in (1, 2)]
        (path / "train.json").write_text(json.dumps({"name": "demo", "status": "finished", "valid": valid}))
        write_results(path / "decode" / "test-ctc_greedy_search-epoch-2-avg-1", [Utterance("u", "a b", hyp)], {})


def test_prints_tables_and_comparison(tmp_path):
    make_runs(tmp_path)
    done = run(tmp_path, "runs/seed1", "runs/seed2")
    assert done.returncode == 0, done.stderr
    assert "| demo, seed=1 | 0.00 [0.00, 0.00] |" in done.stdout
    assert "A 0.00, B 50.00, difference -50.00" in done.stdout


def test_writes_grouped_tables_and_a_picture(tmp_path):
    make_runs(tmp_path)
    done = run(tmp_path, "runs", "--by", "precision", "--loss", "--out", "RESULTS.md", "--plot", "curves.png")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert text.startswith("Made by `python scripts/report.py runs --by precision --loss --out RESULTS.md")
    assert "| demo, precision=fp32 (2 runs) | 25.00 ± 35.36 [0.00, 342.65] (n=2) |" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_faults_are_one_line_and_an_exit_code(tmp_path):
    done = run(tmp_path, "absent")
    assert done.returncode == 1 and "absent" in done.stderr and "Traceback" not in done.stderr
