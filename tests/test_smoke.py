"""The whole way of the data, by the commands as they are typed, each in a process of its own."""

from __future__ import annotations

import json

from tests.commands.tiny import MODEL, digits_data, python, write_digits


def test_from_audio_to_a_table_of_error_rates(tmp_path):
    settings = digits_data(write_digits(tmp_path / "digits"), tmp_path / "prepared")
    done = python("train.py", *MODEL, *settings, "trainer.max_epochs=2", "run_dir=runs/first", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "first"
    assert json.loads((run / "train.json").read_text())["status"] == "finished"

    flags = ["--epoch", "2", "--avg", "1", "--method", "ctc_prefix_beam_search"]
    done = python("decode.py", "run_dir=runs/first", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((run / "decode/test-ctc_prefix_beam_search-epoch-2-avg-1/result.json").read_text())
    assert result["num_utterances"] == 5 and result["wer"] is not None

    done = python("scripts/report.py", "runs/first", "--out", "RESULTS.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{result['wer']:.2f}" in (tmp_path / "RESULTS.md").read_text()
