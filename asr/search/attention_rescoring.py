"""Second pass of U2 (Zhang et al., 2020): an attention decoder chooses among the likeliest transcripts of CTC."""

from __future__ import annotations

import torch

from asr.heads.attention import Attention
from asr.heads.ctc import CTC
from asr.heads.joint import Joint
from asr.search.ctc_paths import emission_frames, valid_log_probs
from asr.search.ctc_prefix_beam_search import likeliest_prefixes
from asr.types import Encoded, Hypothesis


@torch.no_grad()
def attention_rescoring(
    head: Joint,
    encoded: Encoded,
    beam: int = 10,
    ctc_weight: float = 0.5,
    reverse_weight: float | None = None,
    tokens_per_frame: int = 20,
) -> list[Hypothesis]:
    """The transcript of the CTC beam with the best sum of decoder and weighted CTC log-probabilities.

    head: a joint head with heads "ctc" and "attention".
    beam, tokens_per_frame: of the CTC prefix beam search.
    ctc_weight: of the CTC log-probability.
    reverse_weight: share of the decoder that reads from right to left in the decoders' part; None is the share it has
        in training.

    Returns one hypothesis per utterance; a token's frame is where the likeliest CTC path first emits it.
    Raises ValueError for a reverse_weight without such a decoder.
    """
    ctc, decoder = head.heads["ctc"], head.heads["attention"]
    assert isinstance(ctc, CTC) and isinstance(decoder, Attention)
    if reverse_weight is None:
        reverse_weight = decoder.reverse_weight
    if not 0.0 <= reverse_weight <= 1.0 or (reverse_weight > 0.0 and decoder.reverse_decoder is None):
        raise ValueError(
            f"search.reverse_weight={reverse_weight}: 0 to 1 is wanted, and above 0 the run needs a decoder from right "
            "to left (head.heads.attention.reverse_layers)"
        )
    if not len(encoded.lens):
        return []
    log_probs = valid_log_probs(ctc, encoded)
    prefixes = likeliest_prefixes(log_probs, ctc.blank_id, beam, tokens_per_frame)
    ctc_BK, longest = prefixes.total, int(prefixes.lens.max())
    tokens_NU, lens_N = prefixes.tokens[:, :, :longest].flatten(0, 1), prefixes.lens.flatten()

    decoder_N = (1 - reverse_weight) * decoder.log_likelihood(encoded, tokens_NU, lens_N, reverse=False)
    if reverse_weight > 0.0:
        decoder_N = decoder_N + reverse_weight * decoder.log_likelihood(encoded, tokens_NU, lens_N, reverse=True)
    # An empty place of the beam holds no transcript, even where CTC counts for nothing.
    scores_BK = (decoder_N.view_as(ctc_BK) + ctc_weight * ctc_BK).masked_fill(ctc_BK == -torch.inf, -torch.inf)
    scores_B, best_B = scores_BK.max(dim=1)
    rows = range(len(best_B))
    tokens = [prefixes.tokens[row, best_B[row], : prefixes.lens[row, best_B[row]]].tolist() for row in rows]
    frames = emission_frames(log_probs, tokens, ctc.blank_id)
    return [Hypothesis(*fields) for fields in zip(tokens, frames, scores_B.tolist(), strict=True)]
