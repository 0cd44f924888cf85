import numpy as np
import pytest
import soundfile
import torch

from asr.data.cuts import make_cut


class Letters:
    """A tokenizer of a to z."""

    def __init__(self, normaliser=str.strip):
        self.normaliser = normaliser

    def encode(self, text):
        return [ord(letter) - ord("a") + 1 for letter in self.normaliser(text)]


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture
def make_wavs(tmp_path):
    """Function of durations in seconds: cuts c00, c01, ... of noise with the transcript "ab"."""

    def make(durations, text="ab"):
        rng = np.random.default_rng(0)
        cuts = []
        for index, seconds in enumerate(durations):
            path = tmp_path / f"c{index:02d}.wav"
            soundfile.write(path, 0.1 * rng.standard_normal(round(16000 * seconds)), 16000)
            cuts.append(make_cut(f"c{index:02d}", path, text, f"speaker{index % 2}"))
        return cuts

    return make


def extract(samples):
    """Frames of 160 samples with two features: mean and greatest size."""
    frames = samples[: len(samples) // 160 * 160].view(-1, 160)
    return torch.stack([frames.mean(1), frames.abs().amax(1)], dim=1)


@pytest.fixture
def two_features():
    return extract
