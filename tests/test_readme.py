"""Every command that a README shows is one that the project understands.

Trainings are not run here but composed and checked, as each job of a sweep is; tests/test_smoke.py and tests/commands
run the commands themselves on small data.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from asr.config import check
from asr.settings import DecodeSettings, TrainSettings

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("recipes/*/README.md"))]
SCHEMAS = {"train": TrainSettings, "decode": DecodeSettings}


def commands() -> list[str]:
    found = []
    for readme in READMES:
        for block in re.findall(r"```bash\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL):
            found += [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
    return found


def jobs(overrides: list[str]) -> list[list[str]]:
    """The overrides of each job of a sweep; of the one job where nothing is swept."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    keys = [override.get_key_element() for override in parsed]
    values = [
        list(o.sweep_string_iterator()) if o.is_sweep_override() else [o.get_value_element_as_str()] for o in parsed
    ]
    return [
        [f"{key}={value}" for key, value in zip(keys, combination, strict=True)] for combination in product(*values)
    ]


def check_command(config: str, arguments: list[str]) -> None:
    if "--help" in arguments:
        return
    if config == "decode":
        sys.path.insert(0, str(ROOT))
        from decode import flags_to_overrides

        arguments = flags_to_overrides(arguments)
    for job in jobs([argument for argument in arguments if argument not in ("-m", "--multirun")]):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            check(compose(config, overrides=job), SCHEMAS[config])


@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_readme_is_understood(command):
    words = shlex.split(command, comments=True)
    words[0] = words[0].removeprefix(".venv/bin/")
    if words[0] == "torchrun":
        words = ["python", *words[words.index("train.py") :]]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        return
    assert words[0] == "python", f"{command}: no known program"
    script = ROOT / words[1]
    assert script.is_file()
    if words[1] in ("train.py", "scripts/prepare.py"):
        check_command("train", words[2:])
    elif words[1] == "decode.py":
        check_command("decode", words[2:])
    else:
        # What else an import may be told depends on the system.
        chosen = words[words.index("--from") :][:2] if "--from" in words else []
        answer = subprocess.run(
            [sys.executable, str(script), *chosen, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for flag in (word for word in words[2:] if word.startswith("--")):
            assert flag in answer, f"{command}: {words[1]} knows no {flag}"


def test_the_readmes_show_commands():
    assert len(commands()) > 20
