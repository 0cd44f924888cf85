import json

import pytest

from tests.commands.tiny import command

SMALL = ["encoder.num_layers=1", "encoder.output_dim=32", "encoder.feed_forward_dim=32", "encoder.num_heads=2",
         "encoder.subsampling_channels=4"]  # fmt: skip


def bench(*arguments, cwd):
    done = command("scripts/bench.py", *arguments, "--threads", "1", cwd=cwd)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


@pytest.mark.parametrize("optim", ["adamw", "scaled_adam"])
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "bf16"])
def test_the_phases_of_a_training_step(tmp_path, precision, optim):
    told = bench("train-step", "--encoder", "conformer_xs", "--head", "ctc", "--precision", precision, "--batch", "2",
                 "--seconds", "2", "--tokens", "7", "--vocab", "50", "--repeats", "3", "--optim", optim, *SMALL,
                 cwd=tmp_path)  # fmt: skip
    assert (told["encoder"], told["precision"], told["optim"]) == ("conformer_xs", precision, optim)
    assert told["features"] == [2, 200, 80] and told["tokens"] == [2, 7] and told["encoder_frames"] == 49
    phases = [told[name] for name in ("forward_s", "backward_s", "optimiser_s")]
    assert all(seconds > 0 for seconds in phases) and told["step_s"] > 0.5 * sum(phases)
    assert told["peak_memory_mb"] > 10 and told["threads"] == 1 and told["parameters"] > 1000


def test_features(tmp_path):
    told = bench("features", "--batch", "2", "--seconds", "3", cwd=tmp_path)
    assert told["features"] == [2, 300, 80]
    assert min(told[name] for name in ("fbank_s", "normalise_s", "augment_s")) > 0
    assert told["fbank_audio_s_per_s"] == pytest.approx(6 / told["fbank_s"], rel=0.05)


@pytest.mark.slow
def test_a_compiled_encoder(tmp_path):
    told = bench("train-step", "--encoder", "conformer_xs", "--batch", "2", "--seconds", "1", "--tokens", "3",
                 "--repeats", "1", "--compile", *SMALL, cwd=tmp_path)  # fmt: skip
    assert told["compile"] and told["step_s"] > 0


def test_what_cannot_be_measured_is_told(tmp_path):
    done = command("scripts/bench.py", "train-step", "--seconds", "1", "--tokens", "300", *SMALL, cwd=tmp_path)
    assert done.returncode == 1 and "--tokens 300 do not fit into --seconds 1.0" in done.stderr
    done = command("scripts/bench.py", "train-step", "--encoder", "nothing", cwd=tmp_path)
    assert done.returncode == 1 and "Could not find 'encoder/nothing'" in done.stderr
