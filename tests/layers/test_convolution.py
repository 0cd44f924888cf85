import pytest
import torch
from torch import nn

from asr.layers.convolution import ConvolutionModule
from asr.layers.masks import length_mask
from asr.layers.norm import MaskedBatchNorm


def test_batch_norm_equals_pytorch_where_nothing_is_padded():
    torch.manual_seed(0)
    ours, theirs = MaskedBatchNorm(6), nn.BatchNorm1d(6)
    mask = torch.ones(3, 7, dtype=torch.bool)
    for _ in range(2):
        x = torch.randn(3, 7, 6) * 3 + 1
        torch.testing.assert_close(ours(x, mask), theirs(x.transpose(1, 2)).transpose(1, 2))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x, mask), theirs(x.transpose(1, 2)).transpose(1, 2))


def test_batch_norm_statistics_ignore_padding():
    torch.manual_seed(0)
    alone, padded = MaskedBatchNorm(4), MaskedBatchNorm(4)
    x = torch.randn(2, 5, 4)
    wide = torch.cat([x, torch.full((2, 3, 4), 1e6)], dim=1)
    lens = torch.tensor([5, 5])
    torch.testing.assert_close(padded(wide, length_mask(lens, 8))[:, :5], alone(x, length_mask(lens, 5)))
    torch.testing.assert_close(padded.running_mean, alone.running_mean)
    torch.testing.assert_close(padded.running_var, alone.running_var)


@pytest.mark.parametrize("num_valid", [0, 1])
def test_batch_norm_survives_one_value_and_none(num_valid):
    norm = MaskedBatchNorm(4)
    x = torch.randn(1, 1, 4, requires_grad=True)
    output = norm(x, length_mask(torch.tensor([num_valid]), 1))
    output.sum().backward()
    assert output.isfinite().all() and x.grad.isfinite().all()
    assert norm.running_mean.isfinite().all() and norm.running_var.isfinite().all()
    if num_valid == 0:
        assert torch.equal(norm.running_mean, torch.zeros(4)) and torch.equal(norm.running_var, torch.ones(4))
    else:
        assert torch.equal(output, torch.zeros(1, 1, 4))


def test_running_statistics_stay_exact_in_a_bf16_module():
    norm = MaskedBatchNorm(4)
    norm.running_mean.fill_(1.001)
    norm = norm.to(torch.bfloat16)
    assert norm.weight.dtype == torch.bfloat16
    assert torch.equal(norm.running_mean, torch.full((4,), 1.001))
    before = norm.running_mean.clone()
    output = norm(torch.full((1, 5, 4), 1.002, dtype=torch.bfloat16), torch.ones(1, 5, dtype=torch.bool))
    assert output.dtype == torch.bfloat16
    assert (norm.running_mean != before).all()


def reference(module, x):
    """The published form: channels first, pointwise convolutions, PyTorch's own depthwise convolution."""
    gated = nn.functional.glu(module.pointwise_in(x), dim=-1).transpose(1, 2)
    depthwise = nn.functional.conv1d(
        gated, module.depthwise.weight, module.depthwise.bias, padding="same", groups=gated.size(1)
    ).transpose(1, 2)
    normed = module.norm(depthwise) if isinstance(module.norm, nn.LayerNorm) else batch_normed(depthwise)
    return module.pointwise_out(nn.functional.silu(normed))


def batch_normed(x):
    return (x - x.mean((0, 1))) / (x.var((0, 1), unbiased=False) + 1e-5).sqrt()


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
def test_convolution_module_equals_the_published_form(norm):
    torch.manual_seed(0)
    module = ConvolutionModule(8, 5, norm)
    x = torch.randn(2, 9, 8)
    output = module(x, torch.ones(2, 9, dtype=torch.bool))
    torch.testing.assert_close(output, reference(module, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
@pytest.mark.parametrize("training", [True, False])
def test_convolution_module_does_not_see_padding(norm, training):
    torch.manual_seed(0)
    module = ConvolutionModule(8, 5, norm).train(training)
    x = torch.randn(2, 6, 8)
    wide = torch.cat([x, torch.full((2, 4, 8), 1e3)], dim=1)
    lens = torch.tensor([6, 6])
    alone = module(x, length_mask(lens, 6))
    torch.testing.assert_close(module(wide, length_mask(lens, 10))[:, :6], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
def test_a_causal_module_sees_no_later_frame_and_goes_on_from_what_it_kept(norm):
    torch.manual_seed(0)
    module = ConvolutionModule(8, 4, norm, causal=True).eval()
    x, mask = torch.randn(2, 9, 8), torch.ones(2, 9, dtype=torch.bool)
    whole = module(x, mask)
    changed = x.clone()
    changed[:, 5:] += 1
    assert torch.equal(module(changed, mask)[:, :5], whole[:, :5])
    past, parts = module.past(2), []
    for start, stop in ((0, 1), (1, 6), (6, 9)):
        output, past = module.forward_chunk(x[:, start:stop], mask[:, start:stop], past)
        assert past.shape == (2, 3, 8)
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-6, rtol=1e-5)


def test_frames_of_zeros_precede_the_first_one_of_a_causal_module():
    torch.manual_seed(0)
    module = ConvolutionModule(8, 4, "layer_norm", causal=True)
    x = torch.randn(1, 6, 8)
    late = module(torch.cat([torch.zeros(1, 3, 8), x], dim=1), torch.ones(1, 9, dtype=torch.bool))
    torch.testing.assert_close(module(x, torch.ones(1, 6, dtype=torch.bool)), late[:, 3:], atol=1e-6, rtol=1e-5)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="kernel_size=30: must be odd"):
        ConvolutionModule(8, 30)
    with pytest.raises(ValueError, match="'group_norm' is none of batch_norm, layer_norm"):
        ConvolutionModule(8, 31, norm="group_norm")
