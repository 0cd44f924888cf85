from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from asr.encoders.zipformer import Zipformer
from asr.encoders.zipformer.dropout import ChannelDropout, Skip
from asr.encoders.zipformer.stack import Downsample
from asr.encoders.zipformer.subsampling import ConvNeXtSubsampling
from asr.encoders.zipformer.whiten import Whiten
from asr.heads.transducer import Transducer
from asr.layers.dropout import Dropout
from asr.layers.schedule import set_batch_count

CONF = Path(__file__).resolve().parents[2] / "conf" / "encoder"
SMALL = dict(
    num_layers=[1, 2, 1], dims=[16, 24, 20], unmasked_dims=[12, 16, 16], feed_forward_dims=[16, 24, 16],
    num_heads=[2, 1, 2], kernel_sizes=[5, 3, 3], downsampling=[1, 2, 4], query_head_dim=4, value_head_dim=3,
    position_head_dim=2, position_dim=6, subsampling_channels=[2, 3, 4],
)  # fmt: skip
LENS = torch.tensor([60, 41])


def small(**changes):
    torch.manual_seed(0)
    return Zipformer(20, **{**SMALL, **changes})


def only_random_by(kind, encoder):
    """The encoder with every module that leaves something out set to 0, but those of one kind."""
    for module in encoder.modules():
        if hasattr(module, "p") and not isinstance(module, kind):
            module.p = 0.0
    return encoder


@pytest.mark.parametrize(("name", "published"), [("s", 23_285_615), ("m", 65_549_011), ("l", 148_439_574)])
def test_sizes_with_a_transducer_of_500_tokens_are_the_published_ones(name, published):
    with torch.device("meta"):
        encoder = instantiate(OmegaConf.load(CONF / f"zipformer_{name}.yaml"), input_dim=80)
        head = Transducer(encoder.output_dim, vocab_size=500)
    assert sum(p.numel() for module in (encoder, head) for p in module.parameters()) == published


def test_the_smallest_is_for_a_cpu():
    with torch.device("meta"):
        encoder = instantiate(OmegaConf.load(CONF / "zipformer_xs.yaml"), input_dim=80)
    assert 2e6 < sum(parameter.numel() for parameter in encoder.parameters()) < 4e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_layers=[2, 2]), r"encoder.num_layers=\[2, 2\]: has 2 entries where downsampling has 3; give one"),
        (dict(dims=[16, 24, 20, 20], num_heads=[2]), r"dims=.* has 4 entries where.*; encoder.num_heads=\[2\]: has 1"),
        (dict(dims=[16, 26, 20]), r"encoder.dims=\[16, 26, 20\]: must be multiples of 4"),
        (dict(feed_forward_dims=[16, 24, 18]), r"encoder.feed_forward_dims=.*: must be multiples of 4"),
        (dict(kernel_sizes=[5, 4, 3]), r"encoder.kernel_sizes=\[5, 4, 3\]: must be odd"),
        (
            dict(unmasked_dims=[12, 28, 16]),
            r"encoder.unmasked_dims=\[12, 28, 16\]: must not exceed dims=",
        ),
        (dict(downsampling=[1, 0, 2]), r"encoder.downsampling=\[1, 0, 2\]: a list of whole numbers above 0"),
        (dict(num_heads=[2, 1.5, 2]), r"encoder.num_heads=.*: a list of whole numbers above 0"),
        (dict(num_heads=4), r"encoder.num_heads=4: a list of whole numbers above 0 is needed, one for each stack"),
        (dict(downsampling=[]), r"encoder.downsampling=\[\]: a list"),
        (dict(query_head_dim=0), r"encoder.query_head_dim=0: must be 1 or more"),
        (dict(output_downsampling=0), r"encoder.output_downsampling=0: must be 1 or more"),
        (dict(position_dim=7), r"encoder.position_dim=7: must be even"),
        (dict(dropout=1.0), r"encoder.dropout=1.0: must lie in \[0, 1\)"),
        (dict(subsampling_channels=[8, 32]), r"encoder.subsampling_channels=\[8, 32\]: three whole numbers"),
        (dict(position_dim=7, dropout=-1.0), r"encoder.position_dim=.*; encoder.dropout=-1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_too_few_bins_are_refused():
    with pytest.raises(ValueError, match="at least 7 mel bins, got 6"):
        Zipformer(6, **SMALL)


def test_the_output_takes_each_channel_from_the_last_stack_that_has_it():
    encoder = small(output_downsampling=1).eval()
    outputs = []
    for stack in encoder.stacks:
        stack.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    encoded = encoder(torch.randn(1, 60, 20), LENS[:1])
    assert encoder.output_dim == 24 and encoded.lens.tolist() == [26]
    assert [output.size(-1) for output in outputs] == SMALL["dims"]
    assert torch.equal(encoded.frames, torch.cat([outputs[2], outputs[1][..., 20:]], dim=-1))


@pytest.mark.parametrize(("factor", "lens"), [(1, [26, 17]), (2, [13, 9]), (3, [9, 6])])
def test_output_downsampling(factor, lens):
    encoder = small(output_downsampling=factor).eval()
    assert encoder(torch.randn(2, 60, 20), LENS).lens.tolist() == lens == encoder.output_lens(LENS).tolist()


def test_downsampling_lets_the_last_valid_frame_stand_in_for_the_missing():
    torch.manual_seed(0)
    downsample = Downsample(4)
    downsample.bias.data = torch.randn(4)
    frames, lens = torch.randn(8, 11, 3), torch.tensor([11, 10, 9, 8, 5, 4, 1, 0])
    out, new_lens = downsample(frames, lens)
    assert new_lens.tolist() == [3, 3, 3, 2, 2, 1, 1, 0]
    for row, length in enumerate(lens.tolist()):
        valid = frames[row, :length]
        filled = torch.cat([valid, valid[-1:].expand(-length % 4, -1)]) if length else valid
        expected = (filled.view(-1, 4, 3) * downsample.bias.softmax(0).view(4, 1)).sum(1)
        torch.testing.assert_close(out[row, : new_lens[row]], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_parameters_give_frames_of_their_type(dtype):
    assert small().to(dtype)(torch.randn(2, 60, 20), LENS).frames.dtype == dtype


def test_layers_begin_small_and_the_norm_at_e():
    encoder = small(dims=[64, 64, 64], feed_forward_dims=[64, 64, 64])
    layer = encoder.stacks[1].layers[1]
    scales = {
        "attention_weights.project": 4**-0.25,
        "attention_weights.position": 0.05,
        "attention1.output": 0.05,
        "attention2.output": 0.05,
        "nonlin_attention.output": 0.05,
        "convolution1.output": 0.05,
        "convolution2.output": 0.05,
        "feed_forward1.contract": 0.1,
        "feed_forward3.contract": 0.1,
        "feed_forward2.expand": 1.0,
        "attention1.value": 1.0,
    }
    for name, scale in scales.items():
        linear = layer.get_submodule(name)
        expected = scale / (3 * linear.in_features) ** 0.5
        assert linear.weight.std().item() == pytest.approx(expected, rel=0.25), name
        if scale < 1.0 and linear.bias is not None:
            assert 0.05 * scale < linear.bias.abs().max() <= 0.1 * scale, name
    assert encoder.subsampling.convnext.contract.weight.abs().max() <= 0.01 / 12**0.5
    assert layer.norm.log_scale == 1.0 and layer.bypass.scale.unique().tolist() == [0.5]
    frames = encoder.eval()(torch.randn(1, 60, 20), LENS[:1]).frames
    assert 0.5 < frames.square().mean().sqrt() < 3.0


def test_layers_come_in_one_after_the_other_and_skips_fade():
    encoder = small()
    layers = [layer for stack in encoder.stacks for layer in stack.layers]

    def layer_drops(batch_count):
        set_batch_count(encoder, batch_count)
        return [layer.bypass.skip.now(layer.bypass.skip.p) for layer in layers]

    assert layer_drops(0) == layer_drops(1000) == [0.5] * 4
    final = [0.035 * factor**0.5 for factor in (1, 2, 2, 4)]
    assert layer_drops(2000) == pytest.approx([final[0], 0.5, 0.5, 0.5])
    assert layer_drops(2500) == pytest.approx([final[0], final[1], 0.5, 0.5])
    assert layer_drops(4000) == pytest.approx(final)
    set_batch_count(encoder, 1e6)
    at_the_end = {module.now(module.p) for module in encoder.modules() if isinstance(module, (Skip, ChannelDropout))}
    assert sorted(at_the_end) == pytest.approx(sorted({0.0, 0.015, 0.025, 0.1, 0.125, *final}))


def test_an_utterance_may_pass_a_layer_by():
    layer = only_random_by((), small()).stacks[0].layers[0].train()
    layer.bypass.skip.p = 0.5
    frames, mask = torch.randn(1, 9, 16).expand(64, -1, -1), torch.ones(64, 9, dtype=torch.bool)
    out = layer(frames, torch.randn(18, 6), mask)
    same = (out == frames).all(-1).all(-1)
    assert 16 < same.sum() < 48
    assert not (layer.eval()(frames, torch.randn(18, 6), mask) == frames).all(-1).all(-1).any()


def test_training_may_leave_out_the_upper_channels_of_an_utterance():
    encoder = only_random_by((), small()).train()
    encoder.mask_channels.p = 0.5
    outputs = []
    encoder.stacks[0].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    encoder(torch.randn(1, 60, 20).expand(64, -1, -1), torch.full((64,), 60))
    silent = (outputs[0] == 0).all(1)
    assert not silent[:, :12].any()
    kinds, counts = silent[:, 12:].unique(dim=0, return_counts=True)
    assert kinds.tolist() == [[False] * 4, [False, False, True, True], [True] * 4]
    assert counts.tolist() == pytest.approx([16, 16, 32], abs=9)


@pytest.mark.parametrize("kind", [Dropout, ChannelDropout, Skip])
def test_chance_plays_in_training_only(kind):
    encoder = only_random_by(kind, small())
    features = torch.randn(2, 60, 20)
    assert not torch.equal(encoder.train()(features, LENS).frames, encoder(features, LENS).frames)
    encoder.eval()
    draws = torch.get_rng_state()
    first = encoder(features, LENS).frames
    set_batch_count(encoder, 1e5)
    assert torch.equal(first, encoder(features, LENS).frames) and torch.equal(draws, torch.get_rng_state())


def test_without_chance_training_and_evaluation_are_one():
    encoder = only_random_by((), small())
    features = torch.randn(2, 60, 20)
    assert torch.equal(encoder.train()(features, LENS).frames, encoder.eval()(features, LENS).frames)


def test_gradients_of_the_front_end_are_those_of_plain_convolutions():
    torch.manual_seed(0)
    front_end = ConvNeXtSubsampling(20, 16, [2, 3, 4], dropout=0.0).train()
    for module in front_end.modules():
        module.p = module.probability = 0.0
        if isinstance(module, Whiten):
            module.PROBABILITIES = (0.0, 0.0)
    features, direction = torch.randn(2, 60, 20), torch.randn(2, 26, 16)
    grads = []
    for dtype in (torch.float32, torch.float64):  # the faster way is that of fp32 alone
        front_end.to(dtype).zero_grad()
        frames, lens = front_end(features.to(dtype), LENS)
        ((frames * direction)[0].sum() + (frames * direction)[1, : lens[1]].sum()).backward()
        grads.append({name: parameter.grad.double() for name, parameter in front_end.named_parameters()})
    for name, grad in grads[1].items():
        assert (grads[0][name] - grad).norm() < 1e-4 * grad.norm(), name


def test_a_run_that_is_continued_meets_the_same_chances():
    def run(encoder, steps):
        for step in steps:
            set_batch_count(encoder, 1000.0 * step)
            encoder.zero_grad()
            encoder.train()(torch.randn(2, 60, 20), LENS).frames.norm().backward()
            for parameter in encoder.parameters():
                parameter.data -= 0.01 * (0.0 if parameter.grad is None else parameter.grad)
        return encoder

    encoder, other = run(small(), range(12)), small()
    states = {name: value.clone() for name, value in encoder.state_dict().items()}
    assert {value.item() for name, value in states.items() if name.endswith(".above")} == {0.0, 1.0}
    draws = torch.get_rng_state()
    expected = run(encoder, range(12, 16)).state_dict()
    other.load_state_dict(states)
    torch.set_rng_state(draws)
    continued = run(other, range(12, 16)).state_dict()
    assert all(torch.equal(expected[name], continued[name]) for name in expected)
