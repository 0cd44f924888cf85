"""Several heads on one encoder, trained together."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from asr.heads.head import Head
from asr.targets import accepted
from asr.types import Encoded


class Joint(Head):
    """Weighted sum of the losses of `heads` (Watanabe et al., 2017, for CTC with attention).

    Args:
        heads: name -> what makes that head (in YAML a section with `_partial_: true`).
        weights: name -> weight, above 0, of every head.

    An utterance is feasible where it is so for every head. Parts of the loss are called `head` or `head/part`. Heads
    called "ctc" and "attention" offer "attention_rescoring" together.
    Raises ValueError when heads and weights do not name the same.
    """

    # Searches that need several heads: name -> what these must be called.
    combined: ClassVar[dict[str, tuple[str, ...]]] = {"attention_rescoring": ("ctc", "attention")}

    def __init__(
        self,
        heads: dict[str, Callable[..., Head]],
        weights: dict[str, float],
        input_dim: int,
        vocab_size: int,
        blank_id: int = 0,
        sos_eos_id: int | None = None,
    ):
        super().__init__()
        if not heads or set(heads) != set(weights):
            named = ", ".join(heads) or "none given"
            raise ValueError(f"head.weights={weights}: one weight for each of head.heads is needed ({named})")
        wrong = {name: weight for name, weight in weights.items() if weight <= 0}
        if wrong:
            raise ValueError(f"head.weights={wrong}: must be above 0; a head that is not wanted is left out")
        self.vocab_size = vocab_size
        self.blank_id = blank_id
        self.weights = dict(weights)
        given = {"input_dim": input_dim, "vocab_size": vocab_size, "blank_id": blank_id, "sos_eos_id": sos_eos_id}
        made = {name: make(**accepted(make, given)) for name, make in heads.items()}
        self.heads = nn.ModuleDict(made)
        self.num_views = max(head.num_views for head in made.values())
        own = dict.fromkeys(search for head in made.values() for search in head.searches)
        together = [search for search, needed in self.combined.items() if set(needed) <= set(heads)]
        self.searches = (*own, *together)

    def loss_parts(self, encoded: Encoded, tokens_BU: Tensor, token_lens_B: Tensor) -> dict[str, Tensor]:
        feasible = self.feasible(encoded.lens, tokens_BU, token_lens_B)
        parts = {}
        for name, head in self._named():
            for part, losses_B in head.loss_parts(encoded, tokens_BU, token_lens_B).items():
                label = name if part in (name, "loss") else f"{name}/{part}"
                parts[label] = torch.where(feasible, self.weights[name] * losses_B, 0.0)
        return parts

    def feasible(self, lens_B: Tensor, tokens_BU: Tensor, token_lens_B: Tensor) -> Tensor:
        of_heads = [head.feasible(lens_B, tokens_BU, token_lens_B) for _, head in self._named()]
        return torch.stack(of_heads).all(dim=0)

    def min_frames(self, tokens: list[int]) -> int:
        return max(head.min_frames(tokens) for _, head in self._named())

    def part_for(self, search: str) -> Head:
        for _, head in self._named():
            if search in head.searches:
                return head.part_for(search)
        return super().part_for(search)

    def _named(self) -> list[tuple[str, Head]]:
        return [(name, head) for name, head in self.heads.items() if isinstance(head, Head)]
