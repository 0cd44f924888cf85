import multiprocessing
import os
import random
import resource
import shutil
import time

import numpy as np
import pytest
import torch

from asr.training.checkpoint import (
    CheckpointFolder,
    generator_states,
    load_checkpoint,
    load_weights,
    restore_generators,
    save_atomically,
)

fork = multiprocessing.get_context("fork")


def in_child(function):
    """The exit code of a process that runs `function`."""
    process = fork.Process(target=function)
    process.start()
    process.join(60)
    assert not process.is_alive()
    return process.exitcode


def state(step, size=10):
    return {"progress": {"step": step}, "model": {"weight": torch.full((size,), float(step))}}


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "last.pt"
    save_atomically(state(1), path)
    large = state(2, size=10**6)  # here: a forked process has none of the threads that would fill it

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save_atomically(large, path)
        except OSError as error:
            os._exit(7 if str(path) in str(error) and "earlier ones are untouched" in str(error) else 8)

    assert in_child(fill) == 7
    assert load_checkpoint(path)["progress"]["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_a_kill_at_any_time_leaves_only_files_that_load(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    large = state(1, size=100_000)

    def save_forever():
        for step in range(1, 10**6):
            folder.save(large, "step", step, keep_last=3)

    rng = random.Random(0)
    for _ in range(20):
        process = fork.Process(target=save_forever)
        process.start()
        time.sleep(0.02 + rng.uniform(0, 0.05))
        process.kill()
        process.join()
        for path in folder.folder.glob("*.pt"):
            assert load_checkpoint(path)["model"]["weight"].isfinite().all()
    assert folder.numbers("step")
    folder.save(state(10**6), "step", 10**6)
    assert not list(folder.folder.glob(".*.tmp"))  # what the kills left


def test_files_can_be_read_by_those_whom_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        save_atomically(state(1), tmp_path / "a.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o640


def test_numbers_are_numbers(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (8000, 10000, 9000):
        folder.save(state(step), "step", step, keep_last=2)
    assert folder.numbers("step") == [9000, 10000]
    assert folder.load_newest()[0].name == "step-10000.pt"
    (tmp_path / "step-11000.pt.bak").touch()
    (tmp_path / "step-x.pt").touch()
    assert folder.numbers("step") == [9000, 10000] and folder.numbers("epoch") == []


def test_keep_last_counts_each_kind_by_itself_and_spares_what_is_named(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for epoch in range(1, 6):
        folder.save(state(epoch * 10), "epoch", epoch, keep_last=2, keep={1})
        folder.save(state(epoch * 10), "step", epoch * 10, keep_last=1)
    assert folder.numbers("epoch") == [1, 4, 5] and folder.numbers("step") == [50]


def test_the_newest_is_the_one_furthest_in_training_whatever_the_dates(tmp_path):
    folder = CheckpointFolder(tmp_path / "run")
    for kind, number, step in [("epoch", 9, 90), ("epoch", 10, 100), ("step", 95, 95), ("step", 100, 100)]:
        folder.save(state(step), kind, number)
    copied = tmp_path / "copy"
    copied.mkdir()
    for name in ["epoch-10.pt", "step-100.pt", "step-95.pt", "epoch-9.pt"]:  # dates of the copy say the reverse
        shutil.copyfile(folder.folder / name, copied / name)
        os.utime(copied / name, (10**9, 10**9))
    for place in (folder, CheckpointFolder(copied)):
        assert [path.name for path in place.newest_first()] == [
            "epoch-10.pt",
            "step-100.pt",
            "step-95.pt",
            "epoch-9.pt",
        ]


@pytest.mark.parametrize("kind", ["epoch", "step"])
@pytest.mark.parametrize("left", [0, 1, 0.5, 0.99])
def test_a_broken_newest_is_passed_over_in_words(tmp_path, caplog, kind, left):
    folder = CheckpointFolder(tmp_path)
    for number in (1, 2):
        folder.save(state(number * 10), kind, number * 10)
    broken = folder.path(kind, 20)
    content = broken.read_bytes()
    broken.write_bytes(content[: int(left * len(content)) if left != 1 else 1])
    path, found = folder.load_newest()
    assert path.name == f"{kind}-10.pt" and found["progress"]["step"] == 10
    assert str(broken) in caplog.text and "falling back" in caplog.text
    folder.path(kind, 10).write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="none of its checkpoints can be read"):
        folder.load_newest()


def test_nothing_there_is_no_error_but_a_named_file_is(tmp_path):
    assert CheckpointFolder(tmp_path / "new").load_newest() is None
    with pytest.raises(ValueError, match=r"epoch-3\.pt: no such checkpoint"):
        load_checkpoint(tmp_path / "epoch-3.pt")


def test_objects_are_not_loaded(tmp_path):
    torch.save({"where": tmp_path}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: this checkpoint cannot be read"):
        load_checkpoint(tmp_path / "a.pt")


def test_every_generator_continues(tmp_path):
    for seed_it in (torch.manual_seed, random.seed, np.random.seed):
        seed_it(3)
    random.gauss(0, 1)
    np.random.standard_normal()
    save_atomically(generator_states(), tmp_path / "g.pt")

    def draw():
        return torch.rand(3).tolist(), random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist()

    first = draw()
    draw()
    restore_generators(load_checkpoint(tmp_path / "g.pt"))
    assert draw() == first


def test_weights_that_do_not_fit_are_named_with_both_shapes():
    small, large = torch.nn.Linear(3, 4), torch.nn.Linear(3, 6)
    with pytest.raises(ValueError, match=r"a.pt: .*bias: \(6,\) in the file, \(4,\) in the model"):
        load_weights(small, large.state_dict(), "a.pt")
    with pytest.raises(ValueError, match=r"bias: missing in the file; extra: unknown to the model"):
        load_weights(small, {"weight": small.weight, "extra": small.weight}, "a.pt")
    load_weights(small, {name: tensor + 1 for name, tensor in torch.nn.Linear(3, 4).state_dict().items()}, "a.pt")
