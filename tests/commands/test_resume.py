from __future__ import annotations

import shutil
import signal
import sys
import time

import pytest
import torch

from tests.commands.tiny import (
    MODEL,
    ROOT,
    assert_same_state,
    command,
    decode,
    digits_data,
    last_checkpoint,
    read_json,
    spawn,
    train,
)


def test_interrupted_by_hand_it_says_how_to_go_on(tmp_path, digits):
    run = tmp_path / "run"
    settings = [*digits, "trainer.max_epochs=500", f"run_dir={run}"]
    process = spawn(sys.executable, ROOT / "train.py", *MODEL, *settings, cwd=tmp_path)
    while not (run / "checkpoints" / "epoch-1.pt").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and err.endswith("interrupted\n")
    assert f"the same command with run_dir={run} goes on" in (run / "train.log").read_text()


def test_killed_in_mid_epoch_the_same_command_ends_with_the_same_bits(tmp_path, workplace, digits):
    settings = [
        *digits_data(workplace / "digits", workplace / "prepared24", train_strings=24), "data.max_duration=6",
        "data.num_workers=2", "data.speed_factors=[0.9,1.0]", "data.volume_range=[-6,6]", "trainer.accumulate=2",
        "trainer.save_every=2", "trainer.max_epochs=2", "encoder.layer_drop=0.1",
    ]  # fmt: skip
    undisturbed = train(*settings, run_dir=tmp_path / "undisturbed")
    steps = read_json(undisturbed / "train.json")["steps"]

    run = tmp_path / "killed"
    process = spawn(sys.executable, ROOT / "train.py", *MODEL, *settings, f"run_dir={run}", cwd=tmp_path)
    while not (run / "checkpoints" / "step-4.pt").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (run / "checkpoints" / "epoch-2.pt").exists(), "it was to be killed within an epoch"
    assert read_json(run / "train.json")["status"] == "running"

    train(*settings, run_dir=run)
    log = (run / "train.log").read_text()
    assert "continuing from" in log and "starts again" not in log
    record, expected = read_json(run / "train.json"), read_json(undisturbed / "train.json")
    assert record["status"] == "finished" and record["steps"] == steps
    assert record["valid"] == expected["valid"] and record["train_loss"] == expected["train_loss"]
    assert_same_state(last_checkpoint(run), last_checkpoint(undisturbed))


@pytest.fixture
def stopped(tmp_path, digits):
    """A run that has met its limit of two steps within its first epoch."""
    return train(*digits, "trainer.max_epochs=2", "trainer.max_steps=2", run_dir=tmp_path / "run")


def resume(run_dir, *arguments: str):
    return command("train.py", *MODEL, f"run_dir={run_dir}", *arguments, cwd=run_dir.parent)


def test_more_steps_continue_a_run_and_the_loader_may_change(stopped, digits, tmp_path):
    whole = train(*digits, "trainer.max_epochs=2", "schedule=constant", run_dir=tmp_path / "whole")
    parts = tmp_path / "parts"
    train(*digits, "trainer.max_epochs=2", "schedule=constant", "trainer.max_steps=3", run_dir=parts)
    train(*digits, "trainer.max_epochs=2", "schedule=constant", "data.num_workers=1", run_dir=parts)
    assert_same_state(last_checkpoint(parts), last_checkpoint(whole))


def test_a_finished_run_says_so_and_stays_as_it_is(stopped, digits):
    before = torch.load(stopped / "checkpoints" / "step-2.pt", weights_only=True)
    done = resume(stopped, *digits, "trainer.max_epochs=2", "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["step-2.pt"]
    assert_same_state(torch.load(stopped / "checkpoints" / "step-2.pt", weights_only=True), before)
    assert read_json(stopped / "train.json")["status"] == "finished"
    refused = resume(stopped, *digits, "trainer.max_epochs=2", "trainer.max_steps=2", "optim.lr=0.5")
    assert refused.returncode == 1 and read_json(stopped / "train.json")["status"] == "finished"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("encoder.num_layers=2", "encoder.num_layers (was 1, now 2)"),
        ("seed=7", "seed (was 42, now 7)"),
        ("precision=amp_bf16", "precision (was 'auto', now 'amp_bf16')"),
        ("optim.lr=0.5", "optim.lr (was 0.002, now 0.5)"),
        ("tokenizer=char", "tokenizer.kind (was 'word', now 'char')"),
        ("trainer.accumulate=2", "trainer.accumulate (was 1, now 2)"),
    ],
)
def test_other_settings_are_refused_in_words(stopped, digits, change, message):
    done = resume(stopped, *digits, "trainer.max_epochs=2", change)
    assert done.returncode == 1
    told = done.stderr.partition("error: ")[2]
    assert message in told and "choose another run_dir" in told and "Traceback" not in done.stderr


def test_another_max_duration_is_obeyed_in_words(stopped, digits):
    done = resume(stopped, *digits, "trainer.max_epochs=2", "data.max_duration=8", "trainer.log_every=1")
    assert done.returncode == 0, done.stderr
    assert "epoch 1 starts again from its first batch: data.max_duration=8.0 (it was 16.0) makes other" in done.stderr
    record = read_json(stopped / "train.json")
    assert record["status"] == "finished" and record["epochs"] == 2
    assert record["steps"] > 2 + 2 * 4, "batches of half the size are more than twice as many"


def test_changed_data_is_refused_in_words(tmp_path, workplace):
    shutil.copytree(workplace / "digits", tmp_path / "corpus")
    settings = [*digits_data(tmp_path / "corpus", tmp_path / "prepared"), "trainer.max_epochs=1"]
    run = train(*settings, "trainer.max_steps=1", run_dir=tmp_path / "run")
    for old in (tmp_path / "corpus" / "recordings").glob("*_ann_6.wav"):
        old.unlink()
    done = resume(run, *settings)
    assert done.returncode == 1 and "the prepared data has changed since this run began" in done.stderr


def test_resume_true_and_false(stopped, digits, tmp_path):
    done = resume(stopped, *digits, "trainer.max_epochs=2", "resume=false")
    assert done.returncode == 1 and "holds the checkpoints of a run" in done.stderr
    done = resume(tmp_path / "new", *digits, "resume=true")
    assert done.returncode == 1 and "holds no checkpoint to continue from" in done.stderr
    done = command("train.py", *MODEL, *digits, "resume=true", cwd=tmp_path)
    assert done.returncode == 1 and "say which run to continue, as in run_dir=" in done.stderr
    done = resume(stopped, *digits, "trainer.max_epochs=1", "resume=true")
    assert done.returncode == 0, done.stderr
    assert read_json(stopped / "train.json")["epochs"] == 1
    decode(stopped, "data.sets=[dev]")
