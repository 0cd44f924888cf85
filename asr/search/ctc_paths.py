"""What the CTC searches share: log-probabilities that end with the utterance, the best path of given tokens."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from asr.types import Encoded


class CtcScorer(Protocol):
    """The part of a CTC head that a search needs."""

    blank_id: int

    def log_probs(self, encoded: Encoded) -> Tensor:
        """(B, T, V) float32 log-probabilities."""


def valid_log_probs(head: CtcScorer, encoded: Encoded) -> Tensor:
    """(B, T, V) float32 log-probabilities of `head` where every frame past the valid length is a certain blank.

    A certain blank changes neither tokens nor score, so that a search may run over the padded batch without masks.
    T is the longest valid length.
    """
    num_frames = int(encoded.lens.max()) if encoded.lens.numel() else 0
    log_probs = head.log_probs(encoded)[:, :num_frames].float()
    certain_blank = log_probs.new_full(log_probs.shape[-1:], -torch.inf)
    certain_blank[head.blank_id] = 0.0
    valid = torch.arange(num_frames, device=log_probs.device) < encoded.lens.to(log_probs.device)[:, None]
    return torch.where(valid[:, :, None], log_probs, certain_blank)


def emission_frames(log_probs: Tensor, tokens: list[list[int]], blank_id: int) -> list[list[int]]:
    """For every token the frame where the likeliest CTC path of the whole token sequence first emits it.

    log_probs: (B, T, V) as `valid_log_probs` gives them.
    tokens: B token lists, each one possible within its frames.
    Viterbi over the states blank, token 1, blank, token 2, ..., blank (Graves et al., 2006).
    """
    num_frames = log_probs.size(1)
    longest = max(map(len, tokens), default=0)
    if longest == 0:
        return [[] for _ in tokens]
    device = log_probs.device
    states_BS = torch.full((len(tokens), 2 * longest + 1), blank_id)
    for states, row in zip(states_BS, tokens, strict=True):
        states[1 : 2 * len(row) : 2] = torch.tensor(row, dtype=torch.int64)
    states_BS = states_BS.to(device)
    emissions_BTS = log_probs.gather(2, states_BS[:, None, :].expand(-1, num_frames, -1))
    may_skip_BS = torch.zeros_like(states_BS, dtype=torch.bool)
    may_skip_BS[:, 2:] = (states_BS[:, 2:] != blank_id) & (states_BS[:, 2:] != states_BS[:, :-2])

    scores_BS = emissions_BTS[:, 0].clone()
    scores_BS[:, 2:] = -torch.inf
    steps_back = []
    for frame in range(1, num_frames):
        padded = torch.nn.functional.pad(scores_BS, (2, 0), value=-torch.inf)
        skipped = padded[:, :-2].masked_fill(~may_skip_BS, -torch.inf)
        best, step = torch.stack([scores_BS, padded[:, 1:-1], skipped]).max(dim=0)
        scores_BS = best + emissions_BTS[:, frame]
        steps_back.append(step)

    lens_B = torch.tensor([len(row) for row in tokens], device=device)
    ends_B2 = torch.stack([2 * lens_B, (2 * lens_B - 1).clamp(min=0)], dim=1)
    state_B = ends_B2.gather(1, scores_BS.gather(1, ends_B2).argmax(dim=1, keepdim=True)).squeeze(1)
    path = [state_B]
    for step in reversed(steps_back):
        state_B = state_B - step.gather(1, state_B[:, None]).squeeze(1)
        path.append(state_B)
    path_BT = torch.stack(path[::-1], dim=1)
    emits_BT = path_BT % 2 == 1
    emits_BT[:, 1:] &= path_BT[:, 1:] != path_BT[:, :-1]
    return [row.nonzero().squeeze(1).tolist() for row in emits_BT.cpu()]
