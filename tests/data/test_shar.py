import random

import numpy as np
import pytest
from lhotse import CutSet
from lhotse.utils import fastcopy

from asr.data import shar
from asr.data.augment import NoiseMixer, change_speed
from asr.data.corpus import Corpus, write_prepared
from asr.data.cuts import AudioError, load_audio, load_cuts


@pytest.fixture
def stored(tmp_path, make_wavs, monkeypatch):
    """Function of the number of jobs: cuts before and after their audio was stored, with the files gone."""
    monkeypatch.setattr(shar, "UTTERANCES_PER_SHARD", 3)

    def store(num_jobs=1):
        cuts = make_wavs([0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
        # A part of a longer recording is stored without the rest.
        cuts[2] = fastcopy(
            cuts[2], start=0.1, duration=0.2, supervisions=[fastcopy(cuts[2].supervisions[0], duration=0.2)]
        )
        audio = [load_audio(cut) for cut in cuts]
        write_prepared(Corpus({"train": cuts}), tmp_path / "out", None, {}, num_jobs, tmp_path / "shar")
        for wav in tmp_path.glob("*.wav"):
            wav.unlink()
        return cuts, audio, list(load_cuts(tmp_path / "out" / "train.jsonl.gz"))

    return store


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_audio_is_read_from_large_files(stored, tmp_path, num_jobs):
    before, audio, after = stored(num_jobs)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data_report.json", "train.jsonl.gz"]
    assert len(list((tmp_path / "shar").glob("recording.*.tar"))) == 3
    for one, samples, other in zip(before, audio, after, strict=True):
        assert (one.id, one.duration, one.supervisions[0].text) == (
            other.id,
            other.duration,
            other.supervisions[0].text,
        )
        assert np.array_equal(load_audio(other), samples)
    # Other tools read the folder as well.
    assert [cut.id for cut in CutSet.from_shar(in_dir=tmp_path / "shar")] == [cut.id for cut in before]


def test_augmentation_works_as_on_files(stored):
    _, audio, after = stored()
    slow = change_speed(after[3], 0.9)
    assert len(load_audio(slow)) == slow.num_samples > len(audio[3])
    noisy = NoiseMixer([after[6]], 10, 10, 1.0)(after[0], random.Random(0))
    assert not np.array_equal(load_audio(noisy), audio[0]) and len(load_audio(noisy)) == len(audio[0])


def test_a_shard_that_is_gone_or_damaged_is_named(stored, tmp_path):
    _, _, after = stored()
    (archive,) = (tmp_path / "shar").glob("recording.000000.tar")
    archive.write_bytes(archive.read_bytes()[:600])
    with pytest.raises(AudioError, match=r"c00.*recording\.000000\.tar@\d+\+\d+.*corrupt audio"):
        load_audio(after[0])
    archive.unlink()
    with pytest.raises(AudioError, match="missing file"):
        load_audio(after[0])
