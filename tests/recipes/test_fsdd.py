import numpy as np
import pytest
import soundfile

from asr.data.corpus import write_prepared
from asr.data.cuts import load_audio, load_cuts, simple_parts
from recipes.fsdd.prepare import WORDS, prepare


@pytest.fixture
def fsdd(tmp_path):
    """Two digits of three speakers, ten recordings each; the amplitude tells the digit."""
    (tmp_path / "recordings").mkdir()
    for speaker in ("anna", "ben", "theo"):
        for digit in (1, 2):
            for index in range(10):
                samples = np.full(800 + index, 0.1 * digit)
                soundfile.write(tmp_path / "recordings" / f"{digit}_{speaker}_{index}.wav", samples, 8000)
    return tmp_path


def recordings(cuts):
    return {part.recording.sources[0].source for cut in cuts for part in simple_parts(cut)}


def test_strings_are_of_one_speaker_and_splits_share_no_recording(fsdd):
    corpus = prepare(str(fsdd), train_strings=60, dev_strings=20, test_strings=30, dev_indices=2)
    assert {name: len(cuts) for name, cuts in corpus.splits.items()} == {
        "train": 60,
        "dev": 20,
        "test": 30,
        "test_single": 30,
    }
    used = {name: recordings(cuts) for name, cuts in corpus.splits.items()}
    assert not used["train"] & used["dev"] and not used["train"] & used["test"] and not used["dev"] & used["test"]
    assert all(int(path.rsplit("_", 1)[1].split(".")[0]) < 5 for path in used["test"])
    for cut in corpus.splits["train"]:
        assert len({path.split("_")[1] for path in recordings([cut])}) == 1
        assert 1 <= len(cut.supervisions[0].text.split()) <= 7


def test_audio_says_what_the_text_says(fsdd, tmp_path):
    corpus = prepare(str(fsdd), train_strings=5, dev_strings=20, test_strings=5, max_gap=0.3)
    write_prepared(corpus, tmp_path / "out", None, {})
    for cut in load_cuts(tmp_path / "out" / "dev.jsonl.gz"):
        (supervision,) = cut.supervisions
        samples = load_audio(cut)
        assert len(samples) == cut.num_samples and supervision.duration == cut.duration
        loud = [round(float(samples[round((start + 0.05) * 16000)]) * 10) for start in starts(cut)]
        assert [WORDS[digit] for digit in loud] == supervision.text.split()


def starts(cut):
    return [track.offset for track in cut.tracks] if hasattr(cut, "tracks") else [0.0]


def test_unseen_speaker_appears_in_the_test_sets_only(fsdd):
    corpus = prepare(str(fsdd), 40, 10, 10, test_speakers=["theo"])
    speakers = {name: {cut.supervisions[0].speaker for cut in cuts} for name, cuts in corpus.splits.items()}
    assert speakers == {"train": {"anna", "ben"}, "dev": {"anna", "ben"}, "test": {"theo"}, "test_single": {"theo"}}
    assert len(corpus.splits["test_single"]) == 20
    with pytest.raises(ValueError, match="'otto' is not in"):
        prepare(str(fsdd), test_speakers=["otto"])


def test_same_seed_same_strings(fsdd):
    def strings(seed):
        return [cut.supervisions[0].text for cut in prepare(str(fsdd), 20, 5, 5, seed=seed).splits["train"]]

    assert strings(1) == strings(1) != strings(2)


def test_damaged_recordings_are_left_out_and_named(fsdd):
    (fsdd / "recordings" / "1_anna_7.wav").write_text("damaged")
    corpus = prepare(str(fsdd), 200, 5, 5)
    assert [(item.id, item.reason) for item in corpus.rejected] == [("1_anna_7", "corrupt audio")]
    assert not any("1_anna_7" in path for path in recordings(corpus.splits["train"]))
    with pytest.raises(ValueError, match="no folder `recordings`"):
        prepare(str(fsdd / "recordings"))


def test_fsdd_as_published(shared_data):
    corpus = prepare(str(shared_data / "free-spoken-digit-dataset"), 30, 10, 10)
    assert len(corpus.splits["test_single"]) == 250
    longest = max(corpus.splits["train"], key=lambda cut: cut.duration)
    assert len(load_audio(longest)) == round(longest.duration * 16000)
