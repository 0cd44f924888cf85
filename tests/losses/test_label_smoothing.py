import math

import pytest
import torch
import torch.nn.functional as F

from asr.losses.label_smoothing import label_smoothing_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("padding", [0, 10])
def test_uniform_logits_cost_log_v_for_each_token_whatever_smoothing_and_padding(smoothing, padding):
    targets = torch.tensor([[1, 2, 3], [2, 0, 0]])
    losses = label_smoothing_loss(
        torch.zeros(2, 3 + padding, 4), F.pad(targets, (0, padding)), torch.tensor([3, 1]), smoothing
    )
    torch.testing.assert_close(losses, torch.tensor([3.0, 1.0]) * 1.38629, atol=1e-4, rtol=0)


def test_equals_the_divergence_from_the_smoothed_target_and_its_entropy():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, 4, 2], [0, 3, 1]])
    smoothed = torch.full((2, 3, 5), 0.1 / 4).scatter(2, targets.unsqueeze(2), 0.9)
    divergence = F.kl_div(logits.log_softmax(-1), smoothed, reduction="none").sum((1, 2))
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 4))
    losses = label_smoothing_loss(logits, targets, torch.tensor([3, 3]), 0.1)
    torch.testing.assert_close(losses, divergence + 3 * entropy)


def test_padding_of_the_logits_has_neither_value_nor_gradient():
    torch.manual_seed(0)
    logits = torch.randn(1, 4, 5, dtype=torch.float16, requires_grad=True)
    losses = label_smoothing_loss(logits, torch.tensor([[1, 2, 0, 0]]), torch.tensor([2]), 0.1)
    short = label_smoothing_loss(logits[:, :2], torch.tensor([[1, 2]]), torch.tensor([2]), 0.1)
    assert losses.dtype == torch.float32 and torch.equal(losses, short)
    losses.sum().backward()
    assert torch.equal(logits.grad[0, 2:], torch.zeros(2, 5, dtype=torch.float16)) and logits.grad[0, :2].any()


def test_one_wrong_token_costs_its_log_probability_without_smoothing():
    logits = torch.tensor([[[2.0, 0.0, 0.0]]])
    loss = label_smoothing_loss(logits, torch.tensor([[1]]), torch.tensor([1]), 0.0)
    assert loss.item() == pytest.approx(math.log(math.e**2 + 2))
