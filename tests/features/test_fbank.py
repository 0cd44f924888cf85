import math
import os
from pathlib import Path

import pytest
import soundfile
import torch
import torchaudio.compliance.kaldi as kaldi
import yaml

from asr.features.fbank import Fbank

ROOT = Path(__file__).parents[2]
AN4 = Path(os.environ.get("ASR_SHARED", ROOT / ".." / "shared")) / "data" / "an4" / "wav"
SILENCE = math.log(torch.finfo(torch.float32).eps)


def reference(samples, sample_rate=16000, num_mel_bins=80, precise=False):
    """Kaldi's features by torchaudio, in float64 where rounding in float32 would hide a difference."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if precise else torch.float32)
        return kaldi.fbank(
            samples.to(torch.get_default_dtype())[None],
            sample_frequency=sample_rate,
            num_mel_bins=num_mel_bins,
            snip_edges=False,
            dither=0.0,
            low_freq=20.0,
            high_freq=-400.0,
        ).float()
    finally:
        torch.set_default_dtype(default)


def coloured_noise(num_samples):
    """Noise with a falling spectrum and an offset, as speech has, without bins that hold only rounding errors."""
    noise = torch.randn(num_samples + 1, generator=torch.Generator().manual_seed(0))
    return 0.1 * (noise[1:] + 0.8 * noise[:-1]) + 0.02


def sweep(num_samples):
    time = torch.arange(num_samples) / 16000
    return 0.5 * torch.sin(2 * torch.pi * (200 * time + 900 * time.square())) + 0.02


@pytest.mark.parametrize("num_samples", [400, 401, 479, 480, 559, 560, 561, 1234, 16000, 48077])
def test_equals_kaldi(num_samples):
    samples = coloured_noise(num_samples)
    features, expected = Fbank()(samples), reference(samples)
    assert features.dtype == torch.float32
    assert features.shape == expected.shape == (Fbank().num_frames(num_samples), 80)
    torch.testing.assert_close(features, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("sample_rate", "num_mel_bins"), [(8000, 40), (16000, 23), (44100, 80)])
def test_equals_kaldi_at_other_rates(sample_rate, num_mel_bins):
    samples = coloured_noise(sample_rate)
    features = Fbank(sample_rate, num_mel_bins)(samples)
    torch.testing.assert_close(features, reference(samples, sample_rate, num_mel_bins), atol=1e-3, rtol=0)


def test_a_sweep_where_most_bins_hold_only_rounding_errors_is_as_exact_as_float32_allows():
    samples = sweep(48000)
    exact = reference(samples, precise=True)
    error, usual_error = (Fbank()(samples) - exact).abs(), (reference(samples) - exact).abs()
    assert error.max() < 2 * usual_error.max() and error.mean() < 2 * usual_error.mean()


@pytest.mark.skipif(not AN4.is_dir(), reason=f"needs real speech in {AN4}")
def test_equals_kaldi_on_speech():
    for path in sorted(AN4.rglob("*.flac"))[::100]:
        samples = torch.from_numpy(soundfile.read(path, dtype="float32")[0])
        torch.testing.assert_close(Fbank()(samples), reference(samples, precise=True), atol=2e-3, rtol=0)


@pytest.mark.parametrize("num_samples", [0, 1, 100, 399])
def test_less_than_a_window_is_no_frame(num_samples):
    assert Fbank()(torch.zeros(num_samples)).shape == (0, 80)
    assert Fbank().num_frames(num_samples) == 0


def test_silence_and_constant_are_the_floor():
    for level in (0.0, 0.5):
        features = Fbank()(torch.full((16000,), level))
        assert features.shape == (100, 80)
        torch.testing.assert_close(features, torch.full_like(features, SILENCE))


def test_input_is_left_alone():
    samples = coloured_noise(4000)
    before = samples.clone()
    Fbank()(samples)
    assert torch.equal(samples, before)


def test_dither_is_in_16_bit_steps_and_off_by_default():
    silence = torch.zeros(16000)
    assert torch.equal(Fbank()(silence), Fbank()(silence))
    dithered = Fbank(dither=1.0)(silence)
    unit_noise = Fbank()(torch.randn(16000, generator=torch.Generator().manual_seed(0)))
    # log(1 / 32768^2) = -20.79 below noise of standard deviation 1, and above the floor only in part.
    assert (dithered.mean() < unit_noise.mean() - 12).item() and (dithered > SILENCE).any()


def test_wrong_bands_are_refused_in_words():
    with pytest.raises(ValueError, match="num_mel_bins=300 is too many for 16000 Hz"):
        Fbank(num_mel_bins=300)
    with pytest.raises(ValueError, match=r"high_freq=9000.* 0 to 8000"):
        Fbank(high_freq=9000.0)


def test_yaml_is_the_default():
    conf = yaml.safe_load((ROOT / "conf" / "features" / "fbank80.yaml").read_text(encoding="utf-8"))["fbank"]
    assert conf.pop("_target_") == "asr.features.fbank.Fbank"
    fbank = Fbank(**conf)
    assert (fbank.output_dim, fbank.frame_shift_seconds) == (80, 0.01)
    assert torch.equal(fbank(coloured_noise(8000)), Fbank()(coloured_noise(8000)))
