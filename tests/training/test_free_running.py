"""Training on the decoder's own output: exact to resume, undone where it is not finite, and of use to the loss."""

import contextlib
import copy
import math
from functools import partial

import pytest
import torch

from asr.heads.attention import Attention
from asr.heads.ctc import CTC
from asr.heads.joint import Joint
from asr.search.attention import attention
from asr.training.distributed import World
from asr.training.optim import adversaries, adversary_optimizer, parameter_groups
from asr.training.precision import PrecisionMode
from asr.training.step import train_step
from asr.training.validate import validate

CPU, VOCAB = torch.device("cpu"), 6
MODES = {
    "off": dict(mode="off"),
    "scheduled_sampling": dict(mode="scheduled_sampling", share=[[0, 0.0], [4, 0.5]]),
    "own_output": dict(mode="own_output", share=0.6, every=3, buffer_size=32, buffer_tokens=5),
    "professor_forcing": dict(mode="professor_forcing", share=0.2, every=2, buffer_size=8, adversary_dim=8),
}


def model_of(tiny, mode, seed=0, dropout=0.1, **options):
    """The tiny model with a joint head, so that all goes through it as well."""
    model = tiny.model(dropout=dropout, augment=dropout > 0, seed=seed)
    decoder = partial(
        Attention, num_layers=1, num_heads=2, feed_forward_dim=16, dropout=dropout,
        free_running={**MODES[mode], **options},
    )  # fmt: skip
    model.head = Joint(
        {"ctc": partial(CTC, dropout=0.0), "attention": decoder}, {"ctc": 0.3, "attention": 0.7}, 16, VOCAB
    )
    return model


class SameBatches:
    """The same batches in every epoch, so that stale samples are met again."""

    def __init__(self, tiny, num_batches):
        self.tiny, self.num_batches = tiny, num_batches

    def epoch(self, epoch, start_batch=0):
        for place in range(start_batch, self.num_batches):
            yield self.tiny.batch([f"{place}a", f"{place}b"])


def trainer_of(tiny, run_dir, mode, precision="fp32", seed=0, **settings):
    dev = [tiny.batch(["dev1", "dev2"])]
    modes = PrecisionMode(precision, CPU)

    def validation(model):
        def search(head, encoded):
            return attention(head.part_for("attention"), encoded, beam=2)

        return validate(model, dev, search, tiny.to_text, modes, World(), CPU)

    model = model_of(tiny, mode, seed)
    return tiny.trainer(
        run_dir, mode=precision, model=model, loader=SameBatches(tiny, 4), validation=validation, **settings
    )


class Interrupted(BaseException):
    pass


def fit(trainer, stop_at=None):
    take = trainer._step
    if stop_at is not None:

        def step(group):
            if trainer.progress.step + 1 == stop_at:
                raise Interrupted
            take(group)

        trainer._step = step
    with contextlib.suppress(Interrupted):
        trainer.fit()
    vars(trainer).pop("_step", None)
    trainer.monitor.close()
    return copy.deepcopy(trainer.state_dict())


@pytest.mark.parametrize(
    ("mode", "precision"),
    [
        ("scheduled_sampling", "fp32"),
        ("own_output", "fp32"),
        ("professor_forcing", "fp32"),
        ("professor_forcing", "amp_bf16"),
        ("professor_forcing", "amp_fp16"),
        ("professor_forcing", "bf16"),
    ],
)
def test_a_run_stopped_in_mid_epoch_is_resumed_to_the_same_losses_and_state(tiny, tmp_path, mode, precision):
    options = dict(save_every=2, initial_grad_scale=64.0)
    whole = fit(trainer_of(tiny, tmp_path / "whole", mode, precision, **options))
    fit(trainer_of(tiny, tmp_path / "cut", mode, precision, **options), stop_at=7)
    trainer = trainer_of(tiny, tmp_path / "cut", mode, precision, seed=99, **options)
    path, state = trainer.checkpoints.load_newest()
    assert path.name == "step-6.pt" and state["progress"]["batches_done"] == 2
    torch.manual_seed(4)
    trainer.load_state_dict(state)
    resumed = fit(trainer)
    assert tiny.differences(whole, resumed) == []
    assert (whole["adversary"] is not None) == (mode == "professor_forcing")
    if mode == "professor_forcing":
        assert resumed["adversary"]["state"][0]["step"] == 8


@pytest.mark.parametrize("mode", ["own_output", "professor_forcing"])
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_a_step_that_is_not_finite_leaves_no_trace(tiny, mode, precision):
    mode_of = PrecisionMode(precision, CPU, 1024.0)
    model = mode_of.prepare(model_of(tiny, mode, every=1)).train()
    optimizer, adversary = torch.optim.AdamW(parameter_groups(model, 0.01)), adversary_optimizer(model)

    def step(*batches):
        return train_step(model, list(batches), optimizer, mode_of, 5.0, World(), CPU, adversary)

    def state():
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), adversary and adversary.state_dict()))

    assert step(tiny.batch("ab")).finite
    before, poisoned = state(), tiny.batch("cd")
    poisoned.features[1] = math.nan
    assert not step(tiny.batch("ef"), poisoned).finite
    assert tiny.differences(before, state()) == []
    assert step(tiny.batch("ef")).finite
    changed = " ".join(tiny.differences(before, state()))
    assert "num_batches" in changed and "sampler.tokens" in changed
    assert ("discriminator" in changed) == (mode == "professor_forcing")


def test_a_gradient_of_the_adversary_that_is_not_finite_stops_the_whole_step(tiny):
    model = model_of(tiny, "professor_forcing", every=1).train()
    (discriminator,) = adversaries(model)
    optimizer, adversary = torch.optim.SGD(parameter_groups(model, 0.0), lr=0.1), adversary_optimizer(model)
    discriminator.conv1.weight.register_hook(lambda grad: grad * math.inf)
    before = copy.deepcopy(model.state_dict())
    result = train_step(model, [tiny.batch("ab")], optimizer, PrecisionMode("fp32", CPU), 5.0, World(), CPU, adversary)
    assert not result.finite and math.isfinite(result.loss) and math.isfinite(result.grad_norm)
    assert tiny.differences(before, model.state_dict()) == []


def test_each_optimiser_has_its_own_parameters_and_only_the_models_are_in_the_norm(tiny):
    model = model_of(tiny, "professor_forcing", every=1, adversary_lr=0.5).train()
    optimizer, adversary = torch.optim.SGD(parameter_groups(model, 0.01), lr=0.1), adversary_optimizer(model)
    of = [{id(p) for group in each.param_groups for p in group["params"]} for each in (optimizer, adversary)]
    assert not of[0] & of[1] and of[0] | of[1] == {id(p) for p in model.parameters()}
    assert adversary.param_groups[0]["lr"] == 0.5
    (discriminator,) = adversaries(model)
    discriminator.conv1.weight.register_hook(lambda grad: grad * 1e6)
    before = {name: value.clone() for name, value in discriminator.state_dict().items()}
    result = train_step(model, [tiny.batch("ab")], optimizer, PrecisionMode("fp32", CPU), 5.0, World(), CPU, adversary)
    assert result.finite and result.grad_norm < 1e3
    assert any(not torch.equal(value, before[name]) for name, value in discriminator.state_dict().items())
    assert adversary_optimizer(model_of(tiny, "own_output")) is None


@pytest.mark.parametrize("kind", ["full", "linear"])
@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_the_dev_set_falls_under_every_mode(tiny, tmp_path, mode, kind):
    model = model_of(tiny, mode, dropout=0.0)
    model.head = Attention(
        16, VOCAB, num_layers=1, num_heads=2, feed_forward_dim=32, dropout=0.0, attention=kind, free_running=MODES[mode]
    )
    batches = [tiny.batch(["one", "two", "three"])]
    optimizer, adversary = torch.optim.Adam(parameter_groups(model, 0.0), lr=1e-2), adversary_optimizer(model)

    def told_the_truth():
        with torch.no_grad():
            return float(model.eval()(batches[0])["attention"].sum())

    before = told_the_truth()
    for _ in range(40):
        train_step(model.train(), batches, optimizer, PrecisionMode("fp32", CPU), 5.0, World(), CPU, adversary)
    assert told_the_truth() < 0.5 * before
    found = attention(model.head, model.encode(batches[0].features, batches[0].feature_lens), beam=4)
    assert kind == "linear" or [row.tokens for row in found] == batches[0].tokens.tolist()
