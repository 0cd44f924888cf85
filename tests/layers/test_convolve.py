import pytest
import torch
import torch.nn.functional as F
from torch import nn

from asr.layers.convolve import Conv1d, Conv2d, convolve

CASES = [
    {},
    {"stride": (2, 2)},
    {"stride": (1, 2), "padding": (0, 1)},
    {"padding": (1, 1), "groups": 4},
]


def images_and_weight(groups=1):
    torch.manual_seed(0)
    return torch.randn(2, 4, 11, 9), torch.randn(8, 4 // groups, 3, 3), torch.randn(8)


def gradients(function, *tensors, dtype):
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    output = function(*leaves)
    (output.float() ** 2).sum().backward()
    return output, *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_fp16_on_a_cpu_gives_the_values_and_gradients_of_fp32_to_its_precision(options):
    tensors = [tensor.half().float() for tensor in images_and_weight(options.get("groups", 1))]
    half = gradients(lambda *leaves: convolve(*leaves, **options), *tensors, dtype=torch.float16)
    full = gradients(lambda *leaves: F.conv2d(*leaves, **options), *tensors, dtype=torch.float32)
    for ours, exact in zip(half, full, strict=True):
        assert ours.dtype == torch.float16
        assert (ours.float() - exact).norm() < 2e-3 * exact.norm()


def test_modules_equal_pytorchs():
    torch.manual_seed(0)
    for ours, theirs, x in (
        (Conv2d(4, 8, 3, (2, 1), (1, 0)), nn.Conv2d(4, 8, 3, (2, 1), (1, 0)), torch.randn(2, 4, 9, 7)),
        (Conv1d(4, 8, 3, 2, 1, groups=2), nn.Conv1d(4, 8, 3, 2, 1, groups=2), torch.randn(2, 4, 9)),
    ):
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(x), theirs(x))


def test_autocast_computes_in_fp16_and_keeps_the_parameters_gradients_in_fp32():
    images, _, _ = images_and_weight()
    conv = Conv2d(4, 8, 3)
    with torch.autocast("cpu", torch.float16):
        output = conv(images)
    assert output.dtype == torch.float16
    output.float().sum().backward()
    assert conv.weight.grad.dtype == conv.bias.grad.dtype == torch.float32


def test_a_gradient_that_fp16_cannot_hold_is_not_finite():
    x = torch.full((1, 1, 64, 64), 30.0, dtype=torch.float16)
    weight = torch.full((1, 1, 1, 1), 1.0, dtype=torch.float16, requires_grad=True)
    convolve(x, weight).float().sum().backward()
    assert weight.grad.isinf().all()


def test_a_frozen_weight_has_no_gradient_and_passes_one_on():
    images, weight, _ = images_and_weight()
    images = images.half().requires_grad_()
    convolve(images, weight.half()).float().sum().backward()
    assert images.grad is not None
