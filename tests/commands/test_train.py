from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asr.text.tokenizer import load_tokenizer
from tests.commands.tiny import MODEL, RATE, assert_same_state, command, digits_data, read_json, train, write_digits


def test_a_run_folder_holds_what_reports_decoding_and_people_need(trained):
    record = read_json(trained / "train.json")
    assert (record["status"], record["epochs"], record["steps"], record["precision"]) == ("finished", 3, 12, "fp32")
    assert [entry["epoch"] for entry in record["valid"]] == [1, 2, 3]
    assert len(record["seconds_per_epoch"]) == 3 and min(record["seconds_per_epoch"]) > 0
    assert [entry["epoch"] for entry in record["train_loss"]] == [1, 2, 3]
    assert record["train_loss"][2]["loss"] < record["train_loss"][0]["loss"]
    assert record["peak_memory_bytes"] > 10**7 and record["skipped_steps"] == 0
    assert record["best_valid"]["wer"] == min(entry["wer"] for entry in record["valid"])

    names = {path.name for path in (trained / "checkpoints").iterdir()}
    assert names == {*(f"epoch-{n}.pt" for n in (1, 2, 3)), *(f"step-{n}.pt" for n in (3, 6, 9, 12))}
    assert load_tokenizer(trained / "tokenizer").hash == read_json(trained / "tokenizer/tokenizer.json")["hash"]
    assert set(read_json(trained / "data_report.json")["splits"]) == {"train", "dev", "test", "test_single"}
    assert {path.name for path in (trained / "pictures").iterdir()} == {"features_seen.png", "ctc_posteriors.png"}
    assert read_json(trained / "versions.json")["torch"] in torch.__version__
    for place in ("config.yaml", "metrics.jsonl"):
        assert (trained / place).stat().st_size > 0
    events = EventAccumulator(str(trained / "tensorboard")).Reload().Tags()
    assert {"train/loss", "train/grad_norm", "dev/wer"} <= set(events["scalars"])
    assert {"features/seen", "ctc/posteriors"} <= set(events["images"])


def test_the_log_ends_with_the_word_error_rate_and_a_decode_command_that_works(trained):
    log = (trained / "train.log").read_text()
    assert "dev WER" in log.splitlines()[-2]
    words = log.splitlines()[-1].partition("decode with: python ")[2].split()
    done = command(*words, "data.num_workers=0", cwd=trained.parent)
    assert done.returncode == 0, done.stderr


def test_nothing_is_left_beside_what_was_asked_for(tmp_path, digits):
    train(*digits, "trainer.max_steps=1", run_dir=tmp_path / "here" / "run", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["run"]


def test_runs_without_a_run_dir_get_new_folders_under_their_name(tmp_path, digits):
    for _ in range(2):
        done = command("train.py", *MODEL, *digits, "trainer.max_steps=1", "name=a b/c", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a_b_c"]
    runs = list((tmp_path / "runs" / "a_b_c").iterdir())
    assert len(runs) == 2 and all((run / "checkpoints").is_dir() for run in runs)


def test_relative_paths_are_those_of_the_place_where_the_command_was_started(workplace):
    done = command(
        "train.py", *MODEL, *digits_data("../digits", "made/here"), "trainer.max_steps=1", "run_dir=out/run",
        cwd=_inside(workplace, "relative"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    base = workplace / "relative"
    assert sorted(path.name for path in base.iterdir()) == ["made", "out"]
    config = OmegaConf.load(base / "out" / "run" / "config.yaml")
    assert config.data.prepared_dir == str(base / "made" / "here"), "so that decoding works from anywhere"


def _inside(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def test_special_characters_in_data_paths(tmp_path, workplace):
    strange = "数据 集,1=[a]#b"
    (tmp_path / strange).symlink_to(workplace / "digits")
    overrides = digits_data(f"'{tmp_path}/{strange}'", f"'{tmp_path}/p {strange}'")
    overrides += ["trainer.max_steps=1", "trainer.max_epochs=1"]
    done = command("train.py", *MODEL, *overrides, f"name='{strange}'", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / "数据_集_1_a_b").iterdir()
    done = command("decode.py", f"run_dir='{run}'", "data.num_workers=0", "data.sets=[test_single]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    both = f"data.corpus.corpus_dir='{tmp_path}/{strange}','{tmp_path}/{strange}/'"
    done = command("train.py", "-m", *MODEL, *overrides, both, "run_dir=sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "sweep").glob("*/checkpoints/*.pt"))) == 2


def test_what_has_no_usable_audio_is_left_out_of_the_statistics_and_of_training(tmp_path):
    recordings = sorted((write_digits(tmp_path / "corpus") / "recordings").glob("*.wav"))
    soundfile.write(tmp_path / "loud.wav", np.full(RATE, 1e30, dtype=np.float32), RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "gone.wav", np.zeros(RATE), RATE)
    for name, others in (("train", [tmp_path / "loud.wav", tmp_path / "gone.wav"]), ("dev", [])):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{path}\tabc\n" for path in [*others, *recordings]))
    data = ["data=custom", *(f"data.{name}={tmp_path / name}.tsv" for name in ("train", "dev")),
            "data.corpus.test_share=0.1", f"data.prepared_dir={tmp_path / 'prepared'}", "tokenizer=word"]  # fmt: skip
    assert command("scripts/prepare.py", *data, "data.num_jobs=1", cwd=tmp_path).returncode == 0
    (tmp_path / "gone.wav").unlink()
    run = train(*data, "trainer.max_epochs=1", run_dir=tmp_path / "run")
    assert read_json(run / "train.json")["skipped_utterances"] == 2
    (told,) = (line for line in (run / "train.log").read_text().splitlines() if "feature statistics" in line)
    assert "2 utterances" in told and "loud: its audio gives features that are not finite" in told
    assert "gone.wav): missing file" in told


@pytest.mark.parametrize("mode", ["amp_fp16", "amp_bf16", "bf16"])
def test_every_precision_trains_and_decodes_on_a_cpu(mode, tmp_path, digits, trained):
    settings = [f"precision={mode}", "trainer.max_steps=2", "trainer.log_every=1"]
    settings += ["trainer.initial_grad_scale=64"]  # the usual one takes a few skipped steps to come down
    run = train(*digits, *settings, run_dir=tmp_path / mode)
    record = read_json(run / "train.json")
    assert record["precision"] == mode and record["skipped_steps"] == 0
    assert first_loss(run) == pytest.approx(first_loss(trained), rel=0.02)
    expected = torch.bfloat16 if mode == "bf16" else torch.float32
    state = torch.load(run / "checkpoints" / "step-2.pt", weights_only=True)
    assert state["model"]["head.output.weight"].dtype is expected
    assert ("rest" in state["optimizer"]["state"][0]) == (mode == "bf16"), "bf16 weights keep what rounding cuts off"
    done = command("decode.py", f"run_dir={run}", "avg=1", "data.num_workers=0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_json(next(run.glob("decode/test-*/result.json")))["num_utterances"] == 5


def first_loss(run_dir: Path) -> float:
    first = (run_dir / "metrics.jsonl").read_text().splitlines()[0]
    loss = json.loads(first)["loss"]
    assert isinstance(loss, float)
    return loss


def test_a_look_at_the_memory_changes_nothing_of_the_run(tmp_path, digits):
    runs = [train(*digits, "trainer.max_steps=2", f"trainer.scan_memory={scan}", run_dir=tmp_path / scan)
            for scan in ("false", "true")]  # fmt: skip
    assert_same_state(*(torch.load(run / "checkpoints" / "step-2.pt", weights_only=True) for run in runs))
    said = ["GB at most, over" in (run / "train.log").read_text() for run in runs]
    assert said == [False, True]
