"""Parts of a model by their dotted names, as settings name them: `encoder`, `head.output`, `encoder.blocks.*.norm`."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn


def place_of(name: str, places: Iterable[str]) -> str | None:
    """The longest of `places` that names `name` or a part that holds it; `*` in a place stands for any text."""
    fitting = [place for place in places if fnmatchcase(name, place) or fnmatchcase(name, f"{place}.*")]
    return max(fitting, key=len, default=None)


def check_places(module: nn.Module, places: Collection[str], key: str) -> None:
    """Raise ValueError that begins with the setting `key` where one of `places` names no part of `module`."""
    names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
    for place in places:
        if not any(fnmatchcase(name, place) for name in names):
            near = difflib.get_close_matches(place, names, n=1, cutoff=0.5)
            known = f"did you mean {near[0]}?" if near else ", ".join(name for name, _ in module.named_children())
            raise ValueError(f"{key}: {place!r} is no part of the model; {known}")
