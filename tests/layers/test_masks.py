import torch

from asr.layers.masks import length_mask, zero_padding


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
