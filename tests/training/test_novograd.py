import math

import pytest
import torch
from torch import nn

from asr.training.bf16_update import update_bf16
from asr.training.novograd import Novograd


def reference(weight, grads, lr, betas, eps, weight_decay):
    """The paper's algorithm on one parameter, number by number, in double precision."""
    w, m, v = weight.double().flatten().tolist(), None, None
    for grad in grads:
        g = grad.double().flatten().tolist()
        norm = sum(x * x for x in g)
        v = norm if v is None else betas[1] * v + (1 - betas[1]) * norm
        scaled = [x / (math.sqrt(v) + eps) + weight_decay * y for x, y in zip(g, w, strict=True)]
        m = scaled if m is None else [betas[0] * a + b for a, b in zip(m, scaled, strict=True)]
        w = [x - lr * y for x, y in zip(w, m, strict=True)]
    return torch.tensor(w).view_as(weight)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_parameter_moves_as_in_the_paper(weight_decay):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(()))]
    before = [param.detach().clone() for param in params]
    grads = [[torch.randn_like(param) * 10**step for param in params] for step in range(5)]
    settings = {"lr": 0.03, "betas": (0.8, 0.5), "eps": 1e-8, "weight_decay": weight_decay}
    optimizer = Novograd(params, **settings)
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    for index, param in enumerate(params):
        expected = reference(before[index], [of_step[index] for of_step in grads], **settings)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)


def test_state_is_restored_and_what_has_no_gradient_stays():
    def run(interrupted):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        unused = model[1].weight.detach().clone()
        optimizer = Novograd(model.parameters(), lr=0.1)
        for step in range(6):
            if interrupted and step == 3:
                state = optimizer.state_dict()
                optimizer = Novograd(model.parameters(), lr=0.1)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            model[0](torch.full((2, 3), step + 1.0)).square().sum().backward()
            optimizer.step()
        assert torch.equal(model[1].weight, unused)
        return model[0].weight

    assert torch.equal(run(False), run(True))


@pytest.mark.parametrize("update", ["kahan", "stochastic", "plain"])
def test_it_trains_bf16_weights(update):
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = Novograd(layer.parameters(), lr=0.02)
    update_bf16(optimizer, update, seed=0)
    inputs = torch.randn(32, 8).to(torch.bfloat16)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (layer(inputs) - inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
