"""The Zipformer's convolution module (Yao et al., 2023): the Conformer's without its norm."""

from __future__ import annotations

from torch import Tensor, nn

from asr.encoders.zipformer.activation import swoosh_r
from asr.encoders.zipformer.linear import scaled_linear
from asr.encoders.zipformer.whiten import Whiten
from asr.layers.balancer import Balancer
from asr.layers.convolution import convolve_depthwise
from asr.layers.masks import zero_padding
from asr.layers.schedule import PiecewiseLinear


class ConvolutionModule(nn.Module):
    """Pointwise, gate, depthwise over time, SwooshR, pointwise.

    dim: width D. kernel_size: frames of the depthwise kernel, odd.
    """

    def __init__(self, dim: int, kernel_size: int):
        super().__init__()
        self.project = nn.Linear(dim, 2 * dim)
        # Where the gates' inputs begin very large, their gradients are too sparse to learn by.
        self.balance_gate = Balancer(
            PiecewiseLinear((0.0, 0.05), (8000.0, 0.025)), 1.0, 1.5, PiecewiseLinear((0.0, 5.0), (8000.0, 10.0))
        )
        self.depthwise = nn.Conv1d(dim, dim, kernel_size, groups=dim, padding=kernel_size // 2)
        self.balance = Balancer(
            PiecewiseLinear((0.0, 0.1), (8000.0, 0.05)), 1.0, PiecewiseLinear((0.0, 0.2), (20000.0, 0.5)), 10.0
        )
        self.whiten = Whiten(7.5, 15.0)
        self.output = scaled_linear(dim, dim, 0.05)

    def forward(self, frames_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """(B, T, D) of frames (B, T, D); padding, masked out before the kernel passes over it, must be finite."""
        x, gate = self.project(frames_BTD).chunk(2, dim=-1)
        x = zero_padding(x * self.balance_gate(gate, mask_BT).sigmoid(), mask_BT)
        x = convolve_depthwise(x, self.depthwise)
        x = self.whiten(self.balance(x, mask_BT), mask_BT)
        return self.output(swoosh_r(x))
