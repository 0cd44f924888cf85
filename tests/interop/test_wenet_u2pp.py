"""U2++ (causal convolutions with layer norm, decoders from both sides) against its equations, by WeNet's names."""

import math

import pytest
import torch
import torch.nn.functional as F
import yaml

from asr.interop.wenet import read
from asr.types import Encoded
from tests.interop.wenet_files import arguments, model_of


def u2pp(tmp_path):
    """Files of a tiny U2++ model with random weights; a name and a shape for each of WeNet's tensors."""
    torch.manual_seed(0)
    dim, hidden, vocab, kernel = 8, 12, 6, 4
    shapes = {"ctc.ctc_lo": (vocab, dim), "encoder.embed.conv.0": (dim, 1, 3, 3)}
    shapes |= {"encoder.embed.conv.2": (dim, dim, 3, 3), "encoder.embed.out.0": (dim, dim * 19)}
    linears = dict.fromkeys(("linear_q", "linear_k", "linear_v", "linear_out"), (dim, dim))
    feed_forward = {"w_1": (hidden, dim), "w_2": (dim, hidden)}
    norms, biases = ["encoder.after_norm"], {}
    for layer in range(2):
        block = f"encoder.encoders.{layer}"
        shapes |= {f"{block}.self_attn.{name}": shape for name, shape in linears.items()}
        biases |= {f"{block}.self_attn.pos_bias_{name}": (2, dim // 2) for name in "uv"}
        biases[f"{block}.self_attn.linear_pos.weight"] = (dim, dim)
        for part in ("feed_forward", "feed_forward_macaron"):
            shapes |= {f"{block}.{part}.{name}": shape for name, shape in feed_forward.items()}
        conv = f"{block}.conv_module"
        shapes |= {f"{conv}.pointwise_conv1": (2 * dim, dim, 1), f"{conv}.pointwise_conv2": (dim, dim, 1)}
        shapes[f"{conv}.depthwise_conv"] = (dim, 1, kernel)
        norms += [f"{block}.norm_{name}" for name in ("ff", "mha", "ff_macaron", "conv", "final")] + [f"{conv}.norm"]
    for side in ("left_decoder", "right_decoder"):
        norms.append(f"decoder.{side}.after_norm")
        shapes[f"decoder.{side}.output_layer"] = (vocab, dim)
        biases[f"decoder.{side}.embed.0.weight"] = (vocab, dim)
        layer = f"decoder.{side}.decoders.0"
        for part in ("self_attn", "src_attn"):
            shapes |= {f"{layer}.{part}.{name}": shape for name, shape in linears.items()}
        shapes |= {f"{layer}.feed_forward.{name}": shape for name, shape in feed_forward.items()}
        norms += [f"{layer}.norm{number}" for number in (1, 2, 3)]
    weights = {name: torch.randn(shape) * 0.5 for name, shape in biases.items()}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = torch.randn(shape) / math.sqrt(math.prod(shape[1:]))
        weights[f"{name}.bias"] = torch.randn(shape[0]) * 0.5
    for name in norms:
        weights |= {f"{name}.weight": 1 + 0.3 * torch.randn(dim), f"{name}.bias": 0.3 * torch.randn(dim)}
    config = {
        "encoder": "conformer", "decoder": "bitransformer",
        "encoder_conf": {"output_size": dim, "attention_heads": 2, "linear_units": hidden, "num_blocks": 2,
                         "cnn_module_kernel": kernel, "cnn_module_norm": "layer_norm", "causal": True,
                         "use_dynamic_chunk": True},
        "decoder_conf": {"attention_heads": 2, "linear_units": hidden, "num_blocks": 1, "r_num_blocks": 1},
        "model_conf": {"ctc_weight": 0.3, "reverse_weight": 0.3, "lsm_weight": 0.1},
    }  # fmt: skip
    torch.save(weights, tmp_path / "final.pt")
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    # Of 2021: the start and end symbol is the last one.
    (tmp_path / "units.txt").write_text("<blank> 0\n<unk> 1\n一 2\n二 3\n三 4\n<sos/eos> 5\n")
    return weights


class WrittenOut:
    """The published model for one utterance, from its equations, by WeNet's names."""

    def __init__(self, weights):
        self.w = weights

    def linear(self, name, x):
        weight = self.w[f"{name}.weight"]
        return F.linear(x, weight.squeeze(-1) if weight.dim() == 3 else weight, self.w[f"{name}.bias"])

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def feed_forward(self, name, x, activation):
        return self.linear(f"{name}.w_2", activation(self.linear(f"{name}.w_1", x)))

    def attention(self, name, x, memory, mask, relative=False):
        q, k, v = (self.linear(f"{name}.linear_{part}", at) for part, at in (("q", x), ("k", memory), ("v", memory)))
        place = F.linear(positions(len(memory)), self.w[f"{name}.linear_pos.weight"]) if relative else k
        heads = []
        for head, part in enumerate((slice(0, 4), slice(4, 8))):
            if relative:
                scores = (q[:, part] + self.w[f"{name}.pos_bias_u"][head]) @ k[:, part].T
                scores = scores + (q[:, part] + self.w[f"{name}.pos_bias_v"][head]) @ place[:, part].T
            else:
                scores = q[:, part] @ k[:, part].T
            heads.append((scores / 2).masked_fill(~mask, -math.inf).softmax(-1) @ v[:, part])
        return self.linear(f"{name}.linear_out", torch.cat(heads, -1))

    def convolution(self, name, x):
        x = F.glu(self.linear(f"{name}.pointwise_conv1", F.pad(x, (0, 0, 3, 0))), -1)
        depthwise = self.w[f"{name}.depthwise_conv.weight"], self.w[f"{name}.depthwise_conv.bias"]
        x = F.conv1d(x.T[None], *depthwise, groups=8)[0].T
        return self.linear(f"{name}.pointwise_conv2", F.silu(self.norm(f"{name}.norm", x)))

    def encoder(self, features, chunk):
        x = features[None, None]
        for layer in (0, 2):
            name = f"encoder.embed.conv.{layer}"
            x = F.relu(F.conv2d(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"], stride=2))
        x = self.linear("encoder.embed.out.0", x[0].transpose(0, 1).flatten(1)) * math.sqrt(8)
        frame = torch.arange(len(x)) // chunk
        mask = frame[:, None] >= frame
        for layer in range(2):
            block = f"encoder.encoders.{layer}"
            normed = self.norm(f"{block}.norm_ff_macaron", x)
            x = x + 0.5 * self.feed_forward(f"{block}.feed_forward_macaron", normed, F.silu)
            normed = self.norm(f"{block}.norm_mha", x)
            x = x + self.attention(f"{block}.self_attn", normed, normed, mask, relative=True)
            x = x + self.convolution(f"{block}.conv_module", self.norm(f"{block}.norm_conv", x))
            x = x + 0.5 * self.feed_forward(f"{block}.feed_forward", self.norm(f"{block}.norm_ff", x), F.silu)
            x = self.norm(f"{block}.norm_final", x)
        return self.norm("encoder.after_norm", x)

    def decoder(self, side, tokens, memory):
        name = f"decoder.{side}"
        x = self.w[f"{name}.embed.0.weight"][tokens] * math.sqrt(8) + positions(len(tokens))
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        layer = f"{name}.decoders.0"
        normed = self.norm(f"{layer}.norm1", x)
        x = x + self.attention(f"{layer}.self_attn", normed, normed, causal)
        everything = torch.ones(1, len(memory), dtype=torch.bool)
        x = x + self.attention(f"{layer}.src_attn", self.norm(f"{layer}.norm2", x), memory, everything)
        x = x + self.feed_forward(f"{layer}.feed_forward", self.norm(f"{layer}.norm3", x), F.relu)
        return self.linear(f"{name}.output_layer", self.norm(f"{name}.after_norm", x))


def positions(number):
    angles = torch.arange(number)[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("streaming", [False, True])
def test_u2pp_equals_its_equations(tmp_path, chunk, streaming):
    theirs = WrittenOut(u2pp(tmp_path))
    imported = read(arguments(tmp_path, cmvn=None))
    imported.sections["encoder"] |= {"chunk_size": chunk, "streaming": streaming and chunk is not None}
    sections, tokenizer = imported.sections, imported.tokenizer
    assert (tokenizer.sos_eos_id, tokenizer.unk_id) == (5, 1) and sections["encoder"]["chunk_probability"] == 0.5
    model = model_of(imported)
    features = torch.randn(2, 90, 80)
    encoded = model.encode(features, torch.tensor([90, 61]))
    tokens, lens = torch.tensor([[2, 3, 4], [4, 3, 0]]), torch.tensor([3, 2])
    attention = model.head.heads["attention"]
    for row, (frames, length) in enumerate(((90, 3), (61, 2))):
        expected = theirs.encoder(features[row, :frames], chunk or 1000)
        torch.testing.assert_close(encoded.frames[row, : len(expected)], expected, atol=1e-4, rtol=0)
        alone = Encoded(expected[None], torch.tensor([len(expected)]))
        text = tokens[row, :length].tolist()
        for side, reverse in (("left_decoder", False), ("right_decoder", True)):
            ordered = text[::-1] if reverse else text
            log_probs = theirs.decoder(side, [5, *ordered], expected).log_softmax(-1)
            score = sum(log_probs[place, token].item() for place, token in enumerate([*ordered, 5]))
            ours = attention.log_likelihood(alone, tokens[row : row + 1], lens[row : row + 1], reverse)
            assert ours.item() == pytest.approx(score, abs=1e-4)
