from pathlib import Path

import numpy as np
import pytest
import torch

from asr.features.normalise import FeatureNorm
from asr.features.slaney import SlaneyFbank

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "nemo_preprocessor_io.npz"


def test_window_filters_and_features_are_nemos():
    golden, fbank = np.load(GOLDEN), SlaneyFbank()
    np.testing.assert_allclose(fbank.window, golden["window"], atol=1e-7)
    np.testing.assert_allclose(fbank.mel.T, golden["filterbank"][0], atol=1e-8)
    audio = torch.from_numpy(golden["audio_int16"]).float() / 32768
    made = [fbank(row[:length]) for row, length in zip(audio, golden["audio_lengths"], strict=True)]
    lens = torch.from_numpy(golden["lengths"])
    assert [len(features) for features in made] == lens.tolist()
    padded = torch.nn.utils.rnn.pad_sequence(made, batch_first=True, padding_value=float("nan"))
    normalised = FeatureNorm(64, "per_feature")(padded, lens)
    for row, length in enumerate(lens.tolist()):
        raw = golden["features_unnormalised"][row, :, :length].T
        # The golden features are rounded themselves: of energies below 1e-6, where an FFT in fp64 is off by 1.1e-4.
        audible = raw > np.log(1e-6)
        np.testing.assert_allclose(made[row].numpy()[audible], raw[audible], atol=1e-4, rtol=0)
        np.testing.assert_allclose(made[row], raw, atol=2e-4, rtol=0)
        np.testing.assert_allclose(normalised[row, :length], golden["features"][row, :, :length].T, atol=1e-4, rtol=0)
        assert not normalised[row, length:].any()


@pytest.mark.parametrize("num_samples", [0, 1, 159, 160, 161, 319, 4000])
def test_any_length_gives_a_frame_a_shift(num_samples):
    fbank = SlaneyFbank()
    features = fbank(torch.randn(num_samples))
    assert features.shape == (fbank.num_frames(num_samples), 64) == (num_samples // 160, 64)
    assert features.isfinite().all()


def test_silence_and_a_single_frame_stay_finite():
    features = SlaneyFbank()(torch.zeros(800))
    torch.testing.assert_close(features, torch.full((5, 64), -24 * 0.6931472))
    norm = FeatureNorm(64, "per_feature")
    assert not norm(features[None], torch.tensor([5])).any()
    assert norm(torch.randn(1, 1, 64), torch.tensor([1])).isfinite().all()


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="fft_size=256 is below the 320 samples"):
        SlaneyFbank(fft_size=256)
    with pytest.raises(ValueError, match=r"num_mel_bins=200 is too many for an FFT of 512: bins \[0"):
        SlaneyFbank(num_mel_bins=200)
    with pytest.raises(ValueError, match="no band"):
        SlaneyFbank(high_freq=9000)
