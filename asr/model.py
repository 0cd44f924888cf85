"""The model: from features to losses, in the order of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from asr.layers.parts import check_places, place_of
from asr.types import Batch, Encoded


class AsrModel(nn.Module):
    """Feature normalisation, augmentation (in training only), encoder and head.

    The parts are modules with the interfaces of asr/features, `asr.encoders.encoder.Encoder` and `asr.heads.head.Head`;
    `augment` may be None.
    """

    def __init__(self, feature_norm: nn.Module, augment: nn.Module | None, encoder: Any, head: Any):
        super().__init__()
        self.feature_norm = feature_norm
        self.augment = augment
        self.encoder = encoder
        self.head = head
        self.frozen: tuple[str, ...] = ()

    def freeze(self, places: Sequence[str]) -> None:
        """Keep these parts (see `asr.layers.parts`) as they are: parameters without gradients, modules in evaluation
        whatever mode the model is in, so that no statistics change and nothing is dropped."""
        check_places(self, places, "freeze")
        self.frozen = tuple(places)
        for name, parameter in self.named_parameters():
            if place_of(name, places) is not None:
                parameter.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> AsrModel:
        super().train(mode)
        for name, module in self.named_modules():
            if place_of(name, self.frozen) is not None:
                module.training = False
        return self

    def encode(self, features_BTF: Tensor, lens_B: Tensor) -> Encoded:
        """Encoder frames of log-mel features (B, T, F) as the loader gives them."""
        features_BTF = self.feature_norm(features_BTF, lens_B)
        if self.training and self.augment is not None:
            features_BTF = self.augment(features_BTF, lens_B)
        return self.encoder(features_BTF, lens_B)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Weighted parts (B,) of the losses per utterance, fp32; their sum is what is minimised.

        Where the head compares views of an utterance, each part is the mean over them.
        """
        num_views = self.head.num_views if self.training else 1
        if num_views == 1:
            encoded = self.encode(batch.features, batch.feature_lens)
            return self.head.loss_parts(encoded, batch.tokens, batch.token_lens)
        encoded = self._encode_views(batch.features, batch.feature_lens, num_views)
        parts = self.head.loss_parts(encoded, batch.tokens.repeat(num_views, 1), batch.token_lens.repeat(num_views))
        return {name: losses.view(num_views, -1).mean(0) for name, losses in parts.items()}

    def _encode_views(self, features_BTF: Tensor, lens_B: Tensor, num_views: int) -> Encoded:
        """Encoder frames of so many augmented views of every utterance, all first views before all second ones."""
        features_BTF = self.feature_norm(features_BTF, lens_B)
        if self.augment is not None:
            features_BTF = self.augment(features_BTF, lens_B, num_views)
        else:  # dropout alone tells the views apart
            features_BTF = features_BTF.repeat(num_views, 1, 1)
        return replace(self.encoder(features_BTF, lens_B.repeat(num_views)), num_views=num_views)
