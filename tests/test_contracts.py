"""What the design promises of every encoder and head, for whatever stands in conf/encoder and conf/head."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from asr.types import Encoded

CONF = Path(__file__).resolve().parents[1] / "conf"
ENCODERS = sorted((CONF / "encoder").glob("*.yaml"))
HEADS = sorted((CONF / "head").glob("*.yaml"))
# The big ones differ from the small by numbers only, and are built with smaller ones.
LIMITS = {
    "output_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_dim": 48,
    "kernel_size": 31,
    "subsampling_channels": 8,
    "dims": 32,
    "unmasked_dims": 24,
    "feed_forward_dims": 48,
    "channels": 32,
    "kernel_sizes": 15,
    "repeats": 2,
}
MAX_ENTRIES = 8
INPUT_DIM, WIDTH, VOCAB_SIZE = 80, 12, 7
PRECISIONS = {
    "fp32": (torch.float32, None),
    "amp_fp16": (torch.float32, torch.float16),
    "amp_bf16": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, None),
}


def names(paths):
    return [path.stem for path in paths]


def shrunk(cfg):
    """The configuration with each size cut to its limit, and lists of sizes to their last entries."""
    for key, limit in LIMITS.items():
        value = cfg.get(key)
        if isinstance(value, int):
            cfg[key] = min(value, limit)
        elif value is not None:
            cfg[key] = [1 if key == "num_layers" else min(item, limit) for item in value][-MAX_ENTRIES:]
    return cfg


def make_encoder(path):
    torch.manual_seed(0)
    return instantiate(shrunk(OmegaConf.load(path)), _convert_="all", input_dim=INPUT_DIM)


def make_head(path):
    torch.manual_seed(0)
    return instantiate(OmegaConf.load(path), _convert_="all", input_dim=WIDTH, vocab_size=VOCAB_SIZE, blank_id=0)


def without_randomness(encoder):
    """The encoder with every probability to leave something out set to 0."""
    for module in encoder.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    return encoder


def trained(encoder):
    return [(name, parameter) for name, parameter in encoder.named_parameters() if parameter.requires_grad]


def autocast(dtype):
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def test_there_are_encoders_and_heads():
    assert ENCODERS and HEADS


@pytest.fixture(params=ENCODERS, ids=names(ENCODERS))
def encoder(request):
    return make_encoder(request.param)


@pytest.fixture(params=HEADS, ids=names(HEADS))
def head(request):
    return make_head(request.param)


# Encoders


@pytest.mark.parametrize("rubbish", [0.0, -3.0, 1e6, float("nan"), float("inf")])
def test_padding_is_invisible(encoder, rubbish):
    encoder.eval()
    features = torch.randn(3, 160, INPUT_DIM)
    lens = torch.tensor([57, 160, 3])
    features[0, 57:] = rubbish
    features[2, 3:] = rubbish
    with torch.no_grad():
        beside = encoder(features, lens)
        alone = encoder(features[:1, :57], lens[:1])
    valid = int(alone.lens[0])
    assert valid > 0 and int(beside.lens[0]) == valid
    assert (beside.frames[0, :valid] - alone.frames[0, :valid]).abs().max() < 1e-4
    assert beside.frames.isfinite().all()


def test_padding_is_invisible_to_training(encoder):
    """Gradients, too, and what the norms learn, are those of a batch without padding."""
    without_randomness(encoder)
    features, lens = torch.randn(2, 60, INPUT_DIM), torch.tensor([60, 60])
    wide = torch.cat([features, torch.full((2, 44, INPUT_DIM), float("nan"))], dim=1)
    directions = torch.randn(2, int(encoder.output_lens(lens)[0]), encoder.output_dim)
    states = []
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    for inputs in (features, wide):
        encoder.load_state_dict(before)
        encoder.zero_grad()
        torch.manual_seed(0)  # the draws of whether gradients are changed on their way
        frames = encoder.train()(inputs, lens).frames
        (frames[:, : directions.size(1)] * directions).sum().backward()
        grads = {name: parameter.grad.clone() for name, parameter in trained(encoder)}
        states.append((grads, {name: value.clone() for name, value in encoder.state_dict().items()}))
    for tensors, others in zip(*states, strict=True):
        for name in tensors:
            tensor, other = tensors[name].float(), others[name].float()
            assert (tensor - other).norm() < 1e-3 * (1 + tensor.norm()), name


def test_output_lens_is_the_number_of_valid_frames(encoder):
    encoder.eval()
    all_lens = torch.arange(0, 61)
    promised = encoder.output_lens(all_lens)
    assert promised.dtype == torch.int64 and promised[0] == 0 and promised[-1] > 0
    assert (promised.diff() >= 0).all()
    batch_lens = torch.cat([all_lens, torch.tensor([80])])
    with torch.no_grad():
        batch = encoder(torch.randn(62, 80, INPUT_DIM), batch_lens)
        for length in all_lens.tolist():
            encoded = encoder(torch.randn(1, length, INPUT_DIM), torch.tensor([length]))
            expected = int(promised[length])
            assert encoded.lens.tolist() == [expected] == [int(batch.lens[length])]
            assert encoded.frames.shape == (1, max(1, expected), encoder.output_dim)
            for frames in (encoded.frames[0], batch.frames[length]):
                assert torch.equal(frames.abs().sum(-1) > 0, torch.arange(len(frames)) < expected), length


def test_every_parameter_receives_a_gradient(encoder):
    for parameter in encoder.parameters():
        if not parameter.requires_grad:
            parameter.data.fill_(torch.nan)  # what is frozen from the start must have no effect at all
    encoded = without_randomness(encoder).train()(torch.randn(2, 120, INPUT_DIM), torch.tensor([120, 90]))
    (encoded.frames * torch.randn_like(encoded.frames)).sum().backward()
    for name, parameter in trained(encoder):
        assert parameter.grad is not None and 0 < parameter.grad.abs().max() < torch.inf, name


@pytest.mark.parametrize("lens", [[3, 0], [0, 0]])
def test_a_batch_of_too_short_inputs_trains(encoder, lens):
    encoded = encoder.train()(torch.randn(2, 3, INPUT_DIM), torch.tensor(lens))
    assert encoded.lens.tolist() == encoder.output_lens(torch.tensor(lens)).tolist()
    assert not encoded.frames[1].any()
    encoded.frames.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in encoder.parameters())
    assert all(value.isfinite().all() for value in encoder.state_dict().values())


def test_two_eval_passes_are_identical(encoder):
    encoder.eval()
    features, lens = torch.randn(2, 70, INPUT_DIM), torch.tensor([70, 33])
    assert torch.equal(encoder(features, lens).frames, encoder(features, lens).frames)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_encoder_runs_in_every_precision(encoder, precision):
    parameter_type, autocast_type = PRECISIONS[precision]
    features, lens = torch.randn(2, 40, INPUT_DIM), torch.tensor([40, 21])
    with torch.no_grad():
        exact = encoder.eval()(features, lens).frames
    without_randomness(encoder).to(parameter_type)
    with autocast(autocast_type), torch.no_grad():
        frames = encoder(features, lens).frames
    assert frames.isfinite().all()
    assert (frames.float() - exact).square().mean() < 1e-3 * exact.square().mean()
    with autocast(autocast_type):
        encoder.train()(features, lens).frames.float().square().mean().backward()
    for name, parameter in trained(encoder):
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


# Heads


def batch_of(num_frames=14):
    torch.manual_seed(1)
    frames = torch.randn(3, num_frames, WIDTH)
    tokens = torch.tensor([[1, 2, 2, 5], [3, 0, 0, 0], [6, 4, 1, 0]])
    return Encoded(frames, torch.tensor([num_frames, 9, 11])), tokens, torch.tensor([4, 1, 3])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_are_fp32_per_utterance_in_every_precision(head, precision):
    parameter_type, autocast_type = PRECISIONS[precision]
    encoded, tokens, token_lens = batch_of()
    exact = head.eval().loss(encoded, tokens, token_lens)
    head.to(parameter_type)
    frames = encoded.frames.to(parameter_type).requires_grad_()
    with autocast(autocast_type):
        losses = head.loss(Encoded(frames, encoded.lens), tokens, token_lens)
    losses.sum().backward()
    assert losses.dtype == torch.float32 and losses.shape == (3,)
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0.0)
    assert frames.grad.isfinite().all() and frames.grad.abs().sum((1, 2)).min() > 0
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_batch_losses_are_the_single_losses(head):
    head.eval()
    encoded, tokens, token_lens = batch_of()
    together = head.loss(encoded, tokens, token_lens)
    for row in range(3):
        num_frames, num_tokens = int(encoded.lens[row]), int(token_lens[row])
        single = head.loss(
            Encoded(encoded.frames[row : row + 1, :num_frames], encoded.lens[row : row + 1]),
            tokens[row : row + 1, :num_tokens],
            token_lens[row : row + 1],
        )
        torch.testing.assert_close(single[0], together[row], atol=1e-4, rtol=1e-4)


def test_every_head_parameter_receives_a_gradient(head):
    head.train().loss(*batch_of()).sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_an_infeasible_utterance_changes_nothing(head):
    head.eval()
    encoded, tokens, token_lens = batch_of()
    lens = encoded.lens.clone()
    lens[2] = 0
    assert head.feasible(lens, tokens, token_lens).tolist() == [True, True, False]
    frames = encoded.frames.clone().requires_grad_()
    losses = head.loss(Encoded(frames, lens), tokens, token_lens)
    losses.sum().backward()
    assert losses[2] == 0 and torch.equal(frames.grad[2], torch.zeros_like(frames.grad[2]))
    grads = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    good = encoded.frames[:2].clone().requires_grad_()
    alone = head.loss(Encoded(good, lens[:2]), tokens[:2], token_lens[:2])
    alone.sum().backward()
    torch.testing.assert_close(losses[:2], alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(frames.grad[:2], good.grad, atol=1e-6, rtol=0)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 1], [2, 2, 2, 3]])
def test_min_frames_agrees_with_feasible(head, tokens):
    padded, token_lens = torch.tensor([[*tokens, 6]]), torch.tensor([len(tokens)])
    needed = head.min_frames(tokens)
    assert needed >= 1
    for num_frames in range(needed + 2):
        assert head.feasible(torch.tensor([num_frames]), padded, token_lens).item() == (num_frames >= needed)
    encoded = Encoded(torch.randn(1, needed, WIDTH), torch.tensor([needed]))
    assert head.loss(encoded, padded, token_lens).isfinite().all()


def test_blank_in_a_transcript_is_refused(head):
    encoded, tokens, token_lens = batch_of()
    tokens[1, 0] = head.blank_id
    with pytest.raises(ValueError, match="blank"):
        head.loss(encoded, tokens, token_lens)


def test_searches_are_named_and_stand_in_conf(head):
    assert head.searches and all((CONF / "search" / f"{name}.yaml").is_file() for name in head.searches)
    assert all(head.part_for(name) is not None for name in head.searches)
