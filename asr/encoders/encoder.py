"""What every encoder promises."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from asr.types import Encoded


class Encoder(Protocol):
    """A module from features to frames; its constructor takes `input_dim`, the number of mel bins, from the build.

    Promised, and checked for every YAML in conf/encoder: padding is invisible whatever it holds; every parameter
    receives a gradient; every precision mode runs and stays finite; too short an input has length 0 and is no error.
    """

    output_dim: int

    def output_lens(self, lens_B: Tensor) -> Tensor:
        """Lengths (B,) of the frames that inputs of these lengths give: integer arithmetic from 0 up."""
        ...

    def forward(self, features_BTF: Tensor, lens_B: Tensor) -> Encoded:
        """Frames (B, T', output_dim), zero beyond their lengths; T' is at least the longest length and at least 1."""
        ...

    def __call__(self, features_BTF: Tensor, lens_B: Tensor) -> Encoded: ...
