import json

import pytest
import torch

from asr.layers.attention import RelativeSelfAttention
from asr.layers.masks import length_mask
from asr.layers.positional import RelativePositionalEncoding
from asr.layers.transformer_layer import TransformerLayer
from scripts.benches.attention_variants import VARIANTS
from scripts.benches.recurrent_formula import formula_step
from tests.commands.tiny import command, python

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
    assert told["step_mean_s"] > 0 and told["step_memory_mb"] > 0
    assert told["peak_memory_mb"] > 10 and told["threads"] == 1 and told["parameters"] > 1000


def test_what_free_running_costs_over_teacher_forcing(tmp_path):
    done = command("scripts/bench.py", "free-running", "--threads", "1", "--encoder", "conformer_xs", "--batch", "2",
                   "--seconds", "2", "--tokens", "5", "--vocab", "50", "--repeats", "4", *SMALL,
                   "head.heads.attention.num_layers=1", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["off", "scheduled_sampling", "own_output", "professor_forcing"]
    assert rows[0][2] == rows[0][4] == "1.00"
    for _, seconds, slower, _, _ in rows:
        assert float(slower) == pytest.approx(float(seconds) / float(rows[0][1]), abs=0.01)


def test_features(tmp_path):
    told = bench("features", "--batch", "2", "--seconds", "3", cwd=tmp_path)
    assert told["features"] == [2, 300, 80]
    assert min(told[name] for name in ("fbank_s", "normalise_s", "augment_s")) > 0
    assert told["fbank_audio_s_per_s"] == pytest.approx(6 / told["fbank_s"], rel=0.05)


def test_losses(tmp_path):
    told = bench("loss", "--batch", "2", "--seconds", "2", "--tokens", "20", "--vocab", "100", "--repeats", "3",
                 cwd=tmp_path)  # fmt: skip
    assert told["frames"] == [2, 50, 100] and told["tokens"] == [2, 20] and told["prune_range"] == 5
    assert told["times_faster"] == pytest.approx(told["full_s"] / told["pruned_s"], rel=0.01)
    assert 0 <= told["pruned_memory_mb"] <= told["full_memory_mb"]


@pytest.mark.parametrize("head", ["transducer", "transducer_ctc"])
def test_searches(tmp_path, head):
    told = bench("search", "--head", head, "--batch", "2", "--seconds", "1", "--encoder-dim", "16", "--vocab", "30",
                 "--repeats", "1", "--tokens", "5", cwd=tmp_path)  # fmt: skip
    assert told["frames"] == [2, 25, 16]
    names = ["greedy_search", "modified_beam_search"]
    names += ["ctc_greedy_search", "ctc_prefix_beam_search"] if head == "transducer_ctc" else []
    assert {key.removesuffix("_s") for key in told if key.endswith("search_s")} == set(names)
    assert all(told[f"{name}_s"] > 0 for name in names)
    assert all(2 < told[f"{name}_tokens_per_s"] < 7 for name in names if "greedy" in name)


def test_the_table_of_both_forms_of_attention(tmp_path):
    done = command(
        "scripts/bench.py", "recurrent", "--lengths", "5", "250", "--batches", "8", "--forms", "recurrent", "training",
        "--attentions", "linear", "--repeats", "1", "--layers", "1", "--heads", "1", "--threads", "1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [row[:4] for row in rows] == [
        [form, "linear", "8", length] for form in ("recurrent", "training") for length in ("5", "250")
    ]
    assert all(float(row[4]) > 0 and float(row[5]) > 10 for row in rows)
    assert [bool(row[7]) for row in rows] == [True, True, False, False], "of steps, in the same run"
    assert float(rows[1][7]) == pytest.approx(float(rows[1][4]) / float(rows[1][6]), rel=0.05)
    assert [bool(row[9]) for row in rows] == [False, True, False, False], "of what was measured of the peer"
    assert float(rows[1][9]) == pytest.approx(float(rows[1][4]) / 0.111, abs=0.01)


@pytest.mark.parametrize("attention", ["full", "linear"])
@pytest.mark.parametrize("grad", [False, True])
def test_what_the_steps_are_measured_against_computes_the_same(attention, grad):
    torch.manual_seed(0)
    layer = TransformerLayer(8, 2, 16, 0.0, attention, causal=True, cross=False)
    x_BTD = torch.randn(3, 5, 8)
    with torch.set_grad_enabled(grad):
        state, other = layer.self_attention.start(3, 5), ()
        for x in x_BTD.unbind(1):
            expected, state = layer.step(x, state)
            given, other = formula_step(layer, x, other)
            torch.testing.assert_close(given, expected)


@pytest.mark.slow
def test_a_compiled_encoder(tmp_path):
    told = bench("train-step", "--encoder", "conformer_xs", "--batch", "2", "--seconds", "1", "--tokens", "3",
                 "--repeats", "1", "--compile", *SMALL, cwd=tmp_path)  # fmt: skip
    assert told["compile"] and told["step_s"] > 0


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_form_of_attention_that_is_measured_is_the_same_attention(name):
    torch.manual_seed(0)
    variant, shift = VARIANTS[name]
    attention = RelativeSelfAttention(8, 2, shift=shift)
    for bias in (attention.content_bias, attention.position_bias):
        torch.nn.init.normal_(bias)
    x, mask = torch.randn(2, 7, 8), length_mask(torch.tensor([7, 4]), 7).unsqueeze(1)
    table = RelativePositionalEncoding(8)
    places = table.of_distances(7, 7, x), table.of_positions(0, 7, x)
    expected = attention(x, places[0] if shift else places[1], mask)
    torch.testing.assert_close(variant(attention, x, *places, mask), expected, atol=1e-5, rtol=1e-5)


ATTENTION = ["--batch", "2", "--frames", "20", "--heads", "2", "--head-dim", "4", "--repeats", "2"]


@pytest.mark.slow
def test_attention_is_measured_in_every_form(tmp_path):
    sizes = [*ATTENTION, "--threads", "1"]
    done = python("scripts/bench.py", "attention", *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == list(VARIANTS)
    assert all(float(seconds) > 0 and float(megabytes) >= 0 for _, seconds, megabytes in rows)


def test_what_cannot_be_measured_is_told(tmp_path):
    done = command("scripts/bench.py", "train-step", "--seconds", "1", "--tokens", "300", *SMALL, cwd=tmp_path)
    assert done.returncode == 1 and "--tokens 300 do not fit into --seconds 1.0" in done.stderr
    done = command("scripts/bench.py", "train-step", "--encoder", "nothing", cwd=tmp_path)
    assert done.returncode == 1 and "Could not find 'encoder/nothing'" in done.stderr
