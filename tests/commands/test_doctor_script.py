"""scripts/doctor.py, and the doctor during training."""

from __future__ import annotations

import json

import pytest

from tests.commands.tiny import MODEL, command, last_checkpoint, read_json, train


def test_an_experiment_is_examined_before_it_is_trained(tmp_path, digits):
    words = ["head=ctc_attention", "head.heads.attention.num_layers=1", "encoder.scale_input=true"]
    done = command("scripts/doctor.py", "precision", *MODEL, *digits, *words, "encoder.attention_scale=scores",
                   "num_batches=1", "precision=amp_bf16", "out=found", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fp16 overflows nowhere; least room at" in done.stdout and "scores before scaling" in done.stdout
    assert "bf16 weights, plainly rounded, lose" in done.stdout and "bf16_update=kahan" in done.stdout
    found = read_json(tmp_path / "found" / "precision-amp_bf16.json")
    modules = {reading["module"] for reading in found["readings"]}
    assert {"encoder.subsampling.conv1", "head.heads.attention.decoder.layers.0.cross_attention"} <= modules
    assert (tmp_path / "found" / "precision-amp_bf16.png").is_file()


def test_a_saved_run_is_examined_by_its_own_settings_and_with_changes(tmp_path, trained):
    done = command("scripts/doctor.py", "precision", f"run_dir={trained}", "num_batches=1", f"out={tmp_path}",
                   "encoder.attention_scale=scores", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    readings = read_json(tmp_path / "precision-fp32.json")["readings"]
    assert any(r["operation"] == "scores before scaling" and r["in_mode"] for r in readings)
    for words, message in (
        (["num_batches=none"], "num_batches=none"),
        (["encoder.layers=3"], "encoder.layers=3"),
        (["run_dir=nowhere"], "is run_dir a trained run?"),
    ):
        done = command("scripts/doctor.py", "precision", f"run_dir={trained}", *words, cwd=tmp_path)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_training_asks_the_doctor_on_demand_and_is_the_same_with_him(tmp_path, digits):
    short = ["trainer.max_steps=4", "trainer.max_epochs=1"]
    without = train(*digits, *short, run_dir=tmp_path / "without")
    examined = train(*digits, *short, "trainer.doctor_every=2", run_dir=tmp_path / "with")
    assert sorted(path.name for path in (examined / "doctor").glob("*.md")) == ["step-2.md", "step-4.md"]
    assert "fp16 overflows nowhere" in (examined / "train.log").read_text()
    losses = [read_json(run / "train.json")["train_loss"] for run in (without, examined)]
    assert losses[0] == losses[1] and not (without / "doctor").exists()


def test_a_step_that_fails_names_the_module_that_failed_first(tmp_path, digits):
    huge = ["trainer.initial_grad_scale=1e30", "precision=amp_fp16", "trainer.max_steps=3"]
    run = train(*digits, *huge, "trainer.max_skipped=9", run_dir=tmp_path / "run")
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [event for event in events if event["kind"] == "first_non_finite"]
    assert len(told) == 1 and told[0]["step"] == 1
    assert "gradient under the loss scale 1e+30" in told[0]["text"]
    run = tmp_path / "stopped"
    done = command("train.py", *MODEL, *digits, *huge[:2], "trainer.max_skipped=2", f"run_dir={run}", cwd=tmp_path)
    assert done.returncode == 1 and f"The first number that was not finite: {told[0]['text']}" in done.stderr


def test_initialisations_are_compared_before_training(tmp_path, digits, trained):
    words = ["encoder.output_dim=16", "init_mode=xavier_uniform", "modes=null,tds_normal"]
    done = command("scripts/doctor.py", "init", *MODEL, *digits, *words, "out=found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| xavier_uniform (the settings) |" in done.stdout and "| tds_normal |" in done.stdout
    assert "| head.output | Linear | 5x16 | 16 | 5 |" in done.stdout
    found = read_json(tmp_path / "found" / "init.json")
    stds = {mode: {layer["name"]: layer["std"] for layer in reading["layers"]} for mode, reading in found.items()}
    ratio = stds["tds_normal"]["encoder.subsampling.conv2"] / stds["null"]["encoder.subsampling.conv2"]
    assert 3.0 < ratio < 4.0, "2 sqrt(3), as the table of asr.layers.init says"
    inputs = {reading["layers"][0]["input"] for reading in found.values()}
    assert len(found) == 3 and len(inputs) == 1, "all saw one batch"
    words = ["tokenizer=char", f"init_from.run_dir={trained}", "init_from.exclude=[head]", "modes=null"]
    done = command("scripts/doctor.py", "init", *MODEL, *digits, *words, "out=started", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_json(tmp_path / "started" / "init.json")
    first = [reading["layers"][0]["std"] for reading in found.values()]
    assert len(first) == 2 and first[0] == first[1], "what was loaded is the same under every mode"
    done = command("scripts/doctor.py", "init", *MODEL, *digits, "modes=xaver", cwd=tmp_path)
    assert done.returncode == 1 and "init_mode 'xaver' is none of null" in done.stderr
    done = command("scripts/doctor.py", "init", f"run_dir={trained}", "modes=[null]", f"out={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_json(tmp_path / "init.json")
    assert list(found) == [f"{trained}, trained", "null"]
    weights = last_checkpoint(trained)["model"]
    for layer in found[f"{trained}, trained"]["layers"]:
        assert layer["std"] == pytest.approx(weights[f"{layer['name']}.weight"].std().item(), rel=1e-4)
