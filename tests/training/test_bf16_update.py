import copy
import math
import warnings

import pytest
import torch
from torch.nn import Parameter

from asr.training.bf16_update import UPDATES, update_bf16
from asr.training.distributed import World
from asr.training.scaled_adam import ScaledAdam
from asr.training.step import train_step

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True),
    "scaled_adam": lambda params: ScaledAdam(params, lr=1e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-5, momentum=0.9),
}


def quiet(optimizer, update, seed=0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        update_bf16(optimizer, update, seed)
    return optimizer


def made(dtype, shapes=((40, 50), (300,))):
    generator = torch.Generator().manual_seed(0)
    # Values that both formats hold; all between 1 and 2, where they have one grid.
    return [Parameter((1 + torch.rand(shape, generator=generator) / 2).bfloat16().to(dtype)) for shape in shapes]


def walk(optimizer, params, numbers):
    """Steps along gradients with a direction, which are the same for every format."""
    for number in numbers:
        for row, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * number + row)
            sign = torch.ones_like(param, dtype=torch.float32)
            sign.view(-1)[::2] = -1.0
            param.grad = (sign + torch.randn(param.shape, generator=generator)).bfloat16().to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_small_updates_are_lost_by_plain_bf16_and_kept_by_the_others(kind):
    """100 steps of about 0.01% of a weight each, where a weight of bf16 can change by 0.8% or not at all."""
    start = made(torch.float32)
    exact = made(torch.float32)
    walk(OPTIMIZERS[kind](exact), exact, range(100))
    moved = torch.cat([(e - s).detach().flatten() for e, s in zip(exact, start, strict=True)])
    assert 5e-3 < moved.abs().mean() < 2e-2
    error = {}
    for update in UPDATES:
        params = made(torch.bfloat16)
        optimizer = quiet(OPTIMIZERS[kind](params), update)
        walk(optimizer, params, range(100))
        assert all(param.dtype is torch.bfloat16 for param in params)
        now = torch.cat([param.detach().float().flatten() for param in params])
        error[update] = now - torch.cat([e.detach().flatten() for e in exact])
        if update == "plain":
            assert torch.equal(now, torch.cat([s.detach().flatten() for s in start])), "not one weight has moved"
        if update == "kahan":
            rests = torch.cat([optimizer.state[param]["rest"].float().flatten() for param in params])
            assert (error[update] + rests).abs().max() < 4e-4, "weight and rest are the fp32 weight"
    half_a_unit = 2**-8
    assert error["kahan"].abs().max() <= half_a_unit + 4e-4, "as near as bf16 comes"
    rising = moved > 0
    for direction in (rising, ~rising):
        assert abs(error["stochastic"][direction].mean()) < 0.15 * moved.abs().mean(), "right on average"


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_same_bits_after_a_checkpoint(tmp_path, kind, update):
    whole = made(torch.bfloat16)
    walk(quiet(OPTIMIZERS[kind](whole), update), whole, range(20))
    first = made(torch.bfloat16)
    optimizer = quiet(OPTIMIZERS[kind](first), update)
    walk(optimizer, first, range(7))
    torch.save({"values": [p.detach() for p in first], "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second = [Parameter(value) for value in state["values"]]
    resumed = quiet(OPTIMIZERS[kind](second), update)
    resumed.load_state_dict(state["optimizer"])
    assert all(param.dtype is torch.bfloat16 for param in second)
    walk(resumed, second, range(7, 20))
    assert all(torch.equal(one, other) for one, other in zip(whole, second, strict=True))
    types = {name: value.dtype for name, value in resumed.state[second[0]].items() if torch.is_tensor(value)}
    assert types.pop("rest", torch.bfloat16) is torch.bfloat16 and set(types.values()) == {torch.float32}


def test_stochastic_rounding_depends_on_the_seed_and_not_on_the_rank():
    def walked(seed, before=0):
        torch.manual_seed(before)  # as different as the generators of ranks are
        params = made(torch.bfloat16)
        walk(quiet(OPTIMIZERS["adamw"](params), "stochastic", seed), params, range(10))
        return torch.cat([param.detach().flatten() for param in params])

    assert torch.equal(walked(1), walked(1, before=5)) and not torch.equal(walked(1), walked(2))


def test_parameters_of_other_types_and_without_gradient_are_left_alone():
    half, frozen, full = made(torch.bfloat16, [(3,)]) + made(torch.bfloat16, [(3,)]) + made(torch.float32, [(3,)])
    optimizer = quiet(torch.optim.SGD([half, frozen, full], lr=1.0), "kahan")
    before = frozen.detach().clone()
    half.grad, full.grad = torch.full((3,), 0.5, dtype=torch.bfloat16), torch.full((3,), 0.5)
    gradient = half.grad
    optimizer.step()
    assert torch.equal(frozen, before) and frozen.grad is None and "rest" not in optimizer.state[frozen]
    assert half.grad is gradient and half.dtype is torch.bfloat16 and full.dtype is torch.float32
    torch.testing.assert_close(half.float(), full, atol=0.01, rtol=0)


@pytest.mark.parametrize("update", UPDATES)
def test_a_poisoned_step_leaves_no_trace(tiny, update):
    precision = tiny.precision("bf16")
    model = precision.prepare(tiny.model()).train()
    optimizer = quiet(torch.optim.AdamW(model.parameters(), lr=1e-3), update)

    def step(value=None):
        batch = tiny.batch("ab")
        if value is not None:
            batch.features[-1] = value
        return train_step(model, [batch], optimizer, precision, 5.0, World(), torch.device("cpu"))

    assert step().finite
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert not step(math.nan).finite
    assert tiny.differences(before, (model.state_dict(), optimizer.state_dict())) == []
    assert step().finite


@pytest.mark.parametrize("update", ["kahan", "stochastic"])
def test_a_run_goes_on_after_an_interruption_with_the_same_bits(tiny, tmp_path, update):
    def trainer(run_dir, max_epochs):
        model = tiny.precision("bf16").prepare(tiny.model())
        optimizer = quiet(torch.optim.AdamW(model.parameters(), lr=3e-3), update)
        return tiny.trainer(run_dir, "bf16", tiny.loader(5), model, optimizer=optimizer, max_epochs=max_epochs)

    whole = trainer(tmp_path / "whole", 2)
    whole.fit()
    cut = trainer(tmp_path / "cut", 1)
    cut.fit()
    again = trainer(tmp_path / "cut", 2)
    again.load_state_dict(again.checkpoints.load_newest()[1])
    again.fit()
    assert tiny.differences(whole.state_dict(), again.state_dict(), ignore=("seconds", ".config")) == []
    for one in (whole, cut, again):
        one.monitor.close()


def test_plain_warns_and_an_unknown_update_is_refused():
    optimizer = OPTIMIZERS["sgd"](made(torch.bfloat16))
    with pytest.warns(UserWarning, match=r"less than about 0\.4% .* kahan keeps them"):
        update_bf16(optimizer, "plain")
    with pytest.raises(ValueError, match="bf16_update='exact': choose one of plain, kahan, stochastic"):
        update_bf16(optimizer, "exact")
