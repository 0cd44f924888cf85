import pytest
import torch
from torch import nn

from asr.training.averaging import RunningAverage, difference_of_averages, mean_of_states
from asr.training.checkpoint import load_weights, save_atomically
from asr.training.select import averages_to_try, select_weights


class Counting(nn.Module):
    """A weight, a tied copy of it, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.tied = self.weight
        self.constant = nn.Parameter(torch.tensor([0.1, 1e-8]))
        self.norm = nn.BatchNorm1d(2)

    @torch.no_grad()
    def at(self, value):
        self.weight.fill_(value)
        self.norm.num_batches_tracked.fill_(value)
        return self


def averages(upto, period=1):
    """State of the running average after each step k, at which the weight is k."""
    model = Counting()
    average = RunningAverage(model, period)
    states = {}
    for step in range(1, upto + 1):
        average.update(model.at(step), step)
        states[step] = {
            "num_samples": average.num_samples,
            "state": {name: tensor.clone() for name, tensor in average.state.items()},
        }
    return states


def test_the_average_over_a_range_is_a_difference_of_running_averages():
    states = averages(30)
    assert states[10]["state"]["weight"].tolist() == pytest.approx([5.5, 5.5], abs=1e-6)
    assert states[30]["state"]["weight"].tolist() == pytest.approx([15.5, 15.5], abs=1e-6)
    mean = difference_of_averages(states[10], states[30])
    assert mean["weight"].tolist() == pytest.approx([20.5, 20.5], abs=1e-6) and mean["weight"].dtype == torch.float64
    assert torch.equal(mean["constant"], Counting().constant.double())
    assert mean["norm.num_batches_tracked"].dtype == torch.int64 and mean["norm.num_batches_tracked"] == 30
    assert "tied" not in mean


def test_samples_are_taken_every_period_steps():
    states = averages(30, period=10)
    assert states[9]["num_samples"] == 0 and states[30]["num_samples"] == 3
    assert states[30]["state"]["weight"][0] == pytest.approx(20.0)
    with pytest.raises(ValueError, match="no model was sampled between"):
        difference_of_averages(states[20], states[25])
    with pytest.raises(ValueError, match="no model was sampled between"):
        difference_of_averages(states[30], states[30])


def test_the_average_of_bf16_weights_is_fp64():
    model = Counting().to(torch.bfloat16)
    average = RunningAverage(model, 1)
    for step in range(1, 301):
        average.update(model.at(256 if step % 3 else 258), step)
    assert average.state["weight"].dtype == torch.float64
    assert average.state["weight"][0] == pytest.approx(256 + 2 / 3, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_keep_the_type_and_do_not_overflow(dtype):
    mean = mean_of_states([{"w": torch.full((3,), 40000.0, dtype=dtype)}] * 20)
    assert mean["w"].dtype == dtype and torch.equal(mean["w"], torch.full((3,), 40000.0, dtype=dtype))
    mixed = mean_of_states([{"w": torch.ones(1, dtype=dtype)}, {"w": torch.ones(1) * 2}])
    assert mixed["w"].dtype == torch.float32 and mixed["w"].item() == 1.5


def test_integers_are_the_newest():
    mean = mean_of_states([{"n": torch.tensor(1000001)}, {"n": torch.tensor(1000002)}])
    assert mean["n"].dtype == torch.int64 and mean["n"].item() == 1000002


def test_other_models_are_not_averaged():
    with pytest.raises(ValueError, match=r"w has shapes \(3,\) and \(4,\)"):
        mean_of_states([{"w": torch.ones(3)}, {"w": torch.ones(4)}])
    with pytest.raises(ValueError, match="'v'"):
        mean_of_states([{"w": torch.ones(3)}, {"v": torch.ones(3)}])
    with pytest.raises(ValueError, match="no checkpoint"):
        mean_of_states([])


@pytest.fixture
def run(tmp_path):
    """A run of 5 epochs of 10 steps each, with a checkpoint every 5 steps of which the last 4 are left."""
    states = averages(53)
    model = Counting()
    valid = [{"epoch": e, "step": 10 * e, "loss": 1.0, "wer": wer} for e, wer in enumerate([30, 10, 20, 5, 15], 1)]
    valid[3]["loss"] = float("nan")

    def write(kind, number, step, epoch):
        value = {
            "model": model.at(step).state_dict(),
            "average": states[step],
            "progress": {"epoch": epoch, "step": step, "valid": valid[: step // 10]},
            "config": {"trainer": {"save_every": 5}},
        }
        save_atomically(value, tmp_path / f"checkpoints/{kind}-{number}.pt")

    for epoch in range(1, 6):
        write("epoch", epoch, 10 * epoch, epoch + 1)
    for step in (40, 45, 50, 53):
        write("step", step, step, step // 10 + 1)
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "weight", "label"),
    [
        (dict(), 45.5, "epoch-5-avg-1"),
        (dict(epoch=4, avg=2), 30.5, "epoch-4-avg-2"),
        (dict(avg=5), 25.5, "epoch-5-avg-5"),
        (dict(epoch=1), 5.5, "epoch-1-avg-1"),
        (dict(step=50, avg=1), 48.0, "iter-50-avg-1"),
        (dict(step=53, avg=2), 49.5, "iter-53-avg-2"),
        (dict(use_averaged_model=False), 50, "epoch-5-avg-1"),
        (dict(epoch=4, avg=3, use_averaged_model=False), 30, "epoch-4-avg-3"),
        (dict(step=53, avg=2, use_averaged_model=False), 51.5, "iter-53-avg-2"),
        (dict(avg=2, best=True), 35, "epoch-5-avg-2"),  # epochs 2 and 5: in the fourth the loss was NaN
        (dict(epoch=3, best=True), 20, "epoch-3-avg-1"),
    ],
)
def test_selection(run, wanted, weight, label):
    selected = select_weights(run, **wanted)
    assert selected.label == label
    for name in ("weight", "tied"):
        assert selected.weights[name].tolist() == pytest.approx([weight, weight], abs=1e-5), name
    assert selected.weights["weight"].dtype == torch.float32
    newest = 20 if wanted.get("epoch") == 3 else selected.checkpoint["progress"]["step"]
    assert selected.weights["norm.num_batches_tracked"].item() == newest
    model = Counting()
    load_weights(model, selected.weights, "selected")
    assert model.tied is model.weight and len(selected.checksum()) == 64


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (dict(epoch=5, avg=6), "would need epoch 0"),
        (dict(epoch=3, avg=5), "would need epochs -1 to 0"),
        (dict(epoch=9), "epoch 9 does not exist; there are 1-5"),
        (dict(step=41), "step 41 does not exist; there are 40, 45, 50, 53"),
        (dict(step=53, avg=5), "needs 5 step checkpoints"),
        (dict(step=53, avg=4), "starts from step 35, which does not exist"),
        (dict(step=40), "starts from step 35, which does not exist"),
        (dict(avg=5, best=True), "4 have a dev WER"),
    ],
)
def test_what_cannot_be_averaged_is_named(run, wanted, message):
    with pytest.raises(ValueError, match=message):
        select_weights(run, **wanted)


def test_epochs_that_were_removed_are_named(run):
    (run / "checkpoints/epoch-3.pt").unlink()
    with pytest.raises(ValueError, match="starts from epoch 3, which does not exist; there are 1-2, 4-5"):
        select_weights(run, avg=2)
    with pytest.raises(ValueError, match="epoch 3 of avg=4 missing"):
        select_weights(run, avg=4, use_averaged_model=False)
    # A difference of averages needs only its two ends.
    assert select_weights(run, avg=4).weights["weight"][0] == pytest.approx(30.5)


def test_without_a_checkpoint_or_an_average(run, tmp_path_factory):
    with pytest.raises(ValueError, match="there is no epoch checkpoint here"):
        select_weights(tmp_path_factory.mktemp("empty"))
    path = run / "checkpoints/epoch-5.pt"
    state = torch.load(path, weights_only=True)
    del state["average"]
    save_atomically(state, path)
    with pytest.raises(ValueError, match="holds no running average"):
        select_weights(run)
    assert select_weights(run, use_averaged_model=False).weights["weight"][0] == 50


def test_a_run_that_ended_in_its_first_epoch(run):
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    state = {
        "model": Counting().at(3).state_dict(),
        "average": averages(3)[3],
        "config": {"trainer": {"save_every": None}},
    }
    save_atomically({**state, "progress": {"epoch": 1, "valid": []}}, run / "checkpoints/step-3.pt")
    selected = select_weights(run)
    assert selected.label == "iter-3-avg-1" and selected.weights["tied"][0] == pytest.approx(2.0)
    # In a later epoch the same file alone does not reach back to the start of the run.
    save_atomically({**state, "progress": {"epoch": 2, "valid": []}}, run / "checkpoints/step-3.pt")
    with pytest.raises(ValueError, match="use_averaged_model=false"):
        select_weights(run)


def test_only_averages_are_tried_whose_checkpoints_are_there(run):
    assert averages_to_try(run, None, None) == [1, 2, 3, 5]
    assert averages_to_try(run, None, None, best=True) == [1, 2, 3]
    assert averages_to_try(run, None, 53) == [1, 2, 3]
    for epoch in (1, 2):
        (run / f"checkpoints/epoch-{epoch}.pt").unlink()  # as trainer.keep_last removes them
    assert averages_to_try(run, None, None) == [1, 2, 5]  # what begins with the run needs none before
    assert averages_to_try(run, None, None, use_averaged_model=False) == [1, 2, 3]
    for avg in (1, 2, 5):
        select_weights(run, avg=avg)
