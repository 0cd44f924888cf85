from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.tiny import digits_data, train, write_digits


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is nobody's checkout, from which commands are started."""
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="session")
def digits(workplace: Path) -> list[str]:
    """Overrides that train on a corpus of tones, prepared once."""
    return digits_data(write_digits(workplace / "digits"), workplace / "prepared")


@pytest.fixture(scope="session")
def trained(workplace: Path, digits: list[str]) -> Path:
    """A run of three epochs of four steps, with checkpoints after steps 3, 6, 9 and 12 as well."""
    return train(*digits, "trainer.max_epochs=3", "trainer.save_every=3", "trainer.pictures=true",
                 "trainer.log_every=1", run_dir=workplace / "trained")  # fmt: skip
