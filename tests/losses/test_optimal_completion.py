import itertools

import pytest
import torch

from asr.losses.label_smoothing import label_smoothing_loss
from asr.losses.optimal_completion import optimal_completion_loss, optimal_next_tokens, prefix_distances

END, VOCAB = 0, 4


def edit_distance(one, other):
    if not one or not other:
        return len(one) + len(other)
    return min(
        edit_distance(one[:-1], other) + 1,
        edit_distance(one, other[:-1]) + 1,
        edit_distance(one[:-1], other[:-1]) + (one[-1] != other[-1]),
    )


def rows(max_len):
    return [row for length in range(max_len + 1) for row in itertools.product((1, 2), repeat=length)]


def test_distances_are_those_of_all_prefixes():
    for given, truth in itertools.product(rows(3), rows(3)):
        distances = prefix_distances(torch.tensor([given]).long(), torch.tensor([truth]).long())[0]
        for i, j in itertools.product(range(len(given) + 1), range(len(truth) + 1)):
            assert distances[i, j] == edit_distance(given[:i], truth[:j])


def test_best_next_tokens_are_those_from_which_the_fewest_errors_can_be_reached():
    """Against the definition: of all completions of a prefix, those with the smallest edit distance."""
    completions = rows(3)
    for given, truth in itertools.product(rows(2), rows(3)):
        width = torch.tensor([[*truth, 3, 3]])  # padding has no effect
        found = optimal_next_tokens(torch.tensor([given]).long(), width, torch.tensor([len(truth)]), END, VOCAB)[0]
        for length in range(len(given) + 1):
            errors = {row: edit_distance(given[:length] + row, truth) for row in completions}
            least = min(errors.values())
            best = {row[0] if row else END for row in completions if errors[row] == least}
            assert set(found[length].nonzero().flatten().tolist()) == best


def test_after_the_truth_comes_the_truth_and_the_loss_is_that_of_teacher_forcing():
    torch.manual_seed(0)
    tokens, lens = torch.tensor([[1, 2, 2, 3], [3, 1, 0, 0]]), torch.tensor([4, 2])
    logits = torch.randn(2, 5, VOCAB)
    targets = torch.tensor([[1, 2, 2, 3, END], [3, 1, END, 0, 0]])
    for smoothing in (0.0, 0.1):
        expected = label_smoothing_loss(logits, targets, lens + 1, smoothing)
        found = optimal_completion_loss(logits, tokens, lens, tokens, lens, END, smoothing)
        torch.testing.assert_close(found, expected)


def test_loss_after_an_error_spreads_over_what_is_best_and_stops_at_the_length():
    log_probs = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    logits = log_probs.expand(1, 4, VOCAB)
    # 1 3 was said for 1 2: it replaced 2, so the end is best, or it came too much, so 2 is.
    loss = optimal_completion_loss(
        logits, torch.tensor([[1, 3, 9]]), torch.tensor([2]), torch.tensor([[1, 2]]), torch.tensor([2]), END, 0.0
    )
    expected = -(log_probs[1] + log_probs[2] + (log_probs[END] + log_probs[2]) / 2)
    torch.testing.assert_close(loss, expected.unsqueeze(0))


@pytest.mark.parametrize("given", [[], [1, 1, 1, 1, 1, 1]])
def test_empty_transcripts_and_long_samples_are_finite(given):
    logits = torch.randn(1, len(given) + 1, VOCAB, requires_grad=True)
    given, given_len = torch.tensor([given]).long(), torch.tensor([len(given)])
    for truth in ([], [1], [2, 2, 2]):
        tokens, lens = torch.tensor([truth]).long(), torch.tensor([len(truth)])
        loss = optimal_completion_loss(logits, given, given_len, tokens, lens, END, 0.1)
        assert loss.isfinite().all() and loss.shape == (1,)
    loss.sum().backward()
    assert logits.grad.isfinite().all()
