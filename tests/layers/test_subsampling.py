import pytest
import torch

from asr.layers.subsampling import ConvSubsampling


def formula(length, factor):
    length = (length - 1) // 2
    for _ in range({2: 0, 4: 1, 8: 2}[factor]):
        length = (length - 1) // 2
    return max(0, length - 2 if factor == 2 else length)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_lengths_follow_the_formula_and_match_the_frames(factor):
    layer = ConvSubsampling(16, 8, factor, channels=4)
    for length in range(0, 61):
        lens = torch.tensor([length])
        frames, frame_lens = layer(torch.randn(1, length, 16), lens)
        assert frame_lens.tolist() == layer.output_lens(lens).tolist() == [formula(length, factor)]
        assert frames.shape == (1, max(1, formula(length, factor)), 8)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_valid_frame_sees_every_valid_input_it_should_and_no_padding(factor):
    layer = ConvSubsampling(16, 8, factor, channels=4)
    features = torch.randn(1, 40, 16)
    lens = torch.tensor([21])
    clean, frame_lens = layer(features, lens)
    for rubbish in (1e6, float("nan"), float("inf")):
        features[:, 21:] = rubbish
        frames, _ = layer(features, lens)
        assert torch.equal(frames[:, : frame_lens[0]], clean[:, : frame_lens[0]])
        frames.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="subsampling 3"):
        ConvSubsampling(16, 8, factor=3)
    with pytest.raises(ValueError, match="7 mel bins"):
        ConvSubsampling(6, 8)
