"""Augmentation of normalised features during training."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NoAugment(nn.Module):
    """Features as they are."""

    def forward(self, features_BTF: Tensor, lens_B: Tensor, num_views: int = 1) -> Tensor:
        return features_BTF if num_views == 1 else features_BTF.repeat(num_views, 1, 1)


class SpecAugment(nn.Module):
    """Time warping, frequency masks and time masks (Park et al., 2019), drawn anew for each utterance while training.

    num_time_masks, max_time_mask_width: at most so many masks of at most so many frames.
    max_time_mask_fraction: all time masks together cover at most this share of an utterance: short utterances get
        fewer and narrower masks, as in Lhotse.
    num_freq_masks, max_freq_mask_width: so many masks of 0 to so many mel bins.
    time_warp_factor: a random frame moves by up to so many frames, and the frames on both sides are stretched or
        squeezed by linear interpolation; at most a quarter of the utterance. 0 turns warping off.
    num_time_substitutions, max_time_substitution_width: so many spans of 1 to so many frames are replaced by frames
        that lie a random time before them (U2++, Wu et al., 2021).
    probability: share of the utterances that are augmented.
    fill: value of masked features; 0 is the mean of normalised features.

    Padding is neither masked nor read, any length from 0 up is legal, and what happens to an utterance does not depend
    on the padding beside it. Draws come from the global generator of the features' device.

    Raises ValueError for negative numbers and for shares outside 0 to 1.
    """

    def __init__(
        self,
        num_time_masks: int = 5,
        max_time_mask_width: int = 40,
        max_time_mask_fraction: float = 0.15,
        num_freq_masks: int = 2,
        max_freq_mask_width: int = 20,
        time_warp_factor: int = 20,
        probability: float = 0.9,
        fill: float = 0.0,
        num_time_substitutions: int = 0,
        max_time_substitution_width: int = 30,
    ) -> None:
        super().__init__()
        counts = {
            "num_time_masks": num_time_masks,
            "max_time_mask_width": max_time_mask_width,
            "num_freq_masks": num_freq_masks,
            "max_freq_mask_width": max_freq_mask_width,
            "time_warp_factor": time_warp_factor,
            "num_time_substitutions": num_time_substitutions,
            "max_time_substitution_width": max_time_substitution_width,
        }
        for name, value in counts.items():
            if value < 0:
                raise ValueError(f"augment.{name}={value}: must be 0 or more")
        for name, share in {"max_time_mask_fraction": max_time_mask_fraction, "probability": probability}.items():
            if not 0 <= share <= 1:
                raise ValueError(f"augment.{name}={share}: must lie between 0 and 1")
        self.num_time_masks = num_time_masks
        self.max_time_mask_width = max_time_mask_width
        self.max_time_mask_fraction = max_time_mask_fraction
        self.num_freq_masks = num_freq_masks
        self.max_freq_mask_width = max_freq_mask_width
        self.time_warp_factor = time_warp_factor
        self.probability = probability
        self.fill = fill
        self.num_time_substitutions = num_time_substitutions
        self.max_time_substitution_width = max_time_substitution_width

    @torch.no_grad()
    def forward(self, features_BTF: Tensor, lens_B: Tensor, num_views: int = 1) -> Tensor:
        """(B, T, F) features and (B,) valid frames -> (num_views * B, T, F), in eval mode the features as they are.

        The first views of all utterances come first. Views of an utterance share its time warp, so that their frames
        speak of the same moments, and differ in their masks.
        """
        if not self.training or features_BTF.numel() == 0:
            return features_BTF if num_views == 1 else features_BTF.repeat(num_views, 1, 1)
        lens = lens_B.to(features_BTF.device)
        chosen = torch.rand(len(lens), device=lens.device) < self.probability
        if self.time_warp_factor:
            features_BTF = self._warp(features_BTF, torch.where(chosen, lens, 0))
        if num_views > 1:
            features_BTF = features_BTF.repeat(num_views, 1, 1)
            lens, chosen = lens.repeat(num_views), chosen.repeat(num_views)
        if self.num_time_substitutions:
            features_BTF = self._substitute(features_BTF, torch.where(chosen, lens, 0))
        return self._mask(features_BTF, lens, chosen)

    def _mask(self, features_BTF: Tensor, lens: Tensor, chosen: Tensor) -> Tensor:
        num_utterances, num_frames, num_bins = features_BTF.shape
        in_time = spans(*self._draw_time_masks(lens), num_frames)
        in_freq = spans(*self._draw_freq_masks(num_utterances, num_bins, lens.device), num_bins)
        valid = torch.arange(num_frames, device=lens.device) < torch.where(chosen, lens, 0)[:, None]
        mask_BTF = (in_time[:, :, None] | in_freq[:, None, :]) & valid[:, :, None]
        return features_BTF.masked_fill(mask_BTF, self.fill)

    def _warp(self, features_BTF: Tensor, lens: Tensor) -> Tensor:
        farthest = torch.minimum(torch.full_like(lens, self.time_warp_factor), lens // 4)
        centre = farthest + uniform_integer(lens - 2 * farthest)
        target = centre - farthest + uniform_integer(2 * farthest + 1)
        last = (lens - 1).clamp(min=0)
        frame = torch.arange(features_BTF.shape[1], device=lens.device).expand(len(lens), -1)
        left = frame * (centre / target.clamp(min=1))[:, None]
        right = centre[:, None] + (frame - target[:, None]) * ((last - centre) / (last - target).clamp(min=1))[:, None]
        source = torch.where(frame < target[:, None], left, right)
        source = torch.where(frame < lens[:, None], torch.minimum(source.clamp(min=0), last[:, None]), frame)
        before = source.floor().long()
        after = torch.where(frame < lens[:, None], torch.minimum(before + 1, last[:, None]), before)
        weight = (source - before).to(features_BTF.dtype)[..., None]
        rows = torch.arange(len(lens), device=lens.device)[:, None]
        return torch.lerp(features_BTF[rows, before], features_BTF[rows, after], weight)

    def _substitute(self, features_BTF: Tensor, lens: Tensor) -> Tensor:
        starts = uniform_integer(lens[:, None].expand(-1, self.num_time_substitutions))
        widths = 1 + uniform_integer(torch.full_like(starts, self.max_time_substitution_width))
        back = uniform_integer(starts + 1)
        frame = torch.arange(features_BTF.shape[1], device=lens.device).expand(len(lens), -1)
        source = frame
        for start, width, by in zip(starts.T[..., None], widths.T[..., None], back.T[..., None], strict=True):
            within = (frame >= start) & (frame < torch.minimum(start + width, lens[:, None]))
            source = torch.where(within, frame - by, source)
        return features_BTF[torch.arange(len(lens), device=lens.device)[:, None], source]

    def _draw_time_masks(self, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Starts and widths, each (B, num_time_masks)."""
        budget = (lens * self.max_time_mask_fraction).long()
        width_limit = max(self.max_time_mask_width, 1)
        wanted = torch.div(budget + width_limit - 1, width_limit, rounding_mode="floor").clamp(max=self.num_time_masks)
        widest = torch.div(budget, wanted.clamp(min=1), rounding_mode="floor").clamp(max=self.max_time_mask_width)
        index = torch.arange(self.num_time_masks, device=lens.device)
        widest = torch.where(index < wanted[:, None], widest[:, None], 0)
        widths = uniform_integer(widest + 1)
        return uniform_integer(lens[:, None] - widths + 1), widths

    def _draw_freq_masks(self, num_utterances: int, num_bins: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Starts and widths, each (B, num_freq_masks)."""
        shape = (num_utterances, self.num_freq_masks)
        widths = uniform_integer(torch.full(shape, min(self.max_freq_mask_width, num_bins) + 1, device=device))
        return uniform_integer(num_bins - widths + 1), widths


def uniform_integer(bound: Tensor) -> Tensor:
    """Integers of 0 .. bound - 1 with equal probability, one for each entry of `bound`; 0 where bound is below 1."""
    drawn = (torch.rand(bound.shape, device=bound.device) * bound).long()
    return torch.minimum(drawn, bound - 1).clamp(min=0)


def spans(starts: Tensor, widths: Tensor, length: int) -> Tensor:
    """(B, length) mask that is True where any of the (B, N) spans start .. start + width - 1 lies."""
    position = torch.arange(length, device=starts.device)[:, None]
    return ((position >= starts[:, None]) & (position < (starts + widths)[:, None])).any(dim=2)
