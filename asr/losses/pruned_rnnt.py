"""Pruned RNN-T (Kuang et al., 2022, "Pruned RNN-T for fast, memory-efficient ASR training").

A trivial joiner, the sum of a frame's and a token's scores, needs no tensor over frames, tokens and vocabulary at once.
Its alignments say which few tokens matter at a frame, and the real joiner is computed for those alone. The formulas
follow the paper and the losses of k2; k2 itself is not needed.

Legend: U + 1 rows, one for each number of tokens emitted so far; R consecutive rows that a frame keeps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.layers.masks import length_mask, zero_padding
from asr.losses.lattice import NEVER, Topology, alignment_shares, sum_alignments


class Transcripts(NamedTuple):
    """Token ids (B, U) without blank, their lengths and those of the frames (B,), and what blank is.

    Both lengths 0 leave an utterance out: its losses are 0 and have no gradient. Beyond its length a token may be
    anything that is an index of the vocabulary.
    """

    tokens_BU: Tensor
    token_lens_B: Tensor
    frame_lens_B: Tensor
    blank_id: int
    topology: Topology = "regular"


class Ranges(NamedTuple):
    """Rows that pruning keeps: those from `starts_BT` (B, T) on, as many as `widths_B` (B,) says."""

    starts_BT: Tensor
    widths_B: Tensor

    @property
    def rows_BTR(self) -> Tensor:
        """(B, T, R) numbers of the rows, R being the largest width; there need not be so many rows."""
        steps_R = torch.arange(int(self.widths_B.max()), device=self.widths_B.device)
        return self.starts_BT[:, :, None] + steps_R


def simple_loss(
    am_BTV: Tensor, lm_BUV: Tensor, transcripts: Transcripts, lm_scale: float = 0.0, am_scale: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (B,) of the joiner that adds its inputs, and the shares of alignments that `sum_alignments` gives.

    am_BTV: scores (B, T, V) of frames. lm_BUV: scores (B, U + 1, V) after 0, 1, ..., U tokens.
    lm_scale, am_scale: weights of log-probabilities from `lm` alone and from `am` alone (with the mean of lm's
        distributions over the batch in place of lm), which keep either side from leaning on the other.
    """
    with torch.autocast(am_BTV.device.type, enabled=False):
        am = zero_padding(am_BTV.float(), length_mask(transcripts.frame_lens_B, am_BTV.size(1)))
        rows_BU = length_mask(transcripts.token_lens_B + 1, lm_BUV.size(1)) & (transcripts.frame_lens_B > 0)[:, None]
        lm = zero_padding(lm_BUV.float(), rows_BU)
        emit, blank = _simple_log_probs(am, lm, rows_BU, transcripts, lm_scale, am_scale)
        total_B, emit_share, blank_share = sum_alignments(
            emit, blank, transcripts.token_lens_B, transcripts.frame_lens_B, transcripts.topology
        )
    return -total_B, emit_share, blank_share


def _simple_log_probs(
    am: Tensor, lm: Tensor, rows_BU: Tensor, transcripts: Transcripts, lm_scale: float, am_scale: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of emissions (B, U, T) and blanks (B, U + 1, T)."""
    tokens_BU, blank_id = transcripts.tokens_BU, transcripts.blank_id
    tiny = torch.finfo(torch.float32).tiny
    am_max, lm_max = am.detach().amax(2, keepdim=True), lm.detach().amax(2, keepdim=True)
    am_exp, lm_exp = (am - am_max).exp(), (lm - lm_max).exp()
    norm_BUT = (lm_exp @ am_exp.transpose(1, 2) + tiny).log() + lm_max + am_max.transpose(1, 2)

    am_emit = am.gather(2, tokens_BU[:, None].expand(-1, am.size(1), -1)).transpose(1, 2)
    am_blank = am[:, None, :, blank_id]
    lm_emit = lm[:, :-1].gather(2, tokens_BU[:, :, None])
    lm_blank = lm[:, :, blank_id, None]
    joint_scale = 1.0 - lm_scale - am_scale
    emit = joint_scale * (am_emit + lm_emit - norm_BUT[:, :-1])
    blank = joint_scale * (am_blank + lm_blank - norm_BUT)
    if lm_scale:
        lm_norm = lm_exp.sum(2, keepdim=True).log() + lm_max
        emit = emit + lm_scale * (lm_emit - lm_norm[:, :-1])
        blank = blank + lm_scale * (lm_blank - lm_norm)
    if am_scale:
        distributions = lm_exp / lm_exp.sum(2, keepdim=True)
        unigram_V = (distributions * rows_BU[:, :, None]).sum((0, 1)) / rows_BU.sum().clamp(min=1) + tiny
        am_norm = ((am_exp @ unigram_V).log() + am_max.squeeze(2))[:, None]
        log_unigram_V = unigram_V.log()
        emit = emit + am_scale * (am_emit + log_unigram_V[tokens_BU][:, :, None] - am_norm)
        blank = blank + am_scale * (am_blank + log_unigram_V[blank_id] - am_norm)
    return emit, blank


@torch.no_grad()
def pruning_ranges(
    emit_share_BUT: Tensor, blank_share_BUT: Tensor, transcripts: Transcripts, prune_range: int
) -> Ranges:
    """For every frame the `prune_range` consecutive rows that hold the largest share of alignments.

    Counted are those that leave the frame by a blank from one of the rows, without those that came into the first row
    within the frame. Starts never fall, rise so slowly that an alignment can follow within the rows kept, begin at
    row 0 and end with the last one. An utterance with more tokens than its frames could emit within `prune_range` rows
    gets as many as it needs, so that none is lost to pruning.
    """
    token_lens_B, frame_lens_B = transcripts.token_lens_B, transcripts.frame_lens_B
    num_rows, num_frames = blank_share_BUT.shape[1:]
    needed_B = -(-token_lens_B // frame_lens_B.clamp(min=1)) + 1
    if transcripts.topology == "modified":
        needed_B = torch.full_like(needed_B, 2)
    widths_B = needed_B.clamp(min=min(prune_range, num_rows))

    below_BUT = F.pad(blank_share_BUT, (0, 0, 1, 0)).cumsum(1)
    ends_BU = (torch.arange(num_rows, device=widths_B.device) + widths_B[:, None]).clamp(max=num_rows)
    held_BUT = below_BUT.gather(1, ends_BU[:, :, None].expand(-1, -1, num_frames)) - below_BUT[:, :-1]
    held_BUT[:, 1:] -= emit_share_BUT
    last_B1 = (token_lens_B - widths_B + 1).clamp(min=0)[:, None]
    frame_T = torch.arange(num_frames, device=widths_B.device)
    starts_BT = torch.where(frame_T < frame_lens_B[:, None] - 1, held_BUT.argmax(1), last_B1)
    starts_BT = _lowest_ahead(starts_BT)
    # Least starts that rise to these by no more than a frame can climb, seen from frame 0, where the start is row 0.
    climb_B1 = torch.ones_like(last_B1) if transcripts.topology == "modified" else widths_B[:, None] - 1
    slack_BT = _lowest_ahead(climb_B1 * frame_T - starts_BT).clamp(min=0)
    return Ranges(climb_B1 * frame_T - slack_BT, widths_B)


def _lowest_ahead(x_BT: Tensor) -> Tensor:
    """The least value from every position on."""
    return x_BT.flip(1).cummin(1).values.flip(1)


def keep_rows(frames_BUD: Tensor, ranges: Ranges) -> Tensor:
    """(B, T, R, D) of the rows (B, U + 1, D) that each frame keeps; where there is no such row, the last one."""
    batch_size, num_rows, width = frames_BUD.shape
    rows_BTR = ranges.rows_BTR.clamp(max=num_rows - 1)
    offsets_B11 = torch.arange(batch_size, device=rows_BTR.device)[:, None, None] * num_rows
    return F.embedding(rows_BTR + offsets_B11, frames_BUD.reshape(-1, width))


def pruned_loss(logits_BTRV: Tensor, transcripts: Transcripts, ranges: Ranges) -> Tensor:
    """Losses (B,) of the joiner's logits (B, T, R, V), computed for the rows that were kept."""
    return -_PrunedLogProb.apply(logits_BTRV, transcripts, ranges)


class _PrunedLogProb(torch.autograd.Function):
    """Softmax and lattice in one, so that only the log-probabilities are held between forward and backward."""

    @staticmethod
    def forward(ctx: Any, logits_BTRV: Tensor, transcripts: Transcripts, ranges: Ranges) -> Tensor:
        ctx.logits_dtype = logits_BTRV.dtype
        dtype = torch.promote_types(logits_BTRV.dtype, torch.float32)
        log_probs = F.log_softmax(logits_BTRV, dim=-1, dtype=dtype)
        rows_BTR, widths_B = ranges.rows_BTR, ranges.widths_B
        tokens_BTR = _tokens_of_rows(transcripts.tokens_BU, rows_BTR)
        kept_B1R = length_mask(widths_B, rows_BTR.size(2))[:, None]
        emit_BTR = log_probs.gather(3, tokens_BTR[..., None]).squeeze(3)
        lattice = [
            _to_lattice(values_BTR.masked_fill(~kept_B1R, NEVER), rows_BTR, transcripts.tokens_BU.size(1) + 1)
            for values_BTR in (emit_BTR, log_probs[..., transcripts.blank_id])
        ]
        total_B, emit_share, blank_share = alignment_shares(
            lattice[0][:, :-1], lattice[1], transcripts.token_lens_B, transcripts.frame_lens_B, transcripts.topology
        )
        emit_share = _from_lattice(F.pad(emit_share, (0, 0, 0, 1)), rows_BTR) * kept_B1R
        blank_share = _from_lattice(blank_share, rows_BTR) * kept_B1R
        ctx.save_for_backward(log_probs, tokens_BTR, emit_share, blank_share)
        ctx.blank_id, ctx.frame_lens_B = transcripts.blank_id, transcripts.frame_lens_B
        return total_B

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, tokens_BTR, emit_share, blank_share = ctx.saved_tensors
        grad_B11 = grads[0][:, None, None]
        emit_share, blank_share = emit_share * grad_B11, blank_share * grad_B11
        grad = log_probs.exp()
        grad.mul_(-(emit_share + blank_share)[..., None])
        grad.scatter_add_(3, tokens_BTR[..., None], emit_share[..., None])
        grad[..., ctx.blank_id] += blank_share
        padding = (~length_mask(ctx.frame_lens_B, grad.size(1))).flatten().nonzero().squeeze(1)
        grad.flatten(0, 1).index_fill_(0, padding, 0.0)  # where NaN times no share would be NaN
        return grad.to(ctx.logits_dtype), None, None


def _tokens_of_rows(tokens_BU: Tensor, rows_BTR: Tensor) -> Tensor:
    """(B, T, R) the token that leaves every row; of rows beyond the last token, any."""
    num_tokens = tokens_BU.size(1)
    if num_tokens == 0:
        return torch.zeros_like(rows_BTR)
    index_BN = rows_BTR.clamp(max=num_tokens - 1).flatten(1)
    return tokens_BU.gather(1, index_BN).view_as(rows_BTR)


def _to_lattice(values_BTR: Tensor, rows_BTR: Tensor, num_rows: int) -> Tensor:
    """(B, num_rows, T) with the values at their rows and -inf elsewhere."""
    batch_size, num_frames, width = values_BTR.shape
    lattice = values_BTR.new_full((batch_size, num_frames, num_rows + width), NEVER)
    return lattice.scatter_(2, rows_BTR, values_BTR)[:, :, :num_rows].transpose(1, 2)


def _from_lattice(lattice_BUT: Tensor, rows_BTR: Tensor) -> Tensor:
    """(B, T, R) values of a lattice at the rows that were kept; 0 where there is no such row."""
    padded = F.pad(lattice_BUT.transpose(1, 2), (0, rows_BTR.size(2)))
    return padded.gather(2, rows_BTR)
