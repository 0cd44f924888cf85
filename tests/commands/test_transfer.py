"""From one run to another with a new vocabulary, on the command line."""

import json

import torch

from tests.commands.tiny import MODEL, assert_same_state, command, decode, last_checkpoint, read_json, train
from tests.interop.test_nemo import FILE

CHARACTERS = ["tokenizer=char", "trainer.max_epochs=1"]


def test_a_frozen_encoder_is_bit_equal_after_an_epoch_and_letters_are_new(tmp_path, trained, digits):
    run = train(*digits, *CHARACTERS, f"init_from.run_dir={trained}", "freeze=[encoder,feature_norm]",
                "optim.weight_decay=0.5", "lr_scale.head=2", run_dir=tmp_path / "run")  # fmt: skip
    told = read_json(run / "transfer.json")
    assert told["copied"] == ["head.output.weight", "head.output.bias"] and told["shared_tokens"] == ["<blk>", "<unk>"]
    assert told["new"] == [] and told["skipped"] == {}
    log = (run / "train.log").read_text()
    assert "2 tensors copied: head.output.weight, head.output.bias" in log and "2 tokens shared: <blk> <unk>" in log
    # The start is what decode.py takes: the running average of the last epoch.
    checkpoint, source = last_checkpoint(run), last_checkpoint(trained)
    before = torch.load(trained / "checkpoints" / "epoch-2.pt", weights_only=True)["average"]
    frozen = {name: tensor for name, tensor in checkpoint["model"].items() if name.startswith(("encoder.", "feat"))}
    for name, tensor in frozen.items():
        if not tensor.is_floating_point():
            continue
        total = source["average"]["state"][name] * source["average"]["num_samples"]
        mean = (total - before["state"][name] * before["num_samples"]) / (
            source["average"]["num_samples"] - before["num_samples"]
        )
        torch.testing.assert_close(tensor, mean.float(), rtol=1e-6, atol=1e-7, msg=name)
        assert torch.equal(checkpoint["average"]["state"][name].float(), tensor), name
    assert set(checkpoint["model"]) - set(frozen) == {"head.output.weight", "head.output.bias"}
    assert len(checkpoint["optimizer"]["state"]) == 2
    decode(run, "data.sets=[dev]")


def test_frozen_tensors_are_those_of_the_checkpoint_file(tmp_path, trained, digits):
    file = trained / "checkpoints" / "step-6.pt"
    run = train(*digits, *CHARACTERS, f"init_from.checkpoint={file}", "freeze=[encoder]",
                "init_from.exclude=[feature_norm]", run_dir=tmp_path / "run")  # fmt: skip
    source, now = torch.load(file, weights_only=True)["model"], last_checkpoint(run)["model"]
    encoder = [name for name in now if name.startswith("encoder.")]
    assert any("running_mean" in name for name in encoder)
    for name in encoder:
        assert torch.equal(now[name], source[name]), name


def test_a_resumed_run_takes_nothing_over_again(tmp_path, trained, digits):
    settings = [*digits, "tokenizer=char", "schedule=constant", f"init_from.run_dir={trained}",
                "freeze=[encoder.blocks]", "lr_scale.encoder=0.5"]  # fmt: skip
    whole = train(*settings, "trainer.max_epochs=2", run_dir=tmp_path / "whole")
    run = train(*settings, "trainer.max_epochs=1", run_dir=tmp_path / "run")
    (run / "transfer.json").unlink()
    train(*settings, "trainer.max_epochs=2", run_dir=run)
    assert not (run / "transfer.json").exists()
    assert_same_state(last_checkpoint(run), last_checkpoint(whole))
    lrs = [json.loads(line).get("lr") for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert max(filter(None, lrs)) <= 0.001, "told is the learning rate of what has no factor"


def test_an_imported_run_is_a_start(tmp_path, digits):
    imported = command("scripts/import_checkpoint.py", "--from", "nemo", "--checkpoint", str(FILE), "--out", "run",
                       cwd=tmp_path)  # fmt: skip
    assert imported.returncode == 0, imported.stderr
    sizes = ["channels=[16,16,24,24,32]", "kernel_sizes=[11,11,13,15,1]", "repeats=[1,2,2,1,1]"]
    settings = [*digits, *CHARACTERS, "tokenizer.normaliser.case=lower", "features=nemo64", "encoder=quartznet_5x3",
                *(f"encoder.{size}" for size in sizes), "data.num_workers=0", "data.num_jobs=1",
                "trainer.pictures=false"]  # fmt: skip
    done = command("train.py", *settings, f"init_from.run_dir={tmp_path / 'run'}", f"run_dir={tmp_path / 'tuned'}",
                   cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = read_json(tmp_path / "tuned" / "transfer.json")
    letters = {token for token in told["shared_tokens"] if len(token) == 1}
    assert {"▁", "z", "e", "r", "o"} <= letters and told["copied"] == ["head.output.weight", "head.output.bias"]
    assert "trained on other features" not in (tmp_path / "tuned" / "train.log").read_text()


def test_a_start_that_is_not_there_is_told_before_data_is_touched(tmp_path, digits):
    for start, said in (
        (f"init_from.run_dir={tmp_path}", "is run_dir a trained run?"),
        (f"init_from.checkpoint={tmp_path / 'no.pt'}", "no such checkpoint"),
    ):
        done = command("train.py", *MODEL, *digits, start, f"data.prepared_dir={tmp_path / 'prepared'}",
                       f"run_dir={tmp_path / 'new'}", cwd=tmp_path)  # fmt: skip
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
        assert not list(tmp_path.glob("prepared*"))
