import json

import numpy as np
import pytest
import soundfile

from asr.data import checks
from asr.data.corpus import Corpus, prepared_is_current, prepared_splits, split_off, write_prepared
from asr.data.cuts import load_cuts, make_cut
from asr.data.report import add_tokenizer_section, format_summary, read_report


@pytest.fixture
def cut_of(tmp_path):
    """Makes cuts of one second of noise."""
    soundfile.write(tmp_path / "noise.wav", np.random.default_rng(0).uniform(-0.1, 0.1, 16000), 16000)
    return lambda name, text="HELLO", speaker="anna": make_cut(name, tmp_path / "noise.wav", text, speaker)


def test_prepared_folder_holds_checked_cuts_and_a_report(tmp_path, cut_of):
    gone = make_cut("gone", tmp_path / "gone.wav", "LOST WORDS", "ben")
    corpus = Corpus(
        {"train": (cut for cut in [cut_of("a"), cut_of("b", "Hi"), gone]), "test": [cut_of("c"), gone]},
        notes={"audio without transcript": 3},
    )
    report = write_prepared(corpus, tmp_path / "out", str.upper, {"k": 1})
    assert [cut.supervisions[0].text for cut in load_cuts(tmp_path / "out" / "train.jsonl.gz")] == ["HELLO", "HI"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "data_report.json",
        "test.jsonl.gz",
        "train.jsonl.gz",
    ]
    assert report == read_report(tmp_path / "out")
    train, test = report["splits"]["train"], report["splits"]["test"]
    assert (train["utterances"], train["words"], train["hours"]) == (2, 2, round(2 / 3600, 4))
    assert train["characters"] == {"E": 1, "H": 2, "I": 1, "L": 2, "O": 1}
    assert train["sample_rates"] == {"16000": 2} and train["speakers"] == {"anna": 2}
    assert train["duration_histogram"] == {"1-2": 2}
    assert (test["utterances"], test["unreadable"], test["words"]) == (2, 1, 3)
    assert report["rejected_by_reason"] == {"train": {"missing file": 1}, "test": {"missing file": 1}}
    summary = format_summary(report)
    assert "gone" in summary and "gone.wav" in summary and "audio without transcript: 3" in summary


def test_fingerprint_follows_the_data(tmp_path, cut_of):
    def fingerprint(*cuts):
        return write_prepared(Corpus({"train": list(cuts)}), tmp_path / "out", None, {})["fingerprint"]

    first = fingerprint(cut_of("a"), cut_of("b"))
    assert fingerprint(cut_of("a"), cut_of("b")) == first
    assert fingerprint(cut_of("a"), cut_of("b", "OTHER")) != first


def test_preparation_is_current_until_settings_or_sources_change(tmp_path, cut_of):
    source = tmp_path / "transcripts"
    source.write_text("one")
    out = tmp_path / "out"
    assert not prepared_is_current(out, {"k": (1, 2)})
    write_prepared(Corpus({"train": [cut_of("a")]}, sources=[source]), out, None, {"k": (1, 2)})
    assert prepared_is_current(out, {"k": [1, 2]})
    assert not prepared_is_current(out, {"k": [1, 3]})
    source.write_text("edited")
    assert not prepared_is_current(out, {"k": [1, 2]})


def test_a_split_that_is_gone_leaves_no_manifest(tmp_path, cut_of):
    write_prepared(Corpus({"train": [cut_of("a")], "test-old": [cut_of("b")]}), tmp_path, None, {})
    write_prepared(Corpus({"train": [cut_of("a")], "test-new": [cut_of("b")]}), tmp_path, None, {})
    assert set(prepared_splits(tmp_path)) == {"train", "test-new"}
    assert not (tmp_path / "test-old.jsonl.gz").exists()


def test_nothing_usable_is_an_error_that_says_why_and_keeps_what_was_there(tmp_path, cut_of):
    out = tmp_path / "out"
    write_prepared(Corpus({"train": [cut_of("a")]}), out, None, {})
    with pytest.raises(ValueError, match=r"(?s)'train'.*missing file.*gone\.wav"):
        write_prepared(Corpus({"train": [make_cut("x", tmp_path / "gone.wav", "A")]}), out, None, {})
    with pytest.raises(ValueError, match="'train' split is empty"):
        write_prepared(Corpus({"train": []}), out, None, {})
    assert prepared_is_current(out, {}) and len(list(out.iterdir())) == 2
    with pytest.raises(ValueError, match="no data has been prepared"):
        prepared_splits(tmp_path / "nowhere")


def test_a_preparation_that_was_killed_goes_on_without_reading_audio_twice(tmp_path, monkeypatch):
    names = [f"u{number}" for number in range(10)]
    for name in names:
        soundfile.write(tmp_path / f"{name}.wav", np.random.default_rng(0).uniform(-0.1, 0.1, 1600), 16000)
    read = []

    def load_audio(cut):
        read.append(cut.id)
        if len(read) == 8:
            raise KeyboardInterrupt
        return checks_load_audio(cut)

    checks_load_audio = checks.load_audio
    monkeypatch.setattr(checks, "load_audio", load_audio)
    monkeypatch.setattr(checks, "CUTS_PER_JOB", 3)

    def prepare():
        cuts = (make_cut(name, tmp_path / f"{name}.wav", name.upper()) for name in names)
        return write_prepared(Corpus({"train": cuts}), tmp_path / "out", None, {})

    with pytest.raises(KeyboardInterrupt):
        prepare()
    (tmp_path / "out" / ".99-train.jsonl.gz").touch()  # what a kill leaves behind
    soundfile.write(tmp_path / "u1.wav", np.zeros(1600), 16000)
    report = prepare()
    assert read == [*names[:8], "u1", *names[6:]], "two blocks were done; of these one file has changed since"
    assert report["splits"]["train"]["utterances"] == 10
    assert [cut.id for cut in load_cuts(tmp_path / "out" / "train.jsonl.gz")] == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data_report.json", "train.jsonl.gz"]
    assert prepare()["fingerprint"] == report["fingerprint"] and len(read) == 23, "a new one reads everything"


def test_speakers_are_set_aside_whole(cut_of):
    cuts = [cut_of(f"{speaker}-{number}", speaker=speaker) for speaker in "abcdefgh" for number in range(5)]
    parts = split_off(cuts, {"dev": 0.1, "test": 0.1})
    speakers = {name: {cut.supervisions[0].speaker for cut in part} for name, part in parts.items()}
    assert all(speakers.values()) and sum(len(part) for part in parts.values()) == 40
    assert not speakers["train"] & speakers["dev"] and not speakers["train"] & speakers["test"]
    assert split_off(cuts, {"dev": 0.1, "test": 0.1})["dev"] == parts["dev"]


def test_utterances_are_set_aside_where_speakers_are_unknown(cut_of):
    cuts = [cut_of(f"u{number}", speaker="") for number in range(40)]
    parts = split_off(cuts, {"dev": 0.1, "test": 0.05})
    assert {name: len(part) for name, part in parts.items()} == {"train": 34, "dev": 4, "test": 2}
    assert {name: len(part) for name, part in split_off(cuts[:3], {"dev": 0.1, "test": 0.1}).items()} == {
        "train": 1,
        "dev": 1,
        "test": 1,
    }
    with pytest.raises(ValueError, match="too few"):
        split_off(cuts[:2], {"dev": 0.1, "test": 0.1})


class CharacterTokenizer:
    """Knows A to D."""

    tokens = ("<blk>", "<unk>", "A", "B", "C", "D")
    vocab_size, blank_id, unk_id, hash = 6, 0, 1, "h"

    def encode(self, text):
        return [self.tokens.index(c) if c in self.tokens else 1 for c in text if c != " "]

    def decode(self, ids):
        return "".join(self.tokens[i] for i in ids if i > 1)


def test_tokenizer_section_counts_what_is_unknown(tmp_path, cut_of):
    report = write_prepared(Corpus({"train": [cut_of("a")]}), tmp_path, None, {})
    add_tokenizer_section(report, {"train": ["AB CD", "ABC"], "test": ["AX XD k", "AB"]}, CharacterTokenizer())
    splits = report["tokenizer"]["splits"]
    assert splits["train"]["tokens"] == 7 and splits["train"]["unknown_word_share"] == 0.0
    assert splits["train"]["token_histogram"] == {"0-4": 2}
    assert splits["test"]["unknown_words"] == {"AX": 1, "XD": 1, "k": 1}
    assert splits["test"]["characters_outside_vocabulary"] == {"X": 2, "k": 1}
    assert "75.0 %" in format_summary(report)
    json.dumps(report)
