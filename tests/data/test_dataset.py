import dataclasses

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet, Recording
from lhotse.utils import fastcopy

from asr.data.augment import random_volume
from asr.data.cuts import load_cuts
from asr.data.dataset import SILENCE, SpeechDataset
from asr.data.store import FeatureStore
from asr.features.fbank import Fbank


def test_a_batch_holds_each_utterance_in_one_order_with_silence_behind_it(make_wavs, two_features, letters):
    cuts = make_wavs([0.1, 0.3, 0.2], text=" ab ")
    batch = SpeechDataset(two_features, 2, letters)[cuts, 1]
    assert batch.ids == ["c00", "c01", "c02"] and batch.speakers == ["speaker0", "speaker1", "speaker0"]
    assert batch.texts == ["ab"] * 3 and batch.tokens.tolist() == [[1, 2]] * 3 and batch.token_lens.tolist() == [2] * 3
    assert batch.features.shape == (3, 30, 2) and batch.feature_lens.tolist() == [10, 30, 20]
    assert batch.audio_seconds == pytest.approx(0.6) and batch.skipped == []
    for row, length in enumerate([10, 30, 20]):
        assert batch.features[row, :length, 1].gt(0).all() and batch.features[row, length:].eq(SILENCE).all()


def test_empty_transcripts_have_no_tokens(make_wavs, two_features, letters):
    batch = SpeechDataset(two_features, 2, letters)[make_wavs([0.1, 0.1], text="  "), 1]
    assert batch.tokens.shape == (2, 0) and batch.tokens.dtype == torch.int64 and batch.token_lens.tolist() == [0, 0]


def test_what_cannot_be_used_is_left_out_and_named(make_wavs, two_features, letters, tmp_path):
    cuts = make_wavs([0.1, 0.1, 0.1, 0.1])
    (tmp_path / "c00.wav").unlink()
    (tmp_path / "c01.wav").write_bytes(b"")
    soundfile.write(tmp_path / "c02.wav", np.full(1600, np.nan), 16000, subtype="FLOAT")
    batch = SpeechDataset(two_features, 2, letters)[cuts, 1]
    assert batch.ids == ["c03"] and [item.id for item in batch.skipped] == ["c00", "c01", "c02"]
    assert all(f"{item.id}.wav" in item.reason and item.text == "ab" for item in batch.skipped)
    nothing = SpeechDataset(two_features, 2, letters)[cuts[:3], 1]
    assert len(nothing) == 0 and nothing.features.shape == (0, 0, 2) and len(nothing.skipped) == 3
    assert nothing.tokens.dtype == torch.int64


def test_features_that_are_not_finite_are_left_out(make_wavs, letters):
    def broken(samples):
        return torch.full((3, 2), torch.inf)

    batch = SpeechDataset(broken, 2, letters)[make_wavs([0.1]), 1]
    assert len(batch) == 0 and "not finite" in batch.skipped[0][1]


def test_augmentation_differs_between_cuts_epochs_and_seeds_only(make_wavs, two_features, letters):
    cut = make_wavs([0.1])[0]
    twin = dataclasses.replace(cut, id="twin")

    def loudness(which, seed, epoch):
        dataset = SpeechDataset(two_features, 2, letters, seed, cut_augments=(random_volume,))
        return float(dataset[[which], epoch].features[..., 1].max())

    assert loudness(cut, 1, 1) == loudness(cut, 1, 1)
    assert len({loudness(cut, 1, 1), loudness(twin, 1, 1), loudness(cut, 1, 2), loudness(cut, 2, 1)}) == 4


def test_dither_is_a_function_of_seed_epoch_and_cut(make_wavs, letters):
    cuts = make_wavs([0.1, 0.1])
    dataset = SpeechDataset(Fbank(num_mel_bins=20, dither=50.0), 20, letters, seed=1)
    before = torch.get_rng_state()
    first = dataset[cuts, 1].features
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    assert torch.equal(first, dataset[cuts, 1].features)
    assert not torch.equal(first, dataset[cuts, 2].features)


def test_stored_features_are_computed_once_and_the_same_every_time(make_wavs, letters, tmp_path):
    cuts, calls, fbank = make_wavs([0.3, 0.2]), [], Fbank(num_mel_bins=23)

    def counting(samples):
        calls.append(len(samples))
        return fbank(samples)

    dataset = SpeechDataset(counting, 23, letters, store=FeatureStore(tmp_path / "features"))
    first, second = dataset[cuts, 1], dataset[cuts, 2]
    assert len(calls) == 2 and torch.equal(first.features, second.features)
    exact = SpeechDataset(fbank, 23, letters)[cuts, 1].features
    torch.testing.assert_close(first.features, exact, atol=0.01, rtol=0)
    augmented = SpeechDataset(counting, 23, letters, 0, (random_volume_of_6db,), FeatureStore(tmp_path / "features"))
    assert not torch.equal(augmented[cuts, 1].features, first.features), "what changes every epoch is not stored"


def test_what_is_stored_is_found_again_by_another_run(make_wavs, two_features, letters, tmp_path):
    CutSet.from_cuts(make_wavs([0.3, 0.2])).to_file(tmp_path / "cuts.jsonl.gz")

    def never(samples):
        raise AssertionError("computed again")

    def features(extract):
        store = FeatureStore(tmp_path / "features")
        return SpeechDataset(extract, 2, letters, store=store)[list(load_cuts(tmp_path / "cuts.jsonl.gz")), 1].features

    assert torch.equal(features(two_features), features(never))
    assert all(np.load(path).dtype == np.float16 for path in (tmp_path / "features").rglob("*.npy"))


def test_cuts_of_one_id_and_length_are_stored_by_what_they_are_cut_of(make_wavs, letters, tmp_path):
    first, second, third = make_wavs([0.3, 0.3, 0.6])
    stereo = np.random.default_rng(1).uniform(-0.1, 0.1, (4800, 2))
    soundfile.write(tmp_path / "stereo.wav", stereo, 16000)
    left, right = (Recording.from_file(tmp_path / "stereo.wav").to_cut().to_mono()[side] for side in (0, 1))
    cuts = [
        first,
        second,
        fastcopy(third, duration=0.3),
        fastcopy(third, duration=0.3, start=0.3),
        fastcopy(third, duration=0.2),
        third.perturb_speed(2.0, affix_id=False),
        *(fastcopy(side, supervisions=first.supervisions) for side in (left, right)),
        *(first.mix(second.drop_supervisions(), snr=snr) for snr in (0, 10)),
        first.mix(fastcopy(third, duration=0.3, supervisions=[]), snr=10),
    ]
    cuts = [cut.with_id("same") for cut in cuts]
    fbank = Fbank(num_mel_bins=23)
    stored = SpeechDataset(fbank, 23, letters, store=FeatureStore(tmp_path / "features"))
    for cut in [*cuts, *cuts]:
        exact = SpeechDataset(fbank, 23, letters)[[cut], 1].features
        torch.testing.assert_close(stored[[cut], 1].features, exact, atol=0.02, rtol=0)


def test_a_broken_stored_file_is_named(make_wavs, two_features, letters, tmp_path):
    cuts = make_wavs([0.3])
    dataset = SpeechDataset(two_features, 2, letters, store=FeatureStore(tmp_path / "features"))
    _ = dataset[cuts, 1]
    (stored,) = (tmp_path / "features").rglob("*.npy")
    stored.write_bytes(stored.read_bytes()[:100])
    ((name, reason, _),) = dataset[cuts, 1].skipped
    assert name == "c00" and str(stored) in reason and "delete it" in reason


def random_volume_of_6db(cut, generator):
    return random_volume(cut, generator, 6.0, 6.0)
