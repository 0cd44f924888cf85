import json
import math
import os
import re

import numpy as np
import pytest
import soundfile
from lhotse import CutSet
from lhotse.shar import SharWriter
from lhotse.utils import fastcopy

from asr.data.corpus import write_prepared
from asr.data.cuts import load_audio, load_cuts, make_cut, unreadable_reason
from recipes.custom.prepare import prepare


def read(path, **options):
    """id -> text of a test set in some form."""
    cuts = list(prepare(test=str(path), **options).splits["test"])
    return {cut.id: cut.supervisions[0].text for cut in cuts}


@pytest.fixture
def wavs(tmp_path, write_noise):
    for number in range(3):
        write_noise(tmp_path / "wavs" / f"u{number}.wav")
    return tmp_path


def test_table_takes_every_character_of_a_text(wavs):
    table = wavs / "data.tsv"
    table.write_text('wavs/u0.wav\t"Hello\nwavs/u1.wav\tsaid "yes"\u2028so\nwavs/u2.wav\tplain\n', encoding="utf-8")
    assert read(table) == {"u0": '"Hello', "u1": 'said "yes"\u2028so', "u2": "plain"}


@pytest.mark.parametrize("kind", ["plain", "bom", "crlf"])
def test_table_with_header_in_any_encoding_of_lines(wavs, kind):
    text = "id\tspeaker\taudio\ttext\na\tanna\twavs/u0.wav\tONE\nb\tben\twavs/u1.wav\tTWO\n"
    data = text.replace("\n", "\r\n") if kind == "crlf" else text
    (wavs / "data.tsv").write_bytes(data.encode("utf-8-sig" if kind == "bom" else "utf-8"))
    cuts = list(prepare(test=str(wavs / "data.tsv")).splits["test"])
    assert [(cut.id, cut.supervisions[0].text, cut.supervisions[0].speaker) for cut in cuts] == [
        ("a", "ONE", "anna"),
        ("b", "TWO", "ben"),
    ]
    assert len(load_audio(cuts[0])) == 8000


def test_ids_stay_unique_across_folders(tmp_path, write_noise):
    for speaker in ("anna", "ben lee"):
        write_noise(tmp_path / speaker / "001.wav")
    (tmp_path / "data.tsv").write_text("anna/001.wav\tONE\nben lee/001.wav\tTWO\n")
    assert read(tmp_path / "data.tsv") == {"anna-001": "ONE", "ben_lee-001": "TWO"}


def test_faults_in_tables_name_file_and_line(wavs):
    table = wavs / "data.tsv"
    table.write_text("wavs/u0.wav\tONE\nwavs/u1.wav TWO\n")
    with pytest.raises(ValueError, match=r"data\.tsv, line 2.*audio <tab> text"):
        read(table)
    table.write_bytes("wavs/u0.wav\tcafé\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"data\.tsv, line 1: not UTF-8"):
        read(table)
    table.write_text("audio\ttext\tstart\nwavs/u0.wav\tONE\tsoon\n")
    with pytest.raises(ValueError, match=r"data\.tsv, line 2: start and duration"):
        read(table)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.tsv", "audio\ttext\n", r"line 1: a header with nothing below it; add a line"),
        ("t.tsv", "audio\ttext\tstart\nwavs/u0.wav\tA\tnan\n", r"line 2: start and duration .*'nan'; write a f"),
        ("t.tsv", "audio\ttext\tduration\nwavs/u0.wav\tA\tinf\n", r"line 2: start and duration .*'inf'; write a f"),
        ("t.tsv", "id\taudio\ttext\na\rb\twavs/u0.wav\tA\n", r"line 2: the id 'a\\rb' holds a tab or a line.*rename"),
        ("t.jsonl", '{"audio": "wavs/u0.wav", "text": "A", "start": NaN}', r"line 1: start and duration .*nan; write"),
        ("t.json", '{"audio_filepath": "wavs/u0.wav", "duration": Infinity}', r"line 1: start and duration .*inf; w"),
        ("t.json", f'{{"audio_filepath": "wavs/u0.wav", "duration": 1{"0" * 400}}}', r"line 1: start and duration"),
        ("t.jsonl", '{"audio": "wavs/u0.wav", "text": "A", "id": "a\\tb"}', r"line 1: the id 'a\\tb' .*rename it"),
        ("t.jsonl", '{"audio": "wavs/u0.wav", "text": "A", "id": "a\\nb"}', r"line 1: the id 'a\\nb' .*rename it"),
    ],
)  # fmt: skip
def test_what_no_corpus_can_mean_names_file_and_line(wavs, name, text, message):
    (wavs / name).write_bytes(text.encode())
    with pytest.raises(ValueError, match=rf"{re.escape(name)}, {message}"):
        read(wavs / name)


def test_times_and_ids_of_manifests_are_checked_too(wavs):
    good = make_cut("c0", wavs / "wavs" / "u0.wav", "ONE")
    for change, message in (
        ({"start": math.nan}, r"line 2: start and duration .*nan"),
        ({"duration": math.inf}, r"line 2: start and duration .*inf"),
        ({"id": "a\tb"}, r"line 2: the id 'a\\tb'"),
    ):
        lines = [json.dumps(cut.to_dict()) for cut in (good, fastcopy(good, **change))]
        (wavs / "cuts.jsonl").write_text("\n".join(lines))
        with pytest.raises(ValueError, match=rf"cuts\.jsonl, {message}"):
            read(wavs / "cuts.jsonl")
    folder = kaldi(wavs / "k", wav_scp="r0 ../wavs/u0.wav\n", text="s0 A\n", segments="s0 r0 nan 0.2\n")
    with pytest.raises(ValueError, match=r"segments, 's0': start and duration .*'nan'"):
        read(folder)


def test_json_lines_and_nemo(wavs):
    rows = [{"audio": "wavs/u0.wav", "text": "ONE", "id": "x"}, {"audio": "wavs/u1.wav", "text": None}]
    (wavs / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(wavs / "own.jsonl") == {"x": "ONE", "u1": None}
    rows = [
        {"audio_filepath": "wavs/u0.wav", "duration": 0.5, "text": "one"},
        {"audio_filepath": str(wavs / "wavs" / "u1.wav"), "offset": 0.1, "duration": 0.25, "text": "two"},
    ]
    (wavs / "nemo.json").write_text("\n".join(map(json.dumps, rows)))
    assert read(wavs / "nemo.json") == {"u0": "one", "u1-0000100": "two"}
    cuts = list(prepare(test=str(wavs / "nemo.json")).splits["test"])
    assert [len(load_audio(cut)) for cut in cuts] == [8000, 4000]
    (wavs / "own.jsonl").write_text('{"audio": "wavs/u0.wav", "text": "ONE"}\n{"audio": "wavs')
    with pytest.raises(ValueError, match=r"own\.jsonl, line 2: not valid JSON"):
        read(wavs / "own.jsonl")


def kaldi(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_scp", ".scp")).write_text(text)
    return folder


def test_kaldi_folder_with_and_without_segments(wavs):
    plain = kaldi(
        wavs / "plain",
        wav_scp="r0 ../wavs/u0.wav\nr1 ../wavs/u1.wav\nr2 ../wavs/u2.wav\n",
        text="r0 A B\nr1 C\nrx D\n",
        utt2spk="r0 anna\n",
    )
    corpus = prepare(test=str(plain))
    cuts = list(corpus.splits["test"])
    assert [(cut.id, cut.supervisions[0].text) for cut in cuts] == [("r0", "A B"), ("r1", "C"), ("rx", "D")]
    assert cuts[0].supervisions[0].speaker == "anna" and unreadable_reason(cuts[2]) == "missing file"
    assert corpus.notes == {"transcript without audio": 1, "audio without transcript": 1}
    cut_up = kaldi(
        wavs / "cut", wav_scp="r0\t../wavs/u0.wav\n", text="s0 A\ns1 B\n", segments="s0 r0 0.0 0.2\ns1 r0 0.2 -1\n"
    )
    assert [(cut.id, cut.start, len(load_audio(cut))) for cut in prepare(test=str(cut_up)).splits["test"]] == [
        ("s0", 0.0, 3200),
        ("s1", 0.2, 4800),
    ]


def test_kaldi_commands_and_repeated_ids_are_refused(wavs):
    folder = kaldi(wavs / "k", wav_scp="r0 sph2pipe -f wav x.sph |\n", text="r0 A\n")
    with pytest.raises(ValueError, match=r"wav\.scp.*sph2pipe.*command"):
        read(folder)
    kaldi(folder, wav_scp="r0 ../wavs/u0.wav\n", text="r0 A\nr0 B\n")
    with pytest.raises(ValueError, match=r"text, line 2: 'r0' comes twice"):
        read(folder)


def test_lhotse_manifest_with_relative_paths(wavs):
    cuts = [make_cut("c0", wavs / "wavs" / "u0.wav", "ONE")]
    cuts[0].recording.sources[0].source = "wavs/u0.wav"
    CutSet.from_cuts(cuts).to_file(wavs / "cuts.jsonl.gz")
    (cut,) = prepare(test=str(wavs / "cuts.jsonl.gz")).splits["test"]
    assert os.path.isabs(cut.recording.sources[0].source) and len(load_audio(cut)) == 8000


def test_shar_folder_is_unpacked(wavs):
    cuts = [make_cut(f"c/{number}", wavs / "wavs" / f"u{number}.wav", f"TEXT {number}") for number in range(3)]
    (wavs / "shar").mkdir()
    with SharWriter(str(wavs / "shar"), fields={"recording": "flac"}, shard_size=2) as writer:
        for cut in cuts:
            writer.write(cut)
    corpus = prepare(test=str(wavs / "shar"), shar_audio_dir=str(wavs / "out" / "audio"))
    write_prepared(corpus, wavs / "out", None, {})
    loaded = list(load_cuts(wavs / "out" / "test.jsonl.gz"))
    assert {cut.id: cut.supervisions[0].text for cut in loaded} == {f"c/{n}": f"TEXT {n}" for n in range(3)}
    assert all(abs(load_audio(cut) - load_audio(cuts[0])).max() < 1e-3 for cut in loaded)
    assert len(list((wavs / "out" / "audio").glob("shar-*/*.flac"))) == 3


def test_shar_folders_with_the_same_ids_keep_their_own_audio(tmp_path):
    levels = {"train": 0.1, "dev": 0.2, "test": 0.3}
    for split, level in levels.items():
        folder = tmp_path / split / "shar"
        folder.mkdir(parents=True)
        soundfile.write(tmp_path / f"{split}.wav", np.full(4800, level), 16000)
        with SharWriter(str(folder), fields={"recording": "flac"}) as writer:
            writer.write(make_cut("same", tmp_path / f"{split}.wav", "TEXT"))
    given = {split: str(tmp_path / split / "shar") for split in levels}
    splits = {name: list(cuts) for name, cuts in prepare(**given, shar_audio_dir=str(tmp_path / "out")).splits.items()}
    found = {name: float(load_audio(*cuts).mean()) for name, cuts in splits.items()}
    assert found == pytest.approx(levels, abs=1e-3)


def test_dev_and_test_are_set_aside_from_train(tmp_path, write_noise):
    lines = []
    for number in range(20):
        write_noise(tmp_path / f"u{number}.wav", 0.1)
        lines.append(f"u{number}.wav\tTEXT {number}\n")
    (tmp_path / "data.tsv").write_text("".join(lines))
    splits = {name: list(cuts) for name, cuts in prepare(train=str(tmp_path / "data.tsv")).splits.items()}
    assert {name: len(cuts) for name, cuts in splits.items()} == {"train": 18, "dev": 1, "test": 1}
    both = prepare(train=str(tmp_path / "data.tsv"), dev=str(tmp_path / "data.tsv"))
    assert {name: len(list(cuts)) for name, cuts in both.splits.items()} == {"train": 19, "dev": 20, "test": 1}


def test_what_is_no_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.train"):
        prepare()
    with pytest.raises(ValueError, match="no such file or folder"):
        prepare(test=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="neither a Kaldi folder"):
        prepare(test=str(tmp_path))
    (tmp_path / "data.xlsx").touch()
    with pytest.raises(ValueError, match="not a form that is known"):
        prepare(test=str(tmp_path / "data.xlsx"))
