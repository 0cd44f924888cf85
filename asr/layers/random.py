"""Random decisions in training."""

from __future__ import annotations

import torch


def chance(probability: float) -> bool:
    """True with this probability, by PyTorch's CPU generator, so that a GPU need not be waited for."""
    return bool(probability > 0.0) and float(torch.rand(())) < probability
