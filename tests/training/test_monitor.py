import json
import logging
import math
import time
from functools import partial

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asr.heads.attention import Attention
from asr.heads.ctc import CTC
from asr.heads.joint import Joint
from asr.training.monitor import Monitor, clock, start_logging
from asr.training.pictures import Pictures, posteriors, spectrograms
from asr.training.step import StepResult


def result(**changes):
    values = dict(
        loss=2.0, loss_parts={"ctc": 2.0}, grad_norm=1.0, finite=True, clipped=False, num_utterances=4,
        num_infeasible=0, audio_seconds=3600.0, padding_share=0.1,
    )  # fmt: skip
    return StepResult(**{**values, **changes})


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_the_means_of_its_steps(tmp_path):
    monitor = Monitor(tmp_path, 4, 100, progress=False)
    monitor.step(1, 1, result(), 0.1, 1.0)
    monitor.waited(0.05)
    time.sleep(0.1)
    monitor.step(2, 1, result(loss=4.0, clipped=True, grad_norm=9.0), 0.2, 1.0)
    monitor.step(3, 1, result(loss=math.nan, grad_norm=math.inf, finite=False, suspects=["u1"]), 0.3, 1.0)
    monitor.step(4, 1, result(num_infeasible=2), 0.4, 512.0)
    monitor.close()
    first, event, second = lines(tmp_path)
    assert first["step"] == 1 and "loss_scale" not in first
    assert (event["kind"], event["step"], event["ids"]) == ("non_finite_step", 3, ["u1"])
    assert (second["loss"], second["grad_norm"], second["clipped_share"]) == (3.0, 5.0, 0.5)
    assert (second["non_finite_steps"], second["infeasible_utterances"], second["lr"]) == (1, 2, 0.4)
    assert second["loss_scale"] == 512.0 and second["padding_share"] == pytest.approx(0.1)
    assert 0.1 < second["data_wait_share"] < 0.6
    assert 0 < second["audio_hours_per_second"] < 30 and second["peak_memory_mb"] > 10


def test_values_that_are_not_finite_are_null_and_not_sent_to_tensorboard(tmp_path):
    monitor = Monitor(tmp_path, 1, 10, progress=False)
    monitor.write({"kind": "dev", "step": 1, "epoch": 1, "loss": math.nan, "wer": math.inf, "cer": 5.0})
    monitor.write({"kind": "dev", "step": 2, "epoch": 1, "loss": 1.5, "wer": None, "cer": 4.0})
    monitor.close()
    assert lines(tmp_path)[0] == {"kind": "dev", "step": 1, "epoch": 1, "loss": None, "wer": None, "cer": 5.0}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["dev/cer", "dev/loss"]
    assert [event.step for event in events.Scalars("dev/loss")] == [2]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor = Monitor(None, 1, 10, progress=True)
    monitor.step(1, 1, result(finite=False), 0.1, 1.0)
    monitor.text("a", ["b"], 1)
    monitor.summary({})
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_clock():
    assert [clock(0), clock(59.9), clock(3661)] == ["0:00:00", "0:00:59", "1:01:01"]


def test_each_run_of_a_process_logs_to_its_own_file_alone(tmp_path):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        root.handlers = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            start_logging(tmp_path / name)
            logging.getLogger("x").info("line of %s", name)
        start_logging(None)
        logging.getLogger("x").warning("of another rank")
    finally:
        root.handlers, root.level = before, level
        logging.captureWarnings(False)
    assert "line of one" in (tmp_path / "one/train.log").read_text()
    second = (tmp_path / "two/train.log").read_text()
    assert "line of two" in second and "one" not in second and "another" not in second


class Dev:
    def __init__(self, batches):
        self.batches = batches

    def epoch(self, epoch, start_batch=0):
        return iter(self.batches)


def test_pictures_leave_no_trace_in_model_and_generator(tiny, tmp_path):
    monitor = Monitor(tmp_path, 1, 10, progress=False)
    model = tiny.model().train()
    pictures = Pictures(monitor, Dev([tiny.batch([]), tiny.batch("abcd")]), tiny.precision("amp_bf16"), "_abcde")
    before, generator = tiny.flat(model.state_dict()), torch.get_rng_state()
    pictures.draw(model, 1)
    monitor.close()
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        "ctc_posteriors.png",
        "features_seen.png",
    ]
    assert model.training and torch.equal(generator, torch.get_rng_state())
    after = tiny.flat(model.state_dict())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_ctc_branch_is_drawn_among_other_heads(tiny, tmp_path):
    monitor = Monitor(tmp_path, 1, 10, progress=False)
    model = tiny.model()
    parts = {"ctc": partial(CTC), "attention": partial(Attention, num_layers=1, num_heads=2, feed_forward_dim=16)}
    model.head = Joint(parts, {"ctc": 0.3, "attention": 0.7}, 16, 6, 0, 5)
    Pictures(monitor, Dev([tiny.batch("ab")]), tiny.precision("fp32"), "_abcde").draw(model, 1)
    monitor.close()
    assert (tmp_path / "pictures/ctc_posteriors.png").is_file()


def test_utterances_without_frames_before_or_after_subsampling_do_not_stop_a_run(tiny, tmp_path):
    monitor = Monitor(tmp_path, 1, 10, progress=False)
    empty = tiny.batch("ab")
    empty.feature_lens[0] = 0
    for batches in ([], [empty]):
        Pictures(monitor, Dev(batches), tiny.precision("fp32"), "_abcde").draw(tiny.model(), 1)
        assert not (tmp_path / "pictures").exists()
    Pictures(monitor, Dev([empty, tiny.batch("c", frames=5)]), tiny.precision("fp32"), "_abcde").draw(tiny.model(), 1)
    monitor.close()
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["features_seen.png"]


def test_text_that_looks_like_a_formula_is_drawn_as_it_is():
    text = "5% OF $100 AND 10% OF $200"
    spectrograms(torch.zeros(1, 20, 8), torch.tensor([20]), [text]).canvas.draw()
    posteriors(torch.eye(3)[[0, 1, 2, 1]], ["<blk>", "$1$", "$_x$"], 0, text).canvas.draw()


def test_the_peak_of_memory_is_kept_when_a_run_goes_on(tmp_path):
    for peak, kept in ((5, 5), (3, 5), (7, 7)):
        monitor = Monitor(tmp_path, 1, 10, progress=False)
        monitor.summary({"status": "running", "peak_memory_bytes": peak})
        monitor.close()
        assert json.loads((tmp_path / "train.json").read_text())["peak_memory_bytes"] == kept
