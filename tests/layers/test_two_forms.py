"""Attention in parallel and step by step: the two forms give the same, and states stay what they are."""

import pytest
import torch

from asr.layers import linear_attention
from asr.layers.linear_attention import LinearCrossAttention, LinearSelfAttention, causal_linear
from asr.layers.multi_head import FullCrossAttention, FullSelfAttention, reorder

WIDTH, HEADS = 16, 4
SELF = {"full": FullSelfAttention, "linear": LinearSelfAttention}
CROSS = {"full": FullCrossAttention, "linear": LinearCrossAttention}
PRECISIONS = {"amp_fp16": torch.float16, "amp_bf16": torch.bfloat16}


@pytest.fixture(params=SELF)
def self_attention(request):
    return make(SELF[request.param])


@pytest.fixture(params=CROSS)
def cross_attention(request):
    return make(CROSS[request.param])


def make(kind, **options):
    torch.manual_seed(0)
    return kind(WIDTH, HEADS, **options)


def inputs(*sizes, seed=1):
    torch.manual_seed(seed)
    return torch.randn(*sizes, WIDTH)


def steps(attention, x, state):
    outputs = []
    for number in range(x.size(1)):
        y, state = attention.step(x[:, number], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("length", [1, 5, 64, 65, 130])
def test_steps_of_self_attention_give_the_parallel_outputs_and_gradients(self_attention, length):
    lens = torch.tensor([length, max(1, length // 2), 1])
    valid = torch.arange(length) < lens[:, None]
    x, weight = inputs(3, length), inputs(3, length, seed=2)
    grads = []
    for form in ("parallel", "recurrent"):
        own = x.clone().requires_grad_()
        self_attention.zero_grad()
        if form == "parallel":
            y = expected = self_attention(own, lens)
        else:
            y, _ = steps(self_attention, own, self_attention.start(3, length))
        torch.testing.assert_close(y[valid], expected[valid], atol=1e-5, rtol=1e-5)
        (y * weight)[valid].sum().backward()
        grads.append([own.grad, *(parameter.grad.clone() for parameter in self_attention.parameters())])
    for of_parallel, of_steps in zip(*grads, strict=True):
        torch.testing.assert_close(
            of_steps, of_parallel, atol=1e-5 * max(1.0, of_parallel.abs().max().item()), rtol=1e-4
        )
    with torch.no_grad():
        y, _ = steps(self_attention, x, self_attention.start(3, length))
    torch.testing.assert_close(y[valid], expected[valid], atol=1e-5, rtol=1e-5)


def test_steps_of_cross_attention_give_the_parallel_outputs_and_gradients_for_several_rows(cross_attention):
    x, memory, lens = inputs(4, 5), inputs(2, 9, seed=2), torch.tensor([9, 4])
    grads = []
    for form in ("parallel", "recurrent"):
        of_x, of_memory = x.clone().requires_grad_(), memory.clone().requires_grad_()
        cross_attention.zero_grad()
        if form == "parallel":
            y = expected = cross_attention(of_x, of_memory, lens)
        else:
            y, _ = steps(cross_attention, of_x, cross_attention.start(of_memory, lens))
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
        y.square().sum().backward()
        parameters = cross_attention.parameters()
        grads.append([of_x.grad, of_memory.grad, *(parameter.grad.clone() for parameter in parameters)])
    for of_parallel, of_steps in zip(*grads, strict=True):
        torch.testing.assert_close(of_steps, of_parallel, atol=1e-5, rtol=1e-4)
    repeated = cross_attention(x, memory.repeat_interleave(2, 0), lens.repeat_interleave(2))
    torch.testing.assert_close(repeated, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_steps_from_one_state_leave_it_and_each_other_alone(self_attention):
    """However the same state is gone on from: each path gives what a fresh run along it gives."""
    x, other = inputs(3, 6), inputs(3, 6, seed=5)
    _, old = steps(self_attention, x[:, :3], self_attention.start(3, 6))
    first = [self_attention.step(x[:, 3], old)]
    second = [self_attention.step(other[:, 3], old)]  # overwrites nothing of the first
    first.append(self_attention.step(x[:, 4], first[0][1]))
    second.append(self_attention.step(other[:, 4], second[0][1]))
    third = self_attention.step(x[:, 4], second[0][1])
    for path, number, (y, _) in [
        ((x[:, 3],), 0, first[0]),
        ((x[:, 3], x[:, 4]), 1, first[1]),
        ((other[:, 3],), 0, second[0]),
        ((other[:, 3], other[:, 4]), 1, second[1]),
        ((other[:, 3], x[:, 4]), 1, third),
    ]:
        fresh, _ = steps(self_attention, torch.stack([*x[:, :3].unbind(1), *path], 1), self_attention.start(3, 6))
        assert torch.equal(y, fresh[:, 3 + number])
    kept = [self_attention.step(x[:, 5], state)[0] for state in (first[1][1], second[1][1])]
    assert torch.equal(kept[0], steps(self_attention, x, self_attention.start(3, 6))[0][:, 5])
    assert not torch.equal(*kept)


@torch.no_grad()
def test_rows_can_be_reordered_cloned_sliced_and_taken_again(self_attention):
    x = inputs(3, 5)
    expected, _ = steps(self_attention, x, self_attention.start(3, 5))
    _, state = steps(self_attention, x[:, :3], self_attention.start(3, 5))
    rows = torch.tensor([2, 0, 0, 1])
    for branched in (reorder(state, rows), tuple(tensor[rows] for tensor in state)):
        y, _ = steps(self_attention, x[rows, 3:], branched)
        assert torch.allclose(y, expected[rows, 3:], atol=1e-6)
    copy = tuple(tensor.clone() for tensor in state)
    for same in (state, copy, state):
        assert torch.allclose(steps(self_attention, x[:, 3:], same)[0], expected[:, 3:], atol=1e-6)
    half = tuple(tensor[:2] for tensor in copy)
    for part, of_rows in ((half, slice(0, 2)), (copy, slice(0, 3))):
        assert torch.allclose(steps(self_attention, x[of_rows, 3:], part)[0], expected[of_rows, 3:], atol=1e-6)


@torch.no_grad()
def test_rows_know_nothing_of_each_other(self_attention):
    x = inputs(3, 4)
    expected, _ = steps(self_attention, x, self_attention.start(3, 4))
    changed = x.clone()
    changed[1] = float("nan")
    y, _ = steps(self_attention, changed, self_attention.start(3, 4))
    assert torch.equal(y[[0, 2]], expected[[0, 2]])


def test_steps_without_gradients_after_steps_with_them_spoil_no_gradient(self_attention):
    x = inputs(2, 4)
    y, state = steps(self_attention, x[:, :2], self_attention.start(2, 4))
    with torch.no_grad():
        after, _ = steps(self_attention, x[:, 2:], state)
        expected, _ = steps(self_attention, x, self_attention.start(2, 4))
    torch.testing.assert_close(after, expected[:, 2:])
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in self_attention.parameters())


@torch.no_grad()
def test_room_of_full_attention_is_kept_named_and_enlarged():
    attention, x = make(FullSelfAttention), inputs(2, 5)
    _, state = steps(attention, x[:, :3], attention.start(2, 3))
    with pytest.raises(ValueError, match="room for 3 steps"):
        attention.step(x[:, 3], state)
    larger = attention.with_room(state, 5)
    assert larger[0].shape == (2, HEADS, 5, WIDTH // HEADS)
    start = attention.start(2, 5)
    expected, after = steps(attention, x, start)
    torch.testing.assert_close(steps(attention, x[:, 3:], larger)[0], expected[:, 3:])
    assert after[0] is start[0] and after[1] is start[1], "steps along one path allocate no keys and values"


def test_the_state_of_linear_attention_has_one_size():
    attention = make(LinearSelfAttention)
    shapes = [[tensor.shape for tensor in attention.start(3, length)] for length in (1, 1000)]
    assert shapes[0] == shapes[1] == [(3, HEADS, 4, 4), (3, HEADS, 4)]
    assert attention.with_room(attention.start(3, 1), 9)[0].shape == (3, HEADS, 4, 4)


@pytest.mark.parametrize("rubbish", [1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", SELF)
def test_padding_is_invisible_to_outputs_and_gradients(kind, causal, rubbish):
    attention, x, lens = make(SELF[kind], causal=causal), inputs(3, 7), torch.tensor([7, 4, 0])
    padded = x.clone()
    padded[1, 4:], padded[2] = rubbish, rubbish
    results = []
    for of in (x, padded):
        of = of.requires_grad_()
        attention.zero_grad()
        y = attention(of, lens)
        y.square().sum().backward()
        results.append([y.detach(), of.grad, *(parameter.grad.clone() for parameter in attention.parameters())])
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
    assert not results[0][0][1, 4:].any() and not results[0][0][2].any() and not results[0][1][2].any()
    alone = attention(x[1:2, :4], lens[1:2])
    torch.testing.assert_close(results[0][0][1:2, :4], alone.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_mask_has_effect_in_both_ways_that_full_attention_is_computed(dropout):
    attention, x = make(FullSelfAttention, dropout=dropout, causal=False).train(), inputs(1, 6)
    y = attention(x, torch.tensor([4]))
    y[:, :4].sum().backward(retain_graph=True)
    own = x.clone().requires_grad_()
    attention(own, torch.tensor([4])).sum().backward()
    assert own.grad[0, :4].any() and not own.grad[0, 4:].any()
    causal, own = make(FullSelfAttention, dropout=dropout).train(), x.clone().requires_grad_()
    causal(own, torch.tensor([6]))[0, 2].sum().backward()
    assert own.grad[0, :3].any() and not own.grad[0, 3:].any()


def test_no_frames_to_look_at_give_zeros_without_gradient(cross_attention):
    x, memory, lens = inputs(2, 3), inputs(2, 5, seed=2), torch.tensor([5, 0])
    memory[1] = float("nan")
    memory.requires_grad_()
    y = cross_attention(x, memory, lens)
    y.square().sum().backward()
    assert y[0].any() and not y[1].any() and not memory.grad[1].any()
    assert all(parameter.grad.isfinite().all() for parameter in cross_attention.parameters())
    stepped, _ = cross_attention.step(x[:, 0], cross_attention.start(memory, lens))
    torch.testing.assert_close(stepped, y[:, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", SELF)
def test_an_empty_axis_of_time_is_no_error(kind, causal):
    assert make(SELF[kind], causal=causal)(inputs(2, 0), torch.tensor([0, 0])).shape == (2, 0, WIDTH)


@torch.no_grad()
def test_weights_over_a_memory_are_those_that_make_the_output(cross_attention):
    x, memory, lens = inputs(4, 3), inputs(2, 6, seed=2), torch.tensor([6, 2])
    weights = cross_attention.weights(x, memory, lens)
    assert weights.shape == (4, 3, 6) and not weights[2:, :, 2:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 3))
    single = type(cross_attention)(WIDTH, 1)
    frames = single.value(memory).repeat_interleave(2, 0)
    expected = single.output(single.weights(x, memory, lens) @ frames)
    torch.testing.assert_close(single(x, memory, lens), expected, atol=1e-5, rtol=1e-5)


def test_causal_linear_attention_has_exact_gradients_over_chunks(monkeypatch):
    monkeypatch.setattr(linear_attention, "CHUNK", 3)
    torch.manual_seed(0)
    query, key = (torch.rand(1, 2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 2, 7, 2, dtype=torch.float64, requires_grad=True)
    weights = (query @ key.transpose(-2, -1)).tril()
    expected = (weights @ value) / (weights.sum(-1, keepdim=True) + linear_attention.EPS)
    torch.testing.assert_close(causal_linear(query, key, value), expected)
    assert torch.autograd.gradcheck(causal_linear, (query, key, value))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", SELF)
def test_what_is_kept_for_the_gradients_grows_linearly_with_the_length(kind, causal):
    attention = make(SELF[kind], causal=causal)

    def kept(length):
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = attention(inputs(2, length), torch.tensor([length, length]))
        return sum(sizes.values()), y

    (short, _), (long, _) = kept(256), kept(2048)
    assert long < 8.5 * short


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_over_many_positions_are_fp32_in_every_precision(self_attention, precision):
    """A bf16 or fp16 sum of 3000 numbers near 1 ends at 256 or 2048."""
    x, lens = inputs(1, 3000) * 0.1 + 1.0, torch.tensor([3000])
    with torch.no_grad():
        exact = self_attention(x, lens)
    with torch.autocast("cpu", dtype=PRECISIONS[precision]):
        y = self_attention(x, lens)
        state = self_attention.start(1, 40)
        with torch.no_grad():
            stepped, _ = steps(self_attention, x[:, :40], state)
    assert (y.float() - exact).abs().max() < 0.02 * exact.abs().max()
    assert (stepped.float() - exact[:, :40]).abs().max() < 0.02 * exact.abs().max()
    y.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in self_attention.parameters())


@pytest.mark.parametrize("kind", [*SELF.values(), *CROSS.values()])
def test_bf16_parameters_run_in_both_forms(kind):
    attention, x, lens = make(kind).to(torch.bfloat16), inputs(2, 5).bfloat16(), torch.tensor([5, 3])
    if kind in SELF.values():
        expected, state = attention(x, lens), attention.start(2, 5)
    else:
        expected, state = attention(x, x, lens), attention.start(x, lens)
    y, _ = steps(attention, x, state)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y[0], expected[0], atol=0.02, rtol=0.05)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"dropout 0\.1: linear attention has no weights"):
        LinearSelfAttention(8, 2, dropout=0.1)
    with pytest.raises(ValueError, match="num_heads=3"):
        LinearCrossAttention(8, 3)
