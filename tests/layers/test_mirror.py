import pytest
import torch
from torch import nn

from asr.layers.mirror import mirror
from asr.layers.norm import MaskedBatchNorm
from asr.layers.transformer_decoder import TransformerDecoder


class Parallel(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.inner = nn.ModuleDict({"rnn": nn.GRU(4, 4, batch_first=True), "norm": MaskedBatchNorm(4)})
        self.output = nn.Linear(4, 5, bias=False)
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens):
        x, _ = self.inner["rnn"](self.embedding(tokens))
        x = self.inner["norm"](x, torch.ones(x.shape[:2], dtype=torch.bool))
        return self.output(x) * self.scale


class Recurrent(Parallel):
    """The same, one step at a time."""

    def forward(self, tokens):
        state, outputs = None, []
        for number in range(tokens.size(1)):
            x, state = self.inner["rnn"](self.embedding(tokens[:, number : number + 1]), state)
            outputs.append(x)
        x = torch.cat(outputs, 1)
        x = self.inner["norm"](x, torch.ones(x.shape[:2], dtype=torch.bool))
        return self.output(x) * self.scale


def pair(tied=False):
    torch.manual_seed(0)
    return Parallel(tied).double(), Recurrent()


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_buffers_are_the_same_tensors_under_all_names(tied):
    source, target = pair(tied)
    mirror(source, target)
    for name, tensor in [*source.named_parameters(remove_duplicate=False), *source.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        assert getattr(target.get_submodule(owner), leaf) is tensor, name
    assert len(list(target.parameters())) == len(list(source.parameters()))
    assert (target.output.weight is target.embedding.weight) == tied
    tokens = torch.randint(0, 5, (3, 6))
    torch.testing.assert_close(source.eval()(tokens), target.eval()(tokens))


@pytest.mark.parametrize("trained", ["source", "target"])
def test_training_through_either_trains_both(trained):
    source, target = pair(tied=True)
    mirror(source, target)
    before = {name: value.clone() for name, value in source.state_dict().items()}
    one = {"source": source, "target": target}[trained]
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    one.train()(torch.randint(0, 5, (3, 6))).square().sum().backward()
    optimizer.step()
    for name, value in source.state_dict().items():
        assert not torch.equal(value, before[name]), f"{name} was trained, or learnt by the norm"
        assert torch.equal(value, target.state_dict()[name])


def test_decoders_of_one_kind_share_their_weights():
    torch.manual_seed(0)
    one, other = (TransformerDecoder(7, 8, num_layers=2, num_heads=2, feed_forward_dim=16).eval() for _ in range(2))
    mirror(one, other)
    inputs = torch.randint(0, 7, (2, 4)), torch.randn(2, 5, 8), torch.tensor([5, 3])
    assert torch.equal(one(*inputs), other(*inputs))


def test_every_mismatch_is_named_and_nothing_is_shared():
    source, target = pair()
    target.output = nn.Linear(4, 6)
    target.inner["norm"] = nn.LayerNorm(4)
    before = dict(target.named_parameters())
    with pytest.raises(ValueError) as caught:
        mirror(source, target)
    message = str(caught.value)
    assert "inner.norm.running_mean: only in the source" in message
    assert "output.bias: only in the target" in message
    assert "output.weight: Parameter (5, 4) in the source, Parameter (6, 4) in the target" in message
    assert all(target.get_parameter(name) is parameter for name, parameter in before.items())
    with pytest.raises(ValueError, match=r"embedding\.weight, output\.weight: one tensor in the target, two in the"):
        mirror(Parallel(), Recurrent(tied=True))
    target = Recurrent()
    del target.scale
    target.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"scale: Tensor \(\) in the source, Parameter \(\) in the target"):
        mirror(Parallel(), target)
