"""A run that is interrupted anywhere and continued is, bit for bit, the run that was never interrupted."""

import contextlib
import copy

import numpy as np
import pytest
import soundfile
import torch

from asr.data.augment import random_volume
from asr.data.cuts import make_cut
from asr.data.dataset import SpeechDataset
from asr.data.loader import Loader
from asr.features.fbank import Fbank
from asr.training.checkpoint import load_checkpoint
from asr.training.run_folder import changed_keys


class Interrupted(BaseException):
    """The power cut."""


@pytest.fixture(scope="module")
def wavs(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("wavs"), np.random.default_rng(0)
    for index in range(20):
        soundfile.write(folder / f"{index}.wav", 0.1 * rng.standard_normal(4000 + 100 * index), 16000)
    return [make_cut(f"c{index}", folder / f"{index}.wav", "abc") for index in range(20)]


class Abc:
    normaliser = staticmethod(str.strip)

    def encode(self, text):
        return [1 + "abc".index(letter) for letter in text]


@pytest.fixture
def audio_loader(wavs, tiny):
    """A real loader with augmentation and dither, 10 batches of 2 cuts an epoch."""

    def make(num_workers=0):
        fbank = Fbank(num_mel_bins=tiny.num_mel_bins, dither=1.0)
        dataset = SpeechDataset(fbank, tiny.num_mel_bins, Abc(), 5, (random_volume,))
        return Loader(wavs, dataset, max_duration=0.9, num_workers=num_workers, shuffle=True, seed=5)

    return make


def train(trainer, stop_at=None):
    """Run the trainer, which may lose power at the start of a step; its state at the end."""
    if stop_at is not None:
        take_step, steps = trainer._step, iter(range(trainer.progress.step + 1, 10**6))

        def step(group):
            if next(steps) == stop_at:
                raise Interrupted
            take_step(group)

        trainer._step = step
    with contextlib.suppress(Interrupted):
        trainer.fit()
    vars(trainer).pop("_step", None)
    trainer.monitor.close()
    return copy.deepcopy(trainer.state_dict())


def continued(tiny, run_dir, **options):
    """A new trainer, with other weights and generators until it loads what the first one left."""
    trainer = tiny.trainer(run_dir, model=tiny.model(seed=99), **options)
    torch.manual_seed(12345)
    path, state = trainer.checkpoints.load_newest()
    trainer.load_state_dict(state)
    return path.name, trainer


@pytest.mark.parametrize("mode", ["fp32", "amp_fp16", "amp_bf16", "bf16"])
@pytest.mark.parametrize(
    ("stop_at", "found"), [(6, "step-3.pt"), (11, "epoch-1.pt"), (12, "epoch-1.pt"), (16, "step-15.pt")]
)
def test_the_same_after_an_interruption(tiny, tmp_path, mode, stop_at, found):
    options = dict(mode=mode, save_every=3, valid_every=4, initial_grad_scale=2.0**17)
    whole = train(tiny.trainer(tmp_path / "whole", **options))
    assert (whole["progress"]["skipped_steps"] > 0) == (mode == "amp_fp16")
    train(tiny.trainer(tmp_path / "cut", **options), stop_at)
    if stop_at == 12:
        (tmp_path / "cut/checkpoints/step-9.pt").unlink()
    name, trainer = continued(tiny, tmp_path / "cut", **options)
    assert name == found
    assert tiny.differences(whole, train(trainer)) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_same_with_real_audio_accumulation_and_any_number_of_workers(tiny, tmp_path, audio_loader, num_workers):
    options = dict(save_every=1, accumulate=2)
    whole = train(tiny.trainer(tmp_path / "whole", loader=audio_loader(), **options))
    steps = whole["progress"]["step"]
    assert steps >= 10
    train(tiny.trainer(tmp_path / "cut", loader=audio_loader(num_workers), **options), stop_at=3)
    name, trainer = continued(tiny, tmp_path / "cut", loader=audio_loader(2 - num_workers), **options)
    assert name == "step-2.pt"
    train(trainer, stop_at=steps // 2 + 3)
    name, trainer = continued(tiny, tmp_path / "cut", loader=audio_loader(num_workers), **options)
    assert name == f"step-{steps // 2 + 2}.pt"
    assert tiny.differences(whole, train(trainer)) == []
    assert sorted(p.name for p in (tmp_path / "cut/checkpoints").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole/checkpoints").iterdir()
    )


def test_a_skipped_step_is_part_of_the_run(tiny, tmp_path):
    def change(batch):
        if batch.ids[0] in ("1-1a", "1-2a"):
            batch.features[0] = 1e30
        return batch

    options = dict(save_every=1)
    whole = train(tiny.trainer(tmp_path / "whole", loader=tiny.loader(6, change=change), **options))
    assert whole["progress"]["skipped_steps"] == 2
    train(tiny.trainer(tmp_path / "cut", loader=tiny.loader(6, change=change), **options), stop_at=3)
    _, trainer = continued(tiny, tmp_path / "cut", loader=tiny.loader(6, change=change), **options)
    assert trainer.progress.skipped_in_a_row == 1
    assert tiny.differences(whole, train(trainer)) == []


@pytest.mark.parametrize("stop_at", [4, 5, 6])
def test_no_batch_twice_and_none_left_out(tiny, tmp_path, stop_at):
    """Also where the checkpoint was written with the last batch of an epoch, before its end was noted."""
    first, second = tiny.loader(5), tiny.loader(5)
    train(tiny.trainer(tmp_path, loader=first, save_every=1), stop_at=stop_at)
    (tmp_path / "checkpoints/epoch-1.pt").unlink(missing_ok=True)
    name, trainer = continued(tiny, tmp_path, loader=second, save_every=1)
    assert name == f"step-{stop_at - 1}.pt"
    progress = trainer.fit()
    done = [(1 + (step - 1) // 5, (step - 1) % 5) for step in range(1, stop_at)]
    assert done + second.seen == [(epoch, place) for epoch in (1, 2) for place in range(5)]
    assert [entry["step"] for entry in progress.valid] == [5, 10]
    assert len(progress.train_loss) == 2 and progress.step == 10


def test_a_finished_run_stays_finished_and_more_epochs_continue_it(tiny, tmp_path):
    done = train(tiny.trainer(tmp_path))
    _, trainer = continued(tiny, tmp_path)
    assert tiny.differences(done, train(trainer)) == []
    loader = tiny.loader()
    _, trainer = continued(tiny, tmp_path, loader=loader, max_epochs=3)
    assert trainer.fit().step == 30 and {epoch for epoch, _ in loader.seen} == {3}


@pytest.mark.parametrize("valid_every", [None, 4])
def test_a_limit_on_steps_within_an_epoch_is_continued_without_a_trace(tiny, tmp_path, valid_every):
    options = dict(valid_every=valid_every, save_every=2)
    whole = train(tiny.trainer(tmp_path / "whole", **options))
    train(tiny.trainer(tmp_path / "cut", max_steps=4, **options))
    name, trainer = continued(tiny, tmp_path / "cut", **options)
    assert name == "step-4.pt"
    left = tiny.differences(whole, train(trainer), ignore=("seconds", ".config", ".valid"))
    assert left == []


def test_another_number_of_processes_starts_the_epoch_again_in_words(tiny, tmp_path, caplog):
    train(tiny.trainer(tmp_path, save_every=1), stop_at=5)
    loader = tiny.loader()
    trainer = tiny.trainer(tmp_path, loader=loader, model=tiny.model(seed=99))
    state = load_checkpoint(tmp_path / "checkpoints/step-4.pt")
    state["world_size"] = 3
    trainer.load_state_dict(state)
    assert "epoch 1 starts again from its first batch: 3 processes before, 1 now" in caplog.text
    progress = trainer.fit()
    assert loader.seen[0] == (1, 0) and len(loader.seen) == 20 and progress.step == 24
    # The mean loss of the epoch is that of its own batches alone.
    assert trainer.progress.train_loss[0]["loss"] > 0 and trainer.progress.loss_count == 0


def test_restarting_an_epoch_keeps_the_weights_and_says_why(tiny, tmp_path, caplog):
    trained = train(tiny.trainer(tmp_path, save_every=1), stop_at=5)
    _, trainer = continued(tiny, tmp_path, save_every=1)
    trainer.restart_epoch("data.max_duration=50 makes other batches")
    assert "epoch 1 starts again" in caplog.text and "data.max_duration=50" in caplog.text
    changed = tiny.differences(trained, trainer.state_dict())
    assert changed and all(".progress" in name for name in changed)
    assert (trainer.progress.batches_done, trainer.progress.loss_count, trainer.progress.step) == (0, 0, 4)
    caplog.clear()
    trainer.restart_epoch("nothing was done yet")
    assert caplog.text == ""


def test_two_runs_of_one_seed_are_the_same_at_every_step(tiny, tmp_path, audio_loader):
    losses = []
    for name, num_workers in (("one", 0), ("two", 2)):
        trainer = tiny.trainer(tmp_path / name, loader=audio_loader(num_workers), max_epochs=1)
        train(trainer)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([line.split('"lr"')[0] for line in lines if '"train"' in line])
    assert losses[0] == losses[1] and len(losses[0]) >= 10


def test_only_what_is_no_part_of_the_training_may_change():
    before = {"seed": 1, "trainer": {"accumulate": 2, "max_epochs": 3}, "data": {"max_duration": 9, "num_workers": 0}}
    now = {"seed": 2, "trainer": {"accumulate": 4, "max_epochs": 9}, "data": {"max_duration": 5, "num_workers": 2}}
    assert changed_keys(before, before) == []
    assert changed_keys(before, now) == ["seed (was 1, now 2)", "trainer.accumulate (was 2, now 4)"]
    assert changed_keys({}, {"new": 1}) == ["new (was None, now 1)"]
