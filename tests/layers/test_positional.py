import pytest
import torch

from asr.layers.positional import RelativePositionalEncoding


def test_any_length_and_the_middle_row_is_distance_zero():
    positions = RelativePositionalEncoding(8)
    for num_frames in (3, 7000, 1):
        encodings = positions(torch.zeros(1, num_frames, 8))[1]
        assert encodings.shape == (2 * num_frames, 8)
        assert torch.equal(encodings[num_frames - 1], torch.tensor([0.0, 1.0] * 4))


def test_positions_are_distances_from_the_first_frame_and_may_be_negative():
    positions, like = RelativePositionalEncoding(8), torch.zeros(1, 5, 8)
    assert torch.equal(positions.of_positions(0, 5, like), positions.of_distances(1, 5, like)[:5].flip(0))
    assert torch.equal(positions.of_positions(-3, 9, like)[3:8], positions.of_positions(0, 5, like))


def test_opposite_distances_differ():
    encodings = RelativePositionalEncoding(8)(torch.zeros(1, 4, 8))[1]
    assert not torch.allclose(encodings[2], encodings[4])


def test_table_grown_under_inference_mode_serves_training():
    positions = RelativePositionalEncoding(8)
    with torch.inference_mode():
        positions(torch.zeros(1, 9, 8))
    weight = torch.ones(8, requires_grad=True)
    (positions(torch.zeros(1, 4, 8))[1] * weight).sum().backward()
    assert weight.grad is not None


def test_bf16_module_still_computes_angles_in_fp32():
    encodings = RelativePositionalEncoding(8).to(torch.bfloat16)(torch.zeros(1, 900, 8, dtype=torch.bfloat16))[1]
    exact = RelativePositionalEncoding(8)(torch.zeros(1, 900, 8))[1]
    assert encodings.dtype == torch.bfloat16
    assert (encodings.float() - exact).abs().max() < 4e-3


def test_input_scale():
    x = torch.ones(1, 2, 16)
    assert torch.equal(RelativePositionalEncoding(16)(x)[0], x)
    assert torch.equal(RelativePositionalEncoding(16, scale_input=True)(x)[0], 4 * x)


def test_nothing_in_the_state_dict():
    positions = RelativePositionalEncoding(8)
    positions(torch.zeros(1, 5, 8))
    assert not positions.state_dict()


def test_odd_width_is_refused():
    with pytest.raises(ValueError, match="even width"):
        RelativePositionalEncoding(7)
