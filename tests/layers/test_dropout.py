import pytest
import torch

from asr.layers.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_share_scale_and_gradient(p):
    torch.manual_seed(0)
    x = torch.ones(301, 333, requires_grad=True)
    y = Dropout(p)(x)
    y.sum().backward()
    dropped = (y == 0).float()
    assert abs(dropped.mean().item() - p) < 5e-3
    assert (dropped.mean(0) - p).abs().max() < 0.15
    assert y.max().item() == pytest.approx(1 / (1 - p), rel=1e-4)
    assert torch.equal(x.grad, y.detach())


def test_neighbours_are_independent():
    torch.manual_seed(0)
    dropped = (Dropout(0.3)(torch.ones(400_000)) == 0).float().view(-1, 4)
    assert (torch.corrcoef(dropped.T) - torch.eye(4)).abs().max() < 0.01


def test_seed_repeats_and_the_next_draw_differs():
    dropout, x = Dropout(0.5), torch.ones(1000)
    torch.manual_seed(3)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(3)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


def test_off_in_eval_and_at_zero_and_on_empty_input():
    x = torch.randn(5)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert Dropout(0.5)(torch.ones(2, 0)).shape == (2, 0)


def test_type_is_kept():
    assert Dropout(0.5)(torch.ones(8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_probability_outside_its_range_is_refused():
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match="must lie in"):
            Dropout(p)
