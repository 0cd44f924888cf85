from __future__ import annotations

import json

import pytest

from tests.commands.tiny import command, decode, read_json, train


@pytest.fixture(scope="module")
def short(tmp_path_factory, digits):
    """A run of two epochs, decoded by nobody else."""
    return train(*digits, "trainer.max_epochs=2", run_dir=tmp_path_factory.mktemp("decode") / "run")


def result(run_dir, folder: str) -> dict:
    return read_json(run_dir / "decode" / folder / "result.json")


def said(run_dir, *arguments: str) -> str:
    """What a decode command that must fail says."""
    done = command("decode.py", f"run_dir={run_dir}", *arguments, cwd=run_dir.parent)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "error: " in done.stderr
    return done.stderr.partition("error: ")[2]


def test_flags_and_keys_are_the_same(trained):
    decode(trained, "--epoch", "3", "--avg=2", "--method", "ctc_greedy_search")
    by_flags = result(trained, "test-ctc_greedy_search-epoch-3-avg-2")
    decode(trained, "epoch=3", "avg=2", "method=ctc_greedy_search")
    by_keys = result(trained, "test-ctc_greedy_search-epoch-3-avg-2")
    timing = {"rtf", "extra", "date"}
    assert {k: v for k, v in by_flags.items() if k not in timing} == {
        k: v for k, v in by_keys.items() if k not in timing
    }
    assert (by_keys["epoch"], by_keys["avg"], by_keys["method"]) == (3, 2, "ctc_greedy_search")
    assert by_keys["num_utterances"] == 5 and by_keys["ref_words"] > 5
    assert set(by_keys["per_speaker"]) <= {"ann", "bob"}
    assert (trained / "decode" / "test_single-ctc_greedy_search-epoch-3-avg-2" / "errs.txt").stat().st_size > 0
    assert (
        "decoding by ctc_greedy_search with the running average over epoch 2-3" in (trained / "decode.log").read_text()
    )


def test_prefix_beam_search_and_its_options(trained):
    decode(trained, "--method", "ctc_prefix_beam_search", "search.beam=2", "data.sets=[test]")
    found = result(trained, "test-ctc_prefix_beam_search_beam_2-epoch-3-avg-1")
    assert found["method"] == "ctc_prefix_beam_search,beam=2" and found["num_utterances"] == 5
    assert "did you mean beam?" in said(trained, "--method", "ctc_prefix_beam_search", "search.beams=2")


def test_a_streaming_run_is_decoded_in_chunks_by_every_search_of_its_head(tmp_path, digits):
    encoder = ["encoder=conformer_u2pp", "encoder.kernel_size=4"]
    sizes = [f"head.heads.attention.{key}" for key in ("feed_forward_dim=16", "num_layers=1", "reverse_layers=1")]
    run = train(*digits, *encoder, "head=ctc_attention_u2pp", *sizes, "trainer.max_steps=2", run_dir=tmp_path / "run")
    chunks = ["encoder.chunk_size=4", "encoder.left_chunks=1"]
    for method in ("ctc_greedy_search", "ctc_prefix_beam_search", "attention", "attention_rescoring"):
        found = []
        for more in ([], ["encoder.streaming=true"]):
            decode(run, "--method", method, "data.sets=[test]", *chunks, *more)
            name = f"test-{method}_chunk_size_4_left_chunks_1{'_streaming_True' if more else ''}-iter-2-avg-1"
            found.append((run / "decode" / name / "recogs.txt").read_text())
        assert found[0] == found[1]
    assert "encoder.chunks=4" in said(run, "encoder.chunks=4")
    assert "give 0 or more" in said(run, chunks[0], "encoder.left_chunks=-1")


def test_weights_are_those_that_were_asked_for(trained):
    def checksum(label: str, *arguments: str) -> str:
        decode(trained, "data.sets=[test]", *arguments)
        return result(trained, f"test-ctc_greedy_search{label}")["checksum"]

    own = "_use_averaged_model_false"
    ways = [
        checksum("-epoch-3-avg-1", "epoch=3", "avg=1"),
        checksum(f"{own}-epoch-3-avg-1", "epoch=3", "avg=1", "--use-averaged-model", "false"),
        checksum("-epoch-3-avg-3", "epoch=3", "avg=3"),
        checksum(f"{own}-epoch-3-avg-3", "epoch=3", "avg=3", "use_averaged_model=false"),
        checksum("-epoch-2-avg-1", "--epoch", "2"),
        checksum("-iter-6-avg-1", "--iter", "6"),
        checksum(f"{own}-iter-6-avg-2", "iter=6", "avg=2", "use_averaged_model=false"),
    ]
    assert len(set(ways)) == len(ways)
    assert checksum("-epoch-3-avg-1") == ways[0], "the newest epoch is the default"


def test_results_of_other_options_lie_side_by_side_and_are_told_apart_in_the_report(short):
    for options in (
        ["search.beam=2"], ["search.beam=3"], ["precision=amp_bf16"], ["select=best"], ["use_averaged_model=false"],
    ):  # fmt: skip
        decode(short, "method=ctc_prefix_beam_search", "data.sets=[dev]", *options)
    report = command("scripts/report.py", str(short), cwd=short.parent).stdout
    for named in ("beam=2", "beam=3", "precision=amp_bf16", "select=best", "use_averaged_model=false"):
        assert f"--epoch 2 --avg 1, ctc_prefix_beam_search,{named}" in report


def test_select_best_averages_the_epochs_with_the_lowest_dev_error(trained):
    decode(trained, "select=best", "avg=2", "data.sets=[test]")
    valid = sorted(read_json(trained / "train.json")["valid"], key=lambda entry: (entry["wer"], entry["epoch"]))
    named = result(trained, "test-ctc_greedy_search_select_best-epoch-3-avg-2")["extra"]["averaging"]
    best = sorted(entry["epoch"] for entry in valid[:2])
    assert named in (f"best epochs {best[0]}, {best[1]}", f"best epochs {best[0]}-{best[1]}")


def test_avg_auto_tells_what_it_tried_and_takes_the_best_on_dev(trained):
    done = decode(trained, "--avg", "auto", "data.sets=[test]")
    tried = [line.partition("avg=")[2] for line in done.stderr.splitlines() if "dev WER" in line]
    rates = {int(text.partition(":")[0]): float(text.partition("WER ")[2].rstrip("%")) for text in tried}
    assert rates.keys() == {1, 2, 3}
    best = min(rates, key=lambda avg: (rates[avg], avg))
    assert f"test-ctc_greedy_search-epoch-3-avg-{best}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epoch=9"], "epoch 9 does not exist; there are 1-3"),
        (["epoch=3", "avg=5"], "avg=5 up to epoch 3 would need epochs -1 to 0"),
        (["iter=7"], "step 7 does not exist; there are 3, 6, 9, 12"),
        (["iter=6", "avg=5"], "avg=5 needs 5 step checkpoints; there are 3, 6"),
        (["select=best", "avg=7"], "avg=7 best epochs asked for, 3 have a dev WER"),
        (["avg=0"], "avg=0: a whole number from 1, or auto"),
        (["avg=many"], "avg='many': a whole number from 1, or auto"),
        (["--avg"], "--avg: give a value, as in --avg VALUE"),
        (["--avg", "--epoch", "3"], "--avg: give a value"),
        (["--epcoh", "3"], "--epcoh: no such option; did you mean --epoch?"),
        (["iter=6", "select=best"], "select=best: chooses among epochs"),
        (["data.test=my.tsv", "data.sets=[dev]"], "data.sets=['dev']: names sets of the run, and data.test another"),
        (["epoch=3", "iter=3"], "iter=3: give epoch or iter, not both"),
        (["method=beam"], "this run's head offers ctc_greedy_search, ctc_prefix_beam_search"),
        (["data.sets=[tset]"], "['tset'] not prepared; there are"),
        (["data.test=nowhere.tsv"], "nowhere.tsv"),
        (["precision=bf16"], "precision=bf16: decoding knows fp32, amp_fp16 and amp_bf16"),
        (["device=cuda:99"], "device=cuda:99"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, trained):
    assert message in said(trained, *arguments)


def test_a_run_dir_that_is_none(tmp_path):
    for value, message in (("nowhere", "run_dir=nowhere: no such folder"), (".", "is run_dir a trained run?")):
        done = command("decode.py", f"run_dir={value}", cwd=tmp_path)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    done = command("decode.py", cwd=tmp_path)
    assert done.returncode == 1 and "run_dir: a value is required" in done.stderr


def test_results_do_not_depend_on_batches_and_list_every_id_once_in_order(short):
    def hypotheses(max_duration: str) -> str:
        decode(short, f"data.max_duration={max_duration}")
        return (short / "decode" / "test-ctc_greedy_search-epoch-2-avg-1" / "recogs.txt").read_text()

    alone, together = hypotheses("0.1"), hypotheses("1000")
    assert alone == together
    ids = [line.split(":")[0].split("\t")[0] for line in alone.splitlines() if "ref=" in line]
    assert ids == sorted(set(ids)) and len(ids) == 5


def test_audio_that_cannot_be_read_counts_as_deletions(short, workplace):
    decode(short, "data.sets=[test_single]")
    folder = "test_single-ctc_greedy_search-epoch-2-avg-1"
    whole = result(short, folder)
    broken = workplace / "digits" / "recordings" / "1_ann_0.wav"
    content = broken.read_bytes()
    try:
        broken.write_text("no audio at all")
        done = decode(short, "data.sets=[test_single]")
    finally:
        broken.write_bytes(content)
    found = result(short, folder)
    assert found["num_utterances"] == whole["num_utterances"] and found["ref_words"] == whole["ref_words"]
    assert list(found["extra"]["unreadable"]) == ["1_ann_0"]
    assert str(broken) in found["extra"]["unreadable"]["1_ann_0"]
    assert "1_ann_0: not decoded, its words count as deletions" in done.stderr
    assert found["del"] >= 1


def test_decoding_works_from_anywhere_and_leaves_nothing_there(short, tmp_path):
    decode(short, "data.sets=[dev]", cwd=tmp_path)
    assert result(short, "dev-ctc_greedy_search-epoch-2-avg-1")["num_utterances"] == 4
    assert not list(tmp_path.iterdir())


def test_another_test_set_is_scored_under_its_own_name(short, workplace, tmp_path):
    recordings = workplace / "digits" / "recordings"
    (tmp_path / "mine.tsv").write_text(
        f"{recordings}/0_ann_0.wav\tZERO\n{recordings}/2_bob_0.wav\tTWO\n{tmp_path}/missing.wav\tONE\n"
    )
    decode(short, "data.test=mine.tsv", cwd=tmp_path)
    found = result(short, "mine-ctc_greedy_search-epoch-2-avg-1")
    assert found["num_utterances"] == 3 and found["ref_words"] == 3
    assert "missing.wav" in next(iter(found["extra"]["unreadable"].values()))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.tsv"]


def test_results_on_another_file_never_replace_those_of_one_with_its_name(short, workplace, tmp_path):
    recordings = workplace / "digits" / "recordings"
    for folder, digit in (("own", 0), ("other", 1)):
        (tmp_path / folder).mkdir()
        for name in ("test", "mine.v1"):
            (tmp_path / folder / f"{name}.tsv").write_text(f"{recordings}/{digit}_ann_0.wav\tZERO\n")
    decode(short, "data.sets=[test]")
    decode(short, f"data.test={tmp_path}/own/test.tsv")
    assert result(short, "test-ctc_greedy_search-epoch-2-avg-1")["num_utterances"] == 5
    assert result(short, "test_tsv-ctc_greedy_search-epoch-2-avg-1")["num_utterances"] == 1
    decode(short, f"data.test={tmp_path}/own/mine.v1.tsv")
    decode(short, f"data.test={tmp_path}/own/mine.v1.tsv")
    assert result(short, "mine.v1-ctc_greedy_search-epoch-2-avg-1")["num_utterances"] == 1
    message = said(short, f"data.test={tmp_path}/other/mine.v1.tsv")
    assert "holds the results on" in message and "own/mine.v1.tsv" in message


def test_a_sweep_over_averages_leaves_every_result(short, tmp_path):
    done = command(
        "decode.py", "-m", f"run_dir={short}", "avg=1,2", "data.sets=[dev]", "data.num_workers=0", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for avg in (1, 2):
        assert json.loads((short / f"decode/dev-ctc_greedy_search-epoch-2-avg-{avg}/result.json").read_text())["avg"]
