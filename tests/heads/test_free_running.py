import pytest
import torch

from asr.heads import free_running
from asr.heads.attention import Attention
from asr.heads.free_running import FreeRunning, Sampler, draw_tokens
from asr.layers.schedule import set_batch_count
from asr.types import Encoded

VOCAB, WIDTH = 6, 8
SIZES = dict(num_layers=1, num_heads=2, feed_forward_dim=16, dropout=0.0)


def make(attention="full", seed=0, label_smoothing=0.1, sos_eos_id=None, dropout=0.0, **settings):
    torch.manual_seed(seed)
    return Attention(
        WIDTH, VOCAB, 0, sos_eos_id, **{**SIZES, "dropout": dropout}, label_smoothing=label_smoothing,
        attention=attention, free_running=settings or None,
    ).train()  # fmt: skip


def batch():
    torch.manual_seed(1)
    encoded = Encoded(torch.randn(3, 7, WIDTH), torch.tensor([7, 4, 5]))
    return encoded, torch.tensor([[1, 2, 3, 4], [5, 3, 0, 0], [2, 2, 2, 0]]), torch.tensor([4, 2, 3])


def grads_of(head, loss):
    head.zero_grad()
    loss.sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in head.named_parameters()}


MODES = {
    "scheduled_sampling": dict(mode="scheduled_sampling", share=0.7),
    "own_output": dict(mode="own_output", share=0.7, every=2, buffer_size=16),
    "professor_forcing": dict(mode="professor_forcing", share=0.3, every=2, adversary_dim=8),
}


@pytest.mark.parametrize("attention", ["full", "linear"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_all_parameters_and_is_teacher_forcing_in_evaluation(mode, attention):
    head, plain = make(attention, **MODES[mode]), make(attention)
    plain.load_state_dict(head.state_dict(), strict=False)
    for _ in range(3):
        parts = head.loss_parts(*batch())
        assert all(losses.shape == (3,) and losses.dtype == torch.float32 for losses in parts.values())
        assert torch.stack(list(parts.values())).isfinite().all()
    sum(head.loss_parts(*batch()).values()).sum().backward()
    for _ in range(2):  # a batch with samples and one without, and a discriminator that is not always pleased
        sum(head.loss_parts(*batch()).values()).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    assert torch.equal(head.eval().loss(*batch()), plain.eval().loss(*batch()))


@pytest.mark.parametrize("mode", MODES)
def test_a_share_of_zero_is_teacher_forcing_in_training_too_and_shares_follow_the_batch_count(mode):
    options = {**MODES[mode], "share": [[10, 0.0], [20, 1.0]], "every": 1}
    head, plain = make(**options), make()
    plain.load_state_dict(head.state_dict(), strict=False)
    expected = plain.loss(*batch())
    torch.testing.assert_close(head.loss(*batch()), expected)
    set_batch_count(head, 20.0)
    assert not torch.allclose(head.loss(*batch()), expected)


def test_off_is_teacher_forcing_and_yaml_may_call_it_false():
    plain, head = make(), make(mode=False, gradient_checkpointing=True)
    assert plain.state_dict().keys() == head.state_dict().keys()
    torch.testing.assert_close(grads_of(head, head.loss(*batch())), grads_of(plain, plain.loss(*batch())))


@pytest.mark.parametrize("mode", MODES)
def test_gradient_checkpointing_changes_no_gradient_not_even_with_dropout(mode):
    results = []
    for recompute in (False, True):
        head = make(dropout=0.3, **MODES[mode], gradient_checkpointing=recompute)
        torch.manual_seed(3)
        results.append(grads_of(head, head.loss(*batch())))
    torch.testing.assert_close(*results)


# Samples


@pytest.mark.parametrize("attention", ["full", "linear"])
@pytest.mark.parametrize("sos_eos_id", [None, 4])
def test_samples_follow_the_distribution_of_the_decoder_and_leave_no_trace(attention, sos_eos_id):
    head = make(attention, sos_eos_id=sos_eos_id, dropout=0.5)
    encoded = Encoded(batch()[0].frames[:1].repeat(3000, 1, 1), torch.full((3000,), 7))
    tokens, lens = head.sample(encoded, 2)
    assert not tokens.requires_grad and head.decoder.training and tokens.shape[1] <= 2
    assert all(parameter.grad is None for parameter in head.parameters())
    end = head.sos_eos_id
    with torch.no_grad():
        first = head.eval().logits(Encoded(encoded.frames[:1], encoded.lens[:1]), torch.zeros(1, 0).long())[0, 0]
    if sos_eos_id is not None:
        first[0] = -torch.inf  # blank is no token of a transcript
    drawn = torch.where(lens > 0, tokens[:, 0], end)
    shares = torch.bincount(drawn, minlength=VOCAB) / 3000
    torch.testing.assert_close(shares, first.softmax(-1), atol=0.03, rtol=0.0)
    valid = torch.arange(tokens.size(1)) < lens[:, None]
    assert not ((tokens == end) & valid).any() and not ((tokens == 0) & valid).any()


def test_drawing_goes_on_past_nan_and_never_draws_what_is_forbidden():
    logits = torch.zeros(1000, 4)
    assert set(draw_tokens(logits, never=(1, 3)).tolist()) == {0, 2}
    assert 0 <= int(draw_tokens(torch.full((4,), float("nan")))) < 4


class Counting(torch.nn.Module):
    """Stands in for a head: samples that tell when they were drawn."""

    def __init__(self):
        super().__init__()
        self.drawn = 0

    def sample(self, encoded, num_steps):
        self.drawn += 1
        return torch.full((len(encoded.lens), num_steps), self.drawn), torch.tensor([2, 1, 3])[: len(encoded.lens)]


def test_samples_are_drawn_every_few_batches_and_kept_for_the_same_transcripts_between():
    sampler, head, (encoded, tokens, lens) = Sampler(FreeRunning(every=3, buffer_size=64)), Counting(), batch()
    fresh = sampler(head, encoded, tokens, lens, wanted=True)
    assert fresh.there.all() and fresh.lens.tolist() == [2, 1, 3]
    rows = torch.tensor([2, 0])
    wide = torch.nn.functional.pad(tokens[rows], (0, 5), value=3)
    stale = sampler(head, Encoded(encoded.frames[rows], encoded.lens[rows]), wide, lens[rows], wanted=True)
    assert stale.there.all() and stale.lens.tolist() == [3, 2] and stale.tokens[0, :3].tolist() == [1, 1, 1]
    other = tokens.clone()
    other[0, 3] = 5  # another transcript, for which there is no sample
    assert sampler(head, encoded, other, lens, wanted=True).there.tolist() == [False, True, True]
    assert head.drawn == 1
    assert sampler(head, encoded, tokens, lens, wanted=True).tokens[0, 0] == 2
    assert sampler(head, encoded, tokens, lens, wanted=True).tokens[0, 0] == 2, "the newest is kept"
    assert not sampler(head, encoded, tokens, lens, wanted=False).there.any()


def test_without_a_buffer_there_are_none_between_and_a_small_one_keeps_some_cut_to_its_width():
    sampler, head, inputs = Sampler(FreeRunning(every=2)), Counting(), batch()
    assert sampler(head, *inputs, wanted=True).there.all() and not sampler(head, *inputs, wanted=True).there.any()
    sampler = Sampler(FreeRunning(every=2, buffer_size=1, buffer_tokens=2))
    sampler(head, *inputs, wanted=True)
    kept = sampler(head, *inputs, wanted=True)
    assert kept.there.sum() == 1 and kept.lens.max() <= 2


def test_the_state_of_sampling_is_part_of_the_state_dict():
    options = dict(MODES["own_output"])
    head, other = make(**options), make(seed=5, **options)
    head.loss_parts(*batch())
    other.load_state_dict(head.state_dict())
    results = []
    for each in (head, other):
        torch.manual_seed(9)
        parts = each.loss_parts(*batch())
        results.append(parts)
        assert parts["own_output"].any(), "a stale sample was taken"
    torch.testing.assert_close(*results)


# What the modes do


def test_scheduled_sampling_replaces_inputs_and_keeps_the_targets():
    head = make(mode="scheduled_sampling", share=1.0, label_smoothing=0.0)
    encoded, tokens, lens = batch()
    seen = []
    hidden = head.hidden
    head.hidden = lambda encoded, given, recompute: seen.append(given) or hidden(encoded, given, recompute)
    losses = head.loss(encoded, tokens, lens)
    assert seen[0].shape == tokens.shape and not torch.equal(seen[0], tokens) and not (seen[0] == 0).any()
    expected = head.cross_entropy(head.logits(encoded, seen[0]), tokens, lens)
    torch.testing.assert_close(losses, expected)


def test_what_scheduled_sampling_mixes_in_is_said_without_dropout():
    head, during = make(mode="scheduled_sampling", share=0.5, dropout=0.5), []
    logits = head.logits
    head.logits = lambda *given: during.append(head.decoder.training) or logits(*given)
    head.loss(*batch())
    assert during == [False] and head.decoder.training


def test_own_output_is_one_parallel_pass_over_samples_with_their_best_completions():
    head = make(mode="own_output", share=1.0, every=1)
    parts = head.loss_parts(*batch())
    assert not parts["attention"].any() and parts["own_output"].all()
    head = make(mode="own_output", share=0.5, every=1)
    masks = [head.loss_parts(*batch())["own_output"] > 0 for _ in range(40)]
    assert 0.3 < torch.stack(masks).float().mean() < 0.7
    # A decoder that is sure of the transcript says it, and is trained on the truth as ever.
    sure = make(mode="own_output", share=1.0, every=1, label_smoothing=0.0)
    encoded, tokens, lens = batch()
    tokens[:], lens[:] = torch.tensor([3, 3, 3, 3]), torch.tensor([4])
    with torch.no_grad():
        sure.decoder.output.weight.zero_()
        sure.decoder.output.bias.copy_(torch.tensor([-50.0, -50.0, -50.0, 50.0, -50.0, -50.0]))
    own, own_lens = sure.sample(encoded, 4)
    assert torch.equal(own, tokens) and own_lens.tolist() == [4, 4, 4]


def test_each_side_of_professor_forcing_is_trained_by_its_own_part_alone(monkeypatch):
    monkeypatch.setattr(free_running, "TOO_BAD", -1.0)
    monkeypatch.setattr(free_running, "TOO_GOOD", 2.0)
    head = make(mode="professor_forcing", share=0.5, every=1, adversary_dim=8)
    parts = head.loss_parts(*batch())
    for part, of_discriminator, of_decoder in (("discriminator", True, False), ("fooling", False, True)):
        head.zero_grad()
        parts[part].sum().backward(retain_graph=True)
        for name, parameter in head.named_parameters():
            expected = of_discriminator if "discriminator" in name else of_decoder and "decoder.output" not in name
            assert (parameter.grad is not None and bool(parameter.grad.any())) == expected, name


class Judge:
    """A discriminator whose judgements are all right, or all "truth"."""

    def __init__(self, right):
        self.judgements = iter([1.0, -1.0 if right else 1.0])

    def __call__(self, states, lens):
        return torch.full((len(lens),), next(self.judgements)) + 0.0 * states.sum((1, 2))

    def frozen(self, states, lens):
        return 0.0 * states.sum((1, 2))


@pytest.mark.parametrize("right", [True, False])
def test_who_is_far_ahead_rests(right):
    head = make(mode="professor_forcing", share=0.5, every=1, adversary_dim=8)
    del head.free_running.discriminator
    head.free_running.discriminator = Judge(right)
    parts = head.loss_parts(*batch())
    assert (parts["fooling"] > 0).all() == right and (parts["discriminator"] > 0).all() != right
    if right:
        torch.testing.assert_close(parts["fooling"], torch.full((3,), 0.5 * 0.6931), atol=1e-4, rtol=0.0)


def test_the_discriminator_does_not_see_padding():
    head = make(mode="professor_forcing", adversary_dim=8)
    discriminator, states, lens = head.free_running.discriminator, torch.randn(3, 9, WIDTH), torch.tensor([9, 4, 1])
    expected = discriminator(states, lens)
    states[1, 4:] = float("nan")
    torch.testing.assert_close(discriminator(states, lens), expected)
    torch.testing.assert_close(discriminator(states[1:2, :4], lens[1:2]), expected[1:2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_mode_runs_in_half_precision(mode, dtype):
    head = make(**MODES[mode])
    with torch.autocast("cpu", dtype=dtype):
        for _ in range(2):
            losses = head.loss(*batch())
    losses.sum().backward()
    assert losses.dtype == torch.float32 and losses.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in head.parameters())


def test_what_is_frozen_stays_so_when_samples_are_drawn():
    head = make(dropout=0.5)
    frozen = head.decoder.layers[0].eval()
    head.sample(batch()[0], 4)
    assert head.decoder.training and not any(part.training for part in frozen.modules())


@pytest.mark.parametrize("mode", MODES)
def test_an_utterance_without_frames_changes_nothing(mode):
    head, (encoded, tokens, lens) = make(**{**MODES[mode], "every": 1}), batch()
    encoded.lens[1] = 0
    encoded.frames.requires_grad_()
    losses = head.loss(encoded, tokens, lens)
    losses.sum().backward()
    assert losses[1] == 0 and losses.isfinite().all() and not encoded.frames.grad[1].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "own"}, r"head\.free_running\.mode=own: choose one of off, scheduled_sampling"),
        ({"every": 0}, r"head\.free_running\.every=0: must be at least 1"),
        ({"mode": "own_output", "share": 1.5}, r"share=1\.5: a probability"),
        ({"share": [[0, 0.1], [5]]}, r"share=.*points as in"),
        ({"share": "abc"}, r"head\.free_running\.share=abc: a number, or points as in"),
        ({"share": -0.1}, r"share=-0\.1: must be at least 0"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        FreeRunning(**options)
