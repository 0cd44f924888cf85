"""Mean and variance normalisation of features."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

MODES = ("global", "utterance", "per_feature", "none", "raw")
_LEAST_STD = 0.1


class FeatureNorm(nn.Module):
    """Features to zero mean and unit standard deviation per mel bin, over valid frames only.

    mode: "global" uses `mean` and `std` of the training set, set by `fit` and kept in the state dict;
        "utterance" those of each utterance; "per_feature" the same as NeMo takes them; "none" leaves features alone but
        for the padding; "raw" leaves that too, for encoders that were trained to see it.

    A standard deviation below 0.1 counts as 0.1, so that silence, a single frame and dead bins stay finite and small;
    NeMo adds 1e-5 to the one over T - 1 frames.
    Output and statistics are float32 whatever the type of the model.

    Raises ValueError for an unknown mode.
    """

    mean: Tensor
    std: Tensor
    num_frames: Tensor

    def __init__(self, num_mel_bins: int = 80, mode: str = "global") -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"features.normalise.mode={mode!r}: choose one of {', '.join(MODES)}")
        self.mode = mode
        self.register_buffer("mean", torch.zeros(num_mel_bins))
        self.register_buffer("std", torch.ones(num_mel_bins))
        self.register_buffer("num_frames", torch.zeros((), dtype=torch.int64))

    @property
    def needs_fit(self) -> bool:
        """Whether statistics of the training set are wanted and not there yet."""
        return self.mode == "global" and int(self.num_frames) == 0

    @torch.no_grad()
    def fit(self, features: Iterable[Tensor]) -> None:
        """Take mean and standard deviation from an iterable of (T, F) features, in float64.

        Raises ValueError where there is no frame at all or a feature is not finite.
        """
        total = torch.zeros(len(self.mean), dtype=torch.float64)
        # Sums about a typical log-mel value lose fewer digits than sums about 0.
        squares, origin, count = torch.zeros_like(total), -8.0, 0
        for index, features_TF in enumerate(features):
            shifted = features_TF.detach().double().cpu() - origin
            if not bool(shifted.isfinite().all()):
                raise ValueError(f"features of training item {index} are not finite: check its audio for NaN samples")
            total += shifted.sum(dim=0)
            squares += shifted.square().sum(dim=0)
            count += len(shifted)
        if count == 0:
            raise ValueError("feature statistics need at least one frame of training audio, and there is none")
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        self.mean.copy_(mean + origin)
        self.std.copy_(variance.sqrt().clamp(min=_LEAST_STD))
        self.num_frames.fill_(count)

    def forward(self, features_BTF: Tensor, lens_B: Tensor) -> Tensor:
        """(B, T, F) features and (B,) valid frames -> normalised (B, T, F) float32, 0 in the padding unless raw."""
        if self.mode == "raw":
            return features_BTF.float()
        num_frames = features_BTF.shape[1]
        valid_BT1 = (torch.arange(num_frames, device=lens_B.device) < lens_B[:, None])[..., None]
        # A product with the mask would keep NaN, and padding may hold anything.
        features = features_BTF.float().masked_fill(~valid_BT1, 0.0)
        if self.mode == "none":
            return features
        if self.mode == "global":
            normalised = (features - self.mean) / self.std
        else:
            count_B11 = lens_B.clamp(min=1)[:, None, None]
            centred = (features - features.sum(dim=1, keepdim=True) / count_B11).masked_fill(~valid_BT1, 0.0)
            squares = centred.square().sum(dim=1, keepdim=True)
            if self.mode == "per_feature":
                std = (squares / (count_B11 - 1).clamp(min=1)).sqrt() + 1e-5
            else:
                std = (squares / count_B11).sqrt().clamp(min=_LEAST_STD)
            normalised = centred / std
        return normalised.masked_fill(~valid_BT1, 0.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FeatureNorm:
        """Follow the model to its device, but not to bfloat16."""
        exact = {"mean": self.mean, "std": self.std}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self
