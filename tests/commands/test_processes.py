from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.commands.tiny import MODEL, ROOT, decode, digits_data, finish, read_json, spawn

TORCHRUN = Path(sys.executable).with_name("torchrun")


def test_two_processes_train_one_model_into_one_folder(tmp_path, digits):
    done = finish(
        spawn(TORCHRUN, "--standalone", "--nproc-per-node", "2", Path(__file__).with_name("dump_ranks.py"), tmp_path,
              ROOT / "train.py", *MODEL, *digits, "trainer.max_epochs=2", "device=cpu", "name=both", cwd=tmp_path)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / "both").iterdir()
    record = read_json(run / "train.json")
    assert record["status"] == "finished" and record["epochs"] == 2
    assert (run / "train.log").read_text().count("epoch 1 done") == 1
    assert len(list((run / "tensorboard").iterdir())) == 1
    one, other = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs between ranks"
    saved = torch.load(run / "checkpoints" / "epoch-2.pt", weights_only=True)
    assert saved["world_size"] == 2 and len(saved["generators"]) == 2
    assert all(torch.equal(value, one[name]) for name, value in saved["model"].items())
    decode(run, "data.sets=[dev]")


def test_few_open_files_are_enough_for_workers(tmp_path, workplace):
    settings = [*digits_data(workplace / "digits", workplace / "prepared100", train_strings=100), "data.num_workers=2"]
    line = [sys.executable, ROOT / "train.py", *MODEL, *settings, "trainer.max_epochs=1", "run_dir=run"]
    done = finish(spawn("bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *line, cwd=tmp_path))
    assert done.returncode == 0, done.stderr
    record = read_json(tmp_path / "run" / "train.json")
    assert record["status"] == "finished" and record["skipped_utterances"] == 0
