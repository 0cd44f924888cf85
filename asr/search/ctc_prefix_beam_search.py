"""CTC prefix beam search, batched over utterances and beams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asr.search.ctc_paths import CtcScorer, emission_frames, valid_log_probs
from asr.types import Encoded, Hypothesis

NEVER = -torch.inf


@dataclass
class Prefixes:
    """K prefixes of every utterance, the likeliest first. A slot whose scores are both -inf is empty.

    blank, token: (B, K) log-probability of all paths of the prefix that end in a blank, and in its last token.
    tokens: (B, K, U) the prefix, of which the first `lens` (B, K) count.
    within: (B, K, K) whether prefix i is the beginning of prefix j (or equal to it).
    """

    blank: Tensor
    token: Tensor
    tokens: Tensor
    lens: Tensor
    within: Tensor

    @property
    def total(self) -> Tensor:
        """(B, K) log-probability of the prefix."""
        return torch.logaddexp(self.blank, self.token)

    @property
    def last(self) -> Tensor:
        """(B, K) last token, -1 for the empty prefix."""
        last = self.tokens.gather(2, (self.lens - 1).clamp(min=0)[:, :, None]).squeeze(2)
        return last.masked_fill(self.lens == 0, -1)


@torch.no_grad()
def ctc_prefix_beam_search(
    head: CtcScorer, encoded: Encoded, beam: int = 4, tokens_per_frame: int = 20
) -> list[Hypothesis]:
    """The token sequence with the largest sum over all its CTC paths (Graves & Jaitly, 2014; Hannun et al., 2014).

    beam: prefixes kept after every frame; may exceed the vocabulary.
    tokens_per_frame: a prefix is extended only by that many likeliest tokens of a frame.

    Returns one hypothesis per utterance. The score is the log-probability of the tokens over the paths that stayed in
    the beam; a token's frame is where the likeliest path of the hypothesis first emits it.
    """
    log_probs = valid_log_probs(head, encoded)
    prefixes = likeliest_prefixes(log_probs, head.blank_id, beam, tokens_per_frame)
    tokens = [
        row[:length].tolist()
        for row, length in zip(prefixes.tokens[:, 0].cpu(), prefixes.lens[:, 0].tolist(), strict=True)
    ]
    frames = emission_frames(log_probs, tokens, head.blank_id)
    scores = prefixes.total[:, 0].tolist()
    return [Hypothesis(*fields) for fields in zip(tokens, frames, scores, strict=True)]


def likeliest_prefixes(log_probs: Tensor, blank_id: int, beam: int, tokens_per_frame: int) -> Prefixes:
    """The `beam` likeliest token sequences of log-probabilities (B, T, V) as `valid_log_probs` gives them."""
    if beam < 1 or tokens_per_frame < 1:
        raise ValueError(f"beam={beam} and tokens_per_frame={tokens_per_frame} must both be at least 1")
    batch_size, num_frames, vocab_size = log_probs.shape
    without_blank = log_probs.clone()
    without_blank[:, :, blank_id] = NEVER
    likeliest_BTC = without_blank.topk(min(tokens_per_frame, vocab_size - 1), dim=2)

    prefixes = _empty_prefixes(batch_size, beam, num_frames, log_probs)
    for frame in range(num_frames):
        prefixes = _next_prefixes(
            prefixes,
            log_probs[:, frame],
            likeliest_BTC.values[:, frame],
            likeliest_BTC.indices[:, frame],
            blank_id,
            longest=frame,
        )
    return prefixes


def _empty_prefixes(batch_size: int, beam: int, num_frames: int, like: Tensor) -> Prefixes:
    blank = like.new_full((batch_size, beam), NEVER)
    blank[:, 0] = 0.0
    return Prefixes(
        blank=blank,
        token=torch.full_like(blank, NEVER),
        tokens=torch.zeros(batch_size, beam, max(num_frames, 1), dtype=torch.int64, device=like.device),
        lens=torch.zeros(batch_size, beam, dtype=torch.int64, device=like.device),
        within=torch.ones(batch_size, beam, beam, dtype=torch.bool, device=like.device),
    )


def _next_prefixes(
    old: Prefixes, log_probs_BV: Tensor, values_BC: Tensor, tokens_BC: Tensor, blank_id: int, longest: int
) -> Prefixes:
    """The K likeliest prefixes after one more frame; no prefix so far has more than `longest` tokens."""
    beam, num_extensions = old.blank.size(1), values_BC.size(1)
    stay_blank, stay_token, extended_BKC = _candidates(old, log_probs_BV, values_BC, tokens_BC, blank_id)
    candidates = torch.cat([torch.logaddexp(stay_blank, stay_token), extended_BKC.flatten(1)], dim=1)
    scores, chosen = candidates.topk(beam, dim=1)
    extends = chosen >= beam
    extension = (chosen - beam).clamp(min=0)
    source = torch.where(extends, extension // max(num_extensions, 1), chosen)
    appended = tokens_BC.gather(1, extension % num_extensions) if num_extensions else torch.zeros_like(source)

    used = slice(longest + 1)
    old_lens = old.lens.gather(1, source)
    tokens = old.tokens
    tokens[:, :, used] = tokens[:, :, used].gather(1, source[:, :, None].expand(-1, -1, longest + 1))
    # Where a prefix stays, this fills a position behind its end, which does not count.
    tokens.scatter_(2, old_lens[:, :, None], appended[:, :, None])
    lens = old_lens + extends

    # Prefix i + token begins prefix j where prefix i did and j holds that token at the position that i has filled.
    within_BKK = old.within.gather(1, source[:, :, None].expand(-1, -1, beam))
    within_BKK = within_BKK.gather(2, source[:, None, :].expand(-1, beam, -1))
    opposite_BKK = tokens.gather(2, old_lens[:, None, :].expand(-1, beam, -1)).transpose(1, 2)
    reaches_BKK = (lens[:, None, :] > old_lens[:, :, None]) & (opposite_BKK == appended[:, :, None])
    return Prefixes(
        blank=stay_blank.gather(1, source).masked_fill(extends, NEVER),
        token=torch.where(extends, scores, stay_token.gather(1, source)),
        tokens=tokens,
        lens=lens,
        within=within_BKK & (~extends[:, :, None] | reaches_BKK),
    )


def _candidates(
    old: Prefixes, log_probs_BV: Tensor, values_BC: Tensor, tokens_BC: Tensor, blank_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the K prefixes as they are, ending in blank and in their last token (B, K), and extended (B, K, C).

    Two candidates are the same prefix only where the extension of prefix i is prefix j, which stands in the beam
    already: its paths are added to prefix j, and the extension gets -inf.
    """
    total, last = old.total, old.last
    alive = total > NEVER
    parent_BKK = old.within & (old.lens[:, None, :] == old.lens[:, :, None] + 1)
    parent_BKK &= alive[:, :, None] & alive[:, None, :]

    # After its own last token a prefix grows only across a blank.
    repeats_BKK = last[:, :, None] == last[:, None, :]
    from_parent_BKK = torch.where(repeats_BKK, old.blank[:, :, None], total[:, :, None])
    from_parent = from_parent_BKK.masked_fill(~parent_BKK, NEVER).amax(dim=1)
    last_log_prob = log_probs_BV.gather(1, last.clamp(min=0)).masked_fill(last < 0, NEVER)
    stay_blank = total + log_probs_BV[:, blank_id, None]
    stay_token = torch.logaddexp(old.token, from_parent) + last_log_prob

    repeats_BKC = last[:, :, None] == tokens_BC[:, None, :]
    extended_BKC = torch.where(repeats_BKC, old.blank[:, :, None], total[:, :, None]) + values_BC[:, None, :]
    in_beam_BKC = torch.bmm(parent_BKK.float(), repeats_BKC.float()) > 0
    return stay_blank, stay_token, extended_BKC.masked_fill(in_beam_BKC, NEVER)
