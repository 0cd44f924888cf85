"""Novograd: gradients normalised layer by layer (Ginsburg et al., 2019), as NeMo trains convolutional models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Novograd(Optimizer):
    """Momentum on gradients that are divided by the running root mean square of their norm, one number a parameter.

    With g the gradient of a parameter w: v = beta2 v + (1 - beta2) |g|^2, at first |g|^2;
    m = beta1 m + g / (sqrt(v) + eps) + weight_decay w; w = w - lr m.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        betas: tuple[float, float] = (0.8, 0.5),
        eps: float = 1e-8,
        weight_decay: float = 0.001,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        grads = [param.grad for param in params if param.grad is not None]
        squares = torch._foreach_pow(torch._foreach_norm(grads), 2)
        for param, square in zip(params, squares, strict=True):
            if not self.state[param]:
                self.state[param] = {"momentum": torch.zeros_like(param), "square": square.clone()}
        means = [self.state[param]["square"] for param in params]
        momenta = [self.state[param]["momentum"] for param in params]
        torch._foreach_lerp_(means, list(squares), 1 - beta2)
        scales = torch._foreach_sqrt(means)
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_mul_(momenta, beta1)
        torch._foreach_add_(momenta, torch._foreach_div(grads, scales))
        if group["weight_decay"]:
            torch._foreach_add_(momenta, params, alpha=group["weight_decay"])
        torch._foreach_add_(params, momenta, alpha=-group["lr"])
