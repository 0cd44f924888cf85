from functools import partial

import pytest
import torch

from asr.heads.attention import Attention, reverse_tokens
from asr.heads.ctc import CTC
from asr.heads.joint import Joint
from asr.types import Encoded


def make(**changes):
    torch.manual_seed(0)
    sizes = dict(input_dim=8, vocab_size=6, num_layers=1, num_heads=2, feed_forward_dim=16)
    return Attention(**{**sizes, **changes}).eval()


def batch():
    torch.manual_seed(1)
    encoded = Encoded(torch.randn(2, 7, 8), torch.tensor([7, 4]))
    return encoded, torch.tensor([[1, 2, 3, 4], [5, 3, 0, 0]]), torch.tensor([4, 2])


def test_the_loss_is_the_log_probability_of_tokens_and_end_one_after_the_other():
    head, (encoded, tokens, lens) = make(label_smoothing=0.0, sos_eos_id=5), batch()
    tokens[1, 0] = 2
    state, expected, previous = head.start(encoded, 1, 5), torch.zeros(2), torch.tensor([5, 5])
    for number in range(5):
        log_probs, state = head.step(previous, state)
        for row in range(2):
            if number <= lens[row]:
                target = 5 if number == lens[row] else tokens[row, number]
                expected[row] += log_probs[row, target]
        previous = tokens[:, number] if number < 4 else previous
    torch.testing.assert_close(head.loss(encoded, tokens, lens), -expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.log_likelihood(encoded, tokens, lens, False), expected, atol=1e-5, rtol=1e-5)


def test_the_second_decoder_reads_from_the_right():
    head, (encoded, tokens, lens) = make(label_smoothing=0.0, reverse_layers=1, reverse_weight=0.3), batch()
    assert reverse_tokens(tokens, lens)[0].tolist() == [4, 3, 2, 1]
    assert reverse_tokens(tokens, lens)[1, :2].tolist() == [3, 5]
    parts = head.loss_parts(encoded, tokens, lens)
    assert set(parts) == {"attention", "reverse"}
    torch.testing.assert_close(parts["attention"], -0.7 * head.log_likelihood(encoded, tokens, lens, False))
    torch.testing.assert_close(parts["reverse"], -0.3 * head.log_likelihood(encoded, tokens, lens, True))
    head.reverse_decoder = head.decoder  # the same weights, so that only the direction tells them apart
    palindrome = torch.tensor([[1, 2, 2, 1], [3, 3, 0, 0]])
    both = [head.log_likelihood(encoded, palindrome, lens, reverse) for reverse in (False, True)]
    torch.testing.assert_close(*both)


def test_several_transcripts_of_an_utterance_are_scored_beside_each_other():
    head, (encoded, tokens, lens) = make(), batch()
    alone = head.log_likelihood(encoded, tokens, lens, False)
    shorter = torch.tensor([3, 1])
    other = head.log_likelihood(encoded, tokens, shorter, False)
    beside = torch.stack([tokens, tokens], 1).flatten(0, 1), torch.stack([lens, shorter], 1).flatten()
    scores = head.log_likelihood(encoded, *beside, False).view(2, 2)
    torch.testing.assert_close(scores, torch.stack([alone, other], 1), atol=1e-5, rtol=1e-5)


def test_padding_of_tokens_and_frames_is_invisible():
    head, (encoded, tokens, lens) = make(reverse_layers=1, reverse_weight=0.5), batch()
    before = head.loss(encoded, tokens, lens)
    encoded.frames[1, 4:] = float("nan")
    tokens[1, 2:] = 4
    wide = torch.nn.functional.pad(tokens, (0, 10), value=3)
    torch.testing.assert_close(head.loss(encoded, wide, lens), before, atol=1e-5, rtol=1e-5)


def test_blank_starts_and_ends_where_the_tokenizer_has_no_symbol_for_it():
    assert make(blank_id=2).sos_eos_id == 2 and make(sos_eos_id=4).sos_eos_id == 4
    joint = Joint({"a": partial(Attention, num_layers=1, num_heads=2)}, {"a": 1.0}, 8, 6, 0, sos_eos_id=2)
    assert joint.heads["a"].sos_eos_id == 2


def test_empty_transcript_is_the_end_alone():
    head, (encoded, _, _) = make(label_smoothing=0.0), batch()
    losses = head.loss(encoded, torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0]))
    log_probs, _ = head.step(torch.zeros(2, dtype=torch.int64), head.start(encoded, 1, 1))
    torch.testing.assert_close(losses, -log_probs[:, 0], atol=1e-5, rtol=1e-5)


def test_rescoring_is_offered_by_the_joint_of_ctc_and_attention_alone():
    attention = partial(Attention, num_layers=1, num_heads=2, feed_forward_dim=8)
    both = Joint({"ctc": CTC, "attention": attention}, {"ctc": 0.3, "attention": 0.7}, 8, 6)
    assert both.searches == ("ctc_greedy_search", "ctc_prefix_beam_search", "attention", "attention_rescoring")
    assert both.part_for("attention_rescoring") is both and both.part_for("attention") is both.heads["attention"]
    one = Joint({"attention": attention}, {"attention": 1.0}, 8, 6)
    assert one.searches == ("attention",)
    with pytest.raises(ValueError, match="search=attention_rescoring"):
        one.part_for("attention_rescoring")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing 1"),
        ({"reverse_layers": 2}, "reverse_layers 2 and reverse_weight 0.0: give both"),
        ({"reverse_weight": 0.3}, "give both or none"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
