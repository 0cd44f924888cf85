from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from asr.encoders.conformer import Conformer

CONF = Path(__file__).resolve().parents[2] / "conf" / "encoder"
SMALL = dict(input_dim=20, output_dim=16, num_layers=2, num_heads=2, feed_forward_dim=32, kernel_size=7)


def small(**changes):
    torch.manual_seed(0)
    return Conformer(**{**SMALL, "subsampling_channels": 4, **changes})


# The published totals count the transducer's decoder and joint network, 1.6 to 4 million, as well.
@pytest.mark.parametrize(("name", "published"), [("s", 10.3e6), ("m", 30.7e6), ("l", 118.8e6)])
def test_sizes_are_those_of_the_paper(name, published):
    with torch.device("meta"):
        encoder = instantiate(OmegaConf.load(CONF / f"conformer_{name}.yaml"), input_dim=80)
    rest = published - sum(parameter.numel() for parameter in encoder.parameters())
    assert 1e6 < rest < 5e6


@pytest.mark.parametrize("conv_norm", ["batch_norm", "layer_norm"])
@pytest.mark.parametrize("subsampling", [2, 4])
@pytest.mark.parametrize("macaron", [True, False])
def test_padding_is_invisible_under_every_option(conv_norm, subsampling, macaron):
    encoder = small(conv_norm=conv_norm, subsampling=subsampling, macaron=macaron, scale_input=True).eval()
    features = torch.randn(2, 90, 20)
    lens = torch.tensor([40, 90])
    alone = encoder(features[:1, :40], lens[:1])
    for rubbish in (0.0, 1e6, float("nan")):
        features[0, 40:] = rubbish
        beside = encoder(features, lens)
        valid = int(alone.lens[0])
        assert beside.lens[0] == valid
        torch.testing.assert_close(beside.frames[:1, :valid], alone.frames[:, :valid], atol=1e-4, rtol=0)
        assert torch.equal(beside.frames[0, valid:], torch.zeros_like(beside.frames[0, valid:]))


@pytest.mark.parametrize("length", [7, 10])
def test_one_output_frame_trains(length):
    encoder = small().train()
    encoded = encoder(torch.randn(1, length, 20), torch.tensor([length]))
    assert encoded.lens.tolist() == [1]
    encoded.frames.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in encoder.parameters())


def test_longer_than_five_thousand_frames_after_an_earlier_short_one():
    encoder = small(num_layers=1, output_dim=4).eval()
    with torch.no_grad():
        encoder(torch.randn(1, 50, 20), torch.tensor([50]))
        encoded = encoder(torch.randn(1, 20100, 20), torch.tensor([20100]))
    assert encoded.lens.item() > 5000 and encoded.frames.isfinite().all()


def test_layer_drop_passes_whole_utterances_by_and_only_in_training():
    encoder = small(num_layers=1, layer_drop=0.5, dropout=0.0, attention_dropout=0.0, conv_norm="layer_norm")
    features, lens = torch.randn(1, 40, 20).expand(64, -1, -1), torch.full((64,), 40)
    firsts = encoder.train()(features, lens).frames[:, 0, 0]
    kinds, counts = torch.unique((firsts * 1e4).round(), return_counts=True)
    assert len(kinds) == 2 and counts.min() > 16
    encoder.zero_grad()
    encoder(features, lens).frames.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    assert len(torch.unique((encoder.eval()(features, lens).frames[:, 0, 0] * 1e4).round())) == 1


def test_dropout_in_training_only():
    encoder = small(dropout=0.3, attention_dropout=0.3)
    features, lens = torch.randn(1, 40, 20), torch.tensor([40])
    assert not torch.equal(encoder.train()(features, lens).frames, encoder(features, lens).frames)
    assert torch.equal(encoder.eval()(features, lens).frames, encoder(features, lens).frames)


def test_wrong_layer_drop_is_refused():
    with pytest.raises(ValueError, match="layer_drop 1"):
        small(layer_drop=1.0)
