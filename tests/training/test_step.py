import copy
import math

import pytest
import torch

from asr.training.averaging import RunningAverage
from asr.training.distributed import World
from asr.training.optim import parameter_groups
from asr.training.precision import PrecisionMode
from asr.training.step import train_step

CPU = torch.device("cpu")


class Setup:
    """A model in training with everything that one step may change."""

    def __init__(self, model, mode="fp32", sgd=False):
        self.precision = PrecisionMode(mode, CPU, 1024.0)
        self.model = self.precision.prepare(model).train()
        # Under SGD a small difference of gradients stays small in the parameters.
        make = torch.optim.SGD if sgd else torch.optim.AdamW
        self.optimizer = make(parameter_groups(model, 0.01), lr=1e-2)
        self.average = RunningAverage(model, 1)

    def step(self, *batches, clip_norm=5.0):
        return train_step(self.model, list(batches), self.optimizer, self.precision, clip_norm, World(), CPU)

    def state(self):
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.average.state_dict())
        return copy.deepcopy(parts)


def still(tiny, **options):
    """A model without anything random and without statistics over the batch."""
    return tiny.model(dropout=0.0, augment=False, conv_norm="layer_norm", **options)


def poison(batch, value=1e30):
    batch.features[-1] = value
    return batch


@pytest.mark.parametrize("mode", ["fp32", "amp_fp16", "amp_bf16", "bf16"])
@pytest.mark.parametrize("value", [1e30, math.nan, math.inf])
def test_a_poisoned_batch_leaves_no_trace(tiny, mode, value):
    setup = Setup(tiny.model(), mode)
    assert setup.step(tiny.batch("ab")).finite
    setup.average.update(setup.model, 1)
    before = setup.state()
    result = setup.step(tiny.batch("cd"), poison(tiny.batch("ef"), value))
    assert not result.finite and "f" in result.suspects
    assert tiny.differences(before, setup.state()) == []
    assert setup.step(tiny.batch("cd")).finite
    changed = " ".join(tiny.differences(before, setup.state()))
    assert "running_mean" in changed and "encoder.blocks" in changed and "exp_avg" in changed


def test_a_gradient_that_is_not_finite_is_noticed_where_the_loss_is_finite(tiny):
    setup = Setup(still(tiny))
    setup.model.head.output.bias.register_hook(lambda gradient: gradient * math.inf)
    before = setup.state()
    result = setup.step(tiny.batch("ab"), tiny.batch("c"))
    assert math.isfinite(result.loss) and not result.finite
    assert result.suspects == ["a", "b", "c"]
    assert tiny.differences(before, setup.state()) == []


def test_only_the_utterance_itself_is_suspect_where_others_stay_finite(tiny):
    assert Setup(still(tiny)).step(poison(tiny.batch("abc")), tiny.batch("d")).suspects == ["c"]


def test_the_gradient_scale_falls_with_every_overflow_and_the_step_is_not_scaled(tiny):
    setup, plain = Setup(still(tiny), "amp_fp16"), Setup(still(tiny))
    assert setup.precision.scale == 1024.0
    setup.step(poison(tiny.batch("ab")))
    assert setup.precision.scale == 512.0 and not setup.precision.collapsed
    scaled, unscaled = setup.step(tiny.batch("ab")), plain.step(tiny.batch("ab"))
    assert scaled.grad_norm == pytest.approx(unscaled.grad_norm, rel=0.02)
    for _ in range(33):
        setup.step(poison(tiny.batch("ab")))
    assert setup.precision.collapsed


def test_several_batches_are_as_one_of_all_utterances(tiny):
    names = [f"u{i}" for i in range(8)]
    together, apart = Setup(still(tiny), sgd=True), Setup(still(tiny), sgd=True)
    for _ in range(3):
        one = together.step(tiny.batch(names), clip_norm=0.5)
        # Batches of different sizes, one of them empty.
        four = apart.step(tiny.batch(names[:3]), tiny.batch([]), tiny.batch(names[3:4]), tiny.batch(names[4:]),
                          clip_norm=0.5)  # fmt: skip
        assert four.loss == pytest.approx(one.loss, rel=1e-5)
        assert four.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert (four.num_utterances, four.clipped) == (one.num_utterances, one.clipped) == (8, True)
        assert four.audio_seconds == pytest.approx(one.audio_seconds)
    for left, right in zip(together.model.parameters(), apart.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


def test_infeasible_utterances_are_counted_and_change_nothing(tiny):
    alone, beside = Setup(still(tiny), sgd=True), Setup(still(tiny), sgd=True)
    batch = tiny.batch("ab")
    batch.feature_lens[1] = 9  # one frame after subsampling, for three tokens
    one, two = alone.step(tiny.batch("a")), beside.step(batch)
    assert (two.num_utterances, two.num_infeasible) == (1, 1)
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    for left, right in zip(alone.model.parameters(), beside.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


def test_a_step_with_nothing_feasible_changes_nothing(tiny):
    setup = Setup(tiny.model())
    setup.step(tiny.batch("ab"))
    before = setup.state()
    batch = tiny.batch("ab")
    batch.feature_lens[:] = 9
    for batches in ([batch], [tiny.batch([])], []):
        result = setup.step(*batches)
        assert result.finite and result.num_utterances == 0
        assert tiny.differences(before, setup.state()) == []


def test_one_utterance_of_one_output_frame(tiny):
    batch = tiny.batch("a", frames=7)
    batch.token_lens[:] = 1
    setup = Setup(tiny.model())
    assert setup.step(batch).finite
    assert all(parameter.isfinite().all() for parameter in setup.model.parameters())


def test_the_norm_is_that_before_clipping(tiny):
    clipped, free = Setup(still(tiny)), Setup(still(tiny))
    small, large = clipped.step(tiny.batch("ab"), clip_norm=1e-3), free.step(tiny.batch("ab"), clip_norm=1e9)
    assert small.grad_norm == pytest.approx(large.grad_norm) and (small.clipped, large.clipped) == (True, False)
    gradients = [parameter.grad for parameter in clipped.model.parameters()]
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(1e-3, rel=1e-3)


def test_weights_decay_and_everything_of_one_dimension_does_not(tiny):
    model = tiny.model()
    model.head.twin = model.head.output.weight  # tied
    groups = parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(parameter.dim() > 1 for parameter in groups[0]["params"])
    assert all(parameter.dim() <= 1 for parameter in groups[1]["params"])
    numbers = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(numbers) == len(set(numbers)) == len(list(model.parameters()))
