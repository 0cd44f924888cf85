"""Parts of a model that are frozen, or learn at a rate of their own."""

import pytest
import torch

from asr.layers.parts import place_of
from asr.training.distributed import World
from asr.training.optim import parameter_groups
from asr.training.scaled_adam import ScaledAdam
from asr.training.step import train_step


def make_optimizer(model, kind=torch.optim.AdamW, lr_scale=None, **options):
    optimizer = kind(parameter_groups(model, options.get("weight_decay", 0.0), lr_scale), **options)
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)
    return optimizer


@pytest.mark.parametrize(
    "places", [["encoder"], ["encoder.blocks", "head.output.bias"], ["feature_norm", "encoder.*.convolution"]]
)
def test_frozen_parts_are_bit_equal_after_steps_with_weight_decay(tiny, places):
    model = tiny.model()
    model.freeze(places)
    model.train()
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(3):
        result = train_step(
            model, [tiny.batch([f"a{step}", f"b{step}"])], optimizer, tiny.precision("fp32"), 5.0, World(),
            torch.device("cpu"),
        )  # fmt: skip
        assert result.finite
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    frozen = {name for name in before if place_of(name, places) is not None}
    assert frozen and not changed & frozen
    assert changed == {name for name in before if not name.startswith("feature_norm")} - frozen


def test_frozen_modules_stay_in_evaluation(tiny):
    model = tiny.model(dropout=0.5)
    model.freeze(["encoder"])
    for mode in (True, False, True):
        model.train(mode)
        assert model.head.training == mode and not any(module.training for module in model.encoder.modules())
    batch = tiny.batch(["a", "b"])
    features = model.feature_norm(batch.features, batch.feature_lens)
    frames = [model.encoder(features, batch.feature_lens).frames for _ in range(2)]
    assert torch.equal(*frames) and not frames[0].requires_grad


def test_a_part_learns_at_its_own_rate(tiny):
    moved = {}
    for scale in (1.0, 0.1):
        model = tiny.model(dropout=0.0, augment=False)
        optimizer = make_optimizer(
            model, lr=1e-3, weight_decay=0.01, lr_scale={"encoder": scale, "encoder.blocks": 2.0}
        )
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        train_step(model.train(), [tiny.batch(["a", "b"])], optimizer, tiny.precision("fp32"), None, World(),
                   torch.device("cpu"))  # fmt: skip
        moved[scale] = {name: (p.detach() - before[name]).abs().max() for name, p in model.named_parameters()}
    # Adam's first step is the learning rate, whatever the gradient.
    for name in ("encoder.subsampling.conv1.bias", "encoder.blocks.0.norm.bias", "head.output.bias"):
        expected = 0.1 if "subsampling" in name else 1.0
        assert (moved[0.1][name] / moved[1.0][name]).item() == pytest.approx(expected, rel=1e-3)
    assert moved[0.1]["encoder.blocks.0.norm.bias"].item() == pytest.approx(2e-3, rel=1e-3)


def test_groups_with_factors_come_last_and_each_parameter_is_in_one(tiny):
    model = tiny.model()
    groups = parameter_groups(model, 0.1, {"encoder": 0.5, "head.output.weight": 1.0, "head": 3.0})
    assert [group.get("lr_scale", 1.0) for group in groups] == [1.0, 0.5, 0.5, 3.0]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0, 0.0]
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(listed) == sorted(map(id, model.parameters()))
    scaled = make_optimizer(model, ScaledAdam, {"head": 0.5}, lr=0.04)
    assert [group["lr"] for group in scaled.param_groups] == [0.04, 0.02]


def test_parts_that_are_not_there_are_refused_by_key(tiny):
    model = tiny.model()
    with pytest.raises(ValueError, match=r"freeze: 'encodr' is no part of the model; did you mean encoder\?"):
        model.freeze(["encodr"])
    with pytest.raises(ValueError, match=r"lr_scale: 'decoder' is no part of the model"):
        parameter_groups(model, 0.0, {"decoder": 0.1})
    model.freeze(["encoder", "head"])
    with pytest.raises(ValueError, match="freeze: every parameter of the model is frozen"):
        parameter_groups(model, 0.0)
