import pytest
from torch import nn

from asr.layers.schedule import PiecewiseLinear, set_batch_count


def test_a_line_through_points():
    line = PiecewiseLinear((10, 1.0), (20, 3.0), (30, 0.0))
    assert [line(x) for x in (0, 10, 15, 20, 25, 30, 99)] == [1.0, 1.0, 2.0, 3.0, 1.5, 0.0, 0.0]


def test_points_must_rise():
    with pytest.raises(ValueError, match="rise"):
        PiecewiseLinear((1, 0.0), (1, 1.0))


def test_modules_that_ask_learn_the_batch_count():
    inner, plain = nn.Linear(1, 1), nn.Linear(1, 1)
    inner.batch_count = 0.0
    set_batch_count(nn.Sequential(plain, nn.Sequential(inner)), 12.5)
    assert inner.batch_count == 12.5 and not hasattr(plain, "batch_count")
