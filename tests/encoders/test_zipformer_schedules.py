"""What keeps the Zipformer's channels in range and what it leaves out, place by place, against the published values."""

import pytest
import torch

from asr.encoders.zipformer.dropout import ChannelDropout, Skip
from asr.encoders.zipformer.layer import Bypass, ZipformerLayer
from asr.encoders.zipformer.subsampling import ConvNeXtSubsampling
from asr.encoders.zipformer.whiten import Whiten
from asr.heads.transducer import Transducer
from asr.layers.balancer import Balancer
from asr.layers.masks import length_mask
from asr.layers.schedule import set_batch_count

USUAL = (0.5, 0.125)
# Least and largest share of positive values, least and largest mean absolute value, probability. A pair: at batch 0 and
# at batch 20000.
BALANCERS = {
    "attention_weights.balance_keys": (0.4, 0.6, 0.0, 100.0, 0.025),
    "nonlin_attention.balance_gate": ((0.25, 0.05), (0.75, 0.95), 0.5, 5.0, USUAL),
    "convolution1.balance_gate": ((0.05, 0.025), 1.0, 1.5, (5.0, 10.0), USUAL),
    "convolution1.balance": ((0.1, 0.05), 1.0, (0.2, 0.5), 10.0, USUAL),
    "convolution2.balance_gate": ((0.05, 0.025), 1.0, 1.5, (5.0, 10.0), USUAL),
    "convolution2.balance": ((0.1, 0.05), 1.0, (0.2, 0.5), 10.0, USUAL),
    "feed_forward1.balance": (0.3, 1.0, 0.75, 5.0, USUAL),
    "feed_forward2.balance": (0.3, 1.0, 0.75, 5.0, USUAL),
    "feed_forward3.balance": (0.3, 1.0, 0.75, 5.0, USUAL),
    "balance_nonlin": (0.3, 0.7, (0.004, 0.02), 100.0, 0.05),
    "balance_feed_forward2": (0.3, 0.7, (0.0, 0.1), 2.0, 0.05),
    "balance_feed_forward3": (0.3, 0.7, (0.0, 0.2), 4.0, 0.05),
    "balance_before_norm": (0.45, 0.55, 0.2, 4.0, USUAL),
    "balance_output": (0.45, 0.55, 0.1, 4.0, USUAL),
    "balance1": (0.05, 0.95, 0.2, 1.0, USUAL),
    "balance2": (0.05, 0.95, 0.2, 4.0, USUAL),
    "balance3": (0.05, 0.95, 0.2, 4.0, USUAL),
    "convnext.balance_hidden": (0.3, 1.0, 0.75, 5.0, USUAL),
    "convnext.balance": (0.4, 0.6, 1.0, 6.0, USUAL),
    "decoder.balance_embedding": (0.0, 1.0, 0.5, 1.0, 0.05),
    "decoder.balance_output": (0.0, 1.0, 0.5, 1.0, 0.05),
}
# The limit at batch 0 and at batch 20000, the strength, the groups of channels.
WHITENERS = {
    "attention_weights.whiten_keys": (3.0, 6.0, 0.025, 2),
    "nonlin_attention.whiten_hidden": (5.0, 10.0, 0.01, 1),
    "nonlin_attention.whiten": (5.0, 15.0, 0.01, 1),
    "attention1.whiten": (7.5, 22.5, 0.01, 1),
    "attention2.whiten": (7.5, 22.5, 0.01, 1),
    "convolution1.whiten": (7.5, 15.0, 0.01, 1),
    "convolution2.whiten": (7.5, 15.0, 0.01, 1),
    "feed_forward1.whiten": (7.5, 15.0, 0.01, 1),
    "feed_forward2.whiten": (7.5, 15.0, 0.01, 1),
    "feed_forward3.whiten": (7.5, 15.0, 0.01, 1),
    "whiten": (4.0, 12.0, 0.01, 1),
    "embed whiten": (4.0, 8.0, 0.02, 1),
    "convnext.whiten": (5.0, 5.0, 0.01, 1),
}
# Probabilities at batches 0, 4000 and 50000.
SKIPS = {
    "skip_attention": (0.2, 0.05, 0.0),
    "skip_convolution": (0.2, 0.05, 0.0),
    "skip_feed_forward": (0.1, 0.01, 0.0),
    "mix_evenly": (0.25, 0.025, 0.025),
    "attention_weights.skip_positions": (0.5, 0.0, 0.0),
    "convnext.skip": (0.2, 0.163, 0.015),
}


def layer():
    torch.manual_seed(0)
    return ZipformerLayer(8, 2, 4, 3, 2, 6, 16, 3, dropout=0.0, layer_drop=0.0).train()


def front_end():
    torch.manual_seed(0)
    return ConvNeXtSubsampling(20, 8, (2, 3, 4), dropout=0.0).train()


def head():
    torch.manual_seed(0)
    return Transducer(8, 5, decoder_dim=8, joiner_dim=8).train()


def run_layer(model):
    lens = torch.tensor([9, 5])
    x = torch.randn(2, 9, 8, requires_grad=True)
    return model(x, torch.randn(18, 6), length_mask(lens, 9))


def modules_of(kind):
    """All modules of a kind by name, those of the front end under names that a layer does not have."""
    found = {}
    for model in (layer(), front_end(), head()):
        for name, module in model.named_modules():
            if isinstance(module, kind):
                found["embed whiten" if name == "whiten" and name in found else name] = module
    return found


def at(module, value, batch_count):
    set_batch_count(module, batch_count)
    return module.now(value)


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def test_limits_of_channels_are_the_published_ones():
    found = modules_of(Balancer)
    assert sorted(found) == sorted(BALANCERS)
    for name, expected in BALANCERS.items():
        module = found[name]
        options = (module.min_positive, module.max_positive, module.min_abs, module.max_abs, module.probability)
        for option, value in zip(options, expected, strict=True):
            assert (at(module, option, 0), at(module, option, 20000)) == pytest.approx(pair(value)), name


def test_limits_of_covariances_are_the_published_ones():
    found = modules_of(Whiten)
    assert sorted(found) == sorted(WHITENERS)
    for name, expected in WHITENERS.items():
        module = found[name]
        limits = at(module, module.limit, 0), at(module, module.limit, 20000)
        assert (*limits, module.strength, module.num_groups) == expected, name


def test_what_is_left_out_falls_as_published():
    found = {name: module for name, module in modules_of(Skip).items() if not name.startswith("bypass")}
    assert sorted(found) == sorted(SKIPS)
    for name, expected in SKIPS.items():
        assert [at(found[name], found[name].p, count) for count in (0, 4000, 50000)] == pytest.approx(expected), name
    for module in modules_of(Bypass).values():
        assert [at(module, module.lowest, count) for count in (0, 10000, 20000)] == pytest.approx([0.9, 0.55, 0.2])


@pytest.mark.parametrize("make", [layer, front_end, head])
def test_each_has_a_place_in_a_training_pass(make):
    model, used = make(), set()
    for name, module in model.named_modules():
        if isinstance(module, (Balancer, Whiten, ChannelDropout)):
            module.register_forward_hook(lambda module, inputs, output, name=name: used.add(name))
    if make is layer:
        run_layer(model)
    elif make is front_end:
        model(torch.randn(2, 40, 20), torch.tensor([40, 30]))
    else:
        model.decoder(torch.tensor([[1, 2, 3]]), torch.tensor([3]))
    assert used == {n for n, m in model.named_modules() if isinstance(m, (Balancer, Whiten, ChannelDropout))}


def test_the_non_linear_attention_averages_over_valid_frames_at_times():
    model, seen = layer(), []
    model.nonlin_attention.register_forward_hook(lambda module, inputs, output: seen.append(inputs[1]))
    model.mix_evenly.p = 1.0
    run_layer(model)
    expected = torch.tensor([[[1 / 9] * 9], [[1 / 5] * 5 + [0.0] * 4]])
    torch.testing.assert_close(seen[0].detach(), expected)
    model.mix_evenly.p = 0.0
    run_layer(model)
    assert seen[1].shape == (2, 9, 9)
    model.eval().mix_evenly.p = 1.0
    run_layer(model)
    assert seen[2].shape == (2, 9, 9)


def test_the_first_convolution_learns_from_a_fifth_of_its_gradient():
    torch.manual_seed(0)
    x, lens = torch.randn(2, 40, 20), torch.tensor([40, 40])

    def gradients(training):
        model = front_end().train(training)
        for module in model.modules():
            if isinstance(module, (Balancer, Whiten, Skip)):
                module.eval()
        model(x, lens)[0].square().sum().backward()
        return model.conv1.weight.grad, model.conv2.weight.grad

    trained, plain = gradients(True), gradients(False)
    torch.testing.assert_close(trained[0], 0.2 * plain[0])
    torch.testing.assert_close(trained[1], plain[1])
