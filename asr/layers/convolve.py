"""Convolutions whose backward pass is quick in fp16 on a CPU too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight


def convolve(
    images_BCHW: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    groups: int = 1,
) -> Tensor:
    """`F.conv2d`, with the gradients that it has."""
    if computed_on_cpu_in(torch.float16, images_BCHW):
        half = (images_BCHW.half(), weight.half(), None if bias is None else bias.half())
        return _HalfConvolution.apply(*half, stride, padding, groups)
    return F.conv2d(images_BCHW, weight, bias, stride, padding, groups=groups)


def computed_on_cpu_in(dtype: torch.dtype, x: Tensor) -> bool:
    """Whether convolutions of x are computed on a CPU and in that type, be it x's own or autocast's."""
    computed = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return x.device.type == "cpu" and computed == dtype


class Conv1d(nn.Conv1d):
    """`nn.Conv1d` by `convolve`: without dilation, padded with zeros."""

    def forward(self, frames_BDT: Tensor) -> Tensor:
        stride, padding = (1, self.stride[0]), (0, int(self.padding[0]))
        weight = self.weight.unsqueeze(2)
        return convolve(frames_BDT.unsqueeze(2), weight, self.bias, stride, padding, self.groups).squeeze(2)


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` by `convolve`: without dilation, padded with zeros."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        stride, padding = (self.stride[0], self.stride[1]), (int(self.padding[0]), int(self.padding[1]))
        return convolve(images_BCHW, self.weight, self.bias, stride, padding, self.groups)


class _HalfConvolution(torch.autograd.Function):
    """In fp16, but for the sum over all positions that the gradient of the weights is: oneDNN takes hundreds of times
    as long for that one as in fp32, even where the processor computes in fp16. Sums that fp16 cannot hold are inf."""

    @staticmethod
    def forward(ctx, images_BCHW: Tensor, weight: Tensor, bias: Tensor | None, stride, padding, groups) -> Tensor:
        ctx.save_for_backward(images_BCHW, weight)
        ctx.biased = bias is not None
        ctx.options = {"stride": stride, "padding": padding, "groups": groups}
        return F.conv2d(images_BCHW, weight, bias, **ctx.options)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        grad_images = conv2d_input(images.shape, weight, grad, **ctx.options) if ctx.needs_input_grad[0] else None
        wide = grad.float()
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = conv2d_weight(images.float(), weight.shape, wide, **ctx.options).half()
        grad_bias = wide.sum((0, 2, 3)).half() if ctx.biased else None
        return grad_images, grad_weight, grad_bias, None, None, None
