import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from asr.heads.ctc import CTC
from asr.layers.init import initialise
from asr.training.init_doctor import GRADIENT, OUTPUT, WEIGHT, examine_init
from asr.training.init_doctor_report import depth_table, layers_table, like, modes_table, write_init_report
from asr.types import Encoded
from tests.commands.tiny import read_json

CPU = torch.device("cpu")


class Plain(nn.Module):
    """Linear layers of one width, as an encoder; the last uses its weight without calling its layer."""

    output_dim = 64

    def __init__(self, num_layers=3):
        super().__init__()
        self.input = nn.Linear(20, 64, bias=False)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(num_layers))
        self.unused = nn.Linear(2, 2)

    def output_lens(self, lens_B):
        return lens_B

    def forward(self, features_BTF, lens_B):
        x = self.input(features_BTF)
        for layer in self.layers[:-1]:
            x = layer(x)
        return Encoded(nn.functional.linear(x, self.layers[-1].weight.unsqueeze(0).squeeze(0)), lens_B)


def plain_model(tiny, mode=None, **options):
    model = tiny.model(dropout=0.0, augment=False)
    torch.manual_seed(0)
    model.encoder, model.head = Plain(**options), CTC(64, 6, dropout=0.0)
    initialise(model, mode)
    return model


def test_signals_are_those_of_the_layers_in_the_order_of_computing(tiny):
    model, batch = plain_model(tiny), tiny.batch(["a", "b"])
    reading = examine_init(model, batch, CPU)
    names = [layer.name for layer in reading.layers]
    assert names == ["encoder.input", *(f"encoder.layers.{n}" for n in range(3)), "head.output", "encoder.unused"]
    x = model.feature_norm(batch.features, batch.feature_lens)
    for layer in reading.layers[:4]:
        x = x @ model.get_submodule(layer.name).weight.T
        assert layer.rms[OUTPUT] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-4)
    assert reading.layers[-1].rms.keys() == {WEIGHT}
    losses = sum(model.eval()(batch).values())
    assert reading.loss == pytest.approx(losses.mean().item(), rel=1e-5)


@pytest.mark.parametrize(("mode", "growth"), [(None, 1 / math.sqrt(3)), ("tds_normal", 2.0), ("xavier_uniform", 1.0)])
def test_every_layer_widens_signals_by_its_deviation_times_the_root_of_its_fan_in(tiny, mode, growth):
    layers = examine_init(plain_model(tiny, mode), tiny.batch(["a", "b"]), CPU).layers[:4]
    for before, after in pairwise(layers):
        assert after.rms[OUTPUT] / before.rms[OUTPUT] == pytest.approx(growth, rel=0.15)
        assert before.rms[GRADIENT] / after.rms[GRADIENT] == pytest.approx(growth, rel=0.15)
        assert after.std == pytest.approx(after.expected[mode or "none"], rel=0.05)
        assert like(after) == {None: "null", "tds_normal": "tds normal", "xavier_uniform": "xavier"}[mode]


def test_dead_fading_and_exploding_layers_are_told(tiny):
    model = plain_model(tiny, num_layers=9)
    assert not examine_init(model, tiny.batch(["a"]), CPU).troubled
    with torch.no_grad():
        model.encoder.layers[4].weight.mul_(1e4)
        model.encoder.layers[6].weight.mul_(1e-9)
    remarks = {layer.name: layer.remark for layer in examine_init(model, tiny.batch(["a"]), CPU).troubled}
    assert "output explodes" in remarks["encoder.layers.4"] and "output fades" in remarks["encoder.layers.6"]
    with torch.no_grad():
        model.encoder.layers[2].weight.zero_()
        model.encoder.layers[6].weight.fill_(math.inf)
    remarks = {layer.name: layer.remark for layer in examine_init(model, tiny.batch(["a"]), CPU).troubled}
    assert "output dead" in remarks["encoder.layers.2"]


def test_nothing_of_the_model_changes(tiny):
    model = tiny.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    examine_init(model.train(), tiny.batch(["a", "b"]), CPU)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_report_sets_modes_side_by_side(tiny, tmp_path):
    modes = {"null": None, "kaiming_uniform": "kaiming_uniform"}
    readings = {}
    for name, mode in modes.items():
        model = tiny.model()
        initialise(model, mode)
        readings[name] = examine_init(model, tiny.batch(["a", "b"]), CPU)
    text = write_init_report(tmp_path, readings)
    assert modes_table(readings) in text and layers_table(readings["null"]) in text and depth_table(readings) in text
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in layers_table(readings["null"]).splitlines()}
    assert rows["encoder.blocks.0.convolution.depthwise"][1:6] == ["depthwise", "7", rows[
        "encoder.blocks.0.convolution.depthwise"][3], "null", f"{1 / math.sqrt(21):.3g}"]  # fmt: skip
    found = read_json(tmp_path / "init.json")
    layer = next(layer for layer in found["kaiming_uniform"]["layers"] if layer["name"] == "head.output")
    assert layer["fan_in"] == 16 and layer["rms"]["gradient"] > 0 and (tmp_path / "init.png").stat().st_size > 10_000
