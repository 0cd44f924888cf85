import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from asr.layers.attention import RelativeSelfAttention
from asr.layers.init import INIT_MODES, expected_std, fans, initialise, mode_named
from asr.layers.norm import MaskedBatchNorm
from asr.settings import InitMode

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "nemo_init.json"
STDS = {
    None: 1 / math.sqrt(3 * 1024),
    "none": 1 / math.sqrt(3 * 1024),
    "xavier_uniform": math.sqrt(2 / (1024 + 29)),
    "xavier_normal": math.sqrt(2 / (1024 + 29)),
    "kaiming_uniform": math.sqrt(2 / 1024),
    "kaiming_normal": math.sqrt(2 / 1024),
    "tds_uniform": 2 / math.sqrt(3 * 1024),
    "tds_normal": 2 / math.sqrt(1024),
    "trunc_normal": 0.02 * 0.8796,  # of a normal cut at two std
}


@pytest.mark.parametrize(("mode", "std"), STDS.items())
def test_standard_deviation(mode, std):
    torch.manual_seed(0)
    layer = nn.Conv1d(1024, 29, 1)
    initialise(layer, mode)
    assert layer.weight.std().item() == pytest.approx(std, rel=0.02)
    if mode and mode.endswith("uniform"):
        assert layer.weight.abs().max().item() == pytest.approx(math.sqrt(3) * std, rel=0.01)
    elif mode and mode.endswith("_normal") and mode != "trunc_normal":
        assert layer.weight.abs().max().item() > 3 * std


@pytest.mark.parametrize("mode", INIT_MODES)
def test_same_seed_same_weights(mode):
    weights = []
    for _ in range(2):
        torch.manual_seed(7)
        layer = nn.Linear(30, 20)
        initialise(layer, mode)
        weights.append(layer.weight.detach())
    assert torch.equal(*weights)


LAYERS = {
    "pointwise": lambda: nn.Conv1d(1024, 29, 1),
    "depthwise": lambda: nn.Conv1d(256, 256, 33, groups=256),
    "image": lambda: nn.Conv2d(32, 64, (3, 5)),
    "linear": lambda: nn.Linear(512, 256),
}
FANS = {"pointwise": (1024, 29), "depthwise": (33, 256 * 33), "image": (32 * 15, 64 * 15), "linear": (512, 256)}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mode", [mode for mode in INIT_MODES if mode != "paper"])
def test_every_kind_of_layer_gets_what_the_table_says(kind, mode):
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    assert fans(layer.weight) == FANS[kind]
    fan_in, fan_out = FANS[kind]
    table = {
        "none": 1 / math.sqrt(3 * fan_in),
        "tds_uniform": 2 / math.sqrt(3 * fan_in),
        "tds_normal": 2 / math.sqrt(fan_in),
        "kaiming": math.sqrt(2 / fan_in),
        "xavier": math.sqrt(2 / (fan_in + fan_out)),
        "trunc": 0.0176,
    }
    std = table.get(mode) or table[mode.partition("_")[0]]
    initialise(layer, mode)
    assert expected_std(layer.weight, mode) == pytest.approx(std, rel=1e-3)
    assert layer.weight.std().item() == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize("mode", [None, "none", "None", "null"])
def test_none_is_pytorchs_own_whatever_the_constructor_did(mode):
    layer = nn.Conv1d(64, 48, 5)
    with torch.no_grad():
        layer.weight.mul_(0.05)
        layer.bias.fill_(7.0)
    initialise(layer, mode)
    bound = 1 / math.sqrt(64 * 5)
    assert mode_named(mode) == "none"
    assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    for parameter in layer.parameters():
        assert 0.9 * bound < parameter.abs().max().item() <= bound


def test_paper_leaves_what_the_constructor_did():
    layer = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, 4, 3))
    before = [p.clone() for p in layer.parameters()]
    initialise(layer, "paper")
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_parts_have_modes_of_their_own_and_the_longest_name_counts():
    def model():
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 40)}) for _ in range(2))
        return nn.ModuleDict({"encoder": blocks, "head": nn.Linear(40, 40)})

    made, before = model(), model()
    initialise(made, "trunc_normal", {"encoder": "paper", "encoder.1": "tds_normal", "encoder.*.b": None, "head": None})
    assert torch.equal(made["encoder"][0]["a"].weight, before["encoder"][0]["a"].weight)
    assert made["encoder"][1]["a"].weight.std().item() == pytest.approx(2 / math.sqrt(40), rel=0.05)
    for layer in (made["encoder"][0]["b"], made["encoder"][1]["b"], made["head"]):
        assert layer.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 40), rel=0.05)
    initialise(made, "trunc_normal", {"head": "paper"})
    assert made["encoder"][1]["b"].weight.std().item() == pytest.approx(0.0176, rel=0.05)
    with pytest.raises(ValueError, match=r"init: 'encodr' is no part of the model; did you mean encoder\?"):
        initialise(made, None, {"encodr": "paper"})


def test_settings_offer_the_same_modes():
    assert {mode.value for mode in InitMode} | {"none"} == set(INIT_MODES)


@pytest.mark.parametrize("mode", [mode for mode in INIT_MODES if mode != "paper"])
def test_weights_of_linear_and_convolution_layers_change_and_nothing_else(mode):
    module = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "conv1d": nn.Conv1d(4, 4, 3),
            "conv2d": nn.Conv2d(4, 4, 3),
            "layer_norm": nn.LayerNorm(4),
            "batch_norm": MaskedBatchNorm(4),
            "embedding": nn.Embedding(5, 4),
            "tied": nn.Linear(4, 5),
            "lstm": nn.LSTM(4, 4),
            "attention": RelativeSelfAttention(4, 2),
        }
    )
    module["tied"].weight = module["embedding"].weight
    before = {name: value.clone() for name, value in module.state_dict().items()}
    initialise(module, mode)
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    layers = {"linear", "conv1d", "conv2d"} | {
        f"attention.{name}" for name in ("query", "key", "value", "position", "output")
    }
    redrawn = {f"{layer}.weight" for layer in layers}
    if mode == "none":  # as when the layer is made, biases and all; also that of the layer whose weight is tied
        redrawn |= {f"{layer}.bias" for layer in layers} & before.keys()
    assert changed == redrawn


def test_unknown_mode_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"'xaver_uniform' is none of null, paper, none, xavier_uniform"):
        initialise(nn.Linear(2, 2), "xaver_uniform")


def test_matches_the_measured_figures_of_nemo():
    measured = json.loads(GOLDEN.read_text())["measured"]
    makers = {
        "Conv1d(1024,29,1)": lambda: nn.Conv1d(1024, 29, 1),
        "Conv1d(256,256,33,groups=256)": lambda: nn.Conv1d(256, 256, 33, groups=256),
        "Conv1d(256,512,1)": lambda: nn.Conv1d(256, 512, 1),
        "Linear(512,256)": lambda: nn.Linear(512, 256),
    }
    for layer_name, modes in measured.items():
        for mode, figures in modes.items():
            torch.manual_seed(0)
            layer = makers[layer_name]()
            initialise(layer, mode.lower())
            std = layer.weight.double().std().item()
            assert std == pytest.approx(figures["std_mean"], rel=0.02), (layer_name, mode)
            if mode != "None":  # the same layer, seed and draw: the weights are those NeMo made
                assert figures["std_min"] - 1e-9 <= std <= figures["std_max"] + 1e-9, (layer_name, mode)
