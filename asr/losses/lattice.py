"""Sums over all alignments of a transducer lattice, with exact occupation probabilities.

A lattice has a node (u, t) for u tokens emitted and t frames consumed. An alignment goes from (0, 0) to the utterance's
own (U_b, T_b); from (u, t) it takes a blank to (u, t + 1), or emits token u. In the regular topology (Graves, 2012) an
emission leads to (u + 1, t), and a frame may emit several tokens; in the modified one to (u + 1, t + 1): one at most.

Legend: emit_BUT (B, U, T) and blank_BUT (B, U + 1, T) are the log-probabilities of the arcs that leave node (u, t).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.layers.masks import length_mask

log = logging.getLogger(__name__)

Topology = Literal["regular", "modified"]
NEVER = -torch.inf


def sum_alignments(
    emit_BUT: Tensor,
    blank_BUT: Tensor,
    token_lens_B: Tensor,
    frame_lens_B: Tensor,
    topology: Topology = "regular",
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability (B,) of the sum over alignments, and the share of them that takes every arc (like both inputs).

    Differentiable in the log-probability; the shares, detached, are its exact gradients. What lies beyond the lengths
    matters nowhere, whatever it holds. An utterance of no frames and no tokens has log-probability 0; one that cannot
    be aligned has -inf and NaN shares. The recursion runs in fp64: probabilities of long utterances lie hundreds of
    nats below 1, where fp32 no longer resolves shares to four digits.
    """
    return _SumAlignments.apply(emit_BUT, blank_BUT, token_lens_B, frame_lens_B, topology)


class _SumAlignments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, emit_BUT: Tensor, blank_BUT: Tensor, token_lens_B: Tensor, frame_lens_B: Tensor, topology: Topology
    ) -> tuple[Tensor, Tensor, Tensor]:
        total_B, emit_share, blank_share = alignment_shares(emit_BUT, blank_BUT, token_lens_B, frame_lens_B, topology)
        ctx.save_for_backward(emit_share, blank_share)
        ctx.mark_non_differentiable(emit_share, blank_share)
        return total_B, emit_share, blank_share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        emit_share, blank_share = ctx.saved_tensors
        grad_B11 = grads[0][:, None, None]
        return grad_B11 * emit_share, grad_B11 * blank_share, None, None, None


@torch.no_grad()
def alignment_shares(
    emit_BUT: Tensor, blank_BUT: Tensor, token_lens_B: Tensor, frame_lens_B: Tensor, topology: Topology = "regular"
) -> tuple[Tensor, Tensor, Tensor]:
    """What `sum_alignments` computes, without a graph."""
    dtype, num_frames = emit_BUT.dtype, blank_BUT.size(2)
    emit_lens_B = frame_lens_B
    if topology == "modified":
        # In the coordinates (u, t - u) an emission stays in its column: this is the regular lattice, but for emissions
        # in the column after the last blank.
        emit_BUT, blank_BUT = _slide(emit_BUT, -1, num_frames), _slide(blank_BUT, -1, num_frames)
        frame_lens_B = frame_lens_B - token_lens_B
        emit_lens_B = frame_lens_B + 1
    emit, blank = _with_corridor(emit_BUT, blank_BUT, token_lens_B, frame_lens_B, emit_lens_B)
    forward, backward = _node_sums(emit, blank)
    total_B = forward[:, -1, -1]
    shift = total_B[:, None, None]
    emit_share = (forward[:, :-1, :-1] + emit[:, :, :-1] + backward[:, 1:, :-1] - shift).exp().to(dtype)
    blank_share = (forward[:, :, :-1] + blank + backward[:, :, 1:] - shift).exp().to(dtype)
    blank_share.masked_fill_(~length_mask(frame_lens_B, num_frames)[:, None], 0.0)
    if topology == "modified":
        emit_share, blank_share = _slide(emit_share, 1, num_frames, 0.0), _slide(blank_share, 1, num_frames, 0.0)
    return total_B.to(dtype), emit_share, blank_share


def _with_corridor(
    emit_BUT: Tensor, blank_BUT: Tensor, token_lens_B: Tensor, frame_lens_B: Tensor, emit_lens_B: Tensor
) -> tuple[Tensor, Tensor]:
    """fp64 arcs (B, U, T + 1) and (B, U + 1, T) of lattices that all end in the corner (U, T).

    From its own end an utterance goes there in one way of probability 1: blanks along its last row, then emissions
    down the last column. So no length plays a part in the recursion, and the way back is the flipped way forth.
    """
    num_tokens, num_frames = emit_BUT.shape[1:]
    row_U = torch.arange(num_tokens + 1, device=emit_BUT.device)
    valid_BT, emits_BT = length_mask(frame_lens_B, num_frames), length_mask(emit_lens_B, num_frames)
    last_row_BU = row_U == token_lens_B[:, None]
    inside_BU = row_U <= token_lens_B[:, None]
    blank = torch.where(inside_BU[:, :, None] & valid_BT[:, None], blank_BUT.double(), NEVER)
    blank.masked_fill_(last_row_BU[:, :, None] & ~valid_BT[:, None], 0.0)
    emit = torch.where((inside_BU & ~last_row_BU)[:, :-1, None] & emits_BT[:, None], emit_BUT.double(), NEVER)
    way_down_BU = torch.where(row_U < token_lens_B[:, None], NEVER, 0.0)[:, :-1].double()
    return torch.cat([emit, way_down_BU[:, :, None]], dim=2), blank


def _node_sums(emit: Tensor, blank: Tensor) -> tuple[Tensor, Tensor]:
    """(B, U + 1, T + 1) log-sums over the ways from the start to every node, and from every node to the end."""
    node_sums = _gpu_kernel(emit.device) if emit.is_cuda else None
    return (node_sums or node_sums_by_diagonals)(emit, blank)


@cache
def _gpu_kernel(device: torch.device) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """The Triton kernel, or None where it cannot be had; then plain PyTorch does the same."""
    try:
        from asr.losses.lattice_triton import node_sums

        node_sums(*(torch.zeros(1, *shape, dtype=torch.float64, device=device) for shape in ((1, 2), (2, 1))))
    except (ImportError, OSError, RuntimeError) as error:  # Triton is absent, or has no C compiler to build with
        log.warning("the lattice of the transducer runs in plain PyTorch, without its Triton kernel: %s", error)
        return None
    return node_sums


def node_sums_by_diagonals(emit: Tensor, blank: Tensor) -> tuple[Tensor, Tensor]:
    """`_node_sums` in plain PyTorch: all nodes with the same u + t at once, in both directions at once."""
    batch_size, num_tokens, num_columns = emit.shape
    num_steps = num_tokens + num_columns - 1
    emit_NBU = _slide(emit, 1, num_steps).permute(2, 0, 1)
    blank_NBU = _slide(blank, 1, num_steps).permute(2, 0, 1)
    # For every node the arcs that lead into it: from the row above and from its own row, forward and flipped.
    arcs = emit.new_full((num_steps, 2, 2, batch_size, num_tokens + 1), NEVER)
    arcs[:, 0, 0, :, 1:] = emit_NBU
    arcs[:, 0, 1, :, 1:] = emit_NBU.flip(0, 2)
    arcs[:, 1, 0] = blank_NBU
    arcs[:, 1, 1] = blank_NBU.flip(0, 2)

    # One more column on the left stands for the row above the first.
    nodes = emit.new_full((num_steps + 1, 2, batch_size, num_tokens + 2), NEVER)
    nodes[0, :, :, 1] = 0.0
    row, direction, plane = num_tokens + 2, batch_size * (num_tokens + 2), 2 * batch_size * (num_tokens + 2)
    # What an arc leaves from: sources[:, 0] is the row above, sources[:, 1] the own row.
    sources = nodes.as_strided((num_steps, 2, 2, batch_size, num_tokens + 1), (plane, 1, direction, row, 1))
    ways = torch.empty_like(arcs[0])
    from_above, from_left = ways
    for source, arc, target in zip(sources, arcs, nodes[1:, ..., 1:], strict=True):
        torch.add(source, arc, out=ways)
        torch.logaddexp(from_above, from_left, out=target)
    forward, flipped = nodes[..., 1:].permute(1, 2, 3, 0)
    return _slide(forward, -1, num_columns), _slide(flipped.flip(1, 2), -1, num_columns)


def _slide(x_BRC: Tensor, direction: Literal[1, -1], num_columns: int, fill: float = NEVER) -> Tensor:
    """(B, R, num_columns) where row r of (B, R, C) has moved r columns to the right (1) or to the left (-1)."""
    batch_size, num_rows, old_columns = x_BRC.shape
    width = max(old_columns, num_columns) + num_rows
    padded = F.pad(x_BRC, (0, width - old_columns), value=fill)
    # A row step that is one longer or shorter than the row, so that nothing is moved; `fill` is read at the seams.
    return padded.as_strided(
        (batch_size, num_rows, num_columns), (num_rows * width, width - direction, 1), padded.storage_offset()
    )
