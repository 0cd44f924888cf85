"""Run folders as the reports read them: resolved config, training record, decode results."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CONFIG_FILE, TRAINING_FILE, DECODE_FOLDER, RESULT_FILE = "config.yaml", "train.json", "decode", "result.json"
DECODE_NAME = re.compile(r"(?P<set>.+)-(?P<method>[^-]+)-(?P<unit>epoch|iter)-(?P<at>[^-]+)-avg-(?P<avg>.+)")
# Values that differ between runs of one configuration
OWN_KEYS = ("run_dir", "resume", "hydra")


@dataclass(frozen=True)
class Setting:
    """How a set was decoded, as the options of decode.py that ask for it."""

    method: str
    options: str

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.options, self.method)))


@dataclass(frozen=True)
class Decoded:
    """One decode folder of a run: its set, its setting and the contents of result.json."""

    folder: Path
    set_name: str
    setting: Setting
    result: dict[str, Any]

    @property
    def unit(self) -> str:
        """What its error rate counts: "character" for Chinese and Japanese, else "word"."""
        return str(self.result.get("unit") or "word")


@dataclass
class Run:
    """One training run.

    config: the resolved config, empty where none was written.
    training: the contents of train.json, empty where none was written.
    decoded: decode results, sorted by set and setting.
    faults: what could not be read, in words.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    decoded: list[Decoded] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.training.get("name") or self.folder.name)

    @property
    def status(self) -> str:
        """finished, running or failed as the trainer wrote it; "not started" where it wrote nothing."""
        return str(self.training.get("status", "not started"))


def find_runs(folders: list[Path]) -> list[Run]:
    """Runs of the given folders, each a run folder or a folder that holds run folders at any depth (a sweep).

    A job's folder in a sweep that holds no run is listed as a run that did not start, so that no job is lost.
    Raises ValueError for a folder that is absent or holds no run, naming it.
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; give run folders or a folder that holds them")
        paths = _run_folders(folder)
        if not any(map(_is_run, paths)):
            raise ValueError(f"{folder}: holds no {CONFIG_FILE} or {TRAINING_FILE}, here or in its folders; not a run")
        for path in paths:
            found.setdefault(path.resolve(), read_run(path))
    return list(found.values())


def read_run(folder: Path) -> Run:
    """Reads one run folder; whatever is damaged becomes a fault of the run."""
    run = Run(folder)
    if (folder / CONFIG_FILE).is_file():
        try:
            run.config = _mapping(yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8")))
        except (yaml.YAMLError, ValueError, OSError) as error:
            run.faults.append(f"{CONFIG_FILE} cannot be read: {_first_line(error)}")
    if (folder / TRAINING_FILE).is_file():
        run.training = _read_json(folder / TRAINING_FILE, run)
    decoded = []
    for path in sorted((folder / DECODE_FOLDER).glob("*")):
        if not path.is_dir():
            continue
        if not (path / RESULT_FILE).is_file():
            run.faults.append(f"{DECODE_FOLDER}/{path.name} has no {RESULT_FILE}: the decoding did not end")
            continue
        result = _read_json(path / RESULT_FILE, run)
        if result:
            decoded.append(_decoded(path, result))
    run.decoded = sorted(decoded, key=lambda entry: (entry.set_name, str(entry.setting)))
    return run


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a nested mapping by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def settings_of(run: Run) -> dict[str, Any]:
    """The flat config without what belongs to the run alone: its folder, whatever names that folder, Hydra's own."""
    own_folder = str(run.config.get("run_dir") or run.folder)
    return {
        key: value
        for key, value in flatten(run.config).items()
        if key.split(".")[0] not in OWN_KEYS and not (isinstance(value, str) and own_folder in value)
    }


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or (folder / TRAINING_FILE).is_file()


def _run_folders(folder: Path) -> list[Path]:
    """`folder` if it is a run, otherwise the runs below it, and beside them the folders that should have been runs."""
    if _is_run(folder):
        return [folder]
    children = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    # 2 before 10: every odd part is a number
    children.sort(key=lambda child: [int(p) if i % 2 else p for i, p in enumerate(re.split(r"(\d+)", child.name))])
    below = {child: _run_folders(child) for child in children}
    if not any(any(map(_is_run, paths)) for paths in below.values()):
        return [folder]
    return [path for paths in below.values() for path in paths]


def _decoded(folder: Path, result: dict[str, Any]) -> Decoded:
    """What the result says of itself goes before the name of its folder, in which options of the search blur."""
    match = DECODE_NAME.fullmatch(folder.name)
    if match:
        options = f"--{match['unit']} {match['at']} --avg {match['avg']}"
    else:
        options = " ".join(f"--{key} {result[key]}" for key in ("epoch", "avg") if result.get(key) is not None)
    method = result.get("method") or (match["method"] if match else "")
    set_name = result.get("set") or (match["set"] if match else folder.name)
    return Decoded(folder, str(set_name), Setting(str(method), options), result)


def _read_json(path: Path, run: Run) -> dict[str, Any]:
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        run.faults.append(f"{path.relative_to(run.folder)} cannot be read: {_first_line(error)}")
        return {}


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it holds no mapping")
    return value


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]
