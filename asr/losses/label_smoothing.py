"""Cross-entropy with smoothed targets (Szegedy et al., 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asr.layers.masks import length_mask


def label_smoothing_loss(logits_BUV: Tensor, targets_BU: Tensor, lens_B: Tensor, smoothing: float) -> Tensor:
    """(B,) fp32 cross-entropies in nats, each summed over the first `lens_B` targets; what follows has no effect.

    A target has probability 1 - smoothing and every other token smoothing / (V - 1). Uniform logits give log(V) for
    each target whatever the smoothing. WeNet and ESPnet subtract the entropy of the smoothed target, a constant.
    """
    log_probs = F.log_softmax(logits_BUV.float(), dim=-1)
    truth = log_probs.gather(2, targets_BU.unsqueeze(2)).squeeze(2)
    losses_BU = -truth
    if smoothing > 0:
        others = (log_probs.sum(-1) - truth) / (log_probs.size(-1) - 1)
        losses_BU = -(1 - smoothing) * truth - smoothing * others
    return losses_BU.masked_fill(~length_mask(lens_B, targets_BU.size(1)), 0.0).sum(1)
