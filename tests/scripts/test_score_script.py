"""scripts/score.py as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "score.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True, encoding="utf-8"
    )


def test_scores_words_from_any_folder(tmp_path):
    (tmp_path / "ref").write_text("b C D\na\nd E F\nc\n")
    (tmp_path / "hyp").write_text("d E F\na A B\n")
    done = run(tmp_path, "ref", "hyp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("WER 100.00 % [4 / 4, 2 ins, 2 del, 0 sub]")
    assert "2 of 4 hypotheses are missing: b, c" in done.stderr


def test_scores_characters_and_writes_files(tmp_path):
    (tmp_path / "ref").write_bytes("\ufeffu1 今天 天气\r\nu2 我爱 ASR\r\n".encode())
    (tmp_path / "hyp").write_text("u2 我爱ASR\nu1 今天天汽\n", encoding="utf-8")
    done = run(tmp_path, "ref", "hyp", "--cer", "--out", "scored")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CER 11.11 % [1 / 9, 0 ins, 0 del, 1 sub]")
    assert json.loads((tmp_path / "scored" / "result.json").read_text(encoding="utf-8"))["cer"] == 100 / 9
    assert (tmp_path / "scored" / "errs.txt").read_text(encoding="utf-8").startswith("CER 11.11 %")


def test_empty_references_have_no_rate(tmp_path):
    (tmp_path / "ref").write_text("a\n")
    (tmp_path / "hyp").write_text("a x\n")
    done = run(tmp_path, "ref", "hyp")
    assert done.returncode == 0 and done.stdout.startswith("WER n/a [1 / 0, 1 ins")


def test_faults_are_one_line_and_an_exit_code(tmp_path):
    (tmp_path / "ref").write_text("a x\n")
    (tmp_path / "hyp").write_text("a x\nstray y\n")
    (tmp_path / "twice").write_text("a x\na y\n")
    for hyp, words in (("hyp", "stray"), ("twice", "twice, line 2: id a"), ("absent", "absent")):
        done = run(tmp_path, "ref", hyp)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
