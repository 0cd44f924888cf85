import os
import shutil
import struct
from itertools import pairwise

import numpy as np
import pytest
import soundfile
from lhotse import SupervisionSegment
from lhotse.utils import fastcopy

from asr.data.checks import AudioJournal, check_cuts, iterate_checked
from asr.data.cuts import load_audio, make_cut, unreadable_reason
from asr.data.filters import count_reasons, duration_rules, feasibility_rule, filter_cuts

NOISE = np.random.default_rng(0).uniform(-0.1, 0.1, 32000).astype(np.float32)


@pytest.fixture
def wav(tmp_path):
    """Two seconds of noise."""
    soundfile.write(tmp_path / "a.wav", NOISE, 16000)
    return tmp_path / "a.wav"


def segment(start, duration, text="A", name="s"):
    return SupervisionSegment(name, "a", start, duration, text=text, speaker="anna")


def reasons(rejections):
    return [rejection.reason for rejection in rejections]


def test_a_regular_cut_passes_unchanged(wav):
    (cut,), rejected = check_cuts([make_cut("a", wav, "HELLO", speaker="anna")], "train")
    assert not rejected
    assert (cut.id, cut.duration, cut.supervisions[0].text) == ("a", 2.0, "HELLO")


def test_over_long_cut_is_trimmed_within_a_frame_and_refused_beyond(wav):
    cuts = []
    for over in (0.004, 0.5):  # the transcript spans the cut, so that nothing but its recording says where it ends
        supervisions = [segment(0.0, 2.0 + over)]
        cuts.append(fastcopy(make_cut(f"over-{over}", wav, "A"), duration=2.0 + over, supervisions=supervisions))
    (kept,), (refused,) = check_cuts(cuts, "train")
    assert kept.id == "over-0.004" and kept.duration == 2.0 and kept.supervisions[0].duration == 2.0
    assert len(load_audio(kept)) == 32000
    assert refused.id == "over-0.5" and refused.reason == "cut longer than its recording"
    assert refused.path.endswith("a.wav")


def test_negative_durations_and_offsets_beyond_the_end_are_refused(wav):
    whole = make_cut("a", wav, "A")
    cuts = [
        fastcopy(whole, id="negative", start=3.0, duration=-1.0),
        fastcopy(whole, id="zero", duration=0.0),
        fastcopy(whole, id="beyond", start=2.5, duration=0.1),
    ]
    kept, rejected = check_cuts(cuts, "train")
    assert not kept
    assert {rejection.id for rejection in rejected} == {"negative", "zero", "beyond"}


def test_zero_length_supervision_is_refused(wav):
    cut = fastcopy(make_cut("a", wav, "A"), supervisions=[segment(0.5, 0.0)])
    kept, rejected = check_cuts([cut], "train")
    assert not kept and reasons(rejected) == ["zero-length supervision"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_no_supervision_is_refused(wav, split):
    kept, (rejected,) = check_cuts([make_cut("lonely", wav, "A").drop_supervisions()], split)
    assert not kept and rejected.id == "lonely" and rejected.reason == "no supervision"


def test_several_supervisions_become_one_cut_each(wav):
    cut = fastcopy(make_cut("a", wav, ""), supervisions=[segment(1.25, 0.75, "TWO"), segment(0.25, 1.0, "ONE")])
    kept, rejected = check_cuts([cut], "train")
    assert not rejected
    assert [(cut.id, cut.duration, cut.supervisions[0].text) for cut in kept] == [
        ("a-0", 1.0, "ONE"),
        ("a-1", 0.75, "TWO"),
    ]
    assert np.abs(load_audio(kept[1]) - NOISE[20000:32000]).max() < 1e-3


def test_overlapping_supervisions_are_refused_but_scored(wav):
    cut = fastcopy(make_cut("a", wav, ""), supervisions=[segment(0.0, 1.0, "ONE"), segment(0.5, 1.0, "TWO")])
    kept, rejected = check_cuts([cut], "train")
    assert not kept and reasons(rejected) == ["overlapping supervisions"]
    (kept_cut,), _ = check_cuts([cut], "test")
    assert kept_cut.supervisions[0].text == "ONE TWO" and unreadable_reason(kept_cut) == "overlapping supervisions"


def test_supervision_must_lie_in_its_cut_and_cuts_shrink_to_it(wav):
    inside = fastcopy(make_cut("inside", wav, ""), supervisions=[segment(0.5, 1.0)])
    outside = fastcopy(make_cut("outside", wav, ""), supervisions=[segment(0.0, 2.5)])
    (kept,), (refused,) = check_cuts([inside, outside], "train")
    assert kept.id == "inside" and (kept.start, kept.duration) == (0.5, 1.0)
    assert (kept.supervisions[0].start, kept.supervisions[0].duration) == (0.0, 1.0)
    assert refused.id == "outside" and refused.reason == "supervision exceeds its cut"


def zoo(folder):
    """Six kinds of damaged audio and one missing file, by name."""
    soundfile.write(folder / "good.wav", NOISE, 16000)
    good = (folder / "good.wav").read_bytes()
    (folder / "empty.wav").touch()
    (folder / "header.wav").write_bytes(good[:40] + struct.pack("<I", 0))
    (folder / "text.wav").write_text("this is text")
    at = good.find(b"data") + 4
    (folder / "huge.wav").write_bytes(good[:at] + struct.pack("<I", 0x7FFFFFFF) + good[at + 4 :])
    soundfile.write(folder / "nan.wav", np.where(np.arange(32000) == 7, np.nan, NOISE), 16000, subtype="FLOAT")
    soundfile.write(folder / "half.wav", NOISE, 16000)
    cuts = [
        make_cut(name, folder / f"{name}.wav", "SOME WORDS")
        for name in ("good", "empty", "header", "text", "huge", "nan", "half", "gone")
    ]
    (folder / "half.wav").write_bytes(good[: len(good) // 2])
    return cuts


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_damaged_audio_is_refused_by_id_reason_and_path(tmp_path, num_jobs):
    kept, rejected = check_cuts(zoo(tmp_path), "train", num_jobs=num_jobs)
    assert [cut.id for cut in kept] == ["good", "huge"]  # libsndfile reads what is there of the latter
    assert len(load_audio(kept[1])) == 32000
    found = {rejection.id: rejection.reason for rejection in rejected}
    assert found == {
        "empty": "corrupt audio",
        "header": "corrupt audio",
        "text": "corrupt audio",
        "nan": "non-finite samples",
        "half": "cut longer than its recording",
        "gone": "missing file",
    }
    assert all(rejection.path.endswith(f"{rejection.id}.wav") and not rejection.kept for rejection in rejected)


def test_scored_sets_keep_every_word(tmp_path):
    kept, rejected = check_cuts(zoo(tmp_path), "test")
    assert len(kept) == 8 and all(cut.supervisions[0].text == "SOME WORDS" for cut in kept)
    assert {cut.id for cut in kept if unreadable_reason(cut)} == {"empty", "header", "text", "nan", "half", "gone"}
    assert len(rejected) == 6 and all(rejection.kept for rejection in rejected)


def test_nearly_half_a_second_that_is_missing_is_noticed(tmp_path):
    soundfile.write(tmp_path / "a.wav", NOISE, 16000)
    cut = make_cut("a", tmp_path / "a.wav", "A")
    soundfile.write(tmp_path / "a.wav", NOISE[:-6400], 16000)
    kept, rejected = check_cuts([cut], "train")
    assert not kept and "0.400 s are missing" in rejected[0].detail


@pytest.mark.parametrize("rate", [8000, 32000])
def test_a_file_of_another_rate_than_its_manifest_says_is_refused(wav, rate):
    cut = make_cut("a", wav, "A")
    soundfile.write(wav, NOISE, rate)
    found = [cut, make_cut("resampled", wav, "A"), make_cut("fast", wav, "A").perturb_speed(1.1, affix_id=False)]
    kept, (rejected,) = check_cuts(found, "train")
    assert [cut.id for cut in kept] == ["resampled", "fast"]
    assert (rejected.id, rejected.reason, rejected.path) == ("a", "wrong sampling rate", str(wav))
    assert rejected.detail == f"16000 Hz by its manifest, {rate} Hz in {wav}"


def test_the_rate_of_every_file_of_a_mixed_cut_is_compared(wav, tmp_path):
    noise = tmp_path / "noise.wav"
    soundfile.write(noise, NOISE, 16000)
    mixed = make_cut("a", wav, "A").mix(make_cut("n", noise, None).drop_supervisions(), snr=10, preserve_id="left")
    soundfile.write(noise, NOISE, 8000)
    _, (rejected,) = check_cuts([mixed], "train")
    assert rejected.id == "a" and rejected.detail == f"16000 Hz by its manifest, 8000 Hz in {noise}"


def remembered(journal, *cuts):
    """A journal of these cuts, as the next preparation opens it."""
    first = AudioJournal(journal)
    for cut in cuts:
        first.note(cut)
    first.flush()
    return AudioJournal(journal)


def test_the_journal_knows_a_cut_by_its_part_of_a_file(wav, tmp_path):
    cut, copy = make_cut("a", wav, "A", start=0.5, duration=1.0), tmp_path / "copy.wav"
    shutil.copy2(wav, copy)  # with its time of change
    stereo = fastcopy(cut.recording, channel_ids=[0, 1], sources=[fastcopy(cut.recording.sources[0], channels=[0, 1])])
    noise = make_cut("n", copy, None).drop_supervisions()
    known = remembered(tmp_path / "journal", cut)
    assert known.knows(make_cut("a", wav, "ANOTHER TEXT", start=0.5, duration=1.0))
    for other in (
        fastcopy(cut, id="b"),
        fastcopy(cut, start=0.25),
        fastcopy(cut, duration=0.75),
        fastcopy(cut, recording=stereo, channel=1),
        fastcopy(cut, recording=fastcopy(cut.recording, sampling_rate=8000)),
        make_cut("a", copy, "A", start=0.5, duration=1.0),
        cut.mix(noise, preserve_id="left"),
    ):
        assert not known.knows(other)
    assert not remembered(None, cut).knows(cut)


@pytest.mark.parametrize("which", ["speech", "noise"])
@pytest.mark.parametrize("change", ["size", "time", "gone"])
def test_the_journal_forgets_a_file_that_has_changed(wav, tmp_path, which, change):
    files = {"speech": wav, "noise": tmp_path / "noise.wav"}
    shutil.copy2(wav, files["noise"])
    cut = make_cut("a", wav, "A").mix(make_cut("n", files["noise"], None).drop_supervisions(), preserve_id="left")
    known = remembered(tmp_path / "journal", cut)
    assert known.knows(cut)
    path, before = files[which], files[which].stat()
    if change == "gone":
        path.unlink()
    elif change == "size":
        path.write_bytes(path.read_bytes()[:-2])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
    assert not known.knows(cut)


def test_the_journal_holds_no_audio_that_was_refused(wav, tmp_path):
    soundfile.write(tmp_path / "nan.wav", np.full(16000, np.nan), 16000, subtype="FLOAT")
    cuts = [make_cut("good", wav, "A"), make_cut("nan", tmp_path / "nan.wav", "A")]
    for _ in range(2):
        journal = AudioJournal(tmp_path / "journal")
        found = list(iterate_checked(cuts, "train", journal=journal))
        assert found[0].id == "good" and found[1].reason == "non-finite samples"
    assert AudioJournal(tmp_path / "journal").knows(cuts[0])


def test_duplicate_ids_train_once_and_are_scored_twice(wav):
    cuts = [make_cut("a", wav, "ONE"), make_cut("a", wav, "TWO")]
    (kept,), (rejected,) = check_cuts(cuts, "train")
    assert kept.supervisions[0].text == "ONE" and rejected.reason == "duplicate id"
    kept, (rejected,) = check_cuts(cuts, "test")
    assert [(cut.id, cut.supervisions[0].text) for cut in kept] == [("a", "ONE"), ("a-2", "TWO")]
    assert rejected.kept and "a-2" in rejected.detail


@pytest.mark.parametrize("text", ["", "   ", None, "\u200b"])
def test_empty_transcripts_are_not_trained_but_scored(wav, text):
    def normaliser(value):
        return value.replace("\u200b", "").strip()

    kept, (rejected,) = check_cuts([make_cut("silent", wav, text)], "train", normaliser)
    assert not kept and (rejected.id, rejected.reason) == ("silent", "empty transcript")
    (kept_cut,), rejections = check_cuts([make_cut("silent", wav, text)], "test", normaliser)
    assert kept_cut.supervisions[0].text == "" and not rejections and unreadable_reason(kept_cut) is None


def test_rates_and_stereo_come_out_regular(tmp_path):
    soundfile.write(tmp_path / "s.wav", np.stack([NOISE, NOISE], 1), 8000)
    (cut,), rejected = check_cuts([make_cut("s", tmp_path / "s.wav", "A")], "train")
    assert not rejected and cut.sampling_rate == 16000 and load_audio(cut).shape == (64000,)


def test_mixed_cut_keeps_one_supervision_that_spans_it(wav):
    mixed = make_cut("a", wav, "ONE").append(make_cut("b", wav, None).drop_supervisions()).with_id("m")
    cut = fastcopy(mixed)
    cut.tracks[0].cut.supervisions[0] = fastcopy(cut.tracks[0].cut.supervisions[0], duration=4.0)
    (kept,), rejected = check_cuts([cut], "train")
    assert not rejected and kept.supervisions[0].duration == 4.0 and load_audio(kept).shape == (64000,)


def test_filters_count_by_reason(wav):
    cuts = [fastcopy(make_cut(f"c{seconds}", wav, "ABC"), duration=seconds) for seconds in (0.1, 0.5, 1.0, 2.0)]
    rejected = []
    kept = list(filter_cuts(cuts, duration_rules(0.5, 1.0), rejected))
    assert [cut.id for cut in kept] == ["c0.5", "c1.0"]
    assert count_reasons(rejected) == {"shorter than 0.5 s": 1, "longer than 1.0 s": 1}


def test_feasibility_counts_encoder_frames(wav):
    rule = feasibility_rule(
        num_frames=lambda samples: samples // 160,
        frames_after_encoder=lambda frames: frames // 4,
        encode=lambda text: [ord(character) for character in text],
        min_frames=lambda tokens: len(tokens) + sum(a == b for a, b in pairwise(tokens)),
    )
    cuts = [fastcopy(make_cut(text, wav, text), duration=0.2) for text in ("ABCDE", "AABCD", "ABCDEF")]
    rejected = []
    kept = list(filter_cuts(cuts, [rule], rejected))  # 0.2 s are 5 encoder frames
    assert [cut.id for cut in kept] == ["ABCDE"] and len(rejected) == 2
