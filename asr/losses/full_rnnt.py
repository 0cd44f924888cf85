"""The transducer's loss over the whole lattice, by torchaudio: a cross-check of the pruned one, and far more costly."""

from __future__ import annotations

import torch
from torch import Tensor
from torchaudio.functional import rnnt_loss

from asr.losses.pruned_rnnt import Transcripts


def full_loss(logits_BTUV: Tensor, transcripts: Transcripts) -> Tensor:
    """Losses (B,) of the joiner's logits (B, T, U + 1, V) in the regular topology (Graves, 2012).

    An utterance of no frames and no tokens has loss 0 and no gradient.
    """
    present_B = transcripts.frame_lens_B > 0
    frame_lens_B = transcripts.frame_lens_B.clamp(min=1).int()
    token_lens_B = transcripts.token_lens_B.int()
    # torchaudio insists on sizes equal to the longest lengths, and its CPU kernel on fp32 and int32.
    num_frames, num_tokens = int(frame_lens_B.max()), int(token_lens_B.max())
    losses_B = rnnt_loss(
        logits_BTUV[:, :num_frames, : num_tokens + 1].float().contiguous(),
        transcripts.tokens_BU[:, :num_tokens].int().contiguous(),
        frame_lens_B,
        token_lens_B,
        blank=transcripts.blank_id,
        reduction="none",
    )
    return torch.where(present_B, losses_B, 0.0)
