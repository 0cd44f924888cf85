from functools import partial

import pytest
import torch

from asr.heads.ctc import CTC
from asr.heads.joint import Joint
from asr.types import Encoded


def joint(weights):
    torch.manual_seed(0)
    heads = {"ctc": partial(CTC, dropout=0.0), "other": partial(CTC, dropout=0.0)}
    return Joint(heads, weights, input_dim=6, vocab_size=5)


ARGUMENTS = Encoded(torch.randn(2, 8, 6), torch.tensor([8, 1])), torch.tensor([[1, 2], [3, 3]]), torch.tensor([2, 2])


def test_the_loss_is_the_weighted_sum():
    head = joint({"ctc": 0.3, "other": 2.0})
    parts = head.loss_parts(*ARGUMENTS)
    assert set(parts) == {"ctc", "other/ctc"}
    expected = 0.3 * head.heads["ctc"].loss(*ARGUMENTS) + 2.0 * head.heads["other"].loss(*ARGUMENTS)
    torch.testing.assert_close(head.loss(*ARGUMENTS), expected)
    assert head.feasible(ARGUMENTS[0].lens, *ARGUMENTS[1:]).tolist() == [True, False]
    assert head.min_frames([3, 3]) == 3


def test_a_search_finds_the_head_it_works_on():
    head = joint({"ctc": 1.0, "other": 1.0})
    assert head.searches == CTC.searches and head.part_for("ctc_greedy_search") is head.heads["ctc"]
    with pytest.raises(ValueError, match="search=greedy_search"):
        head.part_for("greedy_search")


@pytest.mark.parametrize(
    "weights", [{}, {"ctc": 1.0}, {"ctc": 1.0, "other": 1.0, "third": 1.0}, {"ctc": 0, "other": 1}]
)
def test_every_head_has_a_weight(weights):
    with pytest.raises(ValueError, match=r"head\.weights"):
        joint(weights)


def test_views_are_asked_for_where_one_head_compares_them():
    torch.manual_seed(0)
    heads = {"plain": partial(CTC, dropout=0.0), "ctc": partial(CTC, dropout=0.0, consistency_weight=0.2)}
    head = Joint(heads, {"plain": 1.0, "ctc": 0.5}, input_dim=6, vocab_size=5)
    head.heads["ctc"].batch_count = 4000.0
    assert head.num_views == 2 and joint({"ctc": 1.0, "other": 1.0}).num_views == 1
    encoded = Encoded(torch.randn(4, 8, 6), torch.tensor([8, 1, 8, 1]), num_views=2)
    tokens, token_lens = ARGUMENTS[1].repeat(2, 1), ARGUMENTS[2].repeat(2)
    parts = head.loss_parts(encoded, tokens, token_lens)
    assert set(parts) == {"plain/ctc", "ctc", "ctc/consistency"}
    alone = head.heads["ctc"].loss_parts(encoded, tokens, token_lens)
    torch.testing.assert_close(parts["ctc/consistency"], 0.5 * alone["consistency"])
    assert all((losses[[1, 3]] == 0).all() and (losses[[0, 2]] > 0).all() for losses in parts.values())
