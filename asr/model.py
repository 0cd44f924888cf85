"""The model: from features to losses, in the order of the pipeline."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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

    def encode(self, features_BTF: Tensor, lens_B: Tensor) -> Encoded:
        """Encoder frames of log-mel features (B, T, F) as the loader gives them."""
        features_BTF = self.feature_norm(features_BTF, lens_B)
        if self.training and self.augment is not None:
            features_BTF = self.augment(features_BTF, lens_B)
        return self.encoder(features_BTF, lens_B)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Weighted parts (B,) of the losses per utterance, fp32; their sum is what is minimised."""
        encoded = self.encode(batch.features, batch.feature_lens)
        return self.head.loss_parts(encoded, batch.tokens, batch.token_lens)
