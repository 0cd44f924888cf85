import gzip
import json

import numpy as np
import pytest
import soundfile
from lhotse import AudioSource, CutSet, MonoCut

from asr.data.cuts import AudioError, Manifest, iterate_cuts, load_audio, load_cuts, make_cut, unreadable_reason


def tone(seconds: float, rate: int, frequency: float = 440.0) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def write_tone(path, seconds=1.0, rate=16000, **options):
    soundfile.write(path, tone(seconds, rate), rate, **options)
    return path


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_any_rate_becomes_16_khz_with_the_same_pitch_and_length(tmp_path, rate):
    samples = load_audio(make_cut("a", write_tone(tmp_path / "a.wav", 1.3, rate), "A"))
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert abs(len(samples) / 16000 - 1.3) < 0.001
    spectrum = np.abs(np.fft.rfft(samples))
    assert abs(spectrum.argmax() * 16000 / len(samples) - 440) < 2


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("a.wav", {"subtype": "PCM_24"}, 1e-4),
        ("a.wav", {"subtype": "FLOAT"}, 1e-6),
        ("a.flac", {}, 1e-4),
        ("a.sph", {"format": "NIST"}, 1e-4),
        ("a.opus", {"format": "OGG", "subtype": "OPUS"}, 0.1),
        ("a.mp3", {}, 0.1),
    ],
)
def test_formats_give_the_same_samples(tmp_path, name, options, tolerance):
    samples = load_audio(make_cut("a", write_tone(tmp_path / name, **options), "A"))
    assert len(samples) == 16000
    assert np.abs(samples[2000:-2000] - tone(1.0, 16000)[2000:-2000]).max() < tolerance


def test_stereo_becomes_the_mean_of_its_channels(tmp_path):
    left = tone(1.0, 16000)
    soundfile.write(tmp_path / "a.wav", np.stack([left, np.zeros_like(left)], 1), 16000)
    samples = load_audio(make_cut("a", tmp_path / "a.wav", "A"))
    assert np.abs(samples - left / 2).max() < 1e-3


def test_noise_mixed_into_stereo_counts_in_full(tmp_path):
    left = tone(1.0, 16000)
    soundfile.write(tmp_path / "a.wav", np.stack([left, left], 1), 16000, subtype="FLOAT")
    soundfile.write(tmp_path / "n.wav", tone(1.0, 16000, 1000.0), 16000, subtype="FLOAT")
    mixed = make_cut("a", tmp_path / "a.wav", "A").mix(make_cut("n", tmp_path / "n.wav", None).drop_supervisions())
    assert np.abs(load_audio(mixed) - left - tone(1.0, 16000, 1000.0)).max() < 1e-4


@pytest.mark.parametrize("start", [0.0, 0.1234567, 1.7777])
def test_odd_offsets_into_44_khz_do_not_diverge(tmp_path, start):
    path = tmp_path / "a.wav"
    soundfile.write(path, np.random.default_rng(0).uniform(-0.1, 0.1, 123457), 44100)
    cut = make_cut("a", path, "A", start=start, duration=0.98765).resample(16000)
    assert abs(len(load_audio(cut)) - 0.98765 * 16000) <= 1


def test_silence_and_one_sample_are_audio(tmp_path):
    soundfile.write(tmp_path / "zeros.wav", np.zeros(16000), 16000)
    soundfile.write(tmp_path / "one.wav", np.ones(1) * 0.5, 16000)
    assert not load_audio(make_cut("zeros", tmp_path / "zeros.wav", "A")).any()
    assert len(load_audio(make_cut("one", tmp_path / "one.wav", "A"))) == 1


def test_error_names_id_and_path(tmp_path):
    cut = make_cut("the-id", write_tone(tmp_path / "a.wav"), "A")
    (tmp_path / "a.wav").write_text("no audio at all")
    with pytest.raises(ValueError, match=r"the-id.*a\.wav"):
        load_audio(cut)
    (tmp_path / "a.wav").unlink()
    with pytest.raises(AudioError, match=r"the-id.*a\.wav.*missing file") as caught:
        load_audio(cut)
    assert caught.value.reason == "missing file"


def test_error_tells_what_the_decoder_said(tmp_path):
    cut = make_cut("the-id", write_tone(tmp_path / "a.wav"), "A")
    (tmp_path / "a.wav").write_text("no audio at all")
    with pytest.raises(AudioError, match=r"corrupt audio: .*a\.wav': Format not recognised") as caught:
        load_audio(cut)
    assert "Format not recognised" in caught.value.detail


def test_error_of_an_address_is_not_that_of_a_missing_file(tmp_path):
    cut = make_cut("the-id", write_tone(tmp_path / "a.wav"), "A")
    cut.recording.sources[0] = AudioSource("url", [0], "nowhere://a.wav")
    with pytest.raises(AudioError, match=r"\(nowhere://a\.wav\): corrupt audio: \w+") as caught:
        load_audio(cut)
    assert caught.value.reason == "corrupt audio"


def spoil(path, how):
    if how == "missing file":
        path.unlink()
    elif how == "corrupt audio":
        path.write_text("no audio at all")
    else:
        soundfile.write(path, np.full(16000, np.nan), 16000, subtype="FLOAT")


@pytest.mark.parametrize("how", ["missing file", "corrupt audio", "non-finite samples"])
@pytest.mark.parametrize("which", ["speech", "noise"])
def test_error_names_the_recording_of_a_mix_that_is_to_blame(tmp_path, which, how):
    speech, noise = (make_cut(name, write_tone(tmp_path / f"{name}.wav"), "A") for name in ("speech", "noise"))
    mixed = speech.mix(noise.drop_supervisions(), snr=10, preserve_id="left")
    spoil(tmp_path / f"{which}.wav", how)
    with pytest.raises(AudioError, match=rf"^Utterance 'speech' \(\S*/{which}\.wav\): {how}") as caught:
        load_audio(mixed)
    assert caught.value.reason == how
    assert which == "speech" or caught.value.detail.startswith(str(tmp_path / "noise.wav"))


def test_not_finite_samples_are_refused(tmp_path):
    samples = tone(1.0, 16000)
    samples[100] = np.nan
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    with pytest.raises(AudioError, match="NaN"):
        load_audio(make_cut("a", tmp_path / "a.wav", "A"))


def test_making_a_cut_never_raises_for_its_audio(tmp_path):
    (tmp_path / "empty.wav").touch()
    assert unreadable_reason(make_cut("a", tmp_path / "empty.wav", "A")) == "corrupt audio"
    assert unreadable_reason(make_cut("a", tmp_path / "gone.wav", "A")) == "missing file"
    assert unreadable_reason(make_cut("a", write_tone(tmp_path / "good.wav"), "A")) is None


def manifest(tmp_path, name="cuts.jsonl.gz"):
    cuts = [make_cut(f"c{number}", write_tone(tmp_path / "a.wav"), "A") for number in range(50)]
    CutSet.from_cuts(cuts).to_file(tmp_path / name)
    return tmp_path / name


def test_manifests_survive_writing_and_reading(tmp_path):
    for name in ("cuts.jsonl.gz", "cuts.jsonl"):
        loaded = load_cuts(manifest(tmp_path, name))
        assert [cut.id for cut in loaded] == [f"c{number}" for number in range(50)]
        assert all(isinstance(cut, MonoCut) for cut in loaded)


def test_a_manifest_is_read_anew_each_time(tmp_path):
    cuts = Manifest(manifest(tmp_path))
    assert len(cuts) == 50 and [cut.id for cut in cuts] == [cut.id for cut in cuts] == [f"c{n}" for n in range(50)]
    cuts.path.unlink()
    with pytest.raises(ValueError, match="no such file"):
        next(iter(cuts))


def test_broken_manifests_name_file_and_line(tmp_path):
    whole = manifest(tmp_path)
    half = tmp_path / "half.jsonl.gz"
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"half\.jsonl\.gz, (after )?line \d+"):
        list(iterate_cuts(half))
    lines = gzip.decompress(whole.read_bytes()).decode().splitlines()
    cut_off = tmp_path / "line.jsonl"
    cut_off.write_text("\n".join([*lines[:3], lines[3][:40]]))
    with pytest.raises(ValueError, match=r"line\.jsonl, line 4.*JSON"):
        list(iterate_cuts(cut_off))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"surprise": 1}))
    with pytest.raises(ValueError, match=r"other\.jsonl, line 1"):
        list(iterate_cuts(other))


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.jsonl.gz"])
def test_empty_and_missing_manifests_are_errors(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        list(iterate_cuts(tmp_path / name))
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    with pytest.raises(ValueError, match=f"{name}.*empty"):
        list(iterate_cuts(tmp_path / name))
