from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import yaml

from tests.commands.tiny import (
    MODEL,
    ROOT,
    assert_same_state,
    command,
    decode,
    finish,
    last_checkpoint,
    read_json,
    spawn,
    train,
)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory, digits):
    """Three jobs over the seed, of which the second cannot write its checkpoints; the folder and the outcome."""
    place = tmp_path_factory.mktemp("sweep")
    (place / "out" / "001_seed_2").mkdir(parents=True)
    (place / "out" / "001_seed_2" / "checkpoints").write_text("a file where a folder is wanted")
    done = command("train.py", "-m", *MODEL, *digits, "seed=1,2,3", "trainer.max_epochs=1", "run_dir=out", cwd=place)
    return place, done


def test_a_failing_job_shows_in_the_exit_code_and_does_not_stop_the_others(sweep):
    place, done = sweep
    assert done.returncode != 0
    assert sorted(path.name for path in (place / "out").iterdir()) == ["000_seed_1", "001_seed_2", "002_seed_3"]
    decode(place / "out" / "000_seed_1")  # its name needs no quotes on a command line
    states = {path.name: read_json(path / "train.json")["status"] for path in (place / "out").iterdir()}
    assert states == {"000_seed_1": "finished", "001_seed_2": "failed", "002_seed_3": "finished"}
    assert "checkpoints" in read_json(place / "out" / "001_seed_2" / "train.json")["error"]


def test_each_log_holds_its_own_lines_and_the_failing_one_its_traceback(sweep):
    place, _ = sweep
    for name in ("000_seed_1", "001_seed_2", "002_seed_3"):
        log = (place / "out" / name / "train.log").read_text()
        assert log.count("run folder") == 1 and f"run folder out/{name} " in log
        assert "#1" not in log and "Launching" not in log, "lines of the launcher belong to no job"
        assert ("Traceback" in log) == (name == "001_seed_2")
        if name != "001_seed_2":
            assert "decode with:" in log.splitlines()[-1]
    failed = (place / "out" / "001_seed_2" / "train.log").read_text()
    assert "Error" in failed and "checkpoint.py" in failed


@pytest.mark.parametrize("seed", [1, 3])
def test_a_job_ends_with_the_same_bits_as_the_run_alone(sweep, seed, digits, tmp_path):
    place, _ = sweep
    alone = train(*digits, f"seed={seed}", "trainer.max_epochs=1", run_dir=tmp_path / "alone")
    (job,) = (place / "out").glob(f"*_seed_{seed}")
    assert_same_state(last_checkpoint(job), last_checkpoint(alone))


def test_nothing_is_left_in_the_folder_of_the_start(sweep):
    place, _ = sweep
    assert sorted(path.name for path in place.iterdir()) == ["out", "runs"]
    assert [path.name for path in (place / "runs").iterdir()] == ["sweeps"]
    assert [path.name for path in (place / "runs").glob("sweeps/*/*")] == ["multirun.yaml"]


def test_without_a_run_dir_the_jobs_lie_beside_the_description_of_the_sweep(tmp_path, digits):
    done = command(
        "train.py", "-m", *MODEL, *digits, "trainer.max_steps=1", "precision=fp32,fp61,amp_bf16", cwd=tmp_path
    )
    assert done.returncode != 0 and "precision='fp61'" in done.stderr
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    names = ["000_precision_fp32", "001_precision_fp61", "002_precision_amp_bf16", "multirun.yaml"]
    assert sorted(path.name for path in folder.iterdir()) == names
    states = [read_json(folder / name / "train.json")["status"] for name in names[:3]]
    assert states == ["finished", "failed", "finished"]
    assert "precision='fp61'" in (folder / names[1] / "train.log").read_text()
    assert yaml.safe_load((folder / names[1] / "config.yaml").read_text())["precision"] == "fp61", "for the report"


def test_a_sweep_over_a_group_is_named_by_its_choices(tmp_path, digits):
    arguments = [argument for argument in MODEL if not argument.startswith("tokenizer")]
    done = command(
        "train.py", "-m", *arguments, *digits, "trainer.max_steps=1", "tokenizer=word,char", "run_dir=out",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000_tokenizer_word", "001_tokenizer_char"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("joblib", ["hydra.launcher.n_jobs=2"]),
        ("submitit_local", []),  # what submitit_slurm does, without SLURM
        ("ray", ["+hydra.launcher.ray.init.num_cpus=2"]),
    ],
)
def test_a_launcher_runs_jobs_side_by_side(tmp_path, digits, launcher, options):
    plugin = f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher"
    if not (find_spec("hydra_plugins") and find_spec(plugin)):
        pytest.skip(f"needs hydra-{launcher.removesuffix('_local')}-launcher, of the extras `sweep` and `ray`")
    done = finish(
        spawn(sys.executable, ROOT / "train.py", "-m", *MODEL, *digits, f"hydra/launcher={launcher}", *options,
              "seed=1,2", "trainer.max_steps=1", "run_dir=out", cwd=tmp_path)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    jobs = sorted((tmp_path / "out").iterdir())
    assert len(jobs) == 2 and all(read_json(job / "train.json")["status"] == "finished" for job in jobs)


@pytest.mark.slow
def test_five_runs_started_at_once_get_five_folders(tmp_path, digits):
    line = [sys.executable, ROOT / "train.py", *MODEL, *digits, "trainer.max_steps=1", "name=five"]
    for process in [spawn(*line, cwd=tmp_path) for _ in range(5)]:
        done = finish(process)
        assert done.returncode == 0, done.stderr
    runs = list((tmp_path / "runs" / "five").iterdir())
    assert len(runs) == 5
    for run in runs:
        assert (run / "config.yaml").stat().st_size and (run / "checkpoints" / "step-1.pt").stat().st_size
        assert len(list((run / "tensorboard").iterdir())) == 1
        assert (run / "train.log").read_text().count("run folder") == 1
