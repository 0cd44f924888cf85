"""The Zipformer's functions with gradients of their own, against autograd's of what they stand for."""

import math

import pytest
import torch

from asr.encoders.zipformer import attention
from asr.encoders.zipformer.activation import swoosh_l, swoosh_r
from asr.encoders.zipformer.attention import AttentionWeights
from asr.encoders.zipformer.norm import BiasNorm, limited
from asr.encoders.zipformer.positions import CompactPositions
from asr.encoders.zipformer.whiten import Whiten
from asr.layers.balancer import Balancer
from asr.layers.schedule import set_batch_count

MASK = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])


def gradients(function, *inputs, seed=0):
    """Gradients of the inputs under a random gradient of the output, with the output."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*inputs)
    torch.manual_seed(seed)
    out.backward(torch.randn(out.shape).to(out.dtype))
    return [out.detach(), *(tensor.grad for tensor in inputs)]


# Swoosh


@pytest.mark.parametrize(("swoosh", "shift", "constant"), [(swoosh_l, 4.0, 0.035), (swoosh_r, 1.0, 0.313261687)])
def test_swoosh_is_its_formula_with_its_derivative(swoosh, shift, constant):
    x = torch.cat([torch.linspace(-30, 30, 201), torch.tensor([-1e4, 1e4])])

    def formula(x):
        return torch.logaddexp(torch.zeros((), dtype=x.dtype), x - shift) - 0.08 * x - constant

    ours, exact = gradients(swoosh, x), gradients(formula, x.double())
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, theirs.float(), atol=2e-6, rtol=2e-6)
    assert swoosh_r(torch.zeros(1)).abs() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("swoosh", [swoosh_l, swoosh_r])
def test_swoosh_in_half_precision_is_rounded_once(swoosh, dtype):
    x = torch.cat([torch.randn(500) * 5, torch.tensor([-3e4, 3e4])]).to(dtype)
    half, exact = gradients(swoosh, x), gradients(swoosh, x.float())
    assert torch.equal(half[0], exact[0].to(dtype)) and half[1].dtype == dtype
    torch.testing.assert_close(half[1].float(), exact[1], atol=1e-2, rtol=1e-2)


# BiasNorm and limits


def test_bias_norm_is_its_formula_with_its_gradients():
    torch.manual_seed(0)
    norm = BiasNorm(7).eval()
    norm.bias.data = torch.randn(7)
    x = torch.randn(2, 9, 7) * 3

    def formula(x, bias, log_scale):
        return x * (x - bias).square().mean(-1, keepdim=True).pow(-0.5) * log_scale.exp()

    exact = gradients(formula, x.double(), norm.bias.double(), norm.log_scale.double())
    ours = [*gradients(norm, x), norm.bias.grad, norm.log_scale.grad]
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, theirs.float(), atol=1e-5, rtol=1e-5)


def test_bias_norm_holds_what_fp16_cannot_square_and_frames_equal_to_the_bias():
    norm = BiasNorm(8)
    x = torch.full((1, 2, 8), 3e4, dtype=torch.float16)
    x[0, 0] *= torch.tensor([1, -1] * 4)
    out, grad = gradients(norm, x)
    assert out.dtype == torch.float16 and out.isfinite().all() and grad.isfinite().all()
    torch.testing.assert_close(out[0].float().abs(), torch.full((2, 8), math.e), atol=5e-3, rtol=0)
    norm.bias.data.zero_()
    out, grad = gradients(norm, torch.zeros(1, 2, 8))
    assert torch.equal(out, torch.zeros(1, 2, 8)) and grad.isfinite().all() and norm.bias.grad.isfinite().all()


def test_a_parameter_beyond_its_limits_is_driven_back():
    x = torch.tensor([-2.0, -2.0, 0.0, 0.0, 2.0, 2.0], requires_grad=True)
    upstream = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    changed = 0
    for _ in range(200):
        x.grad = None
        limited(x, -1.0, 1.0).backward(upstream)
        assert x.grad.tolist() in ([-1, -1, 1, -1, 1, 1], upstream.tolist())
        changed += not torch.equal(x.grad, upstream)
    assert 90 < changed < 150


# Balancer

LIMITS = dict(min_positive=0.3, max_positive=0.7, min_abs=0.5, max_abs=1.5)


def unbalanced():
    """Channels: too positive, too negative, too small, too large, within limits, too large and too positive."""
    torch.manual_seed(1)
    noise = torch.randn(2, 9, 6)
    return noise * torch.tensor([1, 1, 0.1, 4, 1, 4.0]) + torch.tensor([1.5, -1.5, 0, 0, 0, 6.0])


def test_a_balancer_adds_the_gradient_of_the_excess_over_the_valid_frames():
    x = unbalanced()
    torch.manual_seed(0)
    upstream = torch.randn(x.shape) * MASK.unsqueeze(-1)
    exact = x.double().requires_grad_()
    valid = exact[MASK]
    mean, square = valid.mean(0), valid.square().mean(0)
    ratio, rms = mean / (square - mean.square()).sqrt(), square.sqrt()
    edge = math.log(0.7 / 0.3) / 2 / (math.sqrt(math.pi) * math.log(2))
    to_rms = math.sqrt(math.pi / 2)
    excess = (ratio - ratio.clamp(-edge, edge)).abs() + (rms.clamp(0.5 * to_rms, 1.5 * to_rms) / rms).log().abs()
    excess.sum().backward()
    size = exact.grad[MASK].square().mean(0).sqrt()
    push = torch.where(size > 0, exact.grad / size * 0.04, 0.0)

    x[~MASK] = 1e4
    x.requires_grad_()
    out = Balancer(**LIMITS, probability=1.0)(x, MASK)
    assert torch.equal(out, x)
    out.backward(upstream)
    torch.testing.assert_close(x.grad, (upstream + upstream.abs() * push).float(), atol=1e-6, rtol=1e-4)
    assert torch.equal(x.grad[..., 4], upstream[..., 4])
    assert all((x.grad - upstream)[..., channel].abs().max() > 1e-3 for channel in (0, 1, 2, 3, 5))


def test_a_balancer_acts_in_training_alone_and_as_often_as_it_should():
    x = unbalanced().requires_grad_()
    balancer = Balancer(**LIMITS)
    assert balancer.eval()(x, MASK) is x and balancer.train()(x.detach(), MASK) is not None
    for batch_count, expected in ((0.0, 0.5), (8000.0, 0.125)):
        set_batch_count(balancer, batch_count)
        torch.manual_seed(0)
        share = sum(balancer(x, MASK) is not x for _ in range(1000)) / 1000
        assert share == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_constant_channels_and_an_empty_batch_give_finite_gradients(value):
    for mask in (MASK, torch.zeros_like(MASK)):
        for module in (Balancer(**LIMITS, probability=1.0), always_looking(Whiten(1.5, 1.5))):
            x = torch.full((2, 9, 4), value, requires_grad=True)
            module(x, mask).backward(torch.ones(2, 9, 4))
            assert x.grad.isfinite().all()


# Whiten


def always_looking(whiten):
    whiten.PROBABILITIES = (1.0, 1.0)
    return whiten


def coloured(groups=1):
    torch.manual_seed(2)
    return torch.randn(2, 9, 4 * groups) * torch.linspace(0.1, 3, 4 * groups) + 5 * torch.randn(4 * groups)


def metric(x, groups):
    x = x[MASK]
    x = (x - x.mean(0)).unflatten(1, (groups, -1)).transpose(0, 1)
    covariance = x.transpose(1, 2) @ x
    mean_eigenvalue = covariance.diagonal(dim1=1, dim2=2).mean()
    eigenvalues = torch.linalg.eigvalsh(covariance)
    return eigenvalues.square().mean() / mean_eigenvalue.square()


@pytest.mark.parametrize("groups", [1, 2])
def test_whitening_adds_the_gradient_of_the_metric_above_its_limit(groups):
    x = coloured(groups)
    torch.manual_seed(0)
    upstream = torch.randn(x.shape) * MASK.unsqueeze(-1)
    exact = x.double().requires_grad_()
    value = metric(exact, groups)
    value.backward()
    change = exact.grad * 0.1 * upstream.norm() / exact.grad.norm()

    x[~MASK] = 1e3
    for limit, above in ((value.item() * 0.99, True), (value.item() * 1.01, False)):
        whiten = always_looking(Whiten(limit, limit, strength=0.1, num_groups=groups))
        x = x.detach().requires_grad_()
        out = whiten(x, MASK)
        assert torch.equal(out, x)
        out.backward(upstream)
        expected = (upstream + change).float() if above else upstream
        torch.testing.assert_close(x.grad, expected, atol=1e-5, rtol=1e-4)
        assert bool(whiten.above) is above


def test_whitening_looks_seldom_once_it_found_nothing():
    x = coloured().requires_grad_()
    torch.manual_seed(0)
    for above, limit, expected in ((1.0, 1e6, 0.25), (0.0, 1.0, 0.025)):
        whiten = Whiten(limit, limit)
        looks = 0
        for _ in range(1000):
            whiten.above.fill_(above)
            whiten(x, MASK).backward(torch.ones_like(x))
            looks += whiten.above.item() != above
        assert looks / 1000 == pytest.approx(expected, rel=0.2)
    assert whiten.eval()(x, MASK) is x
    assert "above" in whiten.state_dict(), "so that a run that is continued looks as often as one that went on"


# Attention weights


def test_scores_beyond_25_are_pulled_back_and_padding_pulls_nothing(monkeypatch):
    torch.manual_seed(0)
    weights = AttentionWeights(8, num_heads=2, query_head_dim=4, position_head_dim=2, position_dim=6).train()
    for module in weights.modules():
        module.probability = module.p = 0.0
    weights.whiten_keys.PROBABILITIES = (0.0, 0.0)
    positions = CompactPositions(6).of_distances(9, 9, torch.empty(0))
    frames = torch.randn(2, 9, 8) * 30
    results = []
    for penalised in (False, True):
        monkeypatch.setattr(attention, "chance", lambda p, answer=penalised: p == 0.1 and answer)
        weights.zero_grad()
        out = weights(frames, positions, MASK)
        out.square().sum(-1)[:, MASK].sum().backward()
        results.append((out.detach(), weights.project.weight.grad.double()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][0][:, 1, :, 6:], torch.zeros(2, 9, 3))

    weights = weights.double().requires_grad_()
    weights.zero_grad()
    query, key, position_query = weights.project(frames.double()).split([8, 8, 4], dim=-1)
    query, key, position_query = (x.unflatten(-1, (2, -1)) for x in (query, key, position_query))
    position = weights.position(positions.double()).unflatten(-1, (2, -1))
    penalty = 0.0
    for row, length in enumerate((9, 6)):
        for i in range(length):
            for j in range(length):
                by_position = (position_query[row, i] * position[9 - 1 - (i - j)]).sum(-1)
                score = (query[row, i] * key[row, j]).sum(-1) + by_position
                penalty = penalty + 1e-4 / 2 * (score.abs() - 25).relu().sum()
    penalty.backward()
    assert weights.project.weight.grad.abs().max() > 1e-3
    torch.testing.assert_close(results[1][1] - results[0][1], weights.project.weight.grad, atol=1e-4, rtol=1e-3)


def test_compact_positions_keep_their_meaning_as_the_table_grows():
    positions = CompactPositions(48)
    short = positions.of_distances(5, 5, torch.empty(0)).clone()
    positions.of_distances(6000, 6000, torch.empty(0))
    assert torch.equal(positions.of_distances(5, 5, torch.empty(0)), short)
    table = positions.of_distances(2000, 2000, torch.empty(0))
    centre = 1999

    def apart(one, other):
        return (table[centre + one] - table[centre + other]).norm()

    assert torch.equal(table[:, -1], torch.ones(4000))
    assert apart(1, -1) > 0.5 and apart(0, 1) > 0.5 and apart(1000, 1001) < 0.01
