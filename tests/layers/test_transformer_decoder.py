import pytest
import torch

from asr.layers.multi_head import FullCrossAttention
from asr.layers.transformer_decoder import TransformerDecoder


def make(**changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=7, dim=8, num_layers=2, num_heads=2, feed_forward_dim=16)
    return TransformerDecoder(**{**sizes, **changes}).eval()


@pytest.fixture(params=["full", "linear"])
def decoder(request):
    return make(attention=request.param)


def memory_of(*lens, num_frames=9):
    return torch.randn(len(lens), num_frames, 8), torch.tensor(lens)


@torch.no_grad()
def test_steps_give_the_parallel_logits_with_several_rows_an_utterance(decoder):
    memory = memory_of(9, 4)
    tokens = torch.randint(0, 7, (6, 5))
    expected = decoder(tokens, *memory)
    repeated = [part.repeat_interleave(3, dim=0) for part in memory]
    torch.testing.assert_close(decoder(tokens, *repeated), expected, atol=1e-5, rtol=1e-5)
    state = decoder.start(*memory, rows=3, num_steps=5)
    for number in range(5):
        logits, state = decoder.step(tokens[:, number], state)
        torch.testing.assert_close(logits, expected[:, number], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_reordered_rows_go_on_from_their_parents_and_leave_the_old_state_alone(decoder):
    memory = memory_of(9)
    first = torch.tensor([1, 2, 3])
    _, state = decoder.step(first, decoder.start(*memory, rows=3, num_steps=2))
    parents = torch.tensor([2, 0, 0])
    branched, _ = decoder.step(torch.tensor([4, 5, 6]), state.reorder(parents))
    straight, _ = decoder.step(torch.tensor([4, 5, 6]), state)
    paths = torch.stack([first[parents], torch.tensor([4, 5, 6])], dim=1)
    torch.testing.assert_close(branched, decoder(paths, *memory)[:, 1], atol=1e-5, rtol=1e-5)
    paths = torch.stack([first, torch.tensor([4, 5, 6])], dim=1)
    torch.testing.assert_close(straight, decoder(paths, *memory)[:, 1], atol=1e-5, rtol=1e-5)


def test_no_token_sees_later_ones_and_no_frame_beyond_the_length_is_seen(decoder):
    memory, lens = memory_of(9, 4)
    tokens = torch.randint(0, 7, (2, 5))
    before = decoder(tokens, memory, lens)
    changed = tokens.clone()
    changed[:, 3:] = (tokens[:, 3:] + 1) % 7
    assert torch.equal(decoder(changed, memory, lens)[:, :3], before[:, :3])
    memory[1, 4:] = float("nan")
    assert torch.equal(decoder(tokens, memory, lens), before)


def test_an_utterance_without_frames_is_finite_and_has_no_effect_on_the_memory(decoder):
    memory, lens = memory_of(0, 4)
    memory.requires_grad_()
    logits = decoder(torch.randint(0, 7, (2, 5)), memory, lens)
    logits.square().sum().backward()
    assert logits.isfinite().all() and torch.equal(memory.grad[0], torch.zeros(9, 8)) and memory.grad[1].any()
    assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())


@torch.no_grad()
def test_attended_frames_are_those_with_most_weight_in_the_last_layer():
    decoder, (memory, lens) = make(num_layers=1), memory_of(9, 4)
    frames = decoder.attended_frames(torch.randint(0, 7, (4, 5)), memory, lens)
    assert frames.shape == (4, 5) and frames[2:].max() < 4
    attention = decoder.layers[0].cross_attention  # let every query look for the direction of one loud frame
    memory[0, 6] *= 10
    attention.query.weight.zero_(), attention.query.bias.copy_(attention.key(memory[0, 6]) * 100)
    assert decoder.attended_frames(torch.tensor([[1, 2]]), memory[:1], lens[:1]).tolist() == [[6, 6]]


def test_scores_stay_in_range_of_half_precision():
    attention = FullCrossAttention(64, 1).half()
    with torch.no_grad():
        for layer in (attention.query, attention.key):
            layer.weight.copy_(torch.eye(64) * 40)
    seen = []
    attention.observe = lambda name, value: seen.append((name, value.abs().max().item()))
    x = torch.ones(1, 3, 64, dtype=torch.float16)
    assert attention(x, x, torch.tensor([3])).isfinite().all()
    assert seen[0][0] == "scores" and seen[0][1] == pytest.approx(12800, rel=0.01)


def test_recomputing_for_the_gradients_changes_neither_them_nor_the_dropout(decoder):
    memory, lens = memory_of(9, 4)
    tokens = torch.randint(0, 7, (2, 5))
    results = []
    for recompute in (False, True):
        torch.manual_seed(3)
        decoder.zero_grad()
        hidden = decoder.train().hidden(tokens, memory, lens, recompute)
        hidden.square().sum().backward()
        named = decoder.named_parameters()
        results.append({"hidden": hidden.detach()} | {n: p.grad for n, p in named if p.grad is not None})
    torch.testing.assert_close(*results)
    assert len(results[0]) > 20


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="attention 'fast' is none of full, linear"):
        make(attention="fast")
    with pytest.raises(ValueError, match="num_heads=3"):
        FullCrossAttention(8, 3)
