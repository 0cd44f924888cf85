"""The report of an fp16 run that died, in small: a Conformer of width 512 with 8 heads whose scores are as large."""

import copy
import json
import math

import pytest
import torch

from asr.encoders.conformer import Conformer
from asr.features.normalise import FeatureNorm
from asr.heads.ctc import CTC
from asr.model import AsrModel
from asr.training.distributed import World
from asr.training.doctor import (
    AFTER,
    BEFORE,
    FP16_MAX,
    examine,
    lost_updates,
    name_first_non_finite,
    untouched,
)
from asr.training.doctor_report import first_overflow, picture, remedy, verdict, write_report
from asr.training.precision import PrecisionMode
from asr.training.step import train_step
from asr.types import Batch

CPU = torch.device("cpu")
CONTENT, POSITION = 50_944.0, 18_800.0  # the maxima of the report


def batch(num_frames=40):
    torch.manual_seed(1)
    features = torch.randn(2, num_frames, 80)
    return Batch(["a", "b"], features, torch.tensor([num_frames, num_frames - 9]), torch.tensor([[1, 2], [3, 0]]),
                 torch.tensor([2, 1]), ["", ""])  # fmt: skip


def build(scale, scale_input, state=None):
    torch.manual_seed(0)
    encoder = Conformer(80, 512, 1, 8, 64, 3, subsampling_channels=32, dropout=0.0, attention_dropout=0.0,
                        scale_input=scale_input, attention_scale=scale)  # fmt: skip
    built = AsrModel(FeatureNorm(80, "none"), None, encoder, CTC(512, 5, dropout=0.0))
    if state:
        built.load_state_dict(state)
    return built


@pytest.fixture(scope="module")
def large():
    """Weights by which the scores of content and position are as large as the report's, at one pair of frames."""
    built = build("scores", scale_input=True)
    attention = built.encoder.blocks[0].attention
    with torch.no_grad():
        # A query of biases alone: its content score is the key's own, its position score peaks at distance 0.
        for parameter in (attention.query.weight, attention.query.bias):
            parameter.zero_()
        attention.content_bias.normal_(), attention.position_bias.fill_(1.0)
        here = built.encoder.positions.of_distances(1, 1, attention.query.weight)[0]
        attention.position.weight.copy_(here.expand(512, -1))
        peaks = {}
        attention.observe = lambda name, value: peaks.setdefault(name, value.flatten()[value.abs().argmax()].item())
        built(batch())
        attention.observe = None
        attention.key.weight.mul_(CONTENT / peaks["content_scores"])
        attention.position.weight.mul_(POSITION / peaks["position_scores"])
    return built.state_dict()


def model(large, scale, scale_input=True):
    return build(scale, scale_input, large)


def by_name(readings):
    return {(reading.module, reading.operation): reading for reading in readings}


ATTENTION = "encoder.blocks.0.attention"


def test_the_doctor_says_where_fp16_would_overflow_before_training_does(large):
    original = model(large, "scores")
    for mode in ("fp32", "amp_fp16"):
        readings = examine(original, [batch()], PrecisionMode(mode, CPU))
        found = by_name(readings)
        assert found[ATTENTION, "content scores"].largest == pytest.approx(CONTENT, rel=1e-3)
        assert found[ATTENTION, "position scores"].largest == pytest.approx(POSITION, rel=1e-3)
        before = found[ATTENTION, BEFORE]
        assert before.largest == pytest.approx(CONTENT + POSITION, rel=1e-3) and before.headroom < 1 and before.half
        assert found[ATTENTION, AFTER].largest == pytest.approx(before.largest / 8, rel=1e-3)
        assert first_overflow(readings) is before
        lines = verdict(readings, {}, original, mode, 1.0)
        assert lines[0].startswith(f"fp16 overflows first at {ATTENTION}, scores before scaling: 69,7")
        assert "encoder.attention_scale=query (the same model" in lines[0] and "scale_input=false" in lines[0]
        if mode == "amp_fp16":
            assert before.in_mode == math.inf
            assert lines[1] == f"Under amp_fp16 the first numbers that are not finite come from {before}."


def test_scaling_the_query_leaves_room_and_forms_no_unscaled_scores(large):
    readings = examine(model(large, "query"), [batch()], PrecisionMode("amp_fp16", CPU))
    found = by_name(readings)
    before, after = found[ATTENTION, BEFORE], found[ATTENTION, AFTER]
    assert not before.half and before.in_mode is None and before.largest == pytest.approx(69_744, rel=1e-3)
    assert after.half and after.in_mode == pytest.approx(69_744 / 8, rel=1e-2) and after.headroom > 7
    assert first_overflow(readings) is None
    assert verdict(readings, {}, model(large, "query"), "amp_fp16", 1.0)[0].startswith("fp16 overflows nowhere")


def step(built, optimizer, precision):
    return train_step(built, [batch()], optimizer, precision, 5.0, World(), CPU)


def test_under_fp16_the_original_fails_and_names_its_attention_where_the_query_scaled_one_trains_on(large):
    outcomes = {}
    for scale in ("scores", "query"):
        built, precision = model(large, scale), PrecisionMode("amp_fp16", CPU, initial_scale=16.0)
        optimizer = torch.optim.SGD(built.parameters(), lr=1e-3)
        outcomes[scale] = [step(built.train(), optimizer, precision) for _ in range(3)]
        culprit = name_first_non_finite(built, [batch()], precision)
        assert culprit == (f"{ATTENTION}, scores" if scale == "scores" else None)
    assert not any(result.finite for result in outcomes["scores"])
    assert all(result.finite for result in outcomes["query"])
    assert outcomes["query"][-1].loss < outcomes["query"][0].loss


def test_both_agree_in_fp32(large):
    with torch.no_grad():
        frames = [model(large, scale).eval().encode(batch().features, batch().feature_lens).frames
                  for scale in ("scores", "query")]  # fmt: skip
    torch.testing.assert_close(*frames, atol=1e-5, rtol=1e-5)


def test_the_other_remedy_is_an_input_that_is_not_scaled(large):
    readings = by_name(examine(build("scores", scale_input=False), [batch()], PrecisionMode("fp32", CPU)))
    scaled = by_name(examine(build("scores", scale_input=True), [batch()], PrecisionMode("fp32", CPU)))
    assert readings[ATTENTION, BEFORE].largest <= scaled[ATTENTION, BEFORE].largest
    some = scaled["encoder.blocks.0.feed_forward.expand", "output"]
    assert "encoder.scale_input=false" in remedy(some, build("scores", scale_input=True))
    assert remedy(some, build("scores", scale_input=False)).startswith("precision=amp_bf16")


def test_a_gradient_that_the_loss_scale_carries_out_of_range_is_told_as_such(large):
    built = model(large, "query").train()
    precision = PrecisionMode("amp_fp16", CPU, initial_scale=2.0**40)
    assert not step(built, torch.optim.SGD(built.parameters(), lr=1e-3), precision).finite
    culprit = name_first_non_finite(built, [batch()], precision)
    assert "gradient under the loss scale 1.09951e+12" in culprit
    readings = examine(built, [batch()], precision)
    told = verdict(readings, {}, built, "amp_fp16", precision.scale)[-1]
    fits = float(told.partition("trainer.initial_grad_scale=")[2].split()[0])
    assert fits < precision.scale
    lower = PrecisionMode("amp_fp16", CPU, initial_scale=fits / 4)
    assert step(built, torch.optim.SGD(built.parameters(), lr=1e-3), lower).finite


def test_watching_changes_nothing(large):
    built, some = model(large, "query").train(), batch()
    before, state = copy.deepcopy(built.state_dict()), torch.get_rng_state()
    examine(built, [some], PrecisionMode("amp_bf16", CPU))
    name_first_non_finite(built, [some], PrecisionMode("fp32", CPU))
    lost_updates(built, some, torch.optim.AdamW(built.parameters(), lr=1e-3), CPU)
    assert torch.equal(torch.get_rng_state(), state) and built.training
    assert all(torch.equal(value, before[name]) for name, value in built.state_dict().items())
    assert all(parameter.grad is None for parameter in built.parameters())
    assert not any(module._forward_hooks for module in built.modules())
    assert built.encoder.blocks[0].attention.observe is None
    with pytest.raises(KeyError), untouched(built, CPU):
        built.eval()
        raise KeyError
    assert built.training


def test_lost_updates_are_those_that_a_bf16_weight_does_not_take():
    built = build("query", scale_input=False)
    small = lost_updates(built, batch(), torch.optim.SGD(built.parameters(), lr=1e-4), CPU)
    assert small["encoder.blocks.0.norm.weight"] == 1.0, "1 + 0.001 is 1 in bf16"
    adam = torch.optim.AdamW(built.parameters(), lr=1e-3, weight_decay=0.0)
    shares = lost_updates(built, batch(), adam, CPU)
    assert shares["encoder.blocks.0.norm.weight"] == 1.0 and shares["encoder.blocks.0.norm.bias"] == 0.0
    line = verdict([], shares, built, "bf16", 1.0)[-1]
    assert "100% of encoder.blocks.0" in line and "bf16_update=kahan" in line


def test_the_report_has_a_table_every_figure_and_a_picture(tmp_path, large):
    built = model(large, "scores")
    readings = examine(built, [batch()], PrecisionMode("amp_fp16", CPU))
    text = write_report(tmp_path, "precision", ["A line."], readings, {"a.weight": 0.5})
    rows = [line for line in text.splitlines() if line.startswith("| encoder")]
    assert text.startswith("- A line.") and "scores before scaling" in rows[0] and "| inf |" in rows[0]
    stored = json.loads((tmp_path / "precision.json").read_text())
    assert len(stored["readings"]) == len(readings) and stored["lost_bf16_updates"] == {"a.weight": 0.5}
    assert (tmp_path / "precision.png").stat().st_size > 10_000
    labels = [line.get_label() for line in picture(readings).axes[0].get_lines()]
    assert {"output", "gradient", BEFORE, AFTER} <= set(labels)
    assert torch.finfo(torch.float16).max == FP16_MAX
