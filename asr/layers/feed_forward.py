"""The Conformer's position-wise feed-forward module (Gulati et al., 2020, figure 4)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from asr.layers.dropout import Dropout

ACTIVATIONS = {"swish": F.silu, "relu": F.relu}


class FeedForward(nn.Module):
    """Linear, activation, dropout, linear, dropout.

    dim: width D. hidden_dim: width between the two linear layers. activation: "swish" or "relu".
    """

    def __init__(self, dim: int, hidden_dim: int, dropout: float = 0.0, activation: str = "swish"):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.expand = nn.Linear(dim, hidden_dim)
        self.contract = nn.Linear(hidden_dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, frames_BTD: Tensor) -> Tensor:
        """(B, T, D) of frames (B, T, D)."""
        hidden = self.dropout(self.activation(self.expand(frames_BTD)))
        return self.dropout(self.contract(hidden))
