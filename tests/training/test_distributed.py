import json
import multiprocessing
import os
import socket
import sys
import traceback

import pytest
import torch

from asr.training.checkpoint import load_checkpoint
from asr.training.distributed import World, average_buffers, connect, disconnect, gather, share, totals
from asr.training.step import train_step
from asr.types import Skipped

# Forked, so that no process imports everything anew.
fork = multiprocessing.get_context("fork")
DEADLINE = 60


def on_ranks(work, world_size=2):
    """Exit codes of processes that are connected as torchrun would, and do work(world, device)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def child(rank):
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )  # fmt: skip
        code = 1
        try:
            torch.set_num_threads(1)
            work(*connect("cpu"))
            disconnect()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    processes = [fork.Process(target=child, args=(rank,)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging, "a process hangs"
    return [process.exitcode for process in processes]


def test_without_torchrun_there_is_one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world, device = connect("cpu")
    assert world == World(0, 1, 0) and world.is_main and device.type == "cpu"
    assert gather("a", world) == ["a"] and share("a", world) == "a" and totals([1, 2.5], world, device) == [1, 2.5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no CUDA device; use device=cpu"):
        connect("cuda")


def test_a_gpu_beyond_those_of_the_machine_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"device=cuda:3: .*1 CUDA device"):
        connect("cuda:3")


def test_what_ranks_tell_one_another():
    def work(world, device):
        assert gather(world.rank, world) == [0, 1, 2]
        assert share(f"of {world.rank}", world) == "of 0"
        assert totals([world.rank, 0.1], world, device) == pytest.approx([3, 0.3])
        norm = torch.nn.BatchNorm1d(4)
        norm.running_mean.fill_(float(world.rank))
        norm.running_var.copy_(torch.tensor([0.1, 1 / 3, 1e-7, 7.7]))
        norm.num_batches_tracked.fill_(world.rank + 5)
        before = norm.running_var.clone()
        average_buffers(norm, world)
        assert norm.num_batches_tracked == 5, "counters become those of rank 0"
        assert norm.running_mean.tolist() == [1, 1, 1, 1]
        # What is the same everywhere stays so to the last bit, also where a third of three times it would not.
        assert torch.equal(norm.running_var, before)

    assert on_ranks(work, world_size=3) == [0, 0, 0]


def test_two_ranks_are_as_one_with_all_utterances(tiny, tmp_path):
    """With uneven batches, one of them empty, and one whose utterances are all too short."""
    groups = [("abcd", "ef"), ("gh", ""), ("", "i"), ("jk", "!!")]

    def batch(names):
        made = tiny.batch(names.replace("!", "z"))
        if "!" in names:
            made.feature_lens[:] = 9
        return made

    def model_and_optimizer():
        model = tiny.model(dropout=0.0, augment=False, conv_norm="layer_norm").train()
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def step(model, optimizer, batches, world, device):
        precision = tiny.precision("fp32")
        return train_step(model, batches, optimizer, precision, 1.0, world, device)

    def work(world, device):
        model, optimizer = model_and_optimizer()
        results = [step(model, optimizer, [batch(group[world.rank])], world, device) for group in groups]
        figures = [(r.loss, r.grad_norm, r.num_utterances, r.num_infeasible, r.audio_seconds) for r in results]
        torch.save({"model": model.state_dict(), "figures": figures}, tmp_path / f"{world.rank}.pt")

    assert on_ranks(work) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first["figures"] == second["figures"] and tiny.differences(first, second) == []
    model, optimizer = model_and_optimizer()
    for group, figures in zip(groups, first["figures"], strict=True):
        alone = step(model, optimizer, [batch(names) for names in group], World(), torch.device("cpu"))
        one = (alone.loss, alone.grad_norm, alone.num_utterances, alone.num_infeasible, alone.audio_seconds)
        assert figures == pytest.approx(one, rel=1e-4)
    for left, right in zip(first["model"].values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


def test_a_run_on_two_ranks_skips_together_names_all_and_is_written_once(tiny, tmp_path):
    def change(batch):
        if batch.ids[0] == "1-3a":  # on rank 1
            batch.features[1] = 1e30
        if batch.ids[0] == "1-5a":  # on rank 1
            batch = tiny.batch([])
            batch.skipped = [Skipped("lost", "no such file", "ab")]
        return batch

    def work(world, device):
        loader = tiny.loader(4, world.rank, world.size, change)
        trainer = tiny.trainer(tmp_path / "run", loader=loader, world=world, save_every=2)
        trainer.fit()
        trainer.monitor.close()
        torch.save(trainer.model.state_dict(), tmp_path / f"{world.rank}.pt")

    assert on_ranks(work) == [0, 0]
    assert tiny.differences(*(torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))) == []
    summary = json.loads((tmp_path / "run/train.json").read_text())
    assert (summary["steps"], summary["skipped_steps"], summary["skipped_utterances"]) == (8, 1, 1)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line["kind"] == "non_finite_step"]
    assert "1-3b" in event["ids"]
    assert len([line for line in lines if line["kind"] == "train"]) == 8
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 1


def test_two_ranks_continue_exactly_in_the_middle_of_an_epoch(tiny, tmp_path):
    def trainer_on(world, name, **options):
        loader = tiny.loader(5, world.rank, world.size)
        return tiny.trainer(tmp_path / name, loader=loader, world=world, save_every=1, valid_every=2, **options)

    def work(world, device):
        whole = trainer_on(world, "whole")
        whole.fit()
        trainer_on(world, "cut", max_steps=3).fit()
        share(None, world)  # rank 0 may still be writing
        state = load_checkpoint(tmp_path / "cut/checkpoints/step-3.pt")
        state["progress"]["valid"].pop()  # the limit on steps had it validated once more
        trainer = trainer_on(world, "cut", model=tiny.model(seed=9))
        torch.manual_seed(99)
        trainer.load_state_dict(state)
        trainer.fit()
        left = tiny.differences(whole.state_dict(), trainer.state_dict())
        # Each rank averages its own batch norm statistics; those of rank 0 are what is saved.
        left = [name for name in left if world.is_main or "running_" not in name]
        assert left == []

    assert on_ranks(work) == [0, 0]


def test_an_error_on_one_rank_ends_all(tiny, tmp_path):
    def change(batch):
        if batch.ids[0] == "1-3a":
            batch.tokens[:] = 99
        return batch

    def work(world, device):
        loader = tiny.loader(4, world.rank, world.size, change)
        tiny.trainer(tmp_path / "run", loader=loader, world=world).fit()

    assert on_ranks(work) == [1, 1]
