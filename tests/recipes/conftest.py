import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

SHARED = Path(os.environ.get("ASR_SHARED", Path(__file__).parents[2].parent / "shared"))


@pytest.fixture
def shared_data():
    """Folder of real speech; skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"{SHARED / 'data'} is absent")
    return SHARED / "data"


@pytest.fixture
def write_noise():
    """Writes an audio file of noise, with its folders."""

    def write(path, seconds=0.5, rate=16000, **options):
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = np.random.default_rng(0).uniform(-0.1, 0.1, round(seconds * rate))
        soundfile.write(path, samples, rate, **options)
        return path

    return write
