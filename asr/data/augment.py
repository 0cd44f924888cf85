"""Waveform augmentation of cuts: speed, volume and noise. Audio is changed when it is loaded, in dataset workers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from lhotse import CutSet, combine
from lhotse.cut import Cut, MixedCut

from asr.data.cuts import iterate_cuts, open_recording

MOST_NOISES_PER_CUT = 10


def cut_rng(seed: int, epoch: int, cut_id: str) -> random.Random:
    """The generator for one cut in one epoch: what is drawn does not depend on workers, ranks or order."""
    return random.Random(f"{seed} {epoch} {cut_id}")


def speed_perturb(cuts: CutSet, factors: Sequence[float] = (0.9, 1.0, 1.1)) -> CutSet:
    """Every cut once per factor, as in Ko et al. (2015); lazy where `cuts` is lazy.

    A copy at 0.9 times the speed has `_sp0.9` behind its id and lasts 1/0.9 times as long; at 1.0 the cut is as it was.

    Raises ValueError for factors that are not positive or not unique, and for a cut that was perturbed before.
    """
    values = _checked(factors)
    return combine([cuts.map(partial(change_speed, factor=factor)) for factor in values])


def random_speed(cut: Cut, factors: Sequence[float], rng: random.Random) -> Cut:
    """`cut` at one of the factors, each with the same probability; ids and errors as in `speed_perturb`."""
    return change_speed(cut, rng.choice(_checked(factors)))


def change_speed(cut: Cut, factor: float) -> Cut:
    """`cut` at `factor` times its speed; at 1.0 the cut itself. ValueError where its speed was changed before."""
    if is_speed_perturbed(cut):
        raise ValueError(
            f"cut {cut.id}: its speed was changed already; give the original cuts, or turn speed perturbation off"
        )
    return cut if factor == 1.0 else cut.perturb_speed(factor)


def is_speed_perturbed(cut: Cut) -> bool:
    """Whether the speed of any recording in the cut is changed when it is loaded."""
    parts = [track.cut for track in cut.tracks] if isinstance(cut, MixedCut) else [cut]
    transforms = (
        transform
        for part in parts
        if getattr(part, "recording", None) is not None
        for transform in part.recording.transforms or ()
    )
    # Manifests read from a file hold transforms as dictionaries.
    return any((t["name"] if isinstance(t, dict) else type(t).__name__) == "Speed" for t in transforms)


def random_volume(cut: Cut, rng: random.Random, min_db: float = -18.0, max_db: float = 6.0) -> Cut:
    """`cut` with a gain drawn evenly between two values in decibel; the id stays."""
    if min_db > max_db:
        raise ValueError(f"volume perturbation: min_db={min_db} is above max_db={max_db}")
    return cut.perturb_volume(10 ** (rng.uniform(min_db, max_db) / 20), affix_id=False)


def noise_cuts(path: str | Path) -> list[Cut]:
    """Cuts of noise: those of a manifest, or of all audio files in a folder at any depth, such as MUSAN's.

    Raises ValueError that names the path where there are none or a file cannot be read.
    """
    if not Path(path).is_dir():
        return list(iterate_cuts(path))
    files = sorted(file for file in Path(path).rglob("*") if file.suffix.lower() in (".wav", ".flac"))
    if not files:
        raise ValueError(f"data.noise={path}: the folder holds no .wav or .flac file at any depth")
    return [open_recording(file).to_cut() for file in files]


class NoiseMixer:
    """Callable (cut, rng) -> cut with noise over its whole length; id, duration and supervisions stay.

    noises: cuts of noise; longer ones are entered at a random place, shorter ones follow one another, at most ten.
        The first channel is used, at the sample rate of the cut. Read into memory as manifests, not as audio.
    min_snr, max_snr: bounds of the signal-to-noise ratio in decibel, drawn evenly. Where the cut or the noise is
        digital silence there is no such ratio: the noise is added as it is.
    probability: share of the cuts that get noise.

    Raises ValueError where there is no noise, min_snr is above max_snr or the probability is outside 0 to 1.
    """

    def __init__(
        self, noises: Iterable[Cut], min_snr: float = 10.0, max_snr: float = 20.0, probability: float = 0.5
    ) -> None:
        self.noises = [noise.drop_supervisions() for noise in noises if noise.duration > 0]
        if not self.noises:
            raise ValueError("noise mixing: the noise manifest holds no cut; give another, or turn noise mixing off")
        if min_snr > max_snr:
            raise ValueError(f"noise mixing: min_snr={min_snr} is above max_snr={max_snr}")
        if not 0 <= probability <= 1:
            raise ValueError(f"noise mixing: probability={probability} must lie between 0 and 1")
        self.min_snr = min_snr
        self.max_snr = max_snr
        self.probability = probability

    def __call__(self, cut: Cut, rng: random.Random) -> Cut:
        if rng.random() >= self.probability:
            return cut
        snr = rng.uniform(self.min_snr, self.max_snr)
        mixed, position = cut, 0.0
        for _ in range(MOST_NOISES_PER_CUT):
            noise = self._draw(rng, cut.sampling_rate, longest=cut.duration - position)
            mixed = mixed.mix(noise, offset_other_by=position, snr=snr, preserve_id="left")
            position = round(position + noise.duration, ndigits=8)
            if cut.duration - position < 2 / cut.sampling_rate:
                break
        return mixed

    def _draw(self, rng: random.Random, sample_rate: int, longest: float) -> Cut:
        noise = rng.choice(self.noises)
        if noise.num_channels > 1:
            noise = noise.to_mono()[0]
        if noise.sampling_rate != sample_rate:
            noise = noise.resample(sample_rate)
        spare = noise.duration - longest
        if spare <= 0:
            return noise
        return noise.truncate(offset=rng.uniform(0, spare), duration=longest, preserve_id=True)


def _checked(factors: Sequence[float]) -> list[float]:
    values = [float(factor) for factor in factors]
    if not values or min(values) <= 0 or len(set(values)) < len(values):
        raise ValueError(f"speed_perturb={list(factors)}: give different positive factors, such as [0.9, 1.0, 1.1]")
    return values
