"""One set of weights for two modules."""

from __future__ import annotations

from torch import Tensor, nn


def mirror(source: nn.Module, target: nn.Module) -> None:
    """Let `target` use the parameters and buffers of `source`: the tensors themselves, under the same nested names.

    For a pair of modules that compute the same in two ways, as a parallel and a recurrent one. Training either changes
    both. What `source` ties, `target` ties too, so that optimisers see each tensor once. Devices and types are those
    of `source`; convert modules before, for a conversion makes new buffers.

    Raises ValueError that names what only one of the two has, what differs in shape or kind, and what `target` alone
    ties; then `target` is as it was.
    """
    theirs, own = _tensors(source), _tensors(target)
    faults = [f"{name}: only in the source" for name in theirs.keys() - own.keys()]
    faults += [f"{name}: only in the target" for name in own.keys() - theirs.keys()]
    both = sorted(own.keys() & theirs.keys())
    for name in both:
        kinds = [type(tensors[name]).__name__ for tensors in (theirs, own)]
        shapes = [tuple(tensors[name].shape) for tensors in (theirs, own)]
        if kinds[0] != kinds[1] or shapes[0] != shapes[1]:
            faults.append(f"{name}: {kinds[0]} {shapes[0]} in the source, {kinds[1]} {shapes[1]} in the target")
    first: dict[int, str] = {}
    for name in both:
        other = first.setdefault(id(own[name]), name)
        if theirs[other] is not theirs[name]:
            faults.append(f"{other}, {name}: one tensor in the target, two in the source")
    if faults:
        raise ValueError("these modules cannot share their weights: " + "; ".join(sorted(faults)))
    for name in both:
        place, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(place), leaf, theirs[name])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name that it has."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
