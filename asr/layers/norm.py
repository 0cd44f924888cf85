"""Batch normalisation over padded sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from asr.layers.masks import zero_padding


class MaskedBatchNorm(nn.Module):
    """Batch normalisation (Ioffe and Szegedy, 2015) over the valid frames of a batch, however many there are.

    Statistics are fp32 in every precision mode, the running ones too. One valid frame has variance 0 and normalises to
    the bias; with none at all the running statistics serve and stay as they are.

    dim: width D. eps: added to the variance. momentum: weight of the newest batch in the running statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, frames_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """(B, T, D) in the type of the input; what it makes of padding is finite if the padding is."""
        x = frames_BTD.float()
        mean, var = self._batch_statistics(x, mask_BT) if self.training else (self.running_mean, self.running_var)
        scale = self.weight.float() * torch.rsqrt(var + self.eps)
        return torch.addcmul(self.bias.float(), x - mean, scale).to(frames_BTD.dtype)

    def _batch_statistics(self, x: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        count = mask_BT.sum()
        divisor = count.clamp(min=1)
        mean = zero_padding(x, mask_BT).sum((0, 1)) / divisor
        var = zero_padding(x - mean, mask_BT).square().sum((0, 1)) / divisor
        any_frame = count > 0
        self._update_running(mean.detach(), var.detach() * divisor / (count - 1).clamp(min=1), any_frame)
        return torch.where(any_frame, mean, self.running_mean), torch.where(any_frame, var, self.running_var)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, var: Tensor, any_frame: Tensor) -> None:
        momentum = self.momentum * any_frame
        # Out of place: the old tensors may be part of this step's graph.
        self.running_mean.copy_(torch.lerp(self.running_mean, mean, momentum))
        self.running_var.copy_(torch.lerp(self.running_var, var, momentum))

    def _apply(self, fn: Callable, recurse: bool = True):
        # module.to(torch.bfloat16) would round each update of a running statistic away.
        exact = {name: buffer for name, buffer in self.named_buffers(recurse=False)}
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != torch.float32:
                setattr(self, name, exact[name].to(device=buffer.device, dtype=torch.float32))
        return self
