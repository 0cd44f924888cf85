"""icefall's own numbers from its own weights."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from asr.encoders.zipformer import Zipformer
from asr.interop.icefall import encoder_weights
from tests.interop.wenet_files import read_safetensors

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "icefall_tiny"
SIZES = dict(
    downsampling=[1, 2, 4], num_layers=[1, 2, 1], dims=[32, 48, 40], unmasked_dims=[24, 32, 32],
    feed_forward_dims=[48, 64, 48], num_heads=[2, 4, 2], kernel_sizes=[15, 9, 15],
    query_head_dim=8, value_head_dim=6, position_head_dim=4, position_dim=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def state():
    return torch.load(GOLDEN / "pretrained.pt", weights_only=True)["model"]


@pytest.fixture(scope="module")
def golden():
    return {name.removeprefix("io."): value for name, value in read_safetensors(GOLDEN / "io.safetensors")[0].items()}


def encoder_of(state, **options):
    encoder = Zipformer(80, **SIZES, **options)
    encoder.load_state_dict(encoder_weights(state))
    return encoder.eval()


@torch.no_grad()
def test_every_utterance_where_padding_is_seen_as_in_icefall(state, golden):
    encoder = encoder_of(state, mask_padding=False)
    held = sum(tensor.numel() for name, tensor in state.items() if name.startswith("encoder"))
    assert sum(parameter.numel() for parameter in encoder.parameters()) == held
    embedded, embed_lens = encoder.subsampling(golden["features"], golden["feature_lens"])
    encoded = encoder(golden["features"], golden["feature_lens"])
    assert torch.equal(embed_lens, golden["embed_lens"]) and torch.equal(encoded.lens, golden["encoder_lens"])
    log_probs = F.linear(encoded.frames, state["ctc_output.1.weight"], state["ctc_output.1.bias"]).log_softmax(-1)
    for row in range(3):
        for ours, theirs, length in (
            (embedded, golden["embed_out"], embed_lens[row]),
            (encoded.frames, golden["encoder_out"], encoded.lens[row]),
            (log_probs, golden["ctc_log_probs"], encoded.lens[row]),
        ):
            torch.testing.assert_close(ours[row, :length], theirs[row, :length], atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_longest_utterance_has_no_padding_to_see_and_the_others_are_as_if_alone(state, golden):
    encoder = encoder_of(state)
    encoded = encoder(golden["features"], golden["feature_lens"])
    torch.testing.assert_close(encoded.frames[0], golden["encoder_out"][0], atol=1e-4, rtol=0)
    as_theirs = encoder_of(state, mask_padding=False)
    for row, length in enumerate(golden["feature_lens"].tolist()):
        alone = as_theirs(golden["features"][row : row + 1, :length], torch.tensor([length])).frames[0]
        torch.testing.assert_close(encoded.frames[row, : len(alone)], alone, atol=1e-4, rtol=0)


def test_a_tensor_of_another_kind_of_zipformer_is_named(state):
    streaming = "encoder.encoders.0.layers.0.conv_module1.depthwise_conv.causal_conv.weight"
    for name in (streaming, "encoder_embed.conv.1.weight", "encoder.frame_reducer.weight"):
        with pytest.raises(ValueError, match=rf"^{name}: no such tensor in a non-streaming zipformer"):
            encoder_weights({**state, name: torch.zeros(1)})
