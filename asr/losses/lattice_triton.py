"""The recursion of `asr.losses.lattice` as one Triton kernel: a program for each utterance and direction.

A program goes through the rows of its lattice. Within a row the sum over the ways from the left is a scan with the
associative rule (d, v) + (d', v') = (d + d', log(exp(v + d') + exp(v'))), d being the log-probability of the blanks
passed and v the sum so far. Other than prefix sums this never subtracts, and it takes impossible arcs as they come.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _log_add(x, y):
    high = tl.maximum(x, y)
    low = tl.minimum(x, y)
    # Two impossible ways make an impossible one; their difference would be NaN.
    rest = tl.where(low == -float("inf"), 0.0, tl.exp(low - high))
    return high + tl.log(1.0 + rest)


@triton.jit
def _pass_blanks(decay, value, next_decay, next_value):
    return decay + next_decay, _log_add(value + next_decay, next_value)


@triton.jit(do_not_specialize=["num_tokens", "num_frames"])
def _node_sums_kernel(emit, blank, nodes, num_tokens, num_frames, BLOCK: tl.constexpr):
    """emit (B, U, T + 1), blank (B, U + 1, T) -> nodes (2, B, U + 1, T + 1): forward, and backward."""
    utterance = tl.program_id(0).to(tl.int64)
    direction = tl.program_id(1)
    backward = direction == 1
    num_columns = num_frames + 1
    emit += utterance * num_tokens * num_columns
    blank += utterance * (num_tokens + 1) * num_frames
    nodes += (direction * tl.num_programs(0) + utterance) * (num_tokens + 1) * num_columns
    column = tl.arange(0, BLOCK)
    inside = column < num_columns
    after_blank = inside & (column > 0)
    # Backward is forward through the lattice turned by half a circle: a node's arcs are those of its mirror image.
    emit_column = tl.where(backward, num_frames - column, column)
    blank_column = tl.where(backward, num_frames - column, column - 1)
    impossible = -float("inf")
    value = tl.where(column == 0, 0.0, impossible).to(tl.float64)
    for step in range(num_tokens + 1):
        row = tl.where(backward, num_tokens - step, step)
        decay = tl.load(blank + row * num_frames + blank_column, mask=after_blank, other=impossible)
        _, value = tl.associative_scan((decay, value), 0, _pass_blanks)
        tl.store(nodes + row * num_columns + emit_column, value, mask=inside)
        emit_row = tl.where(backward, row - 1, row)
        emits = inside & (step < num_tokens)
        value += tl.load(emit + emit_row * num_columns + emit_column, mask=emits, other=impossible)


def node_sums(emit: Tensor, blank: Tensor) -> tuple[Tensor, Tensor]:
    """(B, U + 1, T + 1) log-sums over the ways to and from every node, of fp64 arcs (B, U, T + 1), (B, U + 1, T)."""
    batch_size, num_tokens, num_columns = emit.shape
    nodes = emit.new_empty(2, batch_size, num_tokens + 1, num_columns)
    block = triton.next_power_of_2(num_columns)
    grid = (batch_size, 2)
    with torch.cuda.device_of(emit):
        _node_sums_kernel[grid](
            emit.contiguous(), blank.contiguous(), nodes, num_tokens, num_columns - 1, BLOCK=block,
            num_warps=max(1, min(16, block // 128)),
        )  # fmt: skip
    return nodes[0], nodes[1]
