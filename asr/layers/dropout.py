"""Dropout that does not dominate the step on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 1 << 16


class Dropout(nn.Module):
    """Inverted dropout (Srivastava et al., 2014) with probability `p`, active in training mode only.

    On a GPU this is PyTorch's own. On a CPU, PyTorch draws one Bernoulli variable per element, which costs more than
    the matrix products of a small Conformer; here four 16-bit draws are cut from every 64-bit number of the same global
    generator. `p` is then rounded to 1/65536, and the kept values are scaled by exactly the inverse of their share.
    """

    def __init__(self, p: float):
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout probability {p} must lie in [0, 1)")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        return x * _scaled_keep_mask(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _scaled_keep_mask(x: Tensor, p: float) -> Tensor:
    num_dropped = min(round(p * _LEVELS), _LEVELS - 1)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
    draws = bits.view(torch.int16)[: x.numel()].view(x.shape)
    keep = draws >= num_dropped - _LEVELS // 2
    return keep.to(x.dtype).mul_(_LEVELS / (_LEVELS - num_dropped))
