import pytest
import torch

from asr.features.fbank import Fbank
from asr.features.normalise import FeatureNorm


def fitted(mode, features):
    norm = FeatureNorm(features[0].shape[1], mode)
    if norm.needs_fit:
        norm.fit(features)
    return norm


def batch(items, padding=0.0):
    lens = torch.tensor([len(item) for item in items])
    features = torch.full((len(items), int(lens.max()), items[0].shape[1]), padding)
    for row, item in zip(features, items, strict=True):
        row[: len(item)] = item
    return features, lens


def items(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, 5, generator=generator) * 3 - 9 for length in (40, 7, 1)]


def test_global_statistics_are_those_of_all_frames():
    norm = fitted("global", items())
    frames = torch.cat(items())
    torch.testing.assert_close(norm.mean, frames.mean(dim=0))
    torch.testing.assert_close(norm.std, frames.std(dim=0, correction=0))
    features, lens = batch(items())
    valid = torch.cat([row[:length] for row, length in zip(norm(features, lens), lens, strict=True)])
    torch.testing.assert_close(valid.mean(dim=0), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(valid.std(dim=0, correction=0), torch.ones(5))


def test_utterance_statistics_are_those_of_its_valid_frames():
    features, lens = batch(items(), padding=50.0)
    out = FeatureNorm(5, "utterance")(features, lens)
    for row, length in zip(out[:2], lens[:2], strict=True):
        torch.testing.assert_close(row[:length].mean(dim=0), torch.zeros(5), atol=1e-5, rtol=0)
        torch.testing.assert_close(row[:length].std(dim=0, correction=0), torch.ones(5))


@pytest.mark.parametrize("mode", ["global", "utterance", "none"])
@pytest.mark.parametrize("padding", [0.0, 1e30, float("nan"), float("inf")])
def test_alone_and_beside_others_are_equal_and_padding_is_zero(mode, padding):
    norm = fitted(mode, items())
    features, lens = batch(items(), padding)
    together = norm(features, lens)
    for row, item in zip(together, items(), strict=True):
        alone = norm(item[None], torch.tensor([len(item)]))[0]
        torch.testing.assert_close(row[: len(item)], alone, atol=1e-6, rtol=0)
        assert not row[len(item) :].any()


@pytest.mark.parametrize("mode", ["global", "utterance"])
def test_silence_single_frame_constant_and_nothing_stay_finite(mode):
    silence = Fbank()(torch.zeros(16000))
    for item in (silence, silence[:1], torch.full((10, 80), 3.0)):
        norm = fitted(mode, [item])
        out = norm(item[None], torch.tensor([len(item)]))
        assert out.isfinite().all() and out.abs().max() < 1e-3
    speechlike = torch.randn(50, 80) * 3 - 8
    out = fitted(mode, [silence])(speechlike[None], torch.tensor([50]))
    assert out.isfinite().all()
    assert not fitted(mode, [silence])(torch.randn(1, 4, 80), torch.tensor([0])).any()
    assert fitted(mode, [silence])(torch.zeros(1, 0, 80), torch.tensor([0])).shape == (1, 0, 80)


def test_statistics_are_saved_and_known_to_be_there():
    norm = FeatureNorm(5)
    assert norm.needs_fit and not FeatureNorm(5, "utterance").needs_fit
    norm.fit(items())
    copy = FeatureNorm(5)
    copy.load_state_dict(norm.state_dict())
    assert not copy.needs_fit
    assert torch.equal(copy.mean, norm.mean) and torch.equal(copy.std, norm.std)


def test_many_equal_offsets_do_not_lose_digits():
    frames = [torch.randn(100, 2, generator=torch.Generator().manual_seed(seed)) + 1000.0 for seed in range(50)]
    norm = fitted("global", frames)
    torch.testing.assert_close(norm.std, torch.cat(frames).double().std(dim=0, correction=0).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_model_keeps_exact_statistics(dtype):
    norm = fitted("global", items())
    features, lens = batch(items())
    before, mean = norm(features, lens), norm.mean.clone()
    model = torch.nn.ModuleDict({"norm": norm, "linear": torch.nn.Linear(5, 5)}).to(dtype)
    assert model["linear"].weight.dtype == dtype
    assert norm.mean.dtype == torch.float32 and torch.equal(norm.mean, mean)
    assert torch.equal(norm(features, lens), before)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(norm(features, lens), before)


def test_wrong_use_is_refused_in_words():
    with pytest.raises(ValueError, match=r"mode='cmvn'.*global, utterance, per_feature, none"):
        FeatureNorm(5, "cmvn")
    with pytest.raises(ValueError, match="at least one frame"):
        FeatureNorm(5).fit([torch.zeros(0, 5)])
    with pytest.raises(ValueError, match="item 1 are not finite"):
        FeatureNorm(5).fit([torch.zeros(3, 5), torch.full((3, 5), float("nan"))])


def test_raw_leaves_even_the_padding():
    features = torch.randn(2, 5, 80)
    assert torch.equal(FeatureNorm(mode="raw")(features, torch.tensor([5, 2])), features)
    assert not FeatureNorm(mode="raw").needs_fit
