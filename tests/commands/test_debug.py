from __future__ import annotations

import gzip
import json

import soundfile
import torch

from tests.commands.tiny import MODEL, command, decode, read_json, train

BROKEN = ((0, 6), (2, 6))  # digit and index of recordings that the seeded strings use for training


def test_smoke_is_a_whole_run_in_four_steps(tmp_path, digits):
    run = train(*digits, "+debug=smoke", run_dir=tmp_path / "run")
    record = read_json(run / "train.json")
    assert record["name"] == "smoke" and record["steps"] == 4
    assert decode(run, "data.sets=[dev]").returncode == 0


def test_overfit_reaches_the_transcripts_of_what_it_trained_on(tmp_path, digits):
    run = train(*digits, "+debug=overfit", "data.corpus.train_strings=4", "trainer.max_epochs=80", "optim.lr=0.01",
                "head.dropout=0", "encoder.dropout=0", run_dir=tmp_path / "run")  # fmt: skip
    record = read_json(run / "train.json")
    assert record["valid"][0]["wer"] > 50
    assert record["valid"][-1]["wer"] == 0, "dev is the training set here"
    for method in ("ctc_greedy_search", "ctc_prefix_beam_search"):
        decode(run, "data.sets=[train]", f"method={method}")
        assert read_json(run / f"decode/train-{method}-epoch-80-avg-1/result.json")["wer"] == 0


def test_profile_writes_a_trace(tmp_path, digits):
    run = train(*digits, "+debug=profile", "trainer.max_steps=2", run_dir=tmp_path / "run")
    with gzip.open(run / "profile" / "trace.json.gz", "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert any("conv" in name for name in names)
    assert "aten::" in (run / "profile" / "operations.txt").read_text()


def test_anomaly_names_the_operation(tmp_path, digits):
    train(*digits, "+debug=anomaly", "trainer.max_steps=1", run_dir=tmp_path / "fine")
    assert not torch.is_anomaly_enabled()
    broken = ["+debug=anomaly", "trainer.max_steps=2", "init_mode=none", "optim.lr=1e30", "schedule=constant"]
    done = command("train.py", *MODEL, *digits, *broken, f"run_dir={tmp_path / 'bad'}", cwd=tmp_path)
    assert done.returncode == 1
    assert "returned nan values" in (tmp_path / "bad" / "train.log").read_text()


def test_limit_trains_and_validates_on_that_many(tmp_path, digits):
    run = train(*digits, "data.limit=3", "trainer.max_steps=1", run_dir=tmp_path / "run")
    assert "training on 3 utterances" in (run / "train.log").read_text()
    assert "(3 utterances)" in (run / "train.log").read_text()


def test_broken_training_audio_is_left_out_and_named(tmp_path, workplace, digits):
    nan, text = (workplace / "digits" / "recordings" / f"{digit}_bob_{index}.wav" for digit, index in BROKEN)
    contents = {path: path.read_bytes() for path in (nan, text)}
    try:
        soundfile.write(nan, [float("nan")] * 4000, 8000, subtype="FLOAT")
        text.write_text("no audio at all")
        run = train(*digits, "trainer.max_epochs=1", "data.num_workers=2", run_dir=tmp_path / "run")
    finally:
        for path, content in contents.items():
            path.write_bytes(content)
    log = (run / "train.log").read_text()
    assert read_json(run / "train.json")["skipped_utterances"] > 0
    assert "skipped train-bob-" in log and str(nan) in log and str(text) in log
