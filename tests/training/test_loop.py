import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asr.training.checkpoint import load_checkpoint
from asr.training.loop import Progress
from asr.training.precision import NumericsError
from asr.training.validate import Validation
from asr.types import Skipped


def poison_from(place, upto=10**9):
    """Change of a loader's batches: those of these places of an epoch are poisoned."""

    def change(batch):
        if place <= int(batch.ids[0].split("-")[1][:-1]) < upto:
            batch.features[0] = 1e38
        return batch

    return change


def records(run_dir, kind):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def results(*losses_and_wers):
    """A validation that gives these (loss, wer) one after the other."""
    given = iter(losses_and_wers)

    def validation(model):
        loss, wer = next(given)
        return Validation(loss, {"ctc": loss}, wer, wer, 1, [("a", "ref", "hyp")])

    return validation


@pytest.mark.parametrize("mode", ["fp32", "amp_bf16", "bf16"])
def test_one_poisoned_batch_is_skipped_and_counted_with_step_and_utterances(tiny, tmp_path, mode):
    loader = tiny.loader(4, change=poison_from(2, 3))
    trainer = tiny.trainer(tmp_path, mode, loader, max_epochs=1)
    progress = trainer.fit()
    trainer.monitor.close()
    assert (progress.step, progress.skipped_steps, progress.skipped_in_a_row) == (4, 1, 0)
    assert all(tensor.isfinite().all() for tensor in trainer.model.state_dict().values())
    assert math.isfinite(progress.train_loss[0]["loss"]) and math.isfinite(progress.valid[0]["loss"])
    (event,) = records(tmp_path, "non_finite_step")
    assert event["step"] == 3 and "1-2a" in event["ids"]
    train = records(tmp_path, "train")
    assert [record["non_finite_steps"] for record in train] == [0, 0, 1, 0] and train[2]["loss"] is None
    summary = json.loads((tmp_path / "train.json").read_text())
    assert summary["skipped_steps"] == 1 and summary["status"] == "finished"
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [item.step for item in losses] == [1, 2, 4] and all(math.isfinite(item.value) for item in losses)


@pytest.mark.parametrize(("mode", "remedy"), [("fp32", "lower optim.lr"), ("amp_fp16", "amp_bf16 or fp32")])
def test_a_run_that_cannot_recover_stops_and_its_checkpoints_are_good(tiny, tmp_path, mode, remedy):
    loader = tiny.loader(60, change=poison_from(4))
    trainer = tiny.trainer(
        tmp_path, mode, loader, save_every=2, keep_last=2, max_skipped=100 if mode == "amp_fp16" else 5,
        initial_grad_scale=2.0,
    )  # fmt: skip
    with pytest.raises(NumericsError) as caught:
        trainer.fit()
    trainer.monitor.close()
    text = str(caught.value)
    # From a scale of 2, a collapse below 1e-5 takes 18 halvings.
    assert f"step {22 if mode == 'amp_fp16' else 9} under precision={mode}" in text and remedy in text
    newest = max(trainer.checkpoints.numbers("step"))
    assert f"step-{newest}.pt" in text
    summary = json.loads((tmp_path / "train.json").read_text())
    assert (summary["status"], summary["skipped_steps"]) == ("failed", trainer.progress.skipped_steps)
    for path in trainer.checkpoints.newest_first():
        saved = load_checkpoint(path)
        assert all(tensor.isfinite().all() for tensor in saved["model"].values())
        assert all(tensor.isfinite().all() for tensor in saved["average"]["state"].values())


def test_a_group_with_a_poisoned_batch_is_left_out_as_a_whole(tiny, tmp_path):
    """The step counts all the same, so that learning rate and place in the epoch stay those of the plan."""
    clean = tiny.trainer(tmp_path / "clean", loader=tiny.loader(8), accumulate=4, max_epochs=1, max_steps=1)
    clean.fit()
    seen = tiny.loader(8, change=poison_from(5, 6))
    trainer = tiny.trainer(tmp_path / "bad", loader=seen, accumulate=4, max_epochs=1)
    progress = trainer.fit()
    for one in (clean, trainer):
        one.monitor.close()
    assert (progress.step, progress.skipped_steps, len(seen.seen)) == (2, 1, 8)
    pairs = zip(clean.model.parameters(), trainer.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    lrs = [record["lr"] for record in records(tmp_path / "bad", "train")]
    assert lrs == pytest.approx([3e-3 / 4, 2 * 3e-3 / 4])


def test_the_best_is_finite_and_its_checkpoint_stays(tiny, tmp_path):
    nan = math.nan
    trainer = tiny.trainer(
        tmp_path, loader=tiny.loader(1), max_epochs=5, keep_last=1,
        validation=results((1.0, 120.0), (nan, 100.0), (nan, None), (nan, 100.0), (2.0, 130.0)),
    )  # fmt: skip
    progress = trainer.fit()
    trainer.monitor.close()
    assert progress.best()["epoch"] == 1
    assert trainer.checkpoints.numbers("epoch") == [1, 5]
    assert Progress(valid=[{"wer": None, "loss": 1.0}]).best() is None


def test_equally_good_is_the_earlier(tiny):
    entries = [{"epoch": epoch, "loss": 1.0, "wer": wer} for epoch, wer in enumerate([9.0, 5.0, 5.0], 1)]
    assert Progress(valid=entries).best()["epoch"] == 2


@pytest.mark.parametrize(
    ("settings", "validated", "saved"),
    [
        (dict(max_epochs=2), [5, 10], ["epoch-1", "epoch-2"]),
        (dict(max_epochs=9, max_steps=7), [5, 7], ["epoch-1", "step-7"]),
        (dict(max_epochs=9, max_steps=10), [5, 10], ["epoch-1", "epoch-2"]),
        # The last step is validated already, and still has to be saved.
        (dict(max_epochs=9, max_steps=4, valid_every=2), [2, 4], ["step-4"]),
        (dict(max_epochs=1, save_every=2, valid_every=5), [5], ["epoch-1", "step-2", "step-4"]),
        (dict(max_epochs=1, accumulate=2), [3], ["epoch-1"]),
    ],
)
def test_every_run_ends_validated_and_saved(tiny, tmp_path, settings, validated, saved):
    trainer = tiny.trainer(tmp_path, loader=tiny.loader(5), **settings)
    progress = trainer.fit()
    trainer.monitor.close()
    assert [entry["step"] for entry in progress.valid] == validated
    assert sorted(path.stem for path in (tmp_path / "checkpoints").iterdir()) == saved
    newest = trainer.checkpoints.load_newest()[1]
    assert newest["progress"]["step"] == progress.step and len(newest["progress"]["valid"]) == len(validated)


def test_checkpoints_hold_plain_values(tiny, tmp_path):
    trainer = tiny.trainer(tmp_path, loader=tiny.loader(2), max_epochs=1)
    trainer.fit()
    trainer.monitor.close()
    state = torch.load(tmp_path / "checkpoints/epoch-1.pt", weights_only=True)
    assert {type(value) for value in tiny.flat(state).values()} <= {torch.Tensor, int, float, str, bool, type(None)}
    assert state["progress"]["epoch"] == 2 and state["config"]["trainer"]["max_epochs"] == 1


def test_unreadable_utterances_are_told_once_and_batches_without_any_do_no_harm(tiny, tmp_path, caplog):
    def change(batch):
        if batch.ids[0] in ("1-1a", "2-1a"):
            batch = tiny.batch([])
            batch.skipped = [Skipped("lost", "no such file", "ab")]
        return batch

    trainer = tiny.trainer(tmp_path, loader=tiny.loader(3, change=change))
    progress = trainer.fit()
    trainer.monitor.close()
    assert progress.step == 6 and progress.skipped_steps == 0
    assert caplog.text.count("skipped lost: no such file") == 1
    assert json.loads((tmp_path / "train.json").read_text())["skipped_utterances"] == 1

    resumed = tiny.trainer(tmp_path, loader=tiny.loader(3, change=change), max_epochs=3)
    resumed.load_state_dict(resumed.checkpoints.load_newest()[1])
    resumed.fit()
    resumed.monitor.close()
    assert caplog.text.count("skipped lost: no such file") == 1
    assert json.loads((tmp_path / "train.json").read_text())["skipped_utterances"] == 1


def test_an_epoch_without_anything_to_learn_from_ends(tiny, tmp_path):
    def change(batch):
        batch.feature_lens[:] = 9  # too short for their transcripts
        return batch

    trainer = tiny.trainer(tmp_path, loader=tiny.loader(2, change=change), max_epochs=1)
    progress = trainer.fit()
    trainer.monitor.close()
    assert progress.step == 2 and math.isnan(progress.train_loss[0]["loss"])
    assert sum(record["infeasible_utterances"] for record in records(tmp_path, "train")) == 4


def test_the_last_line_of_a_run_tells_a_perfect_result_as_well():
    entry = {"epoch": 1, "step": 5, "loss": 0.1, "wer": 0.0, "cer": 0.0}
    assert Progress(valid=[entry]).outcome() == "dev WER 0.00% after the last epoch, best 0.00% in epoch 1"
    assert Progress(valid=[{**entry, "wer": None}]).outcome().startswith("no dev WER")
