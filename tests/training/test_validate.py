import copy
import math

import pytest
import torch

from asr.search.ctc_greedy_search import ctc_greedy_search
from asr.training.distributed import World
from asr.training.precision import PrecisionMode
from asr.training.validate import validate
from asr.types import Skipped

CPU = torch.device("cpu")


def run(tiny, model, batches, mode="fp32"):
    precision = PrecisionMode(mode, CPU)
    precision.prepare(model)
    return validate(model, batches, ctc_greedy_search, tiny.to_text, precision, World(), CPU)


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_no_trace_and_repeats_exactly(tiny, training):
    model = tiny.model(dropout=0.5).train(training)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = run(tiny, model, [tiny.batch("abc"), tiny.batch("d", frames=60)])
    second = run(tiny, model, [tiny.batch("abc"), tiny.batch("d", frames=60)])
    assert first == second and first.num_utterances == 4 and math.isfinite(first.loss)
    assert model.training is training and all(module.training is training for module in model.modules())
    assert tiny.differences(before, model.state_dict()) == [] and torch.equal(generator, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_result_is_the_same_to_the_last_bit_in_every_order_of_batches(tiny):
    model, names = tiny.model(), [f"u{i}" for i in range(20)]
    orders = ([tiny.batch([name]) for name in order] for order in (names, names[::-1], names[1::2] + names[::2]))
    assert len({run(tiny, model, batches).loss for batches in orders}) == 1


def test_the_result_does_not_depend_on_batches(tiny):
    model = tiny.model()
    together, alone = run(tiny, model, [tiny.batch("abcd")]), run(tiny, model, [tiny.batch(name) for name in "dbca"])
    assert together.loss == pytest.approx(alone.loss, rel=1e-5)
    assert (together.wer, together.cer, together.examples) == (alone.wer, alone.cer, alone.examples)
    assert [name for name, _, _ in together.examples] == ["a", "b", "c", "d"]


def test_infeasible_and_unreadable_utterances_count_but_not_in_the_loss(tiny):
    model = tiny.model()
    plain, batch = run(tiny, model, [tiny.batch("a")]), tiny.batch("ab")
    batch.feature_lens[1] = 9
    empty = tiny.batch([])
    empty.skipped = [Skipped("lost", "no such file", "ab")]
    result = run(tiny, model, [batch, empty])
    assert ("lost", "ab", "") in result.examples, "all its words are deletions"
    assert result.num_utterances == 3 and result.loss == pytest.approx(plain.loss, rel=1e-5)


def test_a_set_without_references_has_no_rate(tiny):
    batch = tiny.batch("ab")
    batch.texts = ["", ""]
    assert run(tiny, tiny.model(), [batch]).wer is None
    nothing = run(tiny, tiny.model(), [])
    assert math.isnan(nothing.loss) and nothing.wer is None and nothing.examples == []


def test_the_model_is_in_training_again_after_an_error(tiny):
    model = tiny.model().train()
    batch = tiny.batch("a")
    batch.tokens[:] = 99
    with pytest.raises(ValueError, match="vocabulary"):
        run(tiny, model, [batch])
    assert model.training
