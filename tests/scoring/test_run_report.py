"""Reports from run folders made here as the trainer and the decoder write them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from asr.scoring.files import write_results
from asr.scoring.report import _student_t, make_report
from asr.scoring.runs import find_runs
from asr.scoring.wer import Utterance


def utterances(num_errors: int, num_utterances: int = 50) -> list[Utterance]:
    """Two words per utterance, of which the first `num_errors` first words are wrong: a WER of `num_errors` percent."""
    return [
        Utterance(f"u{number:02}", "a b", "x b" if number < num_errors else "a b") for number in range(num_utterances)
    ]


def make_run(
    folder: Path, config: dict[str, Any] | None = None, wers: dict[str, int] | None = None, **training: Any
) -> Path:
    """A run folder; `wers` maps decode folder names to the percentage of wrong words."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": 1, "run_dir": str(folder), **(config or {})}))
    record = {
        "name": "demo",
        "status": "finished",
        "num_parameters": 4_800_000,
        "peak_memory_bytes": 3 * 2**29,
        "seconds_per_epoch": [60.0, 70.0],
        "train_loss": [{"epoch": 1, "loss": 5.0}, {"epoch": 2, "loss": 3.0}],
        "valid": [
            {"epoch": 1, "step": 10, "loss": 4.0, "wer": 80.0},
            {"epoch": 2, "step": 20, "loss": 2.0, "wer": 50.0},
        ],
    }
    (folder / "train.json").write_text(json.dumps({**record, **training}))
    for name, num_errors in (wers or {}).items():
        write_results(folder / "decode" / name, utterances(num_errors), {"method": "ctc_greedy_search"})
    return folder


def tables(report: str) -> list[list[list[str]]]:
    """Every Markdown table of a report as rows of cells, without the line of dashes."""
    found: list[list[list[str]]] = [[]]
    for line in report.splitlines():
        if line.startswith("| "):
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif found[-1]:
            found.append([])
    return [[table[0], *table[2:]] for table in found if table]


GREEDY = "ctc_greedy_search-epoch-3-avg-2"


def test_both_tables_of_one_run(tmp_path):
    make_run(tmp_path / "r", wers={f"test-clean-{GREEDY}": 10, f"test-other-{GREEDY}": 20})
    report = make_report(find_runs([tmp_path / "r"]))
    first, second = tables(report)
    assert first[0] == ["training config", "WER test-clean", "WER test-other", "peak memory", "time per epoch"]
    name, clean, other, memory, seconds = first[1]
    assert name == "demo" and memory == "1.50 GiB" and seconds == "65.0 s"
    assert clean.startswith("10.00 [") and other.startswith("20.00 [")
    assert second[0] == ["model", "test-clean", "test-other", "comment"]
    assert second[1] == ["demo, 4.80 M parameters", clean, other, "--epoch 3 --avg 2, ctc_greedy_search"]
    assert "Decoded with --epoch 3 --avg 2, ctc_greedy_search." in report
    assert "Notes" not in report


def test_every_decode_setting_has_its_row(tmp_path):
    """None is chosen by its WER on the test set."""
    make_run(
        tmp_path / "r",
        wers={
            "dev-ctc_greedy_search-epoch-3-avg-1": 10,
            "dev-ctc_greedy_search-iter-900-avg-2": 8,
            f"test-{GREEDY}": 5,
        },
    )
    first, second = tables(make_report(find_runs([tmp_path / "r"])))
    assert [row[-1] for row in second[1:]] == [
        "--epoch 3 --avg 1, ctc_greedy_search",
        "--epoch 3 --avg 2, ctc_greedy_search",
        "--iter 900 --avg 2, ctc_greedy_search",
    ]
    assert [row[2][:4] for row in second[1:]] == ["-", "5.00", "-"]
    assert first[1][0] == "demo (--epoch 3 --avg 1, ctc_greedy_search)"


def test_seeds_become_mean_and_spread(tmp_path):
    for seed, wer in ((1, 10), (2, 12), (3, 17)):
        loss = [{"epoch": 1, "loss": float(seed)}, {"epoch": 2, "loss": None}]
        make_run(
            tmp_path / "sweep" / f"bf16-{seed}",
            {"seed": seed, "precision": "bf16"},
            {f"test-{GREEDY}": wer},
            peak_memory_bytes=seed * 2**20,
            train_loss=loss,
        )
    make_run(tmp_path / "sweep" / "fp32-1", {"seed": 1, "precision": "fp32"}, {f"test-{GREEDY}": 9})
    first, *_ = tables(make_report(find_runs([tmp_path / "sweep"]), by="precision", loss=True))
    assert [row[0] for row in first[1:]] == ["demo, precision=bf16 (3 runs)", "demo, precision=fp32"]
    deviation, half = math.sqrt(13), 4.303 * math.sqrt(13 / 3)
    assert first[1][1] == f"13.00 ± {deviation:.2f} [{13 - half:.2f}, {13 + half:.2f}] (n=3)"
    assert first[1][2] == "3 MiB"
    assert first[0][-2:] == ["train loss, epoch 1", "train loss, epoch 2"]
    assert first[1][-2:] == ["2.0000 ± 1.0000", "n/a"]
    assert first[2][1].startswith("9.00 [") and first[2][-2:] == ["5.0000", "3.0000"]


def test_only_the_seed_is_averaged_over(tmp_path):
    for number, (precision, lr) in enumerate([("bf16", 1), ("bf16", 2), ("fp32", 1), ("fp32", 2)]):
        config = {"precision": precision, "optim": {"lr": lr}}
        make_run(tmp_path / str(number), config, {f"test-{GREEDY}": number})
    first, *_ = tables(make_report(find_runs([tmp_path]), by="precision"))
    assert [row[0] for row in first[1:]] == [
        f"demo, precision={precision}, optim.lr={lr}" for precision in ("bf16", "fp32") for lr in (1, 2)
    ]


def test_numbers_are_ordered_by_size_and_components_by_their_class(tmp_path):
    for value in (10, 9, 100):
        make_run(tmp_path / f"beam{value}", {"beam": value, "encoder": {"_target_": "asr.encoders.a.Conformer"}})
    runs = find_runs([tmp_path])
    first, *_ = tables(make_report(runs, by="beam"))
    assert [row[0] for row in first[1:]] == [f"demo, beam={value}" for value in (9, 10, 100)]
    first, *_ = tables(make_report(runs, by="encoder"))
    assert all(row[0].startswith("demo, encoder=Conformer") for row in first[1:])


def test_failed_and_undecoded_runs_are_listed(tmp_path):
    make_run(tmp_path / "s" / "0", {"lr": 1}, {f"test-{GREEDY}": 10})
    make_run(tmp_path / "s" / "1", {"lr": 2}, status="failed", seconds_per_epoch=[], peak_memory_bytes=None)
    make_run(tmp_path / "s" / "2", {"lr": 3}, skipped_steps=4)
    (tmp_path / "s" / "10" / ".hydra").mkdir(parents=True)
    report = make_report(find_runs([tmp_path / "s"]))
    first, second = tables(report)
    assert first[2][:2] == ["demo, lr=2 (failed)", "no decode results"] and first[2][-2:] == ["n/a", "n/a"]
    assert first[3][:2] == ["demo, lr=3", "no decode results"]
    assert first[4][:2] == ["10 (not started)", "no decode results"]
    assert len(second) == 5
    assert f"- {tmp_path / 's' / '1'}: failed; no decode results" in report
    assert f"- {tmp_path / 's' / '2'}: no decode results; 4 skipped steps" in report


def test_failed_seeds_are_counted_in_their_row(tmp_path):
    make_run(tmp_path / "0", {"seed": 1, "lr": 1}, {f"test-{GREEDY}": 10})
    make_run(tmp_path / "1", {"seed": 2, "lr": 1}, status="failed")
    first, *_ = tables(make_report(find_runs([tmp_path]), by="lr"))
    assert first[1][0] == "demo, lr=1 (2 runs, 1 failed, 1 without decode results)"
    assert first[1][1].startswith("10.00 [") and first[1][1].endswith("(n=1)")


def test_damaged_files_are_notes_not_crashes(tmp_path):
    run = make_run(tmp_path / "r", wers={f"test-{GREEDY}": 10})
    (run / "train.json").write_text('{"name": "de')
    (run / "decode" / f"dev-{GREEDY}").mkdir()
    (run / "decode" / f"other-{GREEDY}").mkdir()
    (run / "decode" / f"other-{GREEDY}" / "result.json").write_text("[]")
    report = make_report(find_runs([run]))
    assert "10.00 [" in report
    assert "train.json cannot be read" in report
    assert f"decode/dev-{GREEDY} has no result.json" in report
    assert f"other-{GREEDY}/result.json cannot be read" in report


def test_results_without_a_rate(tmp_path):
    run = make_run(tmp_path / "r")
    write_results(run / "decode" / f"test-{GREEDY}", [Utterance("a", "", "x")], {})
    first, _ = tables(make_report(find_runs([run])))
    assert first[1][1] == "n/a"


def test_two_runs_are_compared_on_common_sets(tmp_path):
    make_run(tmp_path / "a", {"lr": 1}, {f"dev-{GREEDY}": 2, f"test-{GREEDY}": 2})
    make_run(tmp_path / "b", {"lr": 2}, {f"test-{GREEDY}": 20})
    report = make_report(find_runs([tmp_path / "a", tmp_path / "b"]))
    assert "Paired bootstrap, A = demo, lr=1, B = demo, lr=2:" in report
    (line,) = [line for line in report.splitlines() if line.startswith("- test, ")]
    assert "A 2.00, B 20.00, difference -18.00 [-" in line
    assert float(line.rsplit(" ", 1)[1]) > 0.99
    assert "- dev, " not in report


def test_other_averages_of_one_method_compare_too(tmp_path):
    make_run(tmp_path / "a", {"lr": 1}, {"test-ctc_greedy_search-epoch-3-avg-2": 2})
    make_run(tmp_path / "b", {"lr": 2}, {"test-ctc_greedy_search-epoch-9-avg-4": 2})
    report = make_report(find_runs([tmp_path]))
    assert "--epoch 3 --avg 2, ctc_greedy_search against --epoch 9 --avg 4, ctc_greedy_search: A 2.00" in report


def test_what_cannot_be_compared_is_said(tmp_path):
    make_run(tmp_path / "a", {"lr": 1}, {f"test-{GREEDY}": 2})
    run = make_run(tmp_path / "b", {"lr": 2})
    assert "no set was decoded in the same way" in make_report(find_runs([tmp_path]))
    write_results(run / "decode" / f"test-{GREEDY}", [Utterance("u00", "other", "words")], {})
    assert "not comparable: 49 utterances are in one system only" in make_report(find_runs([tmp_path]))
    (run / "decode" / f"test-{GREEDY}" / "recogs.txt").unlink()
    assert "not comparable: " in make_report(find_runs([tmp_path]))


def test_runs_of_one_configuration_are_told_apart_by_folder(tmp_path):
    make_run(tmp_path / "first")
    make_run(tmp_path / "second")
    first, _ = tables(make_report(find_runs([tmp_path])))
    assert [row[0] for row in first[1:]] == ["demo, first", "demo, second"]


def test_a_run_named_twice_counts_once(tmp_path):
    run = make_run(tmp_path / "s" / "r")
    assert len(find_runs([run, tmp_path / "s", run])) == 1


def test_folders_without_runs_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="absent"):
        find_runs([tmp_path / "absent"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        find_runs([tmp_path / "empty"])


def test_unknown_keys_name_near_ones(tmp_path):
    make_run(tmp_path / "r", {"precision": "fp32"})
    with pytest.raises(ValueError, match=r"precison.*near ones: precision"):
        make_report(find_runs([tmp_path]), by="precison")


def test_a_key_without_value_is_a_key(tmp_path):
    make_run(tmp_path / "r", {"init_mode": None})
    first, *_ = tables(make_report(find_runs([tmp_path]), by="init_mode"))
    assert first[1][0] == "demo, init_mode=null"


def test_a_key_that_repeats_the_leading_one_is_not_shown(tmp_path):
    for mode, layers in ((None, 1), ("paper", 2)):
        make_run(tmp_path / f"{mode}", {"init_mode": mode, "init": {"head": mode}, "head": {"num_layers": layers}})
    first, *_ = tables(make_report(find_runs([tmp_path]), by="init_mode"))
    labels = {row[0] for row in first[1:]}
    assert labels == {"demo, init_mode=null, head.num_layers=1", "demo, init_mode=paper, head.num_layers=2"}


def test_losses_are_pooled_over_all_that_differs_beside_the_key(tmp_path):
    for mode, shift in ((None, 0.0), ("xavier_uniform", 10.0)):
        for layers in (1, 2):
            for seed in (1, 2):
                first = 20.0 + shift + layers + 4 * seed
                losses = [{"epoch": epoch, "loss": first / epoch} for epoch in (1, 2)]
                valid = [{"epoch": 1, "step": 5, "loss": 99.0}, {"epoch": 1, "step": 9, "loss": first - 1}]
                config = {"init_mode": mode, "head": {"num_layers": layers}, "seed": seed}
                make_run(tmp_path / f"{mode}-{layers}-{seed}", config, train_loss=losses, valid=valid)
    failed = {"train_loss": [{"epoch": 1, "loss": math.nan}], "valid": []}
    make_run(tmp_path / "failed", {"init_mode": "xavier_uniform", "head": {"num_layers": 3}}, status="failed", **failed)
    report = make_report(find_runs([tmp_path]), by="init_mode")
    table = tables(report)[2]
    assert table[0][:3] == ["init_mode", "runs", "train loss, epoch 1"]
    assert table[0][3:] == ["train loss, epoch 2", "dev loss, epoch 1", "dev loss, epoch 2"]
    # 25, 26, 29, 30: mean 27.5, standard deviation sqrt(17 / 3), and t of 3 degrees of freedom 3.182
    half = 3.182 * math.sqrt(17 / 3) / 2
    xavier, null = table[1], table[2]
    assert null[:3] == ["null", "4", f"27.50 ± 2.38 [{27.5 - half:.2f}, {27.5 + half:.2f}]"]
    assert null[3].startswith("13.75 ± 1.19 [") and null[4].startswith("26.50 ± 2.38 [") and null[5] == "n/a"
    assert xavier[:2] == ["xavier_uniform", "5"] and xavier[2].endswith("] (n=4)")


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (9, 2.262), (10, 2.228), (15, 2.131), (30, 2.042)])
def test_quantiles_are_those_of_the_tables(freedom, quantile):
    assert _student_t(freedom) == pytest.approx(quantile, abs=3e-3)


def test_order_follows_the_arguments(tmp_path):
    names = [f"run{number}" for number in (3, 20, 1)]
    paths = [make_run(tmp_path / name, {"lr": name}) for name in names]
    assert [run.folder for run in find_runs(paths)] == paths
    assert [run.folder.name for run in find_runs([tmp_path])] == ["run1", "run3", "run20"]


def test_sets_that_are_scored_by_character_show_their_cer(tmp_path):
    for name, text in (("a", "打开灯"), ("b", "打开 灯")):
        run = make_run(tmp_path / name, {"x": name})
        chinese = [Utterance(f"u{number}", "打开灯", text if number else "关灯") for number in range(4)]
        write_results(run / "decode" / f"test-{GREEDY}", chinese, {}, unit="character")
    report = make_report(find_runs([tmp_path / "a", tmp_path / "b"]))
    training, model = tables(report)[:2]
    assert training[0][1] == "CER test" and model[0][1] == "CER test"
    assert training[1][1].startswith("16.67 [") and training[2][1] == training[1][1], "spaces do not count"
    assert "CER in percent" in report and "difference +0.00" in report
