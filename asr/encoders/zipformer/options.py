"""What the sizes of a Zipformer must be like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MIN_BINS = 7


def check_options(
    input_dim: int,
    per_stack: Mapping[str, Sequence[int]],
    single: Mapping[str, int],
    dropouts: Mapping[str, float],
    subsampling_channels: Sequence[int],
) -> None:
    """Raise ValueError that names each option in fault and says what to give."""
    if input_dim < MIN_BINS:
        raise ValueError(f"encoder: the front end needs at least {MIN_BINS} mel bins, got {input_dim}")
    faults = [f"{name}={value}: must be 1 or more" for name, value in single.items() if not _is_size(value)]
    if single["position_dim"] % 2:
        faults.append(f"position_dim={single['position_dim']}: must be even, for pairs of sine and cosine")
    faults += [f"{name}={p}: must lie in [0, 1)" for name, p in dropouts.items() if not 0.0 <= p < 1.0]
    if not (_are_sizes(subsampling_channels) and len(subsampling_channels) == 3):
        faults.append(f"subsampling_channels={subsampling_channels}: three whole numbers above 0 are needed")
    faults += _stack_faults(per_stack)
    if faults:
        raise ValueError("; ".join(f"encoder.{fault}" for fault in faults))


def _stack_faults(per_stack: Mapping[str, Sequence[int]]) -> list[str]:
    wrong = [
        f"{name}={values}: a list of whole numbers above 0 is needed, one for each stack"
        for name, values in per_stack.items()
        if not _are_sizes(values)
    ]
    if wrong:
        return wrong
    num_stacks = len(per_stack["downsampling"])
    wrong = [
        f"{name}={list(values)}: has {len(values)} entries where downsampling has {num_stacks}; give one for each stack"
        for name, values in per_stack.items()
        if len(values) != num_stacks
    ]
    if wrong:
        return wrong
    for name in ("dims", "feed_forward_dims"):
        if any(size % 4 for size in per_stack[name]):
            wrong.append(f"{name}={list(per_stack[name])}: must be multiples of 4, for modules of 3/4 and 5/4 of them")
    if any(size % 2 == 0 for size in per_stack["kernel_sizes"]):
        wrong.append(f"kernel_sizes={list(per_stack['kernel_sizes'])}: must be odd, so that a frame is in the middle")
    dims, unmasked_dims = per_stack["dims"], per_stack["unmasked_dims"]
    if any(kept > dim for kept, dim in zip(unmasked_dims, dims, strict=True)):
        wrong.append(f"unmasked_dims={list(unmasked_dims)}: must not exceed dims={list(dims)}")
    return wrong


def _are_sizes(values: object) -> bool:
    return isinstance(values, Sequence) and len(values) > 0 and all(_is_size(value) for value in values)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
