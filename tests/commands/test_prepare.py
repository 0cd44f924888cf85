from __future__ import annotations

from asr.data.cuts import audio_path, iterate_cuts
from tests.commands.tiny import MODEL, command, digits_data, read_json, train, write_digits

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
