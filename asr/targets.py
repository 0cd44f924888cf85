"""`_target_` sections of YAML held against the signature of what they name, before anything is made of them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Collection, Iterable
from typing import Any

ALLOWED_PREFIXES = ("asr.", "recipes.", "torch.")


def locate(target: str) -> Any:
    """The object a dotted path names. Raises ImportError or AttributeError."""
    module, _, attribute = target.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def accepted(callee: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that `callee` takes."""
    parameters = inspect.signature(callee).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def nearest(key: str, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown key: the most similar allowed one, or all of them."""
    names = sorted(allowed)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(names) or 'none'}"


def target_faults(place: str, node: dict, passed: Collection[str] = ()) -> list[str]:
    """What is wrong with the section `node` at the dotted key `place`; `passed` are arguments that code gives."""
    target = node["_target_"]
    faults = foreign_targets(place, node)
    if faults:
        return faults
    try:
        callee = locate(str(target))
    except (ImportError, AttributeError, ValueError) as error:
        return [f"{place}._target_={target!r}: cannot be imported ({error})"]
    parameters = inspect.signature(callee).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    given = [key for key in node if not (key.startswith("_") and key.endswith("_"))]
    allowed = [name for name in parameters if name not in passed]
    hints = _hints(callee)
    for key in given:
        if key not in allowed:
            faults.append(f"{place}.{key}={node[key]!r}: {target} takes no such argument{nearest(key, allowed)}")
        elif parts := _partial_sections(node[key]):
            faults += [
                fault for name, part in parts.items() for fault in target_faults(f"{place}.{key}.{name}", part, passed)
            ]
        elif isinstance(node[key], dict) and (schema := _schema_in(hints.get(key, Any))):
            faults += _section_faults(f"{place}.{key}", node[key], schema)
        elif not _fits(node[key], hints.get(key, Any)):
            faults.append(f"{place}.{key}={node[key]!r}: {_name(hints[key])} is expected")
    for name, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind is parameter.VAR_POSITIONAL
        if not optional and name not in given and name not in passed:
            faults.append(f"{place}.{name}: required by {target}")
    return faults


def _schema_in(hint: Any) -> Any:
    """The dataclass that a hint names, alone or among others; None where there is none."""
    return next((option for option in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(option)), None)


def _section_faults(place: str, values: dict, schema: Any) -> list[str]:
    """What is wrong with the fields of a dataclass, given as a section."""
    hints = typing.get_type_hints(schema)
    faults = []
    for key, value in values.items():
        if key not in hints:
            faults.append(f"{place}.{key}={value!r}: no such key{nearest(str(key), hints)}")
        elif not _fits(value, hints[key]):
            faults.append(f"{place}.{key}={value!r}: {_name(hints[key])} is expected")
    return faults


def _partial_sections(value: Any) -> dict[str, dict]:
    """Sections inside a section whose objects its owner makes, with what was `passed` to itself."""
    sections = value if isinstance(value, dict) else {}
    return {name: part for name, part in sections.items() if isinstance(part, dict) and part.get("_partial_")}


def foreign_targets(place: str, node: Any) -> list[str]:
    """`_target_`s at any depth of `node` that name something outside the project and torch."""
    if isinstance(node, dict):
        target = str(node.get("_target_", "asr."))
        faults = [] if target.startswith(ALLOWED_PREFIXES) else [
            f"{place}._target_={target!r}: only {', '.join(ALLOWED_PREFIXES)} may be named here"
        ]  # fmt: skip
        return faults + [fault for key, value in node.items() for fault in foreign_targets(f"{place}.{key}", value)]
    if isinstance(node, list):
        return [fault for index, value in enumerate(node) for fault in foreign_targets(f"{place}[{index}]", value)]
    return []


def _hints(callee: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(callee.__init__ if inspect.isclass(callee) else callee)
    except (NameError, TypeError):  # names that only a type checker sees
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value may be given for `hint`. Whatever is no number, text or choice of them passes."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    return True


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
