import torch

from asr.layers.masks import chunk_mask, length_mask, zero_padding


def test_length_mask():
    assert length_mask(torch.tensor([2, 0, 3]), 3).tolist() == [
        [True, True, False],
        [False, False, False],
        [True, True, True],
    ]


def test_zero_padding_removes_nan_and_its_gradient():
    x = torch.full((1, 3, 2), float("nan"))
    x[0, 0] = 1.0
    x.requires_grad_()
    zeroed = zero_padding(x, length_mask(torch.tensor([1]), 3))
    zeroed.square().sum().backward()
    assert zeroed.tolist() == [[[1, 1], [0, 0], [0, 0]]]
    assert x.grad.tolist() == [[[2, 2], [0, 0], [0, 0]]]


def test_a_frame_looks_at_its_own_chunk_and_at_those_to_the_left_that_are_allowed():
    def rows(left_chunks):
        mask = chunk_mask(5, 2, left_chunks, torch.device("cpu"))
        return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]

    assert rows(0) == ["xx...", "xx...", "..xx.", "..xx.", "....x"]
    assert rows(1) == ["xx...", "xx...", "xxxx.", "xxxx.", "..xxx"]
    assert rows(None) == ["xx...", "xx...", "xxxx.", "xxxx.", "xxxxx"]
