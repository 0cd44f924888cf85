"""Parts of a model that are trained against the rest of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


class Adversary(nn.Module):
    """A module with an optimiser of its own: that of the model leaves its parameters alone.

    lr: the learning rate of that optimiser, which follows no schedule.
    """

    def __init__(self, lr: float):
        super().__init__()
        self.lr = lr

    def frozen(self, *inputs: Any) -> Tensor:
        """The output for losses of its opponent, whose gradients reach the inputs and not the parameters."""
        return functional_call(self, {name: parameter.detach() for name, parameter in self.named_parameters()}, inputs)
