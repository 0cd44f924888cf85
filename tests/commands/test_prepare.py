from __future__ import annotations

import os

import torch

from asr import build
from asr.data.cuts import audio_path, iterate_cuts
from tests.commands.tiny import MODEL, command, decode, digits_data, read_json, train, write_digits

TOKENIZER = [argument for argument in MODEL if argument.startswith(("tokenizer", "data.num_jobs"))]


def test_prepare_reports_and_training_finds_what_it_made(tmp_path):
    settings = digits_data(write_digits(tmp_path / "corpus"), tmp_path / "prepared")
    done = command("scripts/prepare.py", *settings, *TOKENIZER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = done.stdout.rpartition("prepared: ")[2].strip()
    assert folder.startswith(str(tmp_path / "prepared"))
    said = done.stdout + done.stderr
    for part in ("train", "dev", "test_single", "8000", "fingerprint"):
        assert part in said
    (report_path,) = tmp_path.glob("prepared*/data_report.json")
    report = read_json(report_path)
    assert report["splits"]["train"]["utterances"] == 12 and "tokenizer" in str(report)
    assert not (tmp_path / "runs").exists()

    written = {path.name: path.stat().st_mtime_ns for path in report_path.parent.glob("*.jsonl.gz")}
    done = command("train.py", *MODEL, *settings, "trainer.max_steps=1", cwd=tmp_path)
    assert done.returncode == 0 and "preparing" not in done.stderr, done.stderr
    assert {path.name: path.stat().st_mtime_ns for path in report_path.parent.glob("*.jsonl.gz")} == written


def test_a_wrong_place_is_told_in_one_line(tmp_path):
    done = command("scripts/prepare.py", *digits_data(tmp_path / "none", tmp_path / "p"), *TOKENIZER, cwd=tmp_path)
    assert done.returncode == 1
    assert f"error: {tmp_path}/none has no folder `recordings`" in done.stderr and "Traceback" not in done.stderr


def test_audio_may_be_stored_in_large_files(tmp_path):
    recordings = sorted((write_digits(tmp_path / "corpus") / "recordings").glob("*.wav"))
    table = tmp_path / "my.tsv"
    table.write_text("".join(f"{path}\t{'abc'[int(path.name[0])]}\n" for path in recordings))
    data = ["data=custom", f"data.train={table}", f"data.prepared_dir={tmp_path / 'prepared'}"]
    data += [f"data.shar_dir={tmp_path / 'shar'}", "data.num_workers=0"]
    done = command("scripts/prepare.py", *data, *TOKENIZER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "shar").glob("prepared-*/train/recording.000000.tar")
    (prepared,) = (path for path in tmp_path.glob("prepared-*") if path.is_dir())  # beside its lock
    cuts = list(iterate_cuts(prepared / "train.jsonl.gz"))
    assert all(audio_path(cut).startswith(f"{archive}@") for cut in cuts)
    for cut in cuts:
        (tmp_path / "corpus" / "recordings" / f"{cut.id}.wav").unlink()
    train(*data, "trainer.max_steps=1", run_dir=tmp_path / "run")
    assert read_json(tmp_path / "run" / "train.json")["skipped_utterances"] == 0


def test_mixed_audio_is_not_stored(tmp_path):
    data = digits_data(write_digits(tmp_path / "corpus"), tmp_path / "prepared")
    done = command("scripts/prepare.py", *data, *TOKENIZER, f"data.shar_dir={tmp_path / 'shar'}", cwd=tmp_path)
    assert done.returncode == 1 and "mixed from several recordings" in done.stderr


def prepared_from(place, table, tmp_path):
    """Prepares `table` from the folder `place`; the prepared folder, and how many utterances lie in it."""
    data = ["data=custom", f"data.train={table}", f"data.prepared_dir={tmp_path / 'prepared'}"]
    done = command("scripts/prepare.py", *data, *TOKENIZER, cwd=place)
    assert done.returncode == 0, done.stderr
    folder = done.stdout.rpartition("prepared: ")[2].strip()
    splits = read_json(tmp_path / folder / "data_report.json")["splits"]
    return folder, sum(split["utterances"] for split in splits.values())


def test_a_corpus_is_known_by_where_it_is_and_not_by_how_its_path_is_written(tmp_path):
    recordings = sorted((write_digits(tmp_path / "corpus") / "recordings").glob("*.wav"))
    places = {"here": 24, "there": 12}
    for place, number in places.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / "my.tsv").write_text("".join(f"{path}\tabc\n" for path in recordings[:number]))
    found = {place: prepared_from(tmp_path / place, "my.tsv", tmp_path) for place in places}
    assert {place: number for place, (_, number) in found.items()} == places
    assert found["here"][0] != found["there"][0]
    assert prepared_from(tmp_path, tmp_path / "here" / "my.tsv", tmp_path) == found["here"]
    assert prepared_from(tmp_path, "there/../here/my.tsv", tmp_path) == found["here"]


def test_a_run_on_a_relative_path_is_decoded_from_anywhere_and_continued_by_either_path(tmp_path):
    write_digits(tmp_path / "corpus")
    relative, whole = (digits_data(path, tmp_path / "prepared") for path in ("corpus", tmp_path / "corpus"))
    run = train(*relative, "trainer.max_steps=1", run_dir=tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    decode(run, "data.sets=[dev]", cwd=tmp_path / "elsewhere")
    train(*whole, "trainer.max_steps=2", run_dir=run, cwd=tmp_path / "elsewhere")
    assert read_json(run / "train.json")["steps"] == 2
    assert (run / "train.log").read_text().count("preparing") == 1


def test_a_run_that_stored_a_relative_path_still_finds_its_data(tmp_path):
    """As runs did before paths were made absolute."""
    write_digits(tmp_path / "corpus")
    data = digits_data("corpus", tmp_path / "prepared")
    run = train(*data, "trainer.max_steps=1", run_dir=tmp_path / "run")
    checkpoint = torch.load(run / "checkpoints" / "step-1.pt", weights_only=True)
    prepared = build.prepared_folder(build.settings_of_run(checkpoint))
    checkpoint["config"]["data"]["corpus"]["corpus_dir"] = "corpus"
    torch.save(checkpoint, run / "checkpoints" / "step-1.pt")
    earlier = build.prepared_folder(build.settings_of_run(checkpoint))
    assert earlier != prepared
    os.rename(prepared, earlier)
    report = (earlier / "data_report.json").read_text()
    (earlier / "data_report.json").write_text(
        report.replace(f'"corpus_dir": "{tmp_path}/corpus"', '"corpus_dir": "corpus"')
    )

    decode(run, "data.sets=[dev]")
    train(*data, "trainer.max_steps=2", run_dir=run)
    assert read_json(run / "train.json")["steps"] == 2 and not prepared.exists()
    decode(run, "data.sets=[dev]")
