"""Result files of one decoded set."""

from __future__ import annotations

import json
import random

import pytest

from asr.scoring.files import read_recogs, read_transcripts, write_results
from asr.scoring.wer import Utterance, compare, score

UTTERANCES = [
    Utterance("b-2", "the cat sat", "a cat sat on", "ann"),
    Utterance("a-1", "今天 天气", "今天天汽", "bob"),
    Utterance("c-3", "", "", "ann"),
]


def test_recogs_holds_every_id_once_sorted(tmp_path):
    for seed in range(3):
        write_results(tmp_path / str(seed), random.Random(seed).sample(UTTERANCES, 3), {})
    text = (tmp_path / "0" / "recogs.txt").read_text(encoding="utf-8")
    assert text == "a-1\tref=今天 天气\thyp=今天天汽\nb-2\tref=the cat sat\thyp=a cat sat on\nc-3\tref=\thyp=\n"
    for name in ("recogs.txt", "errs.txt", "result.json"):
        assert len({(tmp_path / str(seed) / name).read_bytes() for seed in range(3)}) == 1


def test_recogs_are_read_back(tmp_path):
    odd = [*UTTERANCES, Utterance("d", "a hyp=b\tc\u2028d\ne", "ref=\x85 x")]
    write_results(tmp_path, odd, {})
    back = read_recogs(tmp_path / "recogs.txt")
    assert score(back).alignments == score(odd).alignments
    assert compare(back, odd).difference == 0


def test_result_holds_figures_and_decoding(tmp_path):
    meta = {"method": "ctc_greedy_search", "epoch": 3, "avg": 2, "rtf": 0.01, "commit": "abc", "extra": {"beam": 4}}
    result = write_results(tmp_path, UTTERANCES, meta)
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8")) == result
    assert meta.items() <= result.items() and result["checksum"] is None
    assert (result["num_utterances"], result["ref_words"]) == (3, 7)
    assert (result["ins"], result["del"], result["sub"]) == (1, 0, 2)
    assert result["wer"] == pytest.approx(100 * 3 / 7, abs=1e-12)
    assert result["cer"] == score(UTTERANCES, "character").counts.rate
    low, high = result["wer_ci95"]
    assert low < result["wer"] < high
    assert result["per_speaker"]["ann"]["wer"] == pytest.approx(200 / 3)
    assert result["per_speaker"]["bob"]["cer"] == 25.0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["errs.txt", "recogs.txt", "result.json"]


def test_no_rate_is_null_in_json_and_na_in_text(tmp_path):
    result = write_results(tmp_path, [Utterance("a", "", "x")], {})
    assert result["wer"] is None and result["wer_ci95"] is None and result["cer"] is None
    assert '"wer": null' in (tmp_path / "result.json").read_text()
    assert (tmp_path / "errs.txt").read_text().startswith("WER n/a [1 / 0, 1 ins, 0 del, 0 sub]\n")


def test_errs_shows_totals_marks_and_confusions(tmp_path):
    write_results(tmp_path, UTTERANCES, {})
    lines = (tmp_path / "errs.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("WER 42.86 % [3 / 7, 1 ins, 0 del, 2 sub], 95% interval ")
    assert lines[1] == "3 utterances, 2 of them with errors"
    assert "a-1\t今 天 天 (气->汽)" in lines
    assert "b-2\t(the->a) cat sat (*->on)" in lines
    assert {"1\tthe -> a", "1\t气 -> 汽", "1\t* -> on", "天\t2\t0\t2\t2", "ann\t66.67\t2 / 3"} <= set(lines)


def test_errs_can_align_characters(tmp_path):
    write_results(tmp_path, [Utterance("u", "ab c", "abd")], {}, unit="character")
    lines = (tmp_path / "errs.txt").read_text().splitlines()
    assert lines[0].startswith("CER 33.33 % [1 / 3, 0 ins, 0 del, 1 sub]")
    assert "u\ta b (c->d)" in lines


@pytest.mark.parametrize("id", ["a\tb", "a\nb", ""])
def test_ids_that_break_lines_are_refused_before_anything_is_written(tmp_path, id):
    with pytest.raises(ValueError, match="id"):
        write_results(tmp_path / "out", [Utterance(id, "a", "a")], {})
    assert not (tmp_path / "out").exists()


def test_values_that_json_cannot_hold_leave_the_old_result(tmp_path):
    write_results(tmp_path, UTTERANCES, {"epoch": 1})
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(ValueError):
        write_results(tmp_path, UTTERANCES, {"rtf": float("nan")})
    assert (tmp_path / "result.json").read_bytes() == before


def test_transcripts_tolerate_other_editors(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffu1 the  cat\r\n\r\nu2\r\nu3\t今天 天气 ".encode())
    assert read_transcripts(path) == {"u1": "the  cat", "u2": "", "u3": "今天 天气"}


def test_transcript_faults_name_file_and_line(tmp_path):
    path = tmp_path / "text"
    path.write_text("u1 a\nu2 b\nu1 c\n")
    with pytest.raises(ValueError, match=r"text, line 3: id u1 stands in line 1"):
        read_transcripts(path)
    path.write_bytes(b"u1 a\nu2 \xff\n")
    with pytest.raises(ValueError, match=r"text, line 2: not UTF-8"):
        read_transcripts(path)


def test_damaged_recogs_name_file_and_line(tmp_path):
    path = tmp_path / "recogs.txt"
    path.write_text("u1\tref=a\thyp=a\nu2\tref=a\n")
    with pytest.raises(ValueError, match=r"recogs.txt, line 2"):
        read_recogs(path)
