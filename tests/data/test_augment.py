import random

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet, Recording, SupervisionSegment
from lhotse.cut import Cut

from asr.data.augment import (
    NoiseMixer,
    cut_rng,
    is_speed_perturbed,
    noise_cuts,
    random_speed,
    random_volume,
    speed_perturb,
)
from asr.features.fbank import Fbank

FACTORS = [0.9, 1.0, 1.1]


@pytest.fixture
def make_cut(tmp_path):
    def make(
        name: str, seconds: float = 2.0, level: float = 0.1, sample_rate: int = 16000, channels: int = 1, text="a"
    ) -> Cut:
        noise = np.random.RandomState(len(name)).randn(round(seconds * sample_rate), channels)
        path = tmp_path / f"{name}.wav"
        soundfile.write(path, level * noise, sample_rate, subtype="FLOAT")
        cut = Recording.from_file(path, recording_id=name).to_cut()
        cut.id = name
        if text:
            cut.supervisions = [SupervisionSegment(name, name, 0.0, cut.duration, text=text)]
        return cut

    return make


@pytest.fixture
def corpus(make_cut):
    return CutSet.from_cuts([make_cut(f"utt{index}") for index in range(5)])


def test_speed_expands_with_unique_ids_and_stated_durations(corpus):
    copies = list(speed_perturb(corpus, FACTORS))
    assert len({cut.id for cut in copies}) == 15
    assert {cut.id for cut in copies if cut.id.startswith("utt3")} == {"utt3", "utt3_sp0.9", "utt3_sp1.1"}
    assert sum(cut.duration for cut in copies) == pytest.approx(10 * (1 / 0.9 + 1 + 1 / 1.1), abs=1e-3)
    for cut in copies:
        assert cut.load_audio().shape == (1, cut.num_samples)
        assert cut.supervisions[0].text == "a"
        assert cut.supervisions[0].duration == pytest.approx(cut.duration, abs=1e-4)


def test_speed_changes_the_audio(tmp_path):
    soundfile.write(tmp_path / "tone.wav", 0.5 * np.sin(2 * np.pi * 500 * np.arange(32000) / 16000), 16000)
    tone = Recording.from_file(tmp_path / "tone.wav", recording_id="tone").to_cut()
    fast = random_speed(tone, [1.1], random.Random(0)).load_audio()[0]
    spectrum = np.abs(np.fft.rfft(fast))
    assert spectrum.argmax() * 16000 / len(fast) == pytest.approx(550, abs=1)


def test_factor_one_alone_changes_nothing(corpus):
    assert list(speed_perturb(corpus, [1])) == list(corpus)


def test_expansion_of_a_lazy_set_is_lazy_and_the_same_each_time(corpus, tmp_path):
    corpus.to_file(tmp_path / "cuts.jsonl.gz")
    lazy = speed_perturb(CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl.gz"), FACTORS)
    assert lazy.is_lazy
    assert [cut.id for cut in lazy] == [cut.id for cut in lazy] == [cut.id for cut in speed_perturb(corpus, FACTORS)]


def test_nothing_is_perturbed_twice(corpus, tmp_path):
    once = speed_perturb(corpus, FACTORS)
    with pytest.raises(ValueError, match=r"cut utt0_sp0.9: its speed was changed already"):
        list(speed_perturb(once, FACTORS))
    once.to_file(tmp_path / "once.jsonl.gz")
    with pytest.raises(ValueError, match="changed already"):
        list(speed_perturb(CutSet.from_jsonl_lazy(tmp_path / "once.jsonl.gz"), FACTORS))
    chain = corpus["utt0"].append(corpus["utt1"])
    assert not is_speed_perturbed(chain)
    with pytest.raises(ValueError, match="changed already"):
        random_speed(chain.perturb_speed(0.9), FACTORS, random.Random(0))


@pytest.mark.parametrize("factors", [[], [0.0, 1.0], [-1.0], [0.9, 0.9]])
def test_impossible_factors_are_refused(corpus, factors):
    with pytest.raises(ValueError, match="different positive factors"):
        speed_perturb(corpus, factors)


def test_online_speed_picks_every_factor_and_depends_on_seed_epoch_and_id_only(corpus):
    def picked(seed, epoch, cuts):
        return {cut.id: random_speed(cut, FACTORS, cut_rng(seed, epoch, cut.id)).id for cut in cuts}

    first = picked(0, 0, corpus)
    assert picked(0, 0, reversed(list(corpus))) == first
    draws = [picked(seed, epoch, corpus) for seed in range(3) for epoch in range(5)]
    assert {name.removeprefix("utt0") for draw in draws for name in [draw["utt0"]]} == {"", "_sp0.9", "_sp1.1"}
    assert len({tuple(draw.values()) for draw in draws}) > 10


def test_speed_of_a_chain_of_recordings(corpus):
    chain = corpus["utt0"].append(corpus["utt1"])
    slow = random_speed(chain, [0.9], random.Random(0))
    assert slow.duration == pytest.approx(4 / 0.9, abs=1e-3)
    assert slow.load_audio().shape == (1, slow.num_samples)


def test_volume_is_drawn_within_bounds_and_keeps_the_id(corpus):
    cut, rng = corpus["utt0"], random.Random(0)
    plain = cut.load_audio()
    gains = []
    for _ in range(40):
        louder = random_volume(cut, rng, min_db=-10, max_db=5)
        assert louder.id == cut.id and louder.duration == cut.duration
        gains.append(20 * np.log10(np.abs(louder.load_audio()).mean() / np.abs(plain).mean()))
    assert -10.01 < min(gains) < -6 and 2 < max(gains) < 5.01
    assert np.array_equal(cut.load_audio(), plain)
    with pytest.raises(ValueError, match="min_db=3 is above"):
        random_volume(cut, rng, min_db=3, max_db=0)


@pytest.mark.parametrize(
    "noise",
    [
        {"seconds": 10.0, "level": 0.3},
        {"seconds": 0.5, "level": 0.001},
        {"seconds": 3.0, "sample_rate": 8000},
        {"seconds": 3.0, "sample_rate": 44100, "channels": 2},
    ],
)
def test_noise_covers_the_cut_at_the_asked_ratio(make_cut, noise):
    cut = make_cut("speech", seconds=3.0)
    mixer = NoiseMixer([make_cut("noise", **noise)], min_snr=10, max_snr=10, probability=1.0)
    mixed = mixer(cut, random.Random(0))
    assert (mixed.id, mixed.duration, mixed.num_samples) == (cut.id, cut.duration, cut.num_samples)
    assert [supervision.text for supervision in mixed.supervisions] == ["a"]
    speech, added = cut.load_audio(), mixed.load_audio() - cut.load_audio()
    assert added.shape == speech.shape
    assert 10 * np.log10(np.square(speech).mean() / np.square(added).mean()) == pytest.approx(10, abs=0.2)
    assert np.abs(added[0, -4000:]).mean() > 0.01


@pytest.mark.parametrize(
    ("speech_level", "noise_level"), [(0.0, 0.1), (0.1, 0.0), (0.0, 0.0), (1e-30, 0.1), (0.1, 1e-30)]
)
def test_digital_silence_on_either_side_stays_finite(make_cut, speech_level, noise_level):
    mixer = NoiseMixer([make_cut("noise", seconds=5.0, level=noise_level)], probability=1.0)
    audio = mixer(make_cut("speech", level=speech_level), random.Random(0)).load_audio()
    assert np.isfinite(audio).all() and np.abs(audio).max() < 10
    assert Fbank()(torch.from_numpy(audio[0])).isfinite().all()


def test_noise_depends_on_the_generator_only_and_on_probability(make_cut, corpus):
    mixer = NoiseMixer([make_cut("noise", seconds=9.0), make_cut("noise2", seconds=9.0)], probability=0.5)
    first = [mixer(cut, cut_rng(0, epoch, cut.id)) for cut in corpus for epoch in range(20)]
    again = [mixer(cut, cut_rng(0, epoch, cut.id)) for cut in corpus for epoch in range(20)]
    assert all(np.array_equal(a.load_audio(), b.load_audio()) for a, b in zip(first[:6], again[:6], strict=True))
    assert first == again
    with_noise = sum(len(getattr(cut, "tracks", [])) == 2 for cut in first)
    assert 30 < with_noise < 70


def test_speed_volume_and_noise_together(make_cut, corpus):
    mixer = NoiseMixer([make_cut("noise", seconds=0.7)], probability=1.0)
    for cut in speed_perturb(corpus, FACTORS):
        rng = cut_rng(0, 0, cut.id)
        augmented = mixer(random_volume(cut, rng), rng)
        assert augmented.id == cut.id
        assert augmented.load_audio().shape == (1, cut.num_samples)


def test_wrong_noise_settings_are_refused_in_words(make_cut):
    noises = [make_cut("noise")]
    for arguments, complaint in (
        ({"noises": []}, "holds no cut"),
        ({"noises": noises, "min_snr": 20, "max_snr": 10}, "min_snr=20 is above"),
        ({"noises": noises, "probability": 2}, "probability=2"),
    ):
        with pytest.raises(ValueError, match=complaint):
            NoiseMixer(**arguments)


def test_noise_from_a_folder_of_musans_shape(make_cut, tmp_path):
    for place, rate in (("musan/noise/free-sound/n1.wav", 16000), ("musan/music/fma/m 2.WAV", 44100),
                        ("musan/speech/librivox/s3.flac", 8000)):  # fmt: skip
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        soundfile.write(path, 0.1 * np.random.RandomState(1).randn(rate), rate)
    (tmp_path / "musan" / "README").write_text("not audio")
    found = noise_cuts(str(tmp_path / "musan"))
    assert [round(cut.duration, 3) for cut in found] == [1.0, 1.0, 1.0]
    speech = make_cut("speech")
    for noise in found:
        mixed = NoiseMixer([noise], 10, 10, probability=1.0)(speech, random.Random(0)).load_audio()
        assert np.abs(mixed - speech.load_audio())[0, -4000:].mean() > 0.01
    CutSet.from_cuts(found).to_file(tmp_path / "noise.jsonl.gz")
    assert [cut.id for cut in noise_cuts(tmp_path / "noise.jsonl.gz")] == [cut.id for cut in found]
    (tmp_path / "musan" / "noise" / "broken.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"broken\.wav: cannot be read as audio"):
        noise_cuts(tmp_path / "musan")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"data\.noise=.*nothing: .*no \.wav or \.flac"):
        noise_cuts(tmp_path / "nothing")
