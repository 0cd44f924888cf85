"""The check that stands before every run: Hydra's configuration becomes settings, or all its faults are told.

Parts of the model are chosen by `_target_` in YAML and checked against the signature of what they name.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asr.rules import decode_faults, train_faults
from asr.settings import DecodeSettings, TrainSettings
from asr.targets import nearest, target_faults


class ConfigError(ValueError):
    """Every fault of a configuration, one a line."""

    def __init__(self, faults: list[str]):
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {fault}" for fault in faults))
        self.faults = faults


CONF = Path(__file__).resolve().parents[1] / "conf"

# What build passes to a part itself, so YAML need not (and must not) give it.
PASSED_BY_BUILD = {
    "tokenizer": {"texts"},
    "features.normalise": {"num_mel_bins"},
    "features.fbank": set(),
    "augment": set(),
    "encoder": {"input_dim"},
    "head": {"input_dim", "vocab_size", "blank_id", "sos_eos_id"},
    "optim": {"params"},
    "schedule": {"total_steps"},
    "search": {"head", "encoded"},
    "data.corpus": set(),
}


def check(cfg: DictConfig, schema: type = TrainSettings) -> Any:
    """Resolve `cfg` and hold it against `schema`, an instance of which is returned.

    Raises ConfigError that names every fault at once: the key, its value, what is allowed, the nearest right key.
    """
    faults: list[str] = []
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError([f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}"]) from None
    assert isinstance(plain, dict)
    settings = _fill(schema, plain, "", faults)
    if schema is TrainSettings:
        _check_parts(plain, faults)
    # Rules look at values that may have a fault of their own, which is told already.
    told = {_key_of(fault) for fault in faults}
    faults += [fault for fault in _RULES[schema](settings) if _key_of(fault) not in told]
    if "init_mode" in told:  # parts that follow it have its fault
        echo = f"={plain['init_mode']!r}: "
        faults = [fault for fault in faults if not (fault.startswith("init.") and echo in fault)]
    if faults:
        raise ConfigError(faults)
    return settings


def check_overrides(overrides: list[str], schema: type, config: str) -> None:
    """Find misspelt keys and choices among the command line's overrides of conf/`config`.yaml, before anything heavy is
    imported.

    Where there are any, values of a wrong kind among the others are told with them. Overrides with a prefix pass:
    Hydra and `check` see to them. Raises ConfigError.
    """
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    chosen = [word for word in overrides if re.match(rf"\+?({'|'.join(groups)})=", word)]
    plain = [word for word in overrides if re.match(r"(?!hydra\b)[A-Za-z_][\w.]*=", word) and word not in chosen]
    absent = {word: fault for word in chosen for fault in _unknown_choice(word)}
    misspelt = absent | {word: fault for word in plain for fault in _unknown_key(word, schema())}
    parts = _composed(config, [word for word in chosen if word not in absent])
    if parts is not None:
        misspelt |= {word: fault for word in plain for fault in _unknown_key(word, parts) if word not in misspelt}
    if misspelt:
        others = [word for word in overrides if word not in misspelt]
        raise ConfigError([*misspelt.values(), *_wrong_values(config, others, schema)])


def composed(config: str, overrides: list[str]) -> DictConfig:
    """conf/`config`.yaml with these overrides, outside of a command of Hydra's. Raises HydraException."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(config, overrides)


def _composed(config: str, overrides: list[str]) -> DictConfig | None:
    """The configuration with these overrides; None for what Hydra refuses, such as a sweep."""
    try:
        return composed(config, overrides)
    except HydraException:
        return None


def _wrong_values(config: str, overrides: list[str], schema: type) -> list[str]:
    """Faults of the other overrides that show without a look at the parts, for which torch would be imported."""
    cfg = _composed(config, [word for word in overrides if "=" in word and not word.startswith(("-", "hydra"))])
    faults: list[str] = []
    if cfg is not None:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
        assert isinstance(plain, dict)
        _fill(schema, plain, "", faults)
    return faults


def _unknown_choice(override: str) -> list[str]:
    """The fault of a group's choice, or of one in a sweep over them, that no file in conf has."""
    group, _, names = override.lstrip("+").partition("=")
    known = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    plain = [name for name in names.split(",") if re.fullmatch(r"[\w-]+", name)]
    return [f"{group}={name}: no such choice{nearest(name, known)}" for name in plain if name not in known]


def _unknown_key(override: str, node: Any) -> list[str]:
    """The fault of a dotted key that `node`, a dataclass or a configuration, does not have, if it has any."""
    for part in override.partition("=")[0].split("."):
        if dataclasses.is_dataclass(node):
            known = [f.name for f in dataclasses.fields(node)]
        elif isinstance(node, DictConfig) and len(node):
            known = [str(name) for name in node]
        else:
            return []
        if part not in known:
            return [f"{override}: no such key as {part}{nearest(part, known)}"]
        node = OmegaConf.select(node, part) if isinstance(node, DictConfig) else getattr(node, part)
    return []


def _key_of(fault: str) -> str:
    return re.split("[=:]", fault, maxsplit=1)[0]


def _fill(schema: type, values: dict, prefix: str, faults: list[str]) -> Any:
    """An instance of the dataclass `schema` from a plain dict, with faults collected instead of raised."""
    typed = OmegaConf.structured(schema)
    defaults = schema()
    known = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(schema)}
    types = {f.name: str(f.type) for f in dataclasses.fields(schema)}
    filled = {}
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in known:
            faults.append(f"{full}={value!r}: no such key{nearest(str(key), known)}")
        elif value == "???":
            faults.append(f"{full}: a value is required, as in {full}=...")
        elif dataclasses.is_dataclass(known[key]):
            if isinstance(value, dict):
                filled[key] = _fill(type(known[key]), value, f"{full}.", faults)
            else:
                faults.append(f"{full}={value!r}: a group of keys is expected here")
        else:
            try:
                typed[key] = _spelled(key, value)
                filled[key] = _plain(typed[key])
            except OmegaConfBaseException as error:
                null = ", or null" if "None" in types[key] else ""
                faults.append(f"{full}={value!r}: {str(error).splitlines()[0]}{null}")
    return schema(**filled)


def _spelled(key: str, value: Any) -> Any:
    """The value as the schema spells it: Hydra turns `true` into a bool and leaves `None` a word."""
    if key == "resume" and isinstance(value, bool):
        return str(value).lower()
    if key == "init" and isinstance(value, dict):
        return {place: _spelled(key, mode) for place, mode in value.items()}
    return None if key in ("init_mode", "init") and value in ("none", "None", "null") else value


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _check_parts(plain: dict, faults: list[str]) -> None:
    for place, passed in PASSED_BY_BUILD.items():
        node: Any = plain
        for key in place.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        if place == "data.corpus" and not node:
            continue
        if not isinstance(node, dict) or "_target_" not in node:
            faults.append(f"{place}: choose one, as in {place.split('.')[0]}=NAME (it needs a _target_)")
            continue
        faults += target_faults(place, node, passed)
    for key, value in (plain.get("features") or {}).items():
        if f"features.{key}" not in PASSED_BY_BUILD:
            faults.append(f"features.{key}={value!r}: no such key{nearest(str(key), ('fbank', 'normalise'))}")


_RULES: dict[type, Any] = {TrainSettings: train_faults, DecodeSettings: decode_faults}
