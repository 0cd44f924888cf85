import pytest
import torch

from asr.training.schedule import Constant, WarmupCosine, WarmupHoldDecay, WarmupInverseSqrt, apply_schedule


def test_values():
    cosine = WarmupCosine(100, warmup_steps=10, final_factor=0.1)
    assert cosine.factor(1, 1) == pytest.approx(0.1) and cosine.factor(10, 1) == 1.0
    assert cosine.factor(55, 1) == pytest.approx(0.55) and cosine.factor(100, 1) == cosine.factor(
        900, 1
    ) == pytest.approx(0.1)
    stages = WarmupHoldDecay(100, 0.1, 0.4, 0.01)
    assert [stages.factor(step, 1) for step in (5, 10, 49, 50)] == pytest.approx([0.5, 1, 1, 1])
    assert stages.factor(75, 1) == pytest.approx(0.1) and stages.factor(100, 1) == stages.factor(
        900, 1
    ) == pytest.approx(0.01)
    noam = WarmupInverseSqrt(100)
    assert [noam.factor(step, 1) for step in (25, 100, 400)] == pytest.approx([0.25, 1, 0.5])
    assert [Constant(4).factor(step, 1) for step in (1, 4, 9)] == [0.25, 1, 1] and Constant().factor(1, 1) == 1
    with pytest.raises(ValueError, match="room for the decay"):
        WarmupHoldDecay(100, 0.5, 0.5)


@pytest.mark.parametrize("total_steps", [1, 2, 3, 10])
@pytest.mark.parametrize("kind", [WarmupCosine, WarmupHoldDecay, WarmupInverseSqrt])
def test_short_runs_reach_their_learning_rate(kind, total_steps):
    factors = [kind(total_steps=total_steps).factor(step, 1) for step in range(1, total_steps + 1)]
    assert max(factors) == 1.0 and min(factors) > 0


def test_the_learning_rate_is_a_function_of_the_step_also_after_loading():
    def optimizer():
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        return torch.optim.AdamW([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.5}], lr=1.0)

    first, schedule = optimizer(), Constant(10)
    for step in (1, 2, 3):
        assert apply_schedule(first, schedule, step, 1) == pytest.approx(step / 10)
    second = optimizer()
    second.load_state_dict(first.state_dict())
    assert apply_schedule(second, schedule, 4, 1) == pytest.approx(0.4)
    assert [group["lr"] for group in second.param_groups] == pytest.approx([0.4, 0.2])
