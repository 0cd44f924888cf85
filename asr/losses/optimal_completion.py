"""Training on the model's own transcripts: optimal completion distillation (Sabour, Chan and Norouzi, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asr.layers.masks import length_mask


def optimal_completion_loss(
    logits_BSV: Tensor,
    given_BS: Tensor,
    given_lens_B: Tensor,
    tokens_BU: Tensor,
    token_lens_B: Tensor,
    end: int,
    smoothing: float,
) -> Tensor:
    """(B,) fp32 cross-entropies in nats of what best follows each prefix of what was given, summed over prefixes.

    logits_BSV: (B, S + 1, V) after 0 ... S tokens of `given_BS`; those after more than `given_lens_B` have no effect.
    smoothing: probability that the targets leave to all other tokens.

    Where the transcript itself was given this is `label_smoothing_loss`.
    """
    log_probs = F.log_softmax(logits_BSV.float(), dim=-1)
    best = optimal_next_tokens(given_BS, tokens_BU, token_lens_B, end, log_probs.size(-1))
    num_best = best.sum(-1)
    of_best = log_probs.masked_fill(~best, 0.0).sum(-1)
    losses = -of_best / num_best
    if smoothing > 0:
        others = (log_probs.sum(-1) - of_best) / (log_probs.size(-1) - num_best).clamp(min=1)
        losses = (1 - smoothing) * losses - smoothing * others
    return losses.masked_fill(~length_mask(given_lens_B + 1, losses.size(1)), 0.0).sum(1)


def optimal_next_tokens(given_BS: Tensor, tokens_BU: Tensor, token_lens_B: Tensor, end: int, vocab_size: int) -> Tensor:
    """(B, S + 1, V) mask of the tokens that let each prefix of `given_BS` end with the fewest errors.

    The best completions of a prefix go on from where its edit distance to a prefix of the transcript is smallest.
    """
    distances = prefix_distances(given_BS, tokens_BU)
    beyond = ~length_mask(token_lens_B + 1, distances.size(2)).unsqueeze(1)
    distances = distances.masked_fill(beyond, distances.size(1) + distances.size(2))
    best_BSU = (distances == distances.amin(2, keepdim=True)).float()
    following = F.pad(tokens_BU, (0, 1)).scatter(1, token_lens_B.unsqueeze(1), end)
    counts = best_BSU.new_zeros(*best_BSU.shape[:2], vocab_size)
    return counts.scatter_add_(2, following.unsqueeze(1).expand(-1, best_BSU.size(1), -1), best_BSU) > 0


def prefix_distances(given_BS: Tensor, tokens_BU: Tensor) -> Tensor:
    """(B, S + 1, U + 1) edit distances of all prefixes of the one to all prefixes of the other."""
    places = torch.arange(tokens_BU.size(1) + 1, device=tokens_BU.device)
    row = places.expand(len(tokens_BU), -1)
    rows = [row]
    for token_B in given_BS.unbind(1):
        replaced = row[:, :-1] + (tokens_BU != token_B.unsqueeze(1))
        inserted = row + 1
        row = torch.cat([inserted[:, :1], torch.minimum(replaced, inserted[:, 1:])], dim=1)
        # What remains is to leave out tokens of the transcript: row[j] = min over i <= j of row[i] + j - i.
        row = (row - places).cummin(1).values + places
        rows.append(row)
    return torch.stack(rows, dim=1)
