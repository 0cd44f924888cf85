from types import SimpleNamespace

import pytest
import torch

from asr.encoders.conformer import Conformer
from asr.features.augment import SpecAugment
from asr.features.normalise import FeatureNorm
from asr.heads.ctc import CTC
from asr.model import AsrModel
from asr.search.ctc_greedy_search import ctc_greedy_search
from asr.settings import TrainerSettings
from asr.training.distributed import World
from asr.training.loop import Trainer
from asr.training.monitor import Monitor
from asr.training.optim import adversary_optimizer, parameter_groups
from asr.training.precision import PrecisionMode
from asr.training.schedule import WarmupCosine
from asr.training.validate import validate
from asr.types import Batch

NUM_MEL_BINS = 20
VOCAB = 6
CPU = torch.device("cpu")


def tiny_model(dropout=0.1, augment=True, conv_norm="batch_norm", seed=0):
    torch.manual_seed(seed)
    encoder = Conformer(
        NUM_MEL_BINS, 16, 1, 2, 32, 7, conv_norm=conv_norm, subsampling_channels=4, dropout=dropout,
        attention_dropout=dropout,
    )  # fmt: skip
    spec_augment = SpecAugment(2, 8, 0.3, 1, 5, 4) if augment else None
    return AsrModel(FeatureNorm(NUM_MEL_BINS), spec_augment, encoder, CTC(16, VOCAB, dropout=dropout))


def batch_of(names, frames=40, seed=0):
    """Made-up utterances: what each is depends on its name and the seed alone."""
    features, tokens = [], []
    for name in names:
        generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1009 + seed)
        features.append(torch.randn(frames, NUM_MEL_BINS, generator=generator))
        tokens.append(torch.randint(1, VOCAB, (3,), generator=generator))
    return Batch(
        ids=list(names),
        features=torch.stack(features) if names else torch.zeros(0, 0, NUM_MEL_BINS),
        feature_lens=torch.full((len(names),), frames),
        tokens=torch.stack(tokens) if names else torch.zeros(0, 0, dtype=torch.int64),
        token_lens=torch.full((len(names),), 3),
        texts=[to_text(item.tolist()) for item in tokens],
        speakers=["" for _ in names],
        audio_seconds=0.01 * frames * len(names),
    )


def to_text(tokens):
    return "".join("_abcde"[token] for token in tokens)


class ListLoader:
    """The same number of batches in every epoch, each of two utterances named after epoch and place."""

    def __init__(self, num_batches=10, rank=0, world_size=1, change=lambda batch: batch):
        self.num_batches, self.rank, self.world_size, self.change = num_batches, rank, world_size, change
        self.seen = []

    def epoch(self, epoch, start_batch=0):
        for place in range(start_batch, self.num_batches):
            name = f"{epoch}-{place * self.world_size + self.rank}"
            self.seen.append((epoch, place))
            yield self.change(batch_of([f"{name}a", f"{name}b"]))


def make_trainer(
    run_dir, mode="fp32", loader=None, model=None, world=None, optimizer=None, validation=None, **settings
):
    """A trainer as train.py makes it, of a tiny model on made-up data."""
    world = world or World()
    model = model or tiny_model()
    settings = TrainerSettings(**{"max_epochs": 2, "log_every": 1, "average_period": 2, "progress": False, **settings})
    precision = PrecisionMode(mode, CPU, settings.initial_grad_scale)
    precision.prepare(model)
    run_dir.mkdir(parents=True, exist_ok=True)
    dev = [batch_of(["dev1", "dev2"]), batch_of(["dev3"], frames=50)]
    torch.manual_seed(7 + world.rank)
    return Trainer(
        "tiny", run_dir, settings, model, optimizer or torch.optim.AdamW(parameter_groups(model, 0.01), lr=3e-3),
        WarmupCosine(20, 4), loader or ListLoader(),
        validation or (lambda model: validate(model, dev, ctc_greedy_search, to_text, precision, world, CPU)),
        precision, Monitor(run_dir if world.is_main else None, settings.log_every, 20, False),
        {"config": {"trainer": vars(settings).copy()}}, world, adversary=adversary_optimizer(model),
    )  # fmt: skip


def flat(value, name=""):
    """Every tensor and number of a nested state, by place."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{name}.{key}").items()}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value}


def differences(one, other, ignore=("seconds",)):
    """Names of all that is not bitwise the same in two nested states."""
    one, other = flat(one), flat(other)
    names = [name for name in one.keys() | other.keys() if not any(word in name for word in ignore)]
    return sorted(name for name in names if name not in one or name not in other or not same(one[name], other[name]))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.fixture
def tiny():
    """The helpers of these tests."""
    return SimpleNamespace(
        model=tiny_model, batch=batch_of, loader=ListLoader, trainer=make_trainer, flat=flat, differences=differences,
        to_text=to_text, num_mel_bins=NUM_MEL_BINS, precision=lambda mode: PrecisionMode(mode, CPU),
    )  # fmt: skip
