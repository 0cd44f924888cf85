import math

import pytest
import torch

from asr.layers.attention import RelativeSelfAttention, relative_shift
from asr.layers.masks import length_mask
from asr.layers.positional import RelativePositionalEncoding


def make(dim=8, num_heads=2, scale="query", seed=0, shift=True):
    torch.manual_seed(seed)
    attention = RelativeSelfAttention(dim, num_heads, scale=scale, shift=shift).eval()
    torch.nn.init.normal_(attention.content_bias)
    torch.nn.init.normal_(attention.position_bias)
    return attention, RelativePositionalEncoding(dim)


def all_visible(x):
    return torch.ones(x.size(0), 1, x.size(1), dtype=torch.bool)


def sinusoid(distance, dim):
    angles = [distance / 10000 ** (2 * k / dim) for k in range(dim // 2)]
    return torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)])


def loop_reference(attention, x):
    """O(T^2) attention of one utterance (T, D), pair by pair."""
    num_frames, dim = x.shape
    head_dim = dim // attention.num_heads
    heads = []
    for head in range(attention.num_heads):
        part = slice(head * head_dim, (head + 1) * head_dim)
        q, k, v = attention.query(x)[:, part], attention.key(x)[:, part], attention.value(x)[:, part]
        u, w = attention.content_bias[head].flatten(), attention.position_bias[head].flatten()
        scores = torch.empty(num_frames, num_frames)
        for i in range(num_frames):
            for j in range(num_frames):
                r = attention.position(sinusoid(i - j if attention.shift else j, dim))[part]
                scores[i, j] = ((q[i] + u) @ k[j] + (q[i] + w) @ r) / math.sqrt(head_dim)
        heads.append(scores.softmax(-1) @ v)
    return attention.output(torch.cat(heads, -1))


@pytest.mark.parametrize("num_frames", [1, 2, 5])
@pytest.mark.parametrize("scale", ["query", "scores"])
def test_equals_a_loop_over_all_pairs(num_frames, scale):
    attention, positions = make(scale=scale)
    x = torch.randn(2, num_frames, 8)
    output = attention(x, positions(x)[1], all_visible(x))
    for row, expected in zip(output, (loop_reference(attention, x[0]), loop_reference(attention, x[1])), strict=True):
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", ["query", "scores"])
def test_without_the_shift_a_key_has_its_own_position(scale):
    attention, positions = make(scale=scale, shift=False)
    x = torch.randn(2, 5, 8)
    output = attention(x, positions.of_positions(0, 5, x), all_visible(x))
    for row, frames in zip(output, x, strict=True):
        torch.testing.assert_close(row, loop_reference(attention, frames), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("num_last", [1, 2, 5])
def test_frames_that_follow_others_attend_as_the_last_ones_of_all(shift, num_last):
    attention, positions = make(shift=shift)
    x = torch.randn(2, 7, 8)
    place = positions(x)[1] if shift else positions.of_positions(0, 7, x)
    whole = attention(x, place, all_visible(x))
    first, last = x[:, :-num_last], x[:, -num_last:]
    nothing = torch.zeros(2, 2, 0, 4)
    start = positions(first)[1] if shift else positions.of_positions(0, 7 - num_last, x)
    _, past = attention.forward_chunk(first, start, all_visible(first), (nothing, nothing))
    place = positions.of_distances(num_last, 7, x) if shift else place
    output, (keys, values) = attention.forward_chunk(last, place, all_visible(x), past)
    torch.testing.assert_close(output, whole[:, -num_last:], atol=1e-6, rtol=1e-5)
    assert keys.shape == values.shape == (2, 2, 7, 4)


@pytest.mark.parametrize("scale", ["query", "scores"])
def test_an_observer_sees_the_scores_of_both_products_and_their_sum(scale):
    attention, positions = make(scale=scale)
    x = torch.randn(2, 5, 8)
    seen = {}
    attention.observe = lambda name, value: seen.setdefault(name, value.clone())
    observed = attention(x, positions(x)[1], all_visible(x))
    torch.testing.assert_close(seen["scores"], seen["content_scores"] + seen["position_scores"])
    assert seen["scores"].shape == (2, 2, 5, 5)
    if scale == "scores":
        torch.testing.assert_close(seen["scaled_scores"] * math.sqrt(4), seen["scores"])
    attention.observe = None
    assert torch.equal(attention(x, positions(x)[1], all_visible(x)), observed)


def test_shift_puts_each_distance_on_its_diagonal_and_tells_left_from_right():
    num_frames = 5
    distances = torch.arange(num_frames - 1, -num_frames - 1, -1.0).expand(num_frames, -1)
    i, j = torch.meshgrid(torch.arange(5), torch.arange(5), indexing="ij")
    shifted = relative_shift(distances.contiguous())
    assert torch.equal(shifted, (i - j).float())
    assert not torch.equal(shifted, shifted.T)


@pytest.mark.parametrize("num_keys", [4, 6])
def test_shift_gradient(num_keys):
    scores = torch.randn(2, 4, 4 + num_keys, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(relative_shift, (scores,))


def test_result_is_independent_of_the_size_of_the_position_table():
    attention, positions = make()
    x = torch.randn(1, 5, 8)
    before = attention(x, positions(x)[1], all_visible(x))
    positions(torch.randn(1, 6001, 8))
    assert torch.equal(positions(x)[1], RelativePositionalEncoding(8)(x)[1])
    assert torch.equal(before, attention(x, positions(x)[1], all_visible(x)))


def saturated(scale, value=40.0):
    """d_k = 64, every query and key component 40: the sum of products, 102400, is beyond fp16, its eighth is not."""
    attention = RelativeSelfAttention(64, 1, scale=scale).half()
    with torch.no_grad():
        for layer in (attention.query, attention.key):
            layer.weight.copy_(torch.eye(64) * value)
        attention.query.bias.zero_()
    return attention


def test_query_scaling_keeps_half_precision_finite_where_late_scaling_overflows():
    x = torch.ones(1, 3, 64, dtype=torch.float16)
    positions = RelativePositionalEncoding(64)(x)[1]
    assert saturated("query")(x, positions, all_visible(x)).isfinite().all()
    assert not saturated("scores")(x, positions, all_visible(x)).isfinite().all()


def test_both_scales_agree_in_fp32():
    early, positions = make(scale="query")
    late, _ = make(scale="scores")
    x = torch.randn(2, 7, 8)
    args = (x, positions(x)[1], all_visible(x))
    torch.testing.assert_close(early(*args), late(*args), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fully_masked_rows_give_zeros_and_no_gradient_and_leave_the_others_alone(dtype):
    attention, positions = make()
    attention = attention.to(dtype)
    x = torch.randn(2, 10, 8, dtype=dtype, requires_grad=True)
    mask = length_mask(torch.tensor([10, 0]), 10).unsqueeze(1)
    output = attention(x, positions(x)[1], mask)
    alone = attention(x[:1], positions(x)[1], mask[:1])
    output.square().sum().backward()
    assert torch.equal(output[1], torch.zeros(10, 8, dtype=dtype))
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output[:1], alone, atol=tolerance, rtol=tolerance)
    assert x.grad.isfinite().all() and torch.equal(x.grad[1], torch.zeros(10, 8, dtype=dtype))
    for name, parameter in attention.named_parameters():
        assert parameter.grad.isfinite().all(), name


def test_mask_with_a_row_for_each_query():
    attention, positions = make()
    x = torch.randn(1, 6, 8, requires_grad=True)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().unsqueeze(0).clone()
    causal[0, 2] = False
    output = attention(x, positions(x)[1], causal)
    assert torch.equal(output[0, 2], torch.zeros(8))
    output[0, 3].sum().backward()
    assert x.grad.isfinite().all()
    assert torch.equal(x.grad[0, 4:], torch.zeros(2, 8))
    assert x.grad[0, :4].abs().sum() > 0


def test_masked_frames_do_not_matter():
    attention, positions = make()
    x = torch.randn(1, 6, 8)
    mask = length_mask(torch.tensor([4]), 6).unsqueeze(1)
    changed = x.clone()
    changed[:, 4:] = 1e6
    args = (positions(x)[1], mask)
    assert torch.equal(attention(x, *args)[:, :4], attention(changed, *args)[:, :4])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="num_heads=3"):
        RelativeSelfAttention(8, 3)
    with pytest.raises(ValueError, match=r"'keys' is none of query, scores"):
        RelativeSelfAttention(8, 2, scale="keys")
