import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from asr.layers.attention import RelativeSelfAttention
from asr.layers.init import INIT_MODES, initialise
from asr.layers.norm import MaskedBatchNorm

SHARED = Path(os.environ.get("ASR_SHARED", Path(__file__).resolve().parents[3] / "shared"))
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
        weights.append(layer.weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("mode", [None, "none", "null"])
def test_none_leaves_pytorchs_own(mode):
    layer = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, 4, 3))
    before = [p.clone() for p in layer.parameters()]
    initialise(layer, mode)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


@pytest.mark.parametrize("mode", [mode for mode in INIT_MODES if mode != "none"])
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
    attention = {f"attention.{name}.weight" for name in ("query", "key", "value", "position", "output")}
    assert changed == {"linear.weight", "conv1d.weight", "conv2d.weight"} | attention


def test_unknown_mode_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"'xaver_uniform' is none of none, xavier_uniform"):
        initialise(nn.Linear(2, 2), "xaver_uniform")


def golden_cases():
    path = SHARED / "golden/nemo/nemo_init.json"
    return json.loads(path.read_text())["measured"] if path.exists() else None


def test_matches_the_measured_figures_of_nemo():
    measured = golden_cases()
    if measured is None:
        pytest.skip("no golden figures: set ASR_SHARED to the folder that holds golden/")
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
            # The same layer, seed and draw: the weights are those NeMo made.
            assert figures["std_min"] - 1e-9 <= std <= figures["std_max"] + 1e-9, (layer_name, mode)
