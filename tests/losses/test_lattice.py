import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asr.losses.lattice import sum_alignments

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def arcs(batch_size, num_tokens, num_frames, seed=0):
    torch.manual_seed(seed)
    shape = (batch_size, num_tokens, num_frames)
    emit, blank = -3 * torch.rand(shape), -3 * torch.rand(batch_size, num_tokens + 1, num_frames)
    return emit.double(), blank.double()


def enumerate_alignments(emit, blank, topology):
    """Log-sum over all orders of emissions and blanks, and the share of them that takes every arc."""
    num_tokens, num_frames = emit.shape
    num_symbols = num_frames + (num_tokens if topology == "regular" else 0)
    alignments = []
    for places in itertools.combinations(range(num_symbols), num_tokens):
        row = frame = 0
        score, taken = 0.0, []
        for place in range(num_symbols):
            if frame == num_frames:
                break
            emits = place in places
            score += (emit if emits else blank)[row, frame].item()
            taken.append((emits, row, frame))
            row += emits
            frame += not emits or topology == "modified"
        if (row, frame, len(taken)) == (num_tokens, num_frames, num_symbols):
            alignments.append((score, taken))
    scores = torch.tensor([score for score, _ in alignments], dtype=torch.float64)
    shares = torch.zeros_like(emit), torch.zeros_like(blank)
    for weight, (_, taken) in zip(scores.softmax(0), alignments, strict=True):
        for emits, row, frame in taken:
            shares[0 if emits else 1][row, frame] += weight
    return scores.logsumexp(0), *shares


@pytest.mark.parametrize("topology", ["regular", "modified"])
def test_sums_and_shares_are_those_of_all_alignments(topology):
    emit, blank = arcs(5, 4, 6)
    token_lens, frame_lens = torch.tensor([4, 2, 0, 3, 4]), torch.tensor([6, 5, 3, 3, 4])
    total, emit_share, blank_share = sum_alignments(emit, blank, token_lens, frame_lens, topology)
    for row, (tokens, frames) in enumerate(zip(token_lens.tolist(), frame_lens.tolist(), strict=True)):
        expected = enumerate_alignments(emit[row, :tokens, :frames], blank[row, : tokens + 1, :frames], topology)
        torch.testing.assert_close(total[row], expected[0])
        for share, wanted in zip((emit_share[row], blank_share[row]), expected[1:], strict=True):
            torch.testing.assert_close(share[: wanted.size(0), :frames], wanted)
            assert share.sum() == pytest.approx(wanted.sum().item()), "nothing beyond the lengths"


@pytest.mark.parametrize("topology", ["regular", "modified"])
def test_gradients_are_exact(topology):
    emit, blank = (x.requires_grad_() for x in arcs(3, 3, 5))
    lens = torch.tensor([3, 1, 2]), torch.tensor([5, 4, 2])
    assert torch.autograd.gradcheck(lambda e, b: sum_alignments(e, b, *lens, topology)[0], (emit, blank))


def test_more_tokens_than_frames_are_legal_where_a_frame_may_emit_several():
    emit, blank = arcs(1, 7, 2)
    lens = torch.tensor([7]), torch.tensor([2])
    assert sum_alignments(emit, blank, *lens)[0].isfinite()
    assert sum_alignments(emit, blank, *lens, "modified")[0] == -torch.inf


def test_what_lies_beyond_the_lengths_is_never_read():
    emit, blank = arcs(3, 4, 6)
    token_lens, frame_lens = torch.tensor([4, 2, 0]), torch.tensor([6, 4, 0])
    clean = sum_alignments(emit, blank, token_lens, frame_lens)
    for row, (tokens, frames) in enumerate(zip(token_lens.tolist(), frame_lens.tolist(), strict=True)):
        for x in (emit[row], blank[row]):
            x[:, frames:] = torch.nan
        emit[row, tokens:] = torch.inf
        blank[row, tokens + 1 :] = torch.nan
    for before, after in zip(clean, sum_alignments(emit, blank, token_lens, frame_lens), strict=True):
        assert torch.equal(before, after)
    assert clean[0][2] == 0 and not clean[2][2].any(), "no frames and no tokens: certain, and without shares"


def test_impossible_arcs_are_taken_as_they_come():
    emit, blank = arcs(1, 2, 4)
    blank[0, 0, 1:] = emit[0, 1, :2] = -torch.inf
    total, emit_share, blank_share = sum_alignments(emit, blank, torch.tensor([2]), torch.tensor([4]))
    expected = enumerate_alignments(emit[0], blank[0], "regular")
    torch.testing.assert_close(total[0], expected[0])
    assert emit_share.isfinite().all() and blank_share.isfinite().all()


def test_shares_of_long_utterances_add_up_in_fp32():
    emit, blank = (x.float() - 4 for x in arcs(2, 120, 1500))
    lens = torch.tensor([120, 90]), torch.tensor([1500, 1100])
    total, emit_share, blank_share = sum_alignments(emit, blank, *lens)
    assert total.dtype == emit_share.dtype == torch.float32 and (total < -4000).all()
    for row, (tokens, frames) in enumerate(zip(*(of.tolist() for of in lens), strict=True)):
        assert (blank_share[row, :, :frames].sum(0) - 1).abs().max() < 1e-5, "one blank a frame"
        assert (emit_share[row, :tokens].sum(1) - 1).abs().max() < 1e-5, "one emission a token"


INTERPRETED = """
import torch
from asr.losses.lattice import _with_corridor, node_sums_by_diagonals
from asr.losses.lattice_triton import node_sums

torch.manual_seed(0)
for num_tokens, num_frames in ((3, 6), (4, 2), (0, 3)):
    emit, blank = -3 * torch.rand(2, num_tokens, num_frames), -3 * torch.rand(2, num_tokens + 1, num_frames)
    blank[0, 0, 0] = -torch.inf
    lens = torch.tensor([num_tokens, num_tokens // 2]), torch.tensor([num_frames, 1 + num_frames // 2])
    arcs = _with_corridor(emit, blank, *lens, lens[1])
    for kernel, plain in zip(node_sums(*arcs), node_sums_by_diagonals(*arcs), strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-12, atol=0)
print("equal")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from asr.losses.lattice_triton import _node_sums_kernel

types = {"emit": "*fp64", "blank": "*fp64", "nodes": "*fp64", "num_tokens": "i32", "num_frames": "i32"}
source = ASTSource(_node_sums_kernel, {**types, "BLOCK": "constexpr"}, {"BLOCK": 512})
print("machine code of", len(triton.compile(source, GPUTarget("cuda", 80, 32)).asm["cubin"]), "bytes")
"""


def run_script(script, **environment):
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
def test_the_triton_kernel_gives_the_same_sums():
    assert "equal" in run_script(INTERPRETED, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_the_triton_kernel_compiles_for_a_gpu_that_is_not_there():
    assert "machine code" in run_script(COMPILED, TRITON_INTERPRET="0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("topology", ["regular", "modified"])
def test_a_gpu_gives_what_a_cpu_gives(topology):
    arguments = *(x.float() for x in arcs(4, 30, 200)), torch.tensor([30, 12, 0, 1]), torch.tensor([200, 90, 50, 1])
    on_gpu = sum_alignments(*(x.cuda() for x in arguments), topology)
    for cpu, gpu in zip(sum_alignments(*arguments, topology), on_gpu, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu)
