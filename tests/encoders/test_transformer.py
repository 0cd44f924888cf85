import pytest
import torch

from asr.encoders.transformer import Transformer


def make(**changes):
    torch.manual_seed(0)
    sizes = dict(output_dim=16, num_layers=2, num_heads=2, feed_forward_dim=24, subsampling_channels=4)
    return Transformer(20, **{**sizes, **changes}).eval()


@pytest.mark.parametrize("attention", ["full", "linear"])
def test_every_frame_sees_all_frames_of_its_utterance_and_their_order(attention):
    encoder, lens = make(attention=attention), torch.tensor([80, 60])
    features = torch.randn(2, 80, 20)
    before = encoder(features, lens).frames
    changed = features.clone()
    changed[0, 76:] += 1.0
    moved = (encoder(changed, lens).frames - before).abs().sum(-1)
    assert (moved[0] > 0).all() and not moved[1].any()
    swapped = torch.cat([features[:, 40:], features[:, :40]], dim=1)
    assert not torch.allclose(encoder(swapped[:1], lens[:1]).frames.sum(1), before[:1].sum(1), atol=1e-3)


@pytest.mark.parametrize("attention", ["full", "linear"])
def test_padding_and_lengths_hold_for_both_attentions(attention):
    """What tests/test_contracts.py asks of the YAMLs, of the attention that they do not choose as well."""
    encoder, lens = make(attention=attention), torch.tensor([57, 160, 3])
    features = torch.randn(3, 160, 20)
    features[0, 57:], features[2, 3:] = float("nan"), float("inf")
    beside, alone = encoder(features, lens), encoder(features[:1, :57], lens[:1])
    valid = int(alone.lens[0])
    assert beside.frames.isfinite().all() and beside.lens.tolist() == encoder.output_lens(lens).tolist()
    torch.testing.assert_close(beside.frames[0, :valid], alone.frames[0], atol=1e-5, rtol=1e-4)
    encoder.train()(features, lens).frames.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in encoder.parameters())


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="output_dim 15"):
        make(output_dim=15)
    with pytest.raises(ValueError, match="attention dropout"):
        make(attention="linear", attention_dropout=0.1)
