import torch
from torch import nn

from asr.encoders.conformer import Conformer
from asr.heads.ctc import CTC
from asr.model import AsrModel
from asr.types import Batch


class Halve(nn.Module):
    def forward(self, features_BTF, lens_B):
        return features_BTF / 2


class Silence(nn.Module):
    def forward(self, features_BTF, lens_B):
        return torch.zeros_like(features_BTF)


def make(augment):
    torch.manual_seed(0)
    encoder = Conformer(20, 16, 1, 2, 32, 7, subsampling_channels=4, dropout=0.0, attention_dropout=0.0)
    return AsrModel(Halve(), augment, encoder, CTC(16, 5, dropout=0.0))


def batch():
    torch.manual_seed(1)
    return Batch(
        ids=["a", "b"],
        features=torch.randn(2, 60, 20),
        feature_lens=torch.tensor([60, 44]),
        tokens=torch.tensor([[1, 2, 3], [4, 0, 0]]),
        token_lens=torch.tensor([3, 1]),
        texts=["", ""],
    )


def test_losses_come_from_normalised_features():
    model, data = make(None).eval(), batch()
    losses = model(data)["ctc"]
    assert losses.shape == (2,) and losses.dtype == torch.float32
    encoded = model.encoder(data.features / 2, data.feature_lens)
    assert torch.equal(model.encode(data.features, data.feature_lens).frames, encoded.frames)
    assert torch.equal(losses, model.head.loss(encoded, data.tokens, data.token_lens))


def test_augmentation_in_training_only():
    plain, augmented, data = make(None), make(Silence()), batch()
    assert torch.equal(plain.eval()(data)["ctc"], augmented.eval()(data)["ctc"])
    assert not torch.equal(plain.train()(data)["ctc"], augmented.train()(data)["ctc"])


class Views(nn.Module):
    """The first view as it is, the second halved."""

    def forward(self, features_BTF, lens_B, num_views=1):
        return torch.cat([features_BTF / (view + 1) for view in range(num_views)])


def test_losses_of_two_views_are_their_means_and_the_views_are_compared():
    data, plain = batch(), make(None)
    model = AsrModel(Halve(), Views(), plain.encoder, CTC(16, 5, dropout=0.0, consistency_weight=0.2))
    model.head.load_state_dict(plain.head.state_dict())
    model.head.batch_count = 2000.0
    model.encoder.eval()  # its batch norm would mix the views
    model.training = True
    parts = model(data)
    assert set(parts) == {"ctc", "consistency"} and all(losses.shape == (2,) for losses in parts.values())
    views = [plain.encoder(data.features / factor, data.feature_lens) for factor in (2, 4)]
    losses = [plain.head.loss(view, data.tokens, data.token_lens) for view in views]
    torch.testing.assert_close(parts["ctc"], sum(losses) / 2)
    first, second = (plain.head.log_probs(view) for view in views)
    divergence = ((first.exp() - second.exp()) * (first - second)).sum(2)
    valid = torch.arange(divergence.size(1)) < views[0].lens[:, None]
    torch.testing.assert_close(parts["consistency"], 0.2 * (divergence * valid).sum(1) / 2)
    assert set(model.eval()(data)) == {"ctc"}


def test_views_without_augmentation_differ_by_dropout_alone():
    data, model = batch(), make(None)
    model.head = CTC(16, 5, dropout=0.3, consistency_weight=0.2, consistency_warmup=0)
    model.encoder.eval()
    model.training = True
    assert (model(data)["consistency"] > 0).all()


def test_a_few_steps_lower_the_loss():
    model, data = make(None).train(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(data)["ctc"].sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
