"""ScaledAdam: Adam whose steps are relative to the size of each parameter (icefall's zipformer recipe)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# The threshold is first set after so many steps; norms fall quickly then, so it is twice as wide.
_FIRST_THRESHOLDS = (10, 20, 40)
_LARGE = 16384  # elements
_TENSORS = ("delta", "square", "rms", "scale_square", "scale_grads")
# The most that the scale of a parameter may be asked to change by in one update of scales.
_MAX_SCALE_STEP = 0.1


class ScaledAdam(Optimizer):
    """Adam with steps proportional to a parameter's root mean square, which is learnt as a parameter of its own
    (Yao et al., 2024).

    lr: relative change of a parameter by one step, roughly, when gradients agree.
    betas, eps: as in Adam; the first moment is kept of steps, so that it follows the learning rate.
    clipping_scale: clip where the norm of the gradients, each times its parameter's rms, exceeds this many medians of
        the last `clipping_update_period` steps; None never clips.
    scalar_lr_scale: on `lr`, for parameters of one element and for learning scales.
    min_rms, max_rms: bounds of the rms; below the first, a parameter moves as if it had it.
    scalar_max: bound of parameters of one element.
    size_update_period: steps between updates of scales.

    Small parameters of one shape are updated as one tensor (on a GPU, large ones too). A parameter without a gradient
    keeps its value and its state. Gradients must be finite: `train_step` leaves out steps in which they are not.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.045,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        clipping_scale: float | None = 2.0,
        scalar_lr_scale: float = 0.1,
        min_rms: float = 1e-5,
        max_rms: float = 3.0,
        scalar_max: float = 10.0,
        size_update_period: int = 4,
        clipping_update_period: int = 100,
    ):
        defaults = dict(
            lr=lr, betas=betas, eps=eps, clipping_scale=clipping_scale, scalar_lr_scale=scalar_lr_scale,
            min_rms=min_rms, max_rms=max_rms, scalar_max=scalar_max, size_update_period=size_update_period,
            clipping_update_period=clipping_update_period, num_steps=0, norms=[], threshold=None,
        )  # fmt: skip
        self.clipped = False  # whether the last step was
        self._stacks: dict[Tensor, _Stack] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.param_groups[-1]["norms"] = []  # the default is one list for all groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stacks = {}  # what was loaded is not stacked yet

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.clipped = False
        for group in self.param_groups:
            stacks = self._stacked([p for p in group["params"] if p.grad is not None], group)
            if not stacks:
                continue
            scale = _clipping_factor(group, stacks)
            self.clipped |= scale < 1.0
            for stack in stacks:
                _update(stack, group, scale)
        return loss

    def _stacked(self, params: list[Tensor], group: dict[str, Any]) -> list[_Stack]:
        """Parameters with the same shape and history together, with this step's values and gradients."""
        alike: dict[Any, list[Tensor]] = {}
        for param in params:
            state = self.state[param]
            if not state:
                state.update(_first_state(param, group["size_update_period"]))
            # On a CPU, copying a large parameter into a stack costs more than what the stack saves.
            alone = id(param) if param.device.type == "cpu" and param.numel() >= _LARGE else None
            alike.setdefault((alone, param.shape, param.dtype, param.device, state["step"]), []).append(param)
        stacks = []
        for members in alike.values():
            stack = self._stacks.get(members[0])
            # Rows of an earlier stack may have become part of another one since.
            owned = stack is not None and all(self._stacks.get(param) is stack for param in members)
            if stack is None or not owned or len(stack.params) != len(members):
                stack = _Stack(members, [self.state[p] for p in members])
                self._stacks.update(dict.fromkeys(members, stack))
            stack.gather()
            stacks.append(stack)
        return stacks


class _Stack:
    """Parameters (N, ...) of one shape, their gradients and state. The state of each parameter is a view of its row."""

    value: Tensor
    grad: Tensor

    def __init__(self, params: list[Tensor], states: list[dict[str, Any]]):
        self.params = params
        self.states = states
        self.state = {name: torch.stack([state[name] for state in states]) for name in _TENSORS if name in states[0]}
        for row, state in enumerate(states):
            state.update({name: tensor[row] for name, tensor in self.state.items()})

    @property
    def step(self) -> int:
        return self.states[0]["step"]

    @property
    def is_scalar(self) -> bool:
        return self.params[0].numel() == 1

    def gather(self) -> None:
        self.value = _rows(self.params)
        self.grad = _rows([param.grad for param in self.params if param.grad is not None])

    def scatter(self) -> None:
        """Write the values back and let go of the copies."""
        if len(self.params) > 1:
            torch._foreach_copy_(self.params, list(self.value.unbind()))
        for state in self.states:
            state["step"] += 1
        del self.value, self.grad

    def per_row(self, name: str) -> Tensor:
        """A state of one number per parameter, in a shape (N, 1, ...) that fits the values."""
        return self.state[name].view(-1, *[1] * (self.value.dim() - 1))

    def grad_norms(self) -> Tensor:
        return torch.linalg.vector_norm(_flat(self.grad), dim=1)

    def scale_grads(self) -> Tensor:
        """Derivatives by the logarithm of each parameter's scale."""
        return torch.linalg.vecdot(_flat(self.value), _flat(self.grad))

    def rms(self) -> Tensor:
        return torch.linalg.vector_norm(_flat(self.value), dim=1) / self.params[0].numel() ** 0.5


def _rows(tensors: list[Tensor]) -> Tensor:
    """One tensor of all; of a single one a view, which costs nothing."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _flat(stacked: Tensor) -> Tensor:
    return stacked.reshape(len(stacked), -1)


def _first_state(param: Tensor, size_update_period: int) -> dict[str, Any]:
    """step; delta: what the parameter moves by, with momentum; square: mean of squared gradients; and of the scale:
    rms, mean of squared gradients, the gradients since the last update of scales."""
    state: dict[str, Any] = {"step": 0, "delta": torch.zeros_like(param), "square": torch.zeros_like(param)}
    if param.numel() > 1:
        state["rms"] = param.detach().square().mean().sqrt()
        state["scale_square"] = torch.zeros_like(state["rms"])
        state["scale_grads"] = state["rms"].new_zeros(size_update_period)
    return state


def _clipping_factor(group: dict[str, Any], stacks: list[_Stack]) -> float:
    """What to multiply the gradients by. The first step of a group neither counts nor is clipped."""
    step, period = group["num_steps"], group["clipping_update_period"]
    group["num_steps"] += 1
    if group["clipping_scale"] is None or step == 0:
        return 1.0
    norms = [
        stack.grad_norms() * (group["scalar_lr_scale"] if stack.is_scalar else stack.state["rms"]) for stack in stacks
    ]
    norm = float(torch.linalg.vector_norm(torch.cat([of_stack.to(norms[0].device) for of_stack in norms])))
    group["norms"] = [*group["norms"], norm][-period:]
    early = step in _FIRST_THRESHOLDS and step < period
    if early or step % period == 0:
        median = sorted(group["norms"])[len(group["norms"]) // 4 * 2]
        group["threshold"] = group["clipping_scale"] * median * (2.0 if early else 1.0)
    if group["threshold"] is None or norm <= group["threshold"]:
        return 1.0
    return group["threshold"] / norm


def _update(stack: _Stack, group: dict[str, Any], clipping_factor: float) -> None:
    beta1, beta2 = group["betas"]
    if clipping_factor != 1.0:
        stack.grad = stack.grad * clipping_factor
    delta, square = stack.state["delta"], stack.state["square"]
    delta.mul_(beta1)
    if not stack.is_scalar:
        _learn_scale(stack, group)
    square.mul_(beta2).addcmul_(stack.grad, stack.grad, value=1 - beta2)
    # The second moment is corrected for its start, the first is not: small first steps help.
    correction = (1 - beta2 ** (stack.step + 1)) ** 0.5
    denominator = square.sqrt().add_(group["eps"] * correction)
    step_size = -group["lr"] * (1 - beta1) * correction
    if stack.is_scalar:
        delta.addcdiv_(stack.grad, denominator, value=step_size * group["scalar_lr_scale"])
        stack.value.clamp_(-group["scalar_max"], group["scalar_max"])
    else:
        denominator.div_(stack.per_row("rms").clamp(min=group["min_rms"]))
        delta.addcdiv_(stack.grad, denominator, value=step_size)
    stack.value.add_(delta)
    stack.scatter()


def _learn_scale(stack: _Stack, group: dict[str, Any]) -> None:
    """Collect the gradient of each parameter's log scale; after every period, add a step along it to `delta`."""
    beta1, beta2 = group["betas"]
    period = group["size_update_period"]
    grads, square, rms = (stack.state[name] for name in ("scale_grads", "scale_square", "rms"))
    grads[:, stack.step % period] = stack.scale_grads()
    if (stack.step + 1) % period:
        return
    rms.copy_(stack.rms())
    if stack.step == 0:
        return
    beta2 **= period
    square.mul_(beta2).add_(grads.square().mean(1), alpha=1 - beta2)
    correction = (1 - beta2 ** ((stack.step + 1) // period)) ** 0.5
    step = grads.sum(1) / (square.sqrt() + group["eps"]) * (-group["lr"] * group["scalar_lr_scale"] * correction)
    step.clamp_(-_MAX_SCALE_STEP, _MAX_SCALE_STEP).masked_fill_(rms < group["min_rms"], 0.0)
    step = torch.minimum(step, (group["max_rms"] - rms) / rms)
    stack.state["delta"].add_(stack.value * step.view_as(stack.per_row("rms")), alpha=1 - beta1)
