from pathlib import Path

import numpy as np
import pytest
import torch

from asr.losses.full_rnnt import full_loss
from asr.losses.pruned_rnnt import Ranges, Transcripts, keep_rows, pruned_loss, pruning_ranges, simple_loss

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden" / "pruned_rnnt.npz")
CASES = sorted({name.partition("/")[0] for name in GOLDEN.files})


def assert_relative(found, expected, tolerance=1e-4):
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def whole(transcripts, num_rows, num_frames):
    """Ranges that keep every row."""
    batch_size = len(transcripts.tokens_BU)
    return Ranges(torch.zeros(batch_size, num_frames, dtype=torch.int64), torch.full((batch_size,), num_rows))


def random_case(token_lens, frame_lens, vocab_size=9, seed=0, topology="regular"):
    torch.manual_seed(seed)
    token_lens, frame_lens = torch.tensor(token_lens), torch.tensor(frame_lens)
    tokens = torch.randint(1, vocab_size, (len(token_lens), int(token_lens.max())))
    am = 2 * torch.randn(len(token_lens), int(frame_lens.max()), vocab_size)
    lm = 2 * torch.randn(len(token_lens), tokens.size(1) + 1, vocab_size)
    return am, lm, Transcripts(tokens, token_lens, frame_lens, 0, topology)


def pruned_of(am, lm, transcripts, prune_range):
    _, emit_share, blank_share = simple_loss(am, lm, transcripts)
    ranges = pruning_ranges(emit_share, blank_share, transcripts, prune_range)
    return pruned_loss(torch.tanh(am[:, :, None] + keep_rows(lm, ranges)), transcripts, ranges), ranges


@pytest.mark.parametrize("case", CASES)
def test_losses_shares_ranges_and_gradients_are_k2s(case):
    """With NaN in all padding."""
    golden = {name: torch.from_numpy(GOLDEN[f"{case}/{name}"]) for name in (
        "am", "lm", "symbols", "frame_lens", "token_lens", "px_grad", "py_grad", "ranges",
        "simple_loss", "pruned_loss", "full_loss", "am_grad", "lm_grad",
    )}  # fmt: skip
    lm_scale, am_scale, prune_range = GOLDEN[f"{case}/scales"].tolist()
    am, lm = golden["am"].clone(), golden["lm"].clone()
    for row, (frames, tokens) in enumerate(zip(golden["frame_lens"], golden["token_lens"], strict=True)):
        am[row, frames:] = lm[row, tokens + 1 :] = torch.nan
    am.requires_grad_()
    lm.requires_grad_()
    transcripts = Transcripts(golden["symbols"], golden["token_lens"], golden["frame_lens"], 0)

    simple, emit_share, blank_share = simple_loss(am, lm, transcripts, lm_scale, am_scale)
    ranges = pruning_ranges(emit_share, blank_share, transcripts, int(prune_range))
    pruned = pruned_loss(torch.tanh(am[:, :, None] + keep_rows(lm, ranges)), transcripts, ranges)
    everything = whole(transcripts, lm.size(1), am.size(1))
    full = pruned_loss(torch.tanh(am[:, :, None] + lm[:, None]), transcripts, everything)
    assert_relative(simple, golden["simple_loss"])
    assert_relative(emit_share, golden["px_grad"][:, :, :-1])
    assert_relative(blank_share, golden["py_grad"])
    assert torch.equal(ranges.rows_BTR, golden["ranges"])
    assert_relative(pruned, golden["pruned_loss"])
    assert_relative(full, golden["full_loss"])

    # A joiner passes NaN on to its inputs' gradients, so here it must not see any.
    clean_am, clean_lm = am.nan_to_num(), lm.nan_to_num()
    pruned = pruned_loss(torch.tanh(clean_am[:, :, None] + keep_rows(clean_lm, ranges)), transcripts, ranges)
    (0.5 * simple + pruned).sum().backward()
    assert_relative(am.grad, golden["am_grad"])
    assert_relative(lm.grad, golden["lm_grad"])


@pytest.mark.parametrize(("num_frames", "num_tokens", "expected"), [(4, 2, 7.35404), (2, 5, 9.47431)])
def test_uniform_logits_have_their_closed_form(num_frames, num_tokens, expected):
    tokens = torch.ones(1, num_tokens, dtype=torch.int64)
    transcripts = Transcripts(tokens, torch.tensor([num_tokens]), torch.tensor([num_frames]), 0)
    logits = torch.zeros(1, num_frames, num_tokens + 1, 5)
    ranges = whole(transcripts, num_tokens + 1, num_frames)
    assert pruned_loss(logits, transcripts, ranges).item() == pytest.approx(expected, abs=1e-5)
    assert full_loss(logits, transcripts).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("blank_id", [0, 8])
def test_a_range_over_all_rows_is_the_full_lattice(blank_id):
    am, lm, transcripts = random_case([5, 3, 0, 9, 1], [12, 7, 4, 4, 1])
    transcripts = transcripts._replace(tokens_BU=transcripts.tokens_BU.clamp(max=7), blank_id=blank_id)
    logits = torch.tanh(am[:, :, None] + lm[:, None])
    grads, losses = [], []
    for loss in (full_loss, lambda *given: pruned_loss(*given, whole(transcripts, 10, 12))):
        leaf = logits.clone().requires_grad_()
        losses.append(loss(leaf, transcripts))
        (losses[-1] * torch.arange(1, 6)).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)


def test_gradients_are_exact():
    am, lm, transcripts = random_case([3, 2], [5, 3], vocab_size=4)
    am, lm = am.double(), lm.double()
    ranges = pruned_of(am.float(), lm.float(), transcripts, 2)[1]
    logits = (am[:, :, None] + keep_rows(lm, ranges)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pruned_loss(x, transcripts, ranges), logits)


@pytest.mark.parametrize("topology", ["regular", "modified"])
@pytest.mark.parametrize("prune_range", [2, 3, 5, 50])
def test_ranges_can_be_followed_and_lose_no_utterance(topology, prune_range):
    token_lens, frame_lens = [9, 4, 0, 9, 1], [20, 8, 3, 9, 1]
    if topology == "regular":
        frame_lens[3] = 2  # more tokens than frames, and than two frames could emit within a small range
    for seed in range(20):
        am, lm, transcripts = random_case(token_lens, frame_lens, seed=seed, topology=topology)
        losses, ranges = pruned_of(am, lm, transcripts, prune_range)
        assert losses.isfinite().all()
        everything = whole(transcripts, 10, 20)
        full = pruned_loss(torch.tanh(am[:, :, None] + lm[:, None]), transcripts, everything)
        assert (losses >= full - 1e-4).all(), "pruning only loses alignments"
        for row, (tokens, frames) in enumerate(zip(token_lens, frame_lens, strict=True)):
            starts, width = ranges.starts_BT[row, :frames], int(ranges.widths_B[row])
            assert starts[0] == 0 and starts[-1] == max(0, tokens - width + 1)
            assert (starts.diff() >= 0).all()
            assert (starts.diff() <= (width - 1 if topology == "regular" else 1)).all()


def test_an_utterance_that_needs_a_wider_range_changes_no_other():
    am, lm, transcripts = random_case([6, 10, 4], [12, 2, 9])
    together, ranges = pruned_of(am, lm, transcripts, 3)
    assert ranges.widths_B.tolist() == [3, 6, 3]
    for row, (tokens, frames) in enumerate(zip(transcripts.token_lens_B, transcripts.frame_lens_B, strict=True)):
        only = slice(row, row + 1)
        single = Transcripts(transcripts.tokens_BU[only, :tokens], tokens[None], frames[None], 0)
        alone, _ = pruned_of(am[only, :frames], lm[only, : tokens + 1], single, 3)
        torch.testing.assert_close(alone[0], together[row])


@pytest.mark.parametrize("am_scale", [0.0, 0.2])
def test_an_utterance_without_lengths_is_left_out(am_scale):
    am, lm, transcripts = random_case([4, 2, 3], [9, 6, 7])
    kept = transcripts._replace(
        token_lens_B=transcripts.token_lens_B * torch.tensor([1, 0, 1]),
        frame_lens_B=transcripts.frame_lens_B * torch.tensor([1, 0, 1]),
    )
    am[1] = lm[1] = torch.nan
    am.requires_grad_()
    lm.requires_grad_()
    losses, *shares = simple_loss(am, lm, kept, 0.25, am_scale)
    ranges = pruning_ranges(*shares, kept, 3)
    logits = torch.randn(3, 9, 3, 9).requires_grad_()
    pruned = pruned_loss(logits, kept, ranges)
    (losses + pruned).sum().backward()
    assert losses[1] == pruned[1] == 0 and not logits.grad[1].any()
    assert not am.grad[1].any() and am.grad.isfinite().all() and lm.grad.isfinite().all()
    rows = [0, 2]
    others = Transcripts(kept.tokens_BU[rows], kept.token_lens_B[rows], kept.frame_lens_B[rows], 0)
    torch.testing.assert_close(losses[rows], simple_loss(am[rows], lm[rows], others, 0.25, am_scale)[0])


def test_half_precision_comes_in_and_fp32_goes_out():
    am, lm, transcripts = random_case([4, 2], [9, 6])
    exact_simple, *shares = simple_loss(am.bfloat16().float(), lm.bfloat16().float(), transcripts, 0.25)
    ranges = pruning_ranges(*shares, transcripts, 3)
    logits = torch.randn(2, 9, 3, 9).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        simple, *_ = simple_loss(am.bfloat16(), lm.bfloat16(), transcripts, 0.25)
        leaf = logits.clone().requires_grad_()
        pruned = pruned_loss(leaf, transcripts, ranges)
    pruned.sum().backward()
    assert simple.dtype == pruned.dtype == torch.float32 and leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(simple, exact_simple)
    torch.testing.assert_close(pruned, pruned_loss(logits.float(), transcripts, ranges))


@pytest.mark.parametrize("num_frames", [1, 5])
def test_empty_transcripts_are_all_blank(num_frames):
    transcripts = Transcripts(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0]), torch.tensor([num_frames]), 0)
    am, lm = torch.zeros(1, num_frames, 4), torch.zeros(1, 1, 4)
    losses, *shares = simple_loss(am, lm, transcripts, 0.25, 0.1)
    ranges = pruning_ranges(*shares, transcripts, 5)
    pruned = pruned_loss(am[:, :, None] + keep_rows(lm, ranges), transcripts, ranges)
    for loss in (losses, pruned, full_loss(am[:, :, None] + lm[:, None], transcripts)):
        assert loss.item() == pytest.approx(num_frames * np.log(4), rel=1e-5)
