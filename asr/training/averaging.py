"""Averages of parameters: a running mean during training, and means over checkpoints for decoding.

All sums are fp64. Integer buffers (counters) keep the newest value; a tensor that two names share is averaged once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]


class RunningAverage:
    """Mean of the model over all updates so far, sampled every `period` steps (icefall's model_avg).

    Because it is a plain mean, the mean over a range of epochs is a difference of two of them:
    see `difference_of_averages`.
    """

    def __init__(self, model: nn.Module, period: int):
        self.period = period
        self.num_samples = 0
        self.state = {name: _to_fp64(tensor) for name, tensor in unique_state(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take the model in at every `period`-th step; the k-th sample weighs 1/k."""
        if step % self.period:
            return
        self.num_samples += 1
        for name, tensor in unique_state(model).items():
            mean = self.state[name]
            if mean.is_floating_point():
                mean.lerp_(tensor.detach().to(mean), 1.0 / self.num_samples)
            else:
                mean.copy_(tensor)

    def state_dict(self) -> dict:
        return {"num_samples": self.num_samples, "period": self.period, "state": self.state}

    def load_state_dict(self, state: dict) -> None:
        self.num_samples = state["num_samples"]
        for name, tensor in state["state"].items():
            self.state[name].copy_(tensor)


def unique_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with tensors that several names share listed under the first of them."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


def mean_of_states(states: Sequence[State]) -> dict[str, Tensor]:
    """Mean of several models. The result has the dtype of the inputs; where they differ, the widest.

    Raises ValueError when names or shapes differ between them.
    """
    if not states:
        raise ValueError("nothing to average: no checkpoint was given")
    for other in states[1:]:
        _check_same(states[0], other)
    mean = {}
    for name, newest in states[-1].items():
        if not newest.is_floating_point():
            mean[name] = newest.clone()
            continue
        dtype = newest.dtype
        total = torch.zeros(newest.shape, dtype=torch.float64)
        for state in states:
            total += state[name].to(torch.float64)
            dtype = torch.promote_types(dtype, state[name].dtype)
        mean[name] = (total / len(states)).to(dtype)
    return mean


def difference_of_averages(start: dict, end: dict) -> dict[str, Tensor]:
    """Mean over the updates after `start` up to and including `end`, from two `RunningAverage.state_dict()`s.

    With n_s and n_e samples: (n_e * end - n_s * start) / (n_e - n_s), in fp64.
    Raises ValueError when no sample lies between the two.
    """
    first, last = start["num_samples"], end["num_samples"]
    if last <= first:
        raise ValueError(
            f"no model was sampled between the two checkpoints (samples {first} and {last}): widen the range with a "
            "larger avg, train with a smaller trainer.average_period, or decode with use_averaged_model=false"
        )
    _check_same(start["state"], end["state"])
    mean = {}
    for name, newest in end["state"].items():
        if newest.is_floating_point():
            older = start["state"][name].to(torch.float64)
            # Written as a step from the newest value so that weights that never moved stay exactly as they are.
            newer = newest.to(torch.float64)
            mean[name] = newer + (newer - older) * (first / (last - first))
        else:
            mean[name] = newest.clone()
    return mean


def _to_fp64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def _check_same(one: State, other: State) -> None:
    if one.keys() != other.keys():
        odd = sorted(one.keys() ^ other.keys())
        raise ValueError(f"checkpoints of different models cannot be averaged: {odd[:3]} stand in only one of them")
    for name in one:
        if one[name].shape != other[name].shape:
            shapes = f"{tuple(one[name].shape)} and {tuple(other[name].shape)}"
            raise ValueError(f"checkpoints of different models cannot be averaged: {name} has shapes {shapes}")
