"""Chunks: the masked pass, its equal computed chunk by chunk, and training for every chunk size."""

import pytest
import torch

from asr.encoders.conformer import Conformer

SMALL = dict(input_dim=20, output_dim=16, num_layers=2, num_heads=2, feed_forward_dim=32, subsampling_channels=4)


def small(seed=0, **changes):
    torch.manual_seed(seed)
    encoder = Conformer(**{**SMALL, "kernel_size": 8, "conv_norm": "layer_norm", "causal": True, **changes})
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return encoder.eval()


@pytest.mark.parametrize("left_chunks", [None, 0, 1, 4])
@pytest.mark.parametrize("chunk_size", [1, 4, 8, 16])
@pytest.mark.parametrize(
    "options", [{}, {"relative_shift": False, "scale_input": True, "final_norm": True}, {"subsampling": 2}]
)
@torch.no_grad()
def test_chunk_by_chunk_equals_the_masked_pass(chunk_size, left_chunks, options):
    masked = small(chunk_size=chunk_size, left_chunks=left_chunks, **options)
    streaming = small(chunk_size=chunk_size, left_chunks=left_chunks, streaming=True, **options)
    features, lens = torch.randn(4, 260, 20), torch.tensor([260, 123, 5, 68])
    features[2, 5:] = float("nan")
    expected, got = masked(features, lens), streaming(features, lens)
    assert torch.equal(got.lens, expected.lens) and got.frames.shape == expected.frames.shape
    torch.testing.assert_close(got.frames, expected.frames, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_stream_needs_no_more_than_its_chunk_and_a_state_of_constant_size():
    encoder = small(chunk_size=4, left_chunks=2, conv_norm="batch_norm")
    features = torch.randn(1, 115, 20)
    whole = encoder(features, torch.tensor([115])).frames
    window, stride = encoder.chunk_inputs(4)
    assert (window, stride) == (19, 16)
    state, frames = encoder.start_stream(1), []
    shapes = [part.shape for part in state]
    for start in range(0, 115 - stride, stride):
        chunk = features[:, start : start + window]
        encoded, state = encoder.forward_chunk(chunk, torch.tensor([chunk.size(1)]), state)
        assert [part.shape for part in state] == shapes
        frames.append(encoded.frames)
    torch.testing.assert_close(torch.cat(frames, 1), whole[:, : 4 * len(frames)], atol=1e-5, rtol=0)
    assert int(state.offset) == 4 * len(frames) == 28


@torch.no_grad()
def test_nothing_beyond_the_chunk_changes_a_frame_and_lengths_stay():
    encoder = small(chunk_size=4, left_chunks=1)
    features, lens = torch.randn(1, 120, 20), torch.tensor([120])
    before = encoder(features, lens)
    window, stride = encoder.chunk_inputs(4)
    changed = features.clone()
    changed[:, 2 * stride + window :] += 10.0
    assert torch.equal(encoder(changed, lens).frames[:, :12], before.frames[:, :12])
    encoder.chunk_size = None
    assert torch.equal(encoder(features, lens).lens, before.lens)
    assert not torch.allclose(encoder(features, lens).frames, before.frames)


def test_a_share_of_training_batches_is_seen_in_chunks_and_evaluation_is_not():
    encoder = small(chunk_probability=0.5, max_chunk=3, dropout=0.0, attention_dropout=0.0)
    features, lens = torch.randn(1, 60, 20), torch.tensor([60])
    with torch.no_grad():
        whole = encoder(features, lens).frames
        encoder.train()
        seen = {round(float(encoder(features, lens).frames[0, 0].sum()), 3) for _ in range(60)}
    assert round(float(whole[0, 0].sum()), 3) in seen
    assert len(seen) == 4, "the whole and chunks of 1, 2 and 3 frames"
    torch.manual_seed(1)
    drawn = [encoder.random_chunk() for _ in range(300)]
    assert 100 < drawn.count(None) < 200 and set(drawn) == {None, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": False, "kernel_size": 7, "chunk_size": 8}, r"encoder\.causal=true"),
        ({"causal": False, "kernel_size": 7, "chunk_probability": 0.5}, r"encoder\.causal=true"),
        ({"causal": False, "kernel_size": 8}, "kernel_size=8: must be odd"),
        ({"chunk_size": 0}, r"encoder\.chunk_size=0"),
        ({"left_chunks": -1}, r"encoder\.left_chunks=-1"),
        ({"streaming": True}, r"give encoder\.chunk_size"),
        ({"chunk_probability": 1.5}, r"chunk_probability 1\.5"),
    ],
)
def test_what_cannot_stream_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
