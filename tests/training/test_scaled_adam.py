import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from asr.training.distributed import World
from asr.training.optim import parameter_groups
from asr.training.scaled_adam import ScaledAdam
from asr.training.schedule import Eden, apply_schedule
from asr.training.step import train_step

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "scaled_adam_eden.npz"
NAMES = ("weight", "bias", "scale", "weight2")


def test_values_of_the_published_optimiser_and_schedule_over_130_steps():
    golden = dict(np.load(GOLDEN))
    parameters = {name: Parameter(torch.tensor(golden[f"init/{name}"])) for name in NAMES}
    optimizer, schedule = ScaledAdam(parameters.values(), lr=0.045), Eden(20, 2, 10, 0.1)
    checked = 0
    for index in range(130):
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(golden[f"grads/{name}"][index])
        # There batches are counted from 0; the loop counts from 1.
        assert apply_schedule(optimizer, schedule, index, index // 40 + 1) == pytest.approx(golden["lrs"][index])
        optimizer.step()
        for name, parameter in parameters.items():
            if f"step{index + 1}/{name}" in golden:
                expected = torch.tensor(golden[f"step{index + 1}/{name}"])
                torch.testing.assert_close(parameter.detach(), expected, atol=1e-5, rtol=1e-5)
                checked += 1
    assert checked == 8 * len(NAMES)


def test_eden_is_as_published_after_its_warmup():
    eden = Eden()
    assert eden.factor(500, 1) == pytest.approx((1 + (500 / 7500) ** 2) ** -0.25)
    assert eden.factor(7500, 8) == pytest.approx(2**-0.25 * (1 + (7 / 3.5) ** 2) ** -0.25)
    assert eden.factor(250, 1) == pytest.approx(0.55 * (1 + (250 / 7500) ** 2) ** -0.25)


def shapes_of(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def steps(optimizer, parameters, numbers, give=lambda step, row: True, scale=lambda step: 1.0):
    """Steps along gradients that depend on the step and on the parameter's value, as those of a loss do."""
    for step in numbers:
        for row, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(1000 * step + row)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = scale(step) * (noise + parameter.detach()) if give(step, row) else None
        optimizer.step()


def test_parameters_of_one_shape_move_as_each_would_alone():
    together, alone = shapes_of((3, 4), (3, 4), (1,), (5,)), shapes_of((3, 4), (3, 4), (1,), (5,))
    steps(ScaledAdam(together, clipping_scale=None), together, range(30))
    optimizers = [ScaledAdam([parameter], clipping_scale=None) for parameter in alone]
    for step in range(30):
        for row, optimizer in enumerate(optimizers):
            steps(optimizer, alone, [step], give=lambda _, other, row=row: row == other)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_a_parameter_without_gradient_keeps_value_and_state():
    parameters = shapes_of((3, 4), (3, 4), (3, 4))
    optimizer = ScaledAdam(parameters, clipping_scale=None)

    def odd(step, row):
        return row != 1 or step % 2 == 1

    for step in range(20):
        before = parameters[1].detach().clone(), copy.deepcopy(optimizer.state[parameters[1]])
        steps(optimizer, parameters, [step], give=odd)
        if not odd(step, 1):
            assert torch.equal(parameters[1], before[0])
            assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(optimizer.state[parameters[1]][k]))
                       for k, v in before[1].items())  # fmt: skip
    # It is now where a parameter is that only saw the other steps.
    single = shapes_of((3, 4), (3, 4), (3, 4))
    steps(ScaledAdam([single[1]], clipping_scale=None), single, range(1, 20, 2), give=lambda step, row: row == 1)
    torch.testing.assert_close(parameters[1], single[1], atol=1e-6, rtol=1e-5)
    assert [optimizer.state[parameter]["step"] for parameter in parameters] == [20, 10, 20]
    frozen = ScaledAdam(shapes_of((2,)))
    frozen.step()
    assert not frozen.state


@pytest.mark.parametrize("cut", [1, 7, 45])
def test_the_same_bits_after_a_checkpoint(tmp_path, cut):
    whole = shapes_of((3, 4), (3, 4), (), (6,))
    steps(ScaledAdam(whole), whole, range(60), scale=lambda step: 30.0 if step in (12, 50) else 1.0)
    first = shapes_of((3, 4), (3, 4), (), (6,))
    optimizer = ScaledAdam(first)
    steps(optimizer, first, range(cut), scale=lambda step: 30.0 if step in (12, 50) else 1.0)
    torch.save({"values": [p.detach() for p in first], "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second = [Parameter(value) for value in state["values"]]
    resumed = ScaledAdam(second)
    resumed.load_state_dict(state["optimizer"])
    steps(resumed, second, range(cut, 60), scale=lambda step: 30.0 if step in (12, 50) else 1.0)
    assert all(torch.equal(one, other) for one, other in zip(whole, second, strict=True))


def test_gradients_far_above_the_median_are_clipped():
    def moved(clipping_scale):
        parameters = shapes_of((4, 4))
        optimizer = ScaledAdam(parameters, clipping_scale=clipping_scale)
        steps(optimizer, parameters, range(25))
        assert not optimizer.clipped
        steps(optimizer, parameters, [25], scale=lambda step: 1e4)
        return optimizer, optimizer.state[parameters[0]]["square"].mean().item()

    clipped, square = moved(2.0)
    assert clipped.clipped and square < 10
    free, square = moved(None)
    assert not free.clipped and square > 1e5


def test_scales_are_learnt_within_their_bounds():
    """Each step asks for a larger parameter."""

    def grown(**options):
        parameter = Parameter(0.01 * torch.randn(50, generator=torch.Generator().manual_seed(0)))
        direction = parameter.detach().clone()
        optimizer = ScaledAdam([parameter], lr=0.01, **options)
        for _ in range(400):
            parameter.grad = -direction
            optimizer.step()
        return float(parameter.detach().square().mean().sqrt())

    with_scale, without, bounded = grown(), grown(scalar_lr_scale=0.0), grown(max_rms=0.02)
    assert with_scale > 1.2 * without > 10 * 0.01
    assert bounded < 0.5 * without
    scalar = Parameter(torch.tensor(9.9))
    optimizer = ScaledAdam([scalar], lr=1.0)
    for _ in range(50):
        scalar.grad = torch.tensor(-1.0)
        optimizer.step()
    assert scalar.item() <= 10.1


def test_a_scale_moves_by_a_tenth_at_most():
    def after_four(scalar_lr_scale):
        parameter = Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0)))
        optimizer = ScaledAdam([parameter], lr=1.0, scalar_lr_scale=scalar_lr_scale, clipping_scale=None)
        for _ in range(4):  # the fourth is the first that learns the scale
            before = parameter.detach().clone()
            parameter.grad = torch.ones(50)
            optimizer.step()
        return optimizer.state[parameter]["delta"].clone(), before

    (with_scale, before), (without, _) = after_four(1.0), after_four(0.0)
    steps = (with_scale - without) / (0.1 * before)
    assert steps.abs().max() == pytest.approx(0.1, rel=1e-3) and steps.std() < 1e-3


def test_a_parameter_of_zeros_begins_to_move():
    parameter = Parameter(torch.zeros(4))
    optimizer = ScaledAdam([parameter], lr=0.1)
    for _ in range(50):
        parameter.grad = torch.tensor([1.0, -1.0, 1.0, 0.0])
        optimizer.step()
    assert parameter.isfinite().all() and (parameter[:3] * torch.tensor([-1.0, 1.0, -1.0]) > 0).all()


@pytest.mark.parametrize("mode", ["fp32", "amp_fp16", "amp_bf16", "bf16"])
def test_a_poisoned_step_leaves_no_trace_and_the_optimiser_says_that_it_clipped(tiny, mode):
    model = tiny.model(dropout=0.0, augment=False)
    model.head.twin = model.head.output.weight  # tied
    precision = tiny.precision(mode)
    model = precision.prepare(model).train()
    (group,) = parameter_groups(model, 0.0)
    optimizer = ScaledAdam([group])

    def step(value=None):
        batch = tiny.batch("ab")
        if value is not None:
            batch.features[-1] = value
        return train_step(model, [batch], optimizer, precision, None, World(), torch.device("cpu"))

    while not step().finite:  # the loss scale comes down
        pass
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert not step(math.nan).finite
    assert tiny.differences(before, (model.state_dict(), optimizer.state_dict())) == []
    for _ in range(11):
        assert step().finite
    optimizer.param_groups[0]["threshold"] = 1e-6
    assert step().clipped
    assert not step(math.nan).clipped


@pytest.mark.parametrize("mode", ["fp32", "amp_fp16"])
def test_a_run_goes_on_after_an_interruption_with_the_same_bits(tiny, tmp_path, mode):
    def trainer(run_dir, **options):
        model = tiny.model()
        return tiny.trainer(run_dir, mode, tiny.loader(5), model, optimizer=ScaledAdam(parameter_groups(model, 0.0)),
                            clip_norm=None, save_every=3, initial_grad_scale=2.0**17, **options)  # fmt: skip

    whole = trainer(tmp_path / "whole", max_epochs=3)
    whole.fit()
    cut = trainer(tmp_path / "cut", max_epochs=1)
    cut.fit()
    again = trainer(tmp_path / "cut", max_epochs=3)
    _, state = again.checkpoints.load_newest()
    again.load_state_dict(state)
    again.fit()
    assert tiny.differences(whole.state_dict(), again.state_dict(), ignore=("seconds", ".config")) == []
    for one in (whole, cut, again):
        one.monitor.close()
