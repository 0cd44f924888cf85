from pathlib import Path

import pytest
import torch
import yaml

from asr.features.augment import NoAugment, SpecAugment

CONF = Path(__file__).parents[2] / "conf" / "augment"
ICEFALL = {
    "num_time_masks": 10,
    "max_time_mask_width": 100,
    "max_time_mask_fraction": 0.15,
    "num_freq_masks": 2,
    "max_freq_mask_width": 27,
    "time_warp_factor": 80,
    "probability": 0.9,
}
OFF = {"num_time_masks": 0, "num_freq_masks": 0, "time_warp_factor": 0, "probability": 1.0}


def runs_of(mask):
    """Starts and lengths of the runs of True."""
    padded = torch.cat([torch.tensor([False]), mask, torch.tensor([False])]).int().diff()
    starts = (padded == 1).nonzero().flatten()
    return starts, (padded == -1).nonzero().flatten() - starts


def test_time_masks_are_spread_bounded_and_outside_the_padding():
    torch.manual_seed(0)
    augment = SpecAugment(**(OFF | {"num_time_masks": 10, "max_time_mask_width": 50, "max_time_mask_fraction": 0.15}))
    lens = torch.full((500,), 1000)
    masked = (augment(torch.ones(500, 2000, 4), lens) == 0).all(dim=2)
    assert not masked[:, 1000:].any()
    assert masked.sum(dim=1).max() <= 150 and masked.sum(dim=1).float().mean() > 40
    starts, lengths = map(torch.cat, zip(*(runs_of(row) for row in masked), strict=True))
    assert 300 < starts.float().mean() < 700
    assert starts.min() < 50 and starts.max() > 900 and starts.float().std() > 200
    assert len(starts) > 500 and lengths.float().std() > 5


def test_time_substitutions_are_earlier_frames_and_stay_within_the_utterance():
    torch.manual_seed(0)
    options = {"num_time_substitutions": 3, "max_time_substitution_width": 30}
    lens = torch.full((200,), 90)
    frames = torch.arange(120.0)[None, :, None].expand(200, -1, 2)
    seen = SpecAugment(**(OFF | options))(frames, lens)[..., 0]
    moved = frames[..., 0] - seen
    assert not moved[:, 90:].any() and (moved >= 0).all() and (seen >= 0).all()
    assert moved.max() > 60 and 10 < (moved > 0).sum(dim=1).float().mean() < 45
    assert (moved > 0).sum(dim=1).max() <= 90
    alone = SpecAugment(**(OFF | options | {"num_time_substitutions": 1}))(frames, lens)[..., 0]
    spans = [len(set(row[row > 0].tolist())) for row in frames[..., 0] - alone]
    assert max(spans) == 1, "a span moves as one"
    assert SpecAugment(**(OFF | options))(frames[:1], torch.tensor([0])).equal(frames[:1])


def test_frequency_masks_are_spread_and_cover_the_valid_frames():
    torch.manual_seed(0)
    augment = SpecAugment(**(OFF | {"num_freq_masks": 2, "max_freq_mask_width": 27}))
    masked = augment(torch.ones(300, 12, 80), torch.full((300,), 10)) == 0
    assert not masked[:, 10:].any()
    assert torch.equal(masked[:, :10].all(dim=1), masked[:, :10].any(dim=1))
    per_bin = masked[:, 0].float().mean(dim=0)
    assert masked[:, 0].sum(dim=1).max() <= 54
    assert per_bin[10:70].min() > 0.1 and per_bin.max() < 0.6


@pytest.mark.parametrize(
    "settings",
    [ICEFALL, {}, {"num_time_substitutions": 3}, {"max_time_mask_fraction": 1.0, "max_freq_mask_width": 500}],
)
def test_any_length_survives(settings):
    torch.manual_seed(0)
    augment = SpecAugment(**settings)
    lens = torch.tensor([0, 1, 2, 3, 4, 5, 8, 20, 163, 400])
    for _ in range(50):
        features = torch.randn(len(lens), 400, 80)
        out = augment(features, lens)
        assert out.shape == features.shape and out.isfinite().all()
        for length in lens:
            alone = augment(torch.randn(1, int(length), 80), length[None])
            assert alone.shape == (1, length, 80) and alone.isfinite().all()
    assert augment(torch.zeros(0, 5, 80), torch.zeros(0, dtype=torch.int64)).shape == (0, 5, 80)


def test_an_utterance_of_one_frame_keeps_time_but_not_more_than_its_share():
    augment = SpecAugment(**(OFF | {"num_time_masks": 10, "max_time_mask_width": 100}))
    for length in range(1, 7):
        features = torch.ones(1, length, 3)
        assert torch.equal(augment(features, torch.tensor([length])), features)


def test_padding_is_neither_read_nor_changed_and_does_not_matter():
    augment = SpecAugment(**ICEFALL)
    features, lens = torch.randn(6, 300, 80), torch.tensor([300, 200, 120, 40, 9, 0])
    spoilt = features.clone()
    for row, length in zip(spoilt, lens, strict=True):
        row[length:] = float("nan")
    torch.manual_seed(1)
    clean_out = augment(features, lens)
    torch.manual_seed(1)
    spoilt_out = augment(spoilt, lens)
    torch.manual_seed(1)
    shorter_out = augment(features[1:2].repeat(6, 1, 1)[:, :200], torch.full((6,), 200))
    for clean, spoilt_row, original, length in zip(clean_out, spoilt_out, features, lens, strict=True):
        assert torch.equal(clean[:length], spoilt_row[:length])
        assert torch.equal(clean[length:], original[length:])
    assert torch.equal(shorter_out[1], clean_out[1, :200])


def test_warp_moves_time_keeps_ends_and_order():
    torch.manual_seed(0)
    augment = SpecAugment(**(OFF | {"time_warp_factor": 30}))
    ramp = torch.arange(200.0)[None, :, None].repeat(64, 1, 2)
    lens = torch.full((64,), 150)
    out = augment(ramp, lens)
    assert torch.equal(out[:, 150:], ramp[:, 150:])
    assert (out[:, 0] == 0).all() and torch.allclose(out[:, 149], torch.tensor(149.0))
    steps = out[:, :150].diff(dim=1)
    assert (steps >= 0).all()
    moved = (out - ramp)[:, :150, 0].abs().amax(dim=1)
    assert moved.max() <= 30 + 1e-3 and moved.max() > 15 and (moved > 1).float().mean() > 0.8
    # Two straight pieces: the step changes only around one frame.
    assert ((steps[:, 1:] - steps[:, :-1]).abs() > 1e-3).sum(dim=1).max() <= 2 * 2


def test_probability_is_a_share_of_utterances():
    torch.manual_seed(0)
    features, lens = torch.randn(1000, 60, 10), torch.full((1000,), 60)
    changed = (SpecAugment(probability=0.3)(features, lens) != features).any(dim=2).any(dim=1).float().mean()
    assert 0.2 < changed < 0.35
    assert torch.equal(SpecAugment(probability=0.0)(features, lens), features)


def test_same_seed_same_draw_and_none_in_eval():
    augment = SpecAugment(**ICEFALL)
    features, lens = torch.randn(4, 300, 80), torch.full((4,), 300)
    before = features.clone()
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(augment(features, lens))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert torch.equal(features, before)
    assert torch.equal(augment.eval()(features, lens), features)


def test_views_share_the_warp_and_differ_in_masks():
    torch.manual_seed(0)
    warping = SpecAugment(**(OFF | {"time_warp_factor": 30}))
    features, lens = torch.randn(6, 200, 8), torch.tensor([200, 150, 90, 200, 40, 0])
    first, second = warping(features, lens, num_views=2).chunk(2)
    assert torch.equal(first, second) and not torch.equal(first, features)
    masking = SpecAugment(**(OFF | {"num_time_masks": 5, "num_freq_masks": 2, "max_freq_mask_width": 4}))
    first, second = masking(features, lens, num_views=2).chunk(2)
    for view in (first, second):
        assert ((view == features) | (view == 0)).all()
    assert not torch.equal(first, second)
    for augment in (NoAugment(), masking.eval()):
        assert torch.equal(augment(features, lens, num_views=2), features.repeat(2, 1, 1))


def test_fill_and_dtype():
    torch.manual_seed(0)
    augment = SpecAugment(**(ICEFALL | {"fill": -3.0, "time_warp_factor": 10}))
    out = augment(torch.ones(20, 300, 80, dtype=torch.bfloat16), torch.full((20,), 300))
    assert out.dtype == torch.bfloat16
    assert set(out.unique().tolist()) == {1.0, -3.0}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"num_time_masks": -1}, "num_time_masks=-1"), ({"probability": 1.5}, "probability=1.5.*between 0 and 1")],
)
def test_wrong_settings_are_refused_in_words(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        SpecAugment(**settings)


@pytest.mark.parametrize(("name", "kind"), [("none", NoAugment), ("specaug", SpecAugment)])
def test_yaml(name, kind):
    conf = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    assert conf.pop("_target_") == f"asr.features.augment.{kind.__name__}"
    torch.manual_seed(0)
    features, lens = torch.randn(8, 200, 80), torch.full((8,), 200)
    assert torch.equal(kind(**conf)(features, lens), features) == (name == "none")
