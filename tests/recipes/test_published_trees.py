"""Recipes of published corpora, on tiny trees in the publishers' layouts and on real speech where it is there."""

import shutil
import tarfile
from pathlib import Path

import pytest

from asr.data.checks import check_cuts
from asr.data.corpus import write_prepared
from asr.data.cuts import load_audio, unreadable_reason
from asr.text.normalise import Normaliser
from recipes.aishell.prepare import prepare as prepare_aishell
from recipes.an4.prepare import prepare as prepare_an4
from recipes.librispeech.prepare import prepare as prepare_librispeech


def texts(cuts):
    return {cut.id: cut.supervisions[0].text for cut in cuts}


@pytest.fixture
def an4(tmp_path, write_noise):
    """Four training speakers, one of each format, and a test part whose lines carry no <s>."""
    (tmp_path / "etc").mkdir()
    lines, files = [], []
    for number, (speaker, suffix) in enumerate(zip("abcd", ("wav", "sph", "flac", "wav"), strict=True)):
        options = {"format": "NIST"} if suffix == "sph" else {}
        write_noise(tmp_path / "wav" / "an4_clstk" / speaker / f"an{number}-{speaker}-b.{suffix}", **options)
        lines.append(f"<s> WORD {speaker.upper()} </s> (an{number}-{speaker}-b)\n")
        files.append(f"an4_clstk/{speaker}/an{number}-{speaker}-b\n")
    write_noise(tmp_path / "wav" / "an4test_clstk" / "t" / "an9-t-b.wav")
    (tmp_path / "etc" / "an4_train.transcription").write_text("".join(lines))
    (tmp_path / "etc" / "an4_train.fileids").write_text("".join(files))
    (tmp_path / "etc" / "an4_test.transcription").write_text("RUBOUT G M  (an9-t-b)\nNO AUDIO (an10-t-b)\n")
    (tmp_path / "etc" / "an4_test.fileids").write_text("an4test_clstk/t/an9-t-b\nan4test_clstk/t/an10-t-b\n")
    return tmp_path


def test_an4_reads_every_format_and_both_kinds_of_transcript(an4):
    corpus = prepare_an4(str(an4), dev_speakers=1, dev_seed=3)
    everything = texts(corpus.splits["train"]) | texts(corpus.splits["dev"])
    assert everything == {"an0-a-b": "WORD A", "an1-b-b": "WORD B", "an2-c-b": "WORD C", "an3-d-b": "WORD D"}
    assert len(corpus.splits["dev"]) == 1
    kept, rejected = check_cuts([*corpus.splits["train"], *corpus.splits["dev"]], "train")
    assert len(kept) == 4 and not rejected
    test, _ = check_cuts(corpus.splits["test"], "test")
    assert texts(test) == {"an9-t-b": "RUBOUT G M", "an10-t-b": "NO AUDIO"}
    assert unreadable_reason(test[1]) == "missing file"


def test_an4_works_without_the_test_part_and_refuses_other_folders(an4, tmp_path):
    (an4 / "etc" / "an4_test.transcription").unlink()
    assert set(prepare_an4(str(an4), dev_speakers=1).splits) == {"train", "dev"}
    with pytest.raises(ValueError, match=r"dev_speakers=4.*1 to 3"):
        prepare_an4(str(an4), dev_speakers=4)
    with pytest.raises(ValueError, match="not an AN4 tree"):
        prepare_an4(str(tmp_path / "wav"))
    with (an4 / "etc" / "an4_train.transcription").open("a") as lines:
        lines.write("no id here\n")
    with pytest.raises(ValueError, match=r"an4_train\.transcription, line 5"):
        prepare_an4(str(an4), dev_speakers=1)


def test_an4_as_published(shared_data, tmp_path):
    corpus = prepare_an4(str(shared_data / "an4"))
    report = write_prepared(corpus, tmp_path, None, {})
    train, dev = report["splits"]["train"], report["splits"]["dev"]
    assert train["utterances"] + dev["utterances"] == 948
    assert (train["num_speakers"], dev["num_speakers"]) == (64, 10)
    assert not set(train["speakers"]) & set(dev["speakers"]) and not report["rejected"]
    again = prepare_an4(str(shared_data / "an4"), dev_seed=1)
    assert {cut.id for cut in again.splits["dev"]} != {cut.id for cut in corpus.splits["dev"]}


@pytest.fixture
def librispeech(tmp_path, write_noise):
    for part, speaker in (
        ("train-clean-100", "19"),
        ("train-clean-360", "20"),
        ("dev-clean", "84"),
        ("test-clean", "61"),
    ):
        folder = tmp_path / "LibriSpeech" / part / speaker / "7"
        for number in range(2):
            write_noise(folder / f"{speaker}-7-000{number}.flac")
        lines = "".join(f"{speaker}-7-000{number} TEXT OF {speaker}\n" for number in range(2))
        (folder / f"{speaker}-7.trans.txt").write_text(lines)
    return tmp_path


def test_librispeech_takes_the_parts_that_are_there(librispeech):
    corpus = prepare_librispeech(str(librispeech))
    splits = {name: list(cuts) for name, cuts in corpus.splits.items()}
    assert {name: len(cuts) for name, cuts in splits.items()} == {"train": 4, "dev": 2, "test-clean": 2}
    cut = splits["train"][0]
    assert (cut.id, cut.supervisions[0].text, cut.supervisions[0].speaker) == ("19-7-0000", "TEXT OF 19", "19")
    assert corpus.notes["part train-other-500 not found"] == 1
    smaller = prepare_librispeech(str(librispeech / "LibriSpeech"), train=["train-clean-100"], tests=[])
    assert len(list(smaller.splits["train"])) == 2 and set(smaller.splits) == {"train", "dev"}
    with pytest.raises(ValueError, match=r"train-clean-1\b.*data\.corpus\.train"):
        prepare_librispeech(str(librispeech), train=["train-clean-1"])


def test_librispeech_counts_what_does_not_match(librispeech, write_noise, tmp_path):
    folder = librispeech / "LibriSpeech" / "test-clean" / "61" / "7"
    write_noise(folder / "61-7-0009.flac")
    with (folder / "61-7.trans.txt").open("a") as lines:
        lines.write("61-7-0008 NEVER RECORDED\n")
    report = write_prepared(prepare_librispeech(str(librispeech)), tmp_path / "out", None, {})
    assert report["notes"]["audio without transcript"] == 1 and report["notes"]["transcript without audio"] == 1
    test = report["splits"]["test-clean"]
    assert (test["utterances"], test["unreadable"], test["words"]) == (3, 1, 8)
    assert [(item["id"], item["reason"]) for item in report["rejected"]] == [("61-7-0008", "missing file")]


@pytest.fixture
def aishell(tmp_path, write_noise):
    root = tmp_path / "data_aishell"
    lines = []
    for part, speaker in (("train", "S0002"), ("dev", "S0724"), ("test", "S0764")):
        write_noise(root / "wav" / part / speaker / f"BAC009{speaker}W0121.wav")
        lines.append(f"BAC009{speaker}W0121 广州市 房地产 中介 协会 分析\n")
    (root / "transcript").mkdir()
    (root / "transcript" / "aishell_transcript_v0.8.txt").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_aishell_joins_words_and_counts_what_does_not_match(aishell, write_noise, tmp_path):
    root = aishell / "data_aishell"
    write_noise(root / "wav" / "train" / "S0002" / "BAC009S0002W0999.wav")
    with (root / "transcript" / "aishell_transcript_v0.8.txt").open("a", encoding="utf-8") as lines:
        lines.write("BAC009S0003W0001 没有 录音\n")
    report = write_prepared(prepare_aishell(str(aishell)), tmp_path / "out", None, {})
    assert {name: split["utterances"] for name, split in report["splits"].items()} == {"train": 1, "dev": 1, "test": 1}
    assert report["notes"] == {"audio without transcript": 1, "transcript without audio": 1}
    (cut,) = prepare_aishell(str(root)).splits["test"]
    assert cut.supervisions[0].text == "广州市房地产中介协会分析" and cut.supervisions[0].speaker == "S0764"
    (spaced,) = prepare_aishell(str(root), keep_spaces=True).splits["test"]
    assert spaced.supervisions[0].text == "广州市 房地产 中介 协会 分析"


def test_aishell_reads_marks_line_ends_and_mixed_text(aishell):
    transcript = aishell / "data_aishell" / "transcript" / "aishell_transcript_v0.8.txt"
    first, *others = transcript.read_text(encoding="utf-8").splitlines()
    mixed = f"{first.split()[0]} 播放 Ａ B C 的　歌"
    transcript.write_bytes(("﻿" + "\r\n".join([mixed, *others, ""])).encode())
    (cut,) = prepare_aishell(str(aishell)).splits["train"]
    assert cut.supervisions[0].text == "播放ＡBC的歌"
    assert Normaliser(width="half")(cut.supervisions[0].text) == "播放ABC的歌"


@pytest.fixture
def packed_aishell(aishell):
    """The tree with its speakers in archives alone."""
    wav = aishell / "data_aishell" / "wav"
    for speaker in sorted(wav.glob("*/*")):
        with tarfile.open(wav / f"{speaker.name}.tar.gz", "w:gz") as archive:
            archive.add(speaker, f"./{speaker.parent.name}/{speaker.name}")
        shutil.rmtree(speaker.parent)
    return aishell


def samples_of_aishell(folder):
    corpus = prepare_aishell(str(folder))
    return [len(load_audio(cut)) for part in ("train", "dev", "test") for cut in corpus.splits[part]]


def test_aishell_unpacks_the_archives_of_speakers(packed_aishell):
    assert samples_of_aishell(packed_aishell) == [8000] * 3


def test_aishell_begins_anew_after_an_archive_that_was_cut_off(packed_aishell):
    last = packed_aishell / "data_aishell" / "wav" / "S0764.tar.gz"
    packed = last.read_bytes()
    last.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(EOFError):
        prepare_aishell(str(packed_aishell))
    last.write_bytes(packed)
    assert samples_of_aishell(packed_aishell) == [8000] * 3


@pytest.mark.parametrize("step", range(4))
def test_aishell_that_was_interrupted_while_it_moved_parts_goes_on(packed_aishell, step, monkeypatch):
    rename, moved = Path.rename, []

    def interrupted(path, target):
        if len(moved) == step:
            raise KeyboardInterrupt
        moved.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_aishell(str(packed_aishell))
    assert samples_of_aishell(packed_aishell) == [8000] * 3
