"""Updates of bf16 parameters that are not lost to rounding, whatever the optimiser.

A bf16 number has 8 significant bits: an update of less than 0.4% of a weight (0.2% just below a power of two) rounds
to none. Here the optimiser sees fp32 parameters and gradients while it steps, so that its own state is fp32 as well,
and the result is written back in one of three ways:

| update     | written back                                                                   | bytes per weight |
|------------|--------------------------------------------------------------------------------|------------------|
| plain      | rounded to the nearest                                                         | 2                |
| kahan      | rounded to the nearest, the rest kept in bf16 and added before the next step   | 4                |
| stochastic | rounded up or down, with probabilities that make it right on average           | 2                |

"kahan" is the compensated sum of Kahan (1965) as Zamirai et al. (2021) use it for training: weight and rest together
hold 16 bits, so what is lost is below 0.001% of a weight. The fp32 copies live only during the step, when the
activations are gone.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

UPDATES = ("plain", "kahan", "stochastic")


def update_bf16(optimizer: Optimizer, update: str, seed: int = 0) -> None:
    """Let `optimizer` step in fp32 where its parameters are bf16, and write back as `update` says.

    What is kept lies in the optimiser's own state. seed: of stochastic rounding, which is the same on every rank.
    Raises ValueError for an unknown update.
    """
    if update not in UPDATES:
        raise ValueError(f"bf16_update={update!r}: choose one of {', '.join(UPDATES)}")
    if update == "plain":
        warnings.warn(
            "bf16_update=plain rounds away every update of less than about 0.4% of a weight (norm weights of 1.0 stay "
            "where they are at learning rates below 4e-3); kahan keeps them, stochastic keeps them on average.",
            stacklevel=2,
        )
    stand_in = _Fp32StandIn(update, seed)
    optimizer.register_step_pre_hook(stand_in.before_step)
    optimizer.register_step_post_hook(stand_in.after_step)
    # Loading casts the state to the type of the parameters, which is that of the steps.
    optimizer.register_load_state_dict_pre_hook(stand_in.before_load)
    optimizer.register_load_state_dict_post_hook(stand_in.after_load)


class _Fp32StandIn:
    """Gives the parameters fp32 values and gradients for as long as the optimiser works on them."""

    def __init__(self, update: str, seed: int):
        self.update = update
        self.seed = seed
        self.held: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.master = torch.empty(0)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._hold([p for p in _bf16_parameters(optimizer) if p.grad is not None])
        if not self.held:
            return
        params = [param for param, _, _ in self.held]
        self.master = _filled([value for _, value, _ in self.held])
        grads = _filled([grad for _, _, grad in self.held if grad is not None])
        for param, value, grad in zip(params, _views(self.master, params), _views(grads, params), strict=True):
            if "rest" in optimizer.state[param]:
                value.add_(optimizer.state[param]["rest"])
            param.data, param.grad = value, grad

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.held:
            return
        params = [param for param, _, _ in self.held]
        if self.update == "stochastic":
            _round_stochastically(self.master, self._generator(optimizer))
        rounded = self.master.bfloat16()
        if self.update == "kahan":
            rests = _views((self.master - rounded).bfloat16(), params)
            for param, rest in zip(params, rests, strict=True):
                optimizer.state[param]["rest"] = rest.clone()
        torch._foreach_copy_([value for _, value, _ in self.held], _views(rounded, params))
        self._release()

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._hold(_bf16_parameters(optimizer))
        for param, value, _ in self.held:
            param.data = value.float()

    def after_load(self, optimizer: Optimizer) -> None:
        self._release()
        for state in optimizer.state.values():
            if "rest" in state:
                state["rest"] = state["rest"].bfloat16()

    def _hold(self, params: list[Tensor]) -> None:
        self.held = [(param, param.data, param.grad) for param in params]
        for param in params:
            param.grad = None  # a gradient of another type than its parameter is refused

    def _release(self) -> None:
        for param, value, grad in self.held:
            param.grad = None
            param.data, param.grad = value, grad
        self.held, self.master = [], torch.empty(0)

    def _generator(self, optimizer: Optimizer) -> torch.Generator:
        """A generator for this step, which a resumed run finds again; ranks, whose own differ, draw alike from it."""
        group = optimizer.param_groups[0]
        group["num_roundings"] = group.get("num_roundings", 0) + 1
        return torch.Generator(self.master.device).manual_seed(self.seed * 1_000_003 + group["num_roundings"])


def _bf16_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.dtype is torch.bfloat16]


def _filled(tensors: list[Tensor]) -> Tensor:
    """All of them in one fp32 tensor of one dimension."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), device=tensors[0].device)
    torch._foreach_copy_(_views(flat, tensors), tensors)
    return flat


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _round_stochastically(values: Tensor, generator: torch.Generator) -> None:
    """Make fp32 values ones that bf16 holds: the 16 bits that it lacks decide how likely the larger one is."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    bits.add_(noise).bitwise_and_(-(1 << 16))
