from pathlib import Path

import numpy as np
import pytest
import torch

from asr.heads.transducer import Transducer
from asr.search.greedy_search import greedy_search
from asr.search.modified_beam_search import modified_beam_search
from asr.types import Encoded

GOLDEN = {
    name: torch.from_numpy(value)
    for name, value in np.load(Path(__file__).parents[1] / "data" / "golden" / "icefall_transducer.npz").items()
}


def icefall_head(**options):
    """The head of icefall's model, whose parameters have the same names there."""
    head = Transducer(48, 30, decoder_dim=40, joiner_dim=40, **options)
    weights = {name.removeprefix("model/"): value for name, value in GOLDEN.items() if name.startswith("model/")}
    head.load_state_dict({name: value for name, value in weights.items() if not name.startswith("ctc_output.")})
    return head.eval()


def small(**options):
    torch.manual_seed(0)
    return Transducer(6, 5, **({"decoder_dim": 8, "joiner_dim": 8, "warmup_batches": 0} | options))


def batch(lens=(9, 6), token_lens=(4, 2), vocab_size=5, width=6):
    torch.manual_seed(1)
    tokens = torch.randint(1, vocab_size, (len(lens), max(token_lens)))
    return Encoded(torch.randn(len(lens), max(lens), width), torch.tensor(lens)), tokens, torch.tensor(token_lens)


def test_decoder_and_joiner_are_icefalls():
    head = icefall_head()
    contexts, expected = GOLDEN["io.decoder_in"], GOLDEN["io.decoder_out"]
    with torch.no_grad():
        decoded = torch.stack(
            [head.decoder(context[None], torch.tensor([context.numel()]))[:, -1] for context in contexts]
        )
        torch.testing.assert_close(decoded, expected, atol=1e-5, rtol=1e-5)
        projected = head.joiner.encoder_proj(GOLDEN["io.encoder_out"][:, :1]), head.joiner.decoder_proj(expected)
        torch.testing.assert_close(head.joiner(*projected), GOLDEN["io.joiner_out"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("context_size", [1, 2, 3])
def test_tables_add_up_to_what_the_decoder_says(context_size):
    decoder = small(context_size=context_size).decoder
    tokens = torch.tensor([[3, 1, 4]])
    history = [5, 5, 0, 3, 1, 4]  # the vocabulary's size stands for no token, then blank
    tables = decoder.tables()
    assert tables.shape == (context_size, 6, 8)
    for count in range(4):
        context = history[3 + count - context_size : 3 + count]
        summed = sum(table[token] for table, token in zip(tables, context, strict=True))
        expected = summed.relu() if context_size > 1 else summed
        torch.testing.assert_close(decoder(tokens, torch.tensor([3]))[0, count], expected)


def test_a_range_over_all_rows_is_the_full_lattice():
    pruned, full = small(prune_range=10), small(loss="full")
    full.load_state_dict({n: v for n, v in pruned.state_dict().items() if not n.startswith("simple_")})
    given = batch()
    assert set(full.loss_parts(*given)) == {"full"}
    torch.testing.assert_close(pruned.loss_parts(*given)["pruned"], full.loss(*given))
    for head in (pruned, full):
        head.loss_parts(*given)["full" if head is full else "pruned"].sum().backward()
    for name, parameter in full.named_parameters():
        torch.testing.assert_close(parameter.grad, pruned.get_parameter(name).grad, msg=name)


def test_warm_up_moves_weight_from_the_simple_to_the_pruned_loss():
    head, given = small(warmup_batches=100), batch()
    weights = []
    bare = small(simple_loss_scale=1.0).loss_parts(*given)
    for head.batch_count in (0.0, 50.0, 100.0, 1000.0):
        parts = head.loss_parts(*given)
        weights.append([(parts[name] / bare[name]).mean().item() for name in ("simple", "pruned")])
    torch.testing.assert_close(torch.tensor(weights), torch.tensor([[1.0, 0.1], [0.75, 0.55], [0.5, 1.0], [0.5, 1.0]]))


@pytest.mark.parametrize("loss", ["pruned", "full"])
def test_more_tokens_than_frames_are_legal(loss):
    head = small(loss=loss)
    encoded, tokens, token_lens = batch(lens=(2, 1), token_lens=(7, 9))
    assert head.feasible(encoded.lens, tokens, token_lens).all() and head.min_frames([1] * 9) == 1
    assert head.loss(encoded, tokens, token_lens).isfinite().all()


def test_one_symbol_a_frame_needs_a_frame_for_each_token():
    head = small(topology="modified")
    encoded, tokens, token_lens = batch(lens=(4, 3, 0, 5), token_lens=(4, 4, 0, 0))
    assert head.feasible(encoded.lens, tokens, token_lens).tolist() == [True, False, False, True]
    assert head.min_frames([1, 1, 2]) == 3 and head.min_frames([]) == 1
    losses = head.loss(encoded, tokens, token_lens)
    assert losses.isfinite().all() and losses[1] == losses[2] == 0 and (losses[[0, 3]] > 0).all()


@pytest.mark.parametrize("loss", ["pruned", "full"])
def test_padding_of_any_kind_is_invisible(loss):
    head = small(loss=loss)
    encoded, tokens, token_lens = batch(lens=(9, 5, 0), token_lens=(4, 2, 3))
    clean = head.loss(encoded, tokens, token_lens)
    clean.sum().backward()
    grads = [parameter.grad.clone() for parameter in head.parameters()]
    head.zero_grad()
    frames = torch.cat([encoded.frames, torch.zeros(3, 4, 6)], dim=1)
    frames[0, 9:] = frames[1, 5:] = frames[2] = torch.nan
    wide_tokens = torch.cat([tokens, torch.full((3, 2), -1)], dim=1)
    wide_tokens[1, 2:] = 999
    wide = head.loss(Encoded(frames, encoded.lens), wide_tokens, token_lens)
    wide.sum().backward()
    torch.testing.assert_close(wide, clean)
    for before, parameter in zip(grads, head.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, before)


def test_projections_start_small():
    head = Transducer(64, 50, decoder_dim=64, joiner_dim=64)
    for layer in (head.simple_am_proj, head.simple_lm_proj, head.joiner.encoder_proj, head.joiner.decoder_proj):
        assert 0.2 / 8 < layer.weight.abs().max() <= 0.25 / 8 and layer.bias.abs().max() <= 0.025
    assert head.joiner.output_linear.weight.abs().max() > 0.9 / 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prune_range": 1}, "prune_range=1"),
        ({"lm_scale": 0.7, "am_scale": 0.5}, "am_scale=0.5"),
        ({"warmup_batches": -1}, "warmup_batches=-1"),
        ({"context_size": 0}, "context_size=0"),
        ({"decoder_dim": 10}, "decoder_dim=10"),
        ({"loss": "full", "topology": "modified"}, "loss=full"),
    ],
)
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_training_learns_to_emit_a_transcript():
    torch.manual_seed(0)
    head = Transducer(8, 6, decoder_dim=16, joiner_dim=16, warmup_batches=30)
    frames, tokens = torch.randn(1, 12, 8), torch.tensor([[3, 1, 1, 4]])
    optimizer = torch.optim.Adam(head.parameters(), lr=0.03)
    for step in range(80):
        head.batch_count = float(step)
        optimizer.zero_grad()
        loss = head.loss(Encoded(frames, torch.tensor([12])), tokens, torch.tensor([4])).sum()
        loss.backward()
        optimizer.step()
    for search in (greedy_search, modified_beam_search):
        assert search(head, Encoded(frames, torch.tensor([12])))[0].tokens == [3, 1, 1, 4]
