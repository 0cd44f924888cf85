import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asr.heads.ctc import CTC
from asr.layers.init import initialise
from asr.training.init_doctor import examine_init, flat_share, spread
from asr.training.init_doctor_report import (
    depth_table,
    like,
    modes_table,
    signals_table,
    verdict,
    weights_table,
    write_init_report,
)
from asr.training.init_reading import FLAT, GRADIENT, INPUT, OUTPUT, THRESHOLDS, WEIGHT_GRADIENT
from asr.types import Batch, Encoded
from tests.commands.tiny import read_json
from tests.test_contracts import HEADS, names
from tests.training.test_transfer import KINDS, OLD, head_choice, model_of

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


def cells(table):
    """The cells of a Markdown table's rows, by the first."""
    return {
        row[0]: row[1:] for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    }


def test_signals_are_those_of_the_layers_in_the_order_of_computing(tiny):
    model, batch = plain_model(tiny), tiny.batch(["a", "b"])
    reading = examine_init(model, batch, CPU)
    names = [layer.name for layer in reading.layers]
    assert names == ["encoder.input", *(f"encoder.layers.{n}" for n in range(3)), "head.output", "encoder.unused"]
    x = model.feature_norm(batch.features, batch.feature_lens)
    losses_B = sum(model.eval()(batch).values())
    losses_B.mean().backward()
    for layer in reading.layers[:4]:
        weight = model.get_submodule(layer.name).weight
        assert layer.number(INPUT) == pytest.approx(x.flatten(0, 1).std(0, correction=0).square().mean().sqrt().item())
        x = x @ weight.T
        deviation = (x - x.mean((0, 1))).square().mean().sqrt().item()
        assert layer.number(OUTPUT) == pytest.approx(deviation, rel=1e-4)
        assert layer.gain == pytest.approx(deviation / layer.number(INPUT), rel=1e-4)
        assert layer.number(WEIGHT_GRADIENT) == pytest.approx((weight.grad.norm() / weight.norm()).item(), rel=1e-4)
    assert not reading.layers[-1].uses
    assert reading.loss == pytest.approx(losses_B.mean().item(), rel=1e-5)


@pytest.mark.parametrize(("mode", "growth"), [(None, 1 / math.sqrt(3)), ("tds_normal", 2.0), ("xavier_uniform", 1.0)])
def test_every_layer_widens_signals_by_its_deviation_times_the_root_of_its_fan_in(tiny, mode, growth):
    layers = examine_init(plain_model(tiny, mode), tiny.batch(["a", "b"]), CPU).layers[:4]
    for before, after in pairwise(layers):
        assert after.gain == pytest.approx(growth, rel=0.15)
        assert before.number(GRADIENT) / after.number(GRADIENT) == pytest.approx(growth, rel=0.15)
        assert after.std == pytest.approx(after.expected[mode or "none"], rel=0.05)
        assert like(after) == {None: "null", "tds_normal": "tds normal", "xavier_uniform": "xavier"}[mode]


def test_spread_is_about_the_mean_of_each_channel():
    value_BCT = 5.0 * torch.randn(1, 4, 1) + torch.tensor([[-2.0, 2.0]]).expand(3, 4, 2)
    assert spread(value_BCT, axes_behind=1) == pytest.approx(2.0)
    assert spread(torch.full((3, 5, 4), 7.0)) == 0.0
    assert spread(torch.full((1, 4), 7.0)) == 7.0, "one vector has nothing to vary over"


@pytest.mark.parametrize(
    ("activation", "inputs", "share"),
    [
        (F.relu, [-1.0, -2.0, 3.0, 4.0], 0.5),
        (F.silu, [-20.0, 0.0, 1.0, 30.0], 0.25),
        (torch.tanh, [-9.0, 0.1, 9.0, 20.0], 0.75),
        (F.glu, [500.0, 500.0, 0.0, -9.0], 0.5),
    ],
)
def test_flat_is_where_an_activation_has_no_slope(activation, inputs, share):
    assert flat_share(activation, torch.tensor(inputs)) == share


def outputs_in_trouble(reading):
    return {layer.name: layer.remark for layer in reading.troubled if not layer.remark.startswith("gradient")}


def test_dead_and_exploding_layers_are_named_with_their_remedies(tiny):
    model, batch = plain_model(tiny, num_layers=9), tiny.batch(["a", "b"])
    assert not examine_init(model, batch, CPU).troubled
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.encoder.layers[2].weight.mul_(1e4)
    reading = examine_init(model, batch, CPU)
    assert outputs_in_trouble(reading) == {"encoder.layers.2": "output explodes"}
    told = verdict({"own": reading})[0]
    assert told.startswith("own: encoder.layers.2: output explodes (remedy: +init.encoder.layers.2=xavier_uniform)")
    model.load_state_dict(kept)
    with torch.no_grad():
        model.encoder.layers[2].weight.mul_(1e-6)
    assert outputs_in_trouble(examine_init(model, batch, CPU))["encoder.layers.2"] == "output fades"
    with torch.no_grad():
        model.encoder.layers[2].weight.zero_()
    reading = examine_init(model, batch, CPU)
    remarks = {layer.name: layer.remark for layer in reading.troubled}
    assert remarks["encoder.layers.2"].startswith("output dead") and remarks["encoder.layers.3"].startswith(
        "input dead"
    )
    assert remarks["encoder.layers.1"] == "gradient dead" and "head.output" in remarks
    told = verdict({"own": reading})[0]
    assert told.startswith("own: encoder.layers.2: output dead") and told.count("remedy") == 1
    with torch.no_grad():
        model.encoder.layers[2].weight.fill_(math.nan)
    reading = examine_init(model, batch, CPU)
    name, remark = next(iter(outputs_in_trouble(reading).items()))
    assert name == "encoder.layers.2" and remark.startswith("output not finite")


def test_the_layer_is_named_at_which_growth_through_depth_is_too_much(tiny):
    reading = examine_init(plain_model(tiny, "tds_normal", num_layers=18), tiny.batch(["a", "b"]), CPU)
    (layer,) = reading.troubled
    assert layer.remark == "signal explodes" and layer.name in {f"encoder.layers.{n}" for n in range(10, 15)}
    assert reading.remedy(layer) == "init.encoder=xavier_uniform"


def test_nothing_of_the_model_changes(tiny):
    model = tiny.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    examine_init(model.train(), tiny.batch(["a", "b"]), CPU)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_deviations_of_a_letter_decoder_are_told_beside_those_of_every_mode(tiny):
    model = plain_model(tiny)
    model.encoder.unused = nn.ModuleList([nn.Conv1d(1024, 29, 1), nn.Embedding(50, 30)])
    rows = cells(weights_table(examine_init(model, tiny.batch(["a"]), CPU)))
    kind, shape, fan_in, fan_out, std, named, null, xavier, kaiming, *_ = rows["encoder.unused.0"]
    assert (kind, shape, fan_in, fan_out, named) == ("Conv1d", "29x1024x1", "1024", "29", "null")
    assert float(std) == pytest.approx(0.01804, rel=0.02)
    for cell, expected in ((null, 0.01804), (xavier, 0.04358), (kaiming, 0.04419)):
        deviation, times = cell.split(" ")
        assert float(deviation) == pytest.approx(expected, rel=0.02)
        assert float(times.strip("(x)")) == pytest.approx(expected / 0.01804, rel=0.04)
    assert rows["encoder.unused.1"][:4] == ["Embedding", "50x30", "-", "-"]
    assert set(rows["encoder.unused.1"][6:]) == {"as it is"}


def test_the_report_sets_modes_side_by_side(tiny, tmp_path):
    modes = {"null": None, "kaiming_uniform": "kaiming_uniform"}
    readings = {}
    for name, mode in modes.items():
        model = tiny.model()
        initialise(model, mode)
        readings[name] = examine_init(model, tiny.batch(["a", "b"]), CPU)
    text = write_init_report(tmp_path, readings)
    own = readings["null"]
    for part in (modes_table(readings), weights_table(own), signals_table(own), depth_table(readings), THRESHOLDS):
        assert part in text
    first, second = (reading.layers[0].number(INPUT) for reading in readings.values())
    assert first == second, "both saw one batch under one augmentation"
    depthwise = cells(weights_table(own))["encoder.blocks.0.convolution.depthwise"]
    assert (
        depthwise[:4] == ["depthwise", "16x1x7", "7", "112"] and depthwise[6].split()[0] == f"{1 / math.sqrt(21):.3g}"
    )
    convolution = next(layer for layer in own.layers if layer.name == "encoder.subsampling.conv1")
    assert 0.2 < convolution.number(FLAT) < 0.8, "a ReLU follows"
    found = read_json(tmp_path / "init.json")
    layer = next(layer for layer in found["kaiming_uniform"]["layers"] if layer["name"] == "head.output")
    assert layer["fan_in"] == 16 and layer["gradient"] > 0 and layer["weight_gradient"] > 0
    assert (tmp_path / "init.png").stat().st_size > 10_000


USUAL = {f"encoder={path.stem}": [f"encoder={path.stem}"] for path in KINDS}
USUAL |= {
    f"head={name}": [*head_choice(path), "encoder=conformer_xs"] for name, path in zip(names(HEADS), HEADS, strict=True)
}


@pytest.mark.parametrize("words", USUAL.values(), ids=USUAL)
def test_every_encoder_and_head_is_in_no_trouble_as_its_paper_has_it(words):
    model, _ = model_of(OLD, *words)
    lens, token_lens = torch.tensor([200, 180, 150]), torch.tensor([4, 4, 4])
    features = torch.randn(3, 200, 80, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[2, 3, 4, 5], [3, 4, 5, 6], [6, 5, 4, 3]])
    batch = Batch(["a", "b", "c"], features, lens, tokens, token_lens, [""] * 3, [""] * 3, 5.3)
    reading = examine_init(model, batch, CPU)
    assert {layer.name: layer.remark for layer in reading.troubled} == {}
    weights = {name for name, value in model.named_parameters() if name.endswith(".weight") and value.dim() > 1}
    assert {f"{layer.name}.weight" for layer in reading.layers} == weights
