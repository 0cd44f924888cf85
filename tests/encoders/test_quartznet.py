"""What the contracts do not see: several convolutions in a block, strides within, squeeze and excitation, dilation."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import OmegaConf

from asr.encoders.quartznet import QuartzNet

CONF = Path(__file__).parents[2] / "conf" / "encoder"


def citrinet(squeeze_ratio=4):
    torch.manual_seed(0)
    return QuartzNet(
        20, [16, 16, 24, 24, 32], [5, 7, 9, 5, 3], [1, 3, 2, 2, 1], strides=[1, 2, 1, 2, 1], dilations=[1, 1, 3, 1, 1],
        residual=[False, True, True, True, False], separable=[True, True, True, False, True],
        squeeze_ratio=squeeze_ratio,
    )  # fmt: skip


@pytest.mark.parametrize("squeeze_ratio", [0, 4])
def test_padding_is_invisible_in_training_and_evaluation(squeeze_ratio):
    encoder = citrinet(squeeze_ratio)
    features, lens = torch.randn(2, 61, 20), torch.tensor([61, 61])
    wide = torch.cat([features, torch.full((2, 30, 20), float("nan"))], dim=1)
    results = []
    for inputs in (features, wide):
        encoder.load_state_dict(citrinet(squeeze_ratio).state_dict())
        encoder.zero_grad()
        encoder.train()(inputs, lens).frames.sum().backward()
        grads = {name: parameter.grad.clone() for name, parameter in encoder.named_parameters()}
        results.append(grads | {name: value.clone() for name, value in encoder.state_dict().items()})
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], atol=1e-4, rtol=1e-4, msg=name)
    beside = encoder.eval()(wide, torch.tensor([61, 37]))
    alone = encoder(features[1:, :37], torch.tensor([37]))
    assert beside.lens.tolist() == [16, 10]
    torch.testing.assert_close(beside.frames[1:, :10], alone.frames, atol=1e-5, rtol=1e-5)
    assert not beside.frames[1, 10:].any()


@pytest.mark.parametrize("num_frames", [1, 2, 5, 6, 31])
def test_dilation_is_pytorchs(num_frames):
    layer = citrinet().blocks[2].layers[0]
    x = torch.randn(3, num_frames, 16, requires_grad=True)
    expected = F.conv1d(x.transpose(1, 2), layer.convolution.weight, padding=12, dilation=3, groups=16).transpose(1, 2)
    torch.testing.assert_close(layer._convolve(x), expected)


@pytest.mark.parametrize(
    ("name", "input_dim", "size"), [("quartznet_15x5", 64, 18894656), ("quartznet_5x3", 80, 645104)]
)
def test_size(name, input_dim, size):
    with torch.device("meta"):
        encoder = instantiate(OmegaConf.load(CONF / f"{name}.yaml"), input_dim=input_dim, _convert_="all")
    assert sum(parameter.numel() for parameter in encoder.parameters()) == size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel_sizes": [3, 3]}, "encoder.kernel_sizes has 2 entries for the 3 blocks"),
        ({"dropout": [0.1]}, "encoder.dropout has 1 entries for the 3 blocks"),
        ({"kernel_sizes": [3, 4, 1]}, "kernel size 4 must be odd"),
        ({"dilations": [2, 1, 1]}, "stride 2 or dilation 2 must be 1"),
        ({"channels": [8, 8], "kernel_sizes": [3, 1], "repeats": [1, 1]}, "three blocks are the least"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    sizes = {"channels": [8, 8, 8], "kernel_sizes": [3, 3, 1], "repeats": [1, 1, 1]}
    with pytest.raises(ValueError, match=message):
        QuartzNet(20, **sizes | changes)
