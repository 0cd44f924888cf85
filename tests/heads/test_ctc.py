import itertools
import math

import pytest
import torch

from asr.heads.ctc import CTC
from asr.types import Encoded


class GivenLogits(CTC):
    """Takes its frames as they are for logits."""

    def __init__(self, vocab_size, blank_id=0):
        super().__init__(vocab_size, vocab_size, blank_id, dropout=0.0)
        self.output = torch.nn.Identity()


def loss_of(head, frames, lens, tokens, token_lens):
    return head.loss(Encoded(frames, torch.tensor(lens)), torch.tensor(tokens), torch.tensor(token_lens))


def brute_force(log_probs, tokens, blank):
    """-log of the sum over every path that collapses to the tokens."""
    total = 0.0
    for path in itertools.product(range(log_probs.size(1)), repeat=log_probs.size(0)):
        collapsed = [t for t, _ in itertools.groupby(path) if t != blank]
        if collapsed == list(tokens):
            total += math.exp(sum(log_probs[t, v].item() for t, v in enumerate(path)))
    return -math.log(total)


@pytest.mark.parametrize(("tokens", "num_frames"), [([1], 2), ([2, 2], 4), ([1, 2], 3), ([], 3)])
def test_equals_the_sum_over_all_paths_with_blank_zero(tokens, num_frames):
    torch.manual_seed(0)
    logits = torch.randn(1, num_frames, 3)
    loss = loss_of(GivenLogits(3), logits, [num_frames], [tokens or [0]], [len(tokens)])
    assert loss.item() == pytest.approx(brute_force(logits[0].log_softmax(-1), tokens, blank=0), rel=1e-5)


def test_empty_transcript_is_all_blank():
    head = GivenLogits(4)
    for tokens in ([[0]], [[]]):
        loss = head.loss(
            Encoded(torch.zeros(1, 5, 4), torch.tensor([5])), torch.tensor(tokens).long(), torch.tensor([0])
        )
        assert loss.item() == pytest.approx(5 * math.log(4), rel=1e-5)


INFEASIBLE = {
    "too few frames": (2, [1, 2, 3], 3),
    "repeats": (3, [1, 1, 2], 3),
    "no frames": (0, [1, 2, 3], 3),
    "no frames and no tokens": (0, [0, 0, 0], 0),
}


@pytest.mark.parametrize("case", INFEASIBLE)
def test_an_infeasible_item_gives_zero_and_changes_nothing(case):
    bad_len, bad_tokens, bad_token_len = INFEASIBLE[case]
    torch.manual_seed(0)
    head = CTC(6, 5, dropout=0.0)
    frames = torch.randn(2, 8, 6, requires_grad=True)
    losses = loss_of(head, frames, [8, bad_len], [[1, 2, 2], bad_tokens], [3, bad_token_len])
    losses.sum().backward()
    grads = [parameter.grad.clone() for parameter in head.parameters()]
    assert losses[1].item() == 0.0
    assert torch.equal(frames.grad[1], torch.zeros(8, 6))
    head.zero_grad()
    good = frames.detach()[:1].requires_grad_()
    alone = loss_of(head, good, [8], [[1, 2, 2]], [3])
    alone.sum().backward()
    torch.testing.assert_close(losses[:1], alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(frames.grad[:1], good.grad, atol=1e-6, rtol=0)
    for with_bad, without in zip(grads, head.parameters(), strict=True):
        torch.testing.assert_close(with_bad, without.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "least"), [([], 1), ([1], 1), ([1, 1], 3), ([1, 2], 2), ([1, 1, 1], 5), ([1, 2, 2, 1], 5)]
)
def test_min_frames_is_the_edge_of_feasible(tokens, least):
    head = GivenLogits(3)
    needed = head.min_frames(tokens)
    assert needed == least
    padded = torch.tensor([tokens + [2] * 3])
    for num_frames in range(0, 8):
        feasible = head.feasible(torch.tensor([num_frames]), padded, torch.tensor([len(tokens)]))
        assert feasible.item() == (num_frames >= needed)
    loss = head.loss(Encoded(torch.zeros(1, needed, 3), torch.tensor([needed])), padded, torch.tensor([len(tokens)]))
    assert loss.isfinite().all() and loss.item() > 0


def test_padding_of_tokens_and_frames_does_not_matter():
    torch.manual_seed(0)
    head = GivenLogits(5)
    frames = torch.randn(1, 6, 5)
    short = loss_of(head, frames, [6], [[1, 2]], [2])
    longer = loss_of(head, torch.cat([frames, torch.randn(1, 4, 5)], 1), [6], [[1, 2, 0, 4, 0]], [2])
    torch.testing.assert_close(short, longer)


def test_blank_and_unknown_ids_in_a_transcript_are_refused():
    head = GivenLogits(4)
    frames = torch.zeros(2, 6, 4)
    with pytest.raises(ValueError, match="token 1 of utterance 1 of the batch is 0, which is blank"):
        loss_of(head, frames, [6, 6], [[1, 2], [1, 0]], [2, 2])
    for token in (4, -1):
        with pytest.raises(ValueError, match="outside the vocabulary of 4"):
            loss_of(head, frames, [6, 6], [[1, token], [1, 0]], [2, 1])


def test_blank_need_not_be_zero():
    torch.manual_seed(0)
    logits = torch.randn(1, 3, 3)
    loss = loss_of(GivenLogits(3, blank_id=2), logits, [3], [[0, 1]], [2])
    assert loss.item() == pytest.approx(brute_force(logits[0].log_softmax(-1), [0, 1], blank=2), rel=1e-5)


def test_overfits_one_utterance():
    torch.manual_seed(0)
    head = CTC(12, 5, dropout=0.0)
    frames = torch.randn(1, 10, 12)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        loss = loss_of(head, frames, [10], [[3, 1, 1, 4]], [4]).sum()
        loss.backward()
        optimizer.step()
    best = head.log_probs(Encoded(frames, torch.tensor([10])))[0].argmax(-1).tolist()
    assert [token for token, _ in itertools.groupby(best) if token != head.blank_id] == [3, 1, 1, 4]


def two_views(lens=(9, 6)):
    torch.manual_seed(0)
    frames = torch.randn(2 * len(lens), max(lens), 5)
    return Encoded(frames, torch.tensor([*lens, *lens]), num_views=2)


TWICE = torch.tensor([[1, 2], [3, 0]]).repeat(2, 1), torch.tensor([2, 1]).repeat(2)


def test_consistency_is_the_symmetric_divergence_of_two_views():
    head = CTC(5, 5, dropout=0.0, consistency_weight=0.2, consistency_warmup=0)
    encoded = two_views()
    parts = head.loss_parts(encoded, *TWICE)
    assert head.num_views == 2 and list(parts) == ["ctc", "consistency"]
    log_probs = head.log_probs(encoded)
    for row, length in enumerate((9, 6)):
        first, second = log_probs[row, :length], log_probs[row + 2, :length]
        symmetric = ((first.exp() - second.exp()) * (first - second)).sum()
        torch.testing.assert_close(parts["consistency"][[row, row + 2]].sum(), 0.2 * symmetric)
    torch.testing.assert_close(parts["ctc"], CTC.loss_parts(head, Encoded(encoded.frames, encoded.lens), *TWICE)["ctc"])


def test_the_other_view_is_a_fixed_target():
    head = CTC(5, 5, dropout=0.0, consistency_weight=1.0, consistency_warmup=0)
    encoded = two_views()
    encoded.frames.requires_grad_()
    head.loss_parts(encoded, *TWICE)["consistency"][:2].sum().backward()
    assert encoded.frames.grad[:2].abs().max() > 0 and not encoded.frames.grad[2:].any()


def test_consistency_warms_up_and_counts_feasible_frames_only():
    head = CTC(5, 5, dropout=0.0, consistency_weight=0.2, consistency_warmup=100)
    encoded = two_views((9, 1))
    tokens = torch.tensor([[1, 2], [3, 4]]).repeat(2, 1), torch.tensor([2, 2]).repeat(2)
    encoded.frames[:, 9:] = torch.nan
    values = []
    for head.batch_count in (0.0, 50.0, 100.0, 500.0):
        values.append(head.loss_parts(encoded, *tokens)["consistency"])
    assert not values[0].any() and not values[3][[1, 3]].any()
    torch.testing.assert_close(values[1], 0.5 * values[2])
    torch.testing.assert_close(values[3], values[2])


def test_one_view_has_no_consistency():
    head = CTC(5, 5, consistency_weight=0.2)
    encoded = Encoded(torch.randn(2, 9, 5), torch.tensor([9, 6]))
    assert list(head.loss_parts(encoded, torch.tensor([[1], [2]]), torch.tensor([1, 1]))) == ["ctc"]
    assert CTC(5, 5).num_views == 1
    with pytest.raises(ValueError, match=r"consistency_weight=-0\.1"):
        CTC(5, 5, consistency_weight=-0.1)


def test_two_layers_have_a_relu_between_them():
    torch.manual_seed(0)
    head = CTC(6, 5, dropout=0.0, num_layers=2, hidden_dim=4)
    frames = torch.randn(2, 3, 6)
    hidden = (frames @ head.hidden[0].weight.T + head.hidden[0].bias).clamp(min=0)
    expected = (hidden @ head.output.weight.T + head.output.bias).log_softmax(-1)
    torch.testing.assert_close(head.log_probs(Encoded(frames, torch.tensor([3, 3]))), expected)
    assert [tuple(layer.weight.shape) for layer in CTC(6, 5, num_layers=3, hidden_dim=4).hidden] == [(4, 6), (4, 4)]
    with pytest.raises(ValueError, match=r"head\.num_layers=0: at least 1"):
        CTC(6, 5, num_layers=0)
