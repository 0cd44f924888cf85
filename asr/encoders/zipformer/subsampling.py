"""The Zipformer's front end: three convolutions and a ConvNeXt layer, to half the frames (Yao et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from asr.encoders.zipformer.activation import swoosh_l, swoosh_r
from asr.encoders.zipformer.dropout import ChannelDropout, Skip, add_kept
from asr.encoders.zipformer.linear import scaled_linear
from asr.encoders.zipformer.norm import BiasNorm
from asr.encoders.zipformer.whiten import Whiten
from asr.layers.balancer import Balancer
from asr.layers.convolve import Conv2d, computed_on_cpu_in
from asr.layers.masks import length_mask, zero_padding
from asr.layers.schedule import PiecewiseLinear, Schedulable

# The least input that leaves a frame.
MIN_FRAMES = 9


class ConvNeXtSubsampling(nn.Module):
    """Convolutions without padding in time, strides 1, 2, 1, so that T' = (T - 7) // 2; a ConvNeXt layer; a projection.

    Images are laid out (B, T, F, C) in memory.

    input_dim: mel bins F, at least 7. output_dim: width D. channels: of the three convolutions.
    dropout: of the output's channels. mask_padding: see `Zipformer`.
    """

    def __init__(
        self, input_dim: int, output_dim: int, channels: Sequence[int], dropout: Schedulable, mask_padding: bool = True
    ):
        super().__init__()
        self.mask_padding = mask_padding
        first, second, third = channels
        self.conv1 = Conv2d(1, first, 3, padding=(0, 1))
        self.balance1 = Balancer(max_abs=1.0)
        self.conv2 = Conv2d(first, second, 3, stride=2)
        self.balance2 = Balancer(max_abs=4.0)
        self.conv3 = Conv2d(second, third, 3, stride=(1, 2))
        self.balance3 = Balancer(max_abs=4.0)
        self.convnext = ConvNeXt(third)
        self.project = nn.Linear(third * (((input_dim - 1) // 2 - 1) // 2), output_dim)
        self.whiten = Whiten(4.0, 8.0, strength=0.02)
        self.norm = BiasNorm(output_dim)
        self.dropout = ChannelDropout(dropout)
        self.to(memory_format=torch.channels_last)

    def output_lens(self, lens_B: Tensor) -> Tensor:
        """Frames that remain of inputs of these lengths; 0 for those too short."""
        return ((lens_B - 7) // 2).clamp(min=0)

    def forward(self, features_BTF: Tensor, lens_B: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T', D) and their lengths. T' is at least 1, so that later layers never meet an empty axis."""
        features_BTF = F.pad(features_BTF, (0, 0, 0, max(0, MIN_FRAMES - features_BTF.size(1))))
        new_lens_B = self.output_lens(lens_B)
        if not self.mask_padding:
            lens_B = torch.full_like(lens_B, features_BTF.size(1))
        # No valid frame sees padding before the ConvNeXt layer; here it must only be finite.
        x = zero_padding(features_BTF, length_mask(lens_B, features_BTF.size(1))).unsqueeze(-1)
        x = _scale_gradient(_convolve(x, self.conv1), 0.2) if self.training else _convolve(x, self.conv1)
        x = swoosh_r(self.balance1(x, _valid(lens_B - 2, x)))
        x = _convolve(x, self.conv2)
        x = swoosh_r(self.balance2(x, _valid((lens_B - 3) // 2, x)))
        x = _convolve(x, self.conv3)
        mask_BT = _valid((lens_B - 7) // 2, x)
        x = swoosh_r(self.balance3(x, mask_BT))
        x = self.convnext(x, mask_BT)
        x = self.whiten(self.project(x.flatten(2)), mask_BT)
        return self.dropout(self.norm(x)), new_lens_B


class ConvNeXt(nn.Module):
    """Depthwise 7x7, pointwise to three times the channels, SwooshL, pointwise back, and a residual (Liu et al., 2022).

    channels: C. In training an utterance passes it by, with a probability that falls from 0.2 to 0.015.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.depthwise = Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.expand = nn.Linear(channels, 3 * channels)
        self.balance_hidden = Balancer(0.3, 1.0, 0.75, 5.0)
        self.contract = scaled_linear(3 * channels, channels, 0.01)
        self.skip = Skip(PiecewiseLinear((0.0, 0.2), (20000.0, 0.015)))
        self.balance = Balancer(0.4, 0.6, 1.0, 6.0)
        self.whiten = Whiten(5.0, 5.0)

    def forward(self, images_BTFC: Tensor, mask_BT: Tensor) -> Tensor:
        x = images_BTFC.masked_fill(~mask_BT[:, :, None, None], 0.0)
        change = self.expand(_convolve(x, self.depthwise))
        change = self.contract(swoosh_l(self.balance_hidden(change, mask_BT)))
        x = add_kept(x, change, self.skip.kept(x))
        return self.whiten(self.balance(x, mask_BT), mask_BT)


def _convolve(images_BTFC: Tensor, convolution: nn.Conv2d) -> Tensor:
    """The convolution of images that lie channels-last in memory, as its result does."""
    images = images_BTFC.permute(0, 3, 1, 2)
    if computed_on_cpu_in(torch.float32, images) and convolution.in_channels > convolution.groups == 1:
        images = _Convolve.apply(images, convolution.weight, convolution.bias, convolution.stride)
    else:
        images = convolution(images)
    return images.permute(0, 2, 3, 1)


class _Convolve(torch.autograd.Function):
    """A convolution without padding. Its weight gradient is a matrix product, in a third of the time oneDNN needs."""

    @staticmethod
    def forward(ctx, images_BCTF: Tensor, weight: Tensor, bias: Tensor, stride: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(images_BCTF, weight)
        ctx.stride = stride
        return F.conv2d(images_BCTF, weight, bias, stride)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        images, weight = ctx.saved_tensors
        grad_images = conv2d_input(images.shape, weight, grad, ctx.stride)
        num_out, num_in, height, width = weight.shape
        windows = images.unfold(2, height, ctx.stride[0]).unfold(3, width, ctx.stride[1])
        windows = windows.permute(0, 2, 3, 4, 5, 1).reshape(-1, height * width * num_in)
        grad_rows = grad.permute(0, 2, 3, 1).flatten(0, 2)
        grad_weight = (grad_rows.t() @ windows).view(num_out, height, width, num_in).permute(0, 3, 1, 2)
        return grad_images, grad_weight, grad_rows.sum(0), None


def _valid(lens_B: Tensor, images_BTFC: Tensor) -> Tensor:
    return length_mask(lens_B, images_BTFC.size(1))


def _scale_gradient(x: Tensor, scale: float) -> Tensor:
    return _ScaleGradient.apply(x, scale)


class _ScaleGradient(torch.autograd.Function):
    """Keeps the gradients of the first convolution, sums over all frames and bins, in the range of fp16."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
