"""Log-mel features as librosa and NeMo define them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GUARD = 2.0**-24
_PREEMPHASIS = 0.97


class SlaneyFbank:
    """Callable: samples (N,) float32 in [-1, 1] -> log-mel features (T, num_mel_bins) float32, T = N // frame shift.

    NeMo's AudioToMelSpectrogramPreprocessor in evaluation: pre-emphasis of the whole signal, a symmetric Hann window in
    the middle of the FFT's length, frames centred on multiples of the shift with zeros beyond the ends of the audio,
    power spectrum, Slaney's mel filters of equal area, log(x + 2^-24). NeMo's dither, which it adds in training alone,
    is left out, and so is the padding of batches to a multiple of frames, which no masked model sees.

    sample_rate: Hz, of the samples given. frame_length, frame_shift: milliseconds. fft_size: samples, at least a frame.
    low_freq, high_freq: Hz; high_freq None is half the sample rate.

    Raises ValueError for frequencies outside 0..sample_rate/2, for a frame longer than the FFT, and for so many mel
    bins that one of them is empty.
    """

    def __init__(
        self,
        sample_rate: int = 16000,
        num_mel_bins: int = 64,
        frame_length: float = 20.0,
        frame_shift: float = 10.0,
        fft_size: int = 512,
        low_freq: float = 0.0,
        high_freq: float | None = None,
    ) -> None:
        self.sample_rate = sample_rate
        self.window_size = int(sample_rate * frame_length / 1000)
        self.window_shift = int(sample_rate * frame_shift / 1000)
        if self.window_size > fft_size:
            raise ValueError(f"features: fft_size={fft_size} is below the {self.window_size} samples of a frame")
        self._fft_size = fft_size
        self.window = torch.hann_window(self.window_size, periodic=False)
        self.mel = slaney_filters(sample_rate, fft_size, num_mel_bins, low_freq, high_freq or sample_rate / 2)

    @property
    def output_dim(self) -> int:
        return self.mel.shape[1]

    @property
    def frame_shift_seconds(self) -> float:
        return self.window_shift / self.sample_rate

    def num_frames(self, num_samples: int) -> int:
        return num_samples // self.window_shift

    def __call__(self, samples: Tensor) -> Tensor:
        assert samples.dim() == 1, f"one channel is wanted, got samples of shape {tuple(samples.shape)}"
        num_frames = self.num_frames(len(samples))
        if num_frames == 0:
            return torch.zeros(0, self.output_dim)
        samples = samples.float()
        emphasised = torch.cat([samples[:1], samples[1:] - _PREEMPHASIS * samples[:-1]])
        spectrum = torch.stft(
            emphasised,
            self._fft_size,
            self.window_shift,
            self.window_size,
            self.window,
            center=True,
            pad_mode="constant",
            return_complex=True,
        )
        power = torch.view_as_real(spectrum[:, :num_frames]).square().sum(-1)
        return (power.T @ self.mel + _GUARD).log()


def slaney_filters(sample_rate: int, fft_size: int, num_bins: int, low_freq: float, high_freq: float) -> Tensor:
    """(fft_size // 2 + 1, num_bins) triangles of area 1 over Hz, equally spaced on Slaney's mel scale.

    The scale (Auditory Toolbox, 1998) is linear up to 1000 Hz, 200/3 Hz a mel, and logarithmic above, 27 mels for each
    factor of 6.4.
    """
    if not 0 <= low_freq < high_freq <= sample_rate / 2:
        raise ValueError(f"features: low_freq={low_freq} to high_freq={high_freq} is no band within 0 to half the rate")
    linear, corner = 200.0 / 3.0, 1000.0
    log_step = math.log(6.4) / 27.0

    def mel(frequency: float) -> float:
        return frequency / linear if frequency < corner else corner / linear + math.log(frequency / corner) / log_step

    mels = torch.linspace(mel(low_freq), mel(high_freq), num_bins + 2, dtype=torch.float64)
    edges = torch.where(mels < corner / linear, mels * linear, corner * torch.exp(log_step * (mels - corner / linear)))
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    points = torch.arange(fft_size // 2 + 1, dtype=torch.float64)[:, None] * sample_rate / fft_size
    filters = torch.minimum((points - left) / (centre - left), (right - points) / (right - centre)).clamp(min=0)
    empty = (filters.sum(dim=0) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"features: num_mel_bins={num_bins} is too many for an FFT of {fft_size}: bins {empty[:5]} are empty"
        )
    return (filters * 2.0 / (right - left)).float()
