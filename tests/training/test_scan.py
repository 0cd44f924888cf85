import copy
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asr.data.packed import PackedCuts
from asr.heads.attention import Attention
from asr.settings import DataSettings
from asr.training.monitor import forget_peak_memory
from asr.training.optim import parameter_groups
from asr.training.scan import largest_batches, scan_memory

CUTS = []


def batch_of(*durations_and_texts):
    first = len(CUTS)
    for duration, text in durations_and_texts:
        CUTS.append(SimpleNamespace(duration=duration, supervisions=[SimpleNamespace(text=text)]))
    return list(range(first, len(CUTS)))


LONGEST = batch_of((30.0, "few"))
MOST_AUDIO = batch_of((9.0, "some"), (8.0, "text"), (8.5, ""), (9.0, "is"), (9.0, "here"))
MOST_CHARACTERS = batch_of((2.0, "w" * 40), (2.0, ""), (2.0, ""))
MOST_TOKENS = batch_of((1.0, "x y z x y z"), (1.0, "x"), (1.0, None))
PLAN = [batch_of((1.0, "a b")), MOST_TOKENS, LONGEST, batch_of((2.0, "a")), MOST_AUDIO, MOST_CHARACTERS]


class Planned:
    def __init__(self, tiny):
        self.tiny = tiny
        self.loaded = []

        self.cuts = PackedCuts(CUTS)

    def plan(self, epoch):
        return PLAN if epoch == 3 else []

    def load(self, batch, epoch):
        self.loaded.append(batch)
        return self.tiny.batch([str(index) for index in batch], frames=40 + len(batch))


def encode(text):
    return [1] * len(text.split())


def test_what_is_longest_has_most_audio_or_most_tokens():
    cuts = PackedCuts(CUTS)
    assert largest_batches(PLAN, cuts, encode) == [LONGEST, MOST_AUDIO, MOST_TOKENS]
    assert largest_batches([LONGEST], cuts, encode) == [LONGEST]


@pytest.mark.parametrize("mode", ["fp32", "amp_fp16", "amp_bf16", "bf16"])
def test_nothing_is_left_behind(tiny, mode, caplog):
    precision, loader = tiny.precision(mode), Planned(tiny)
    model = precision.prepare(tiny.model())
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01))

    def state():
        generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), precision.state_dict(), generators))

    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append((module.training, len(inputs[0]))))
    model.eval()
    before = state()
    with caplog.at_level("INFO"):
        peak = scan_memory(model, optimizer, loader, 3, encode, precision, DataSettings())
    assert tiny.differences(before, state()) == []
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert seen == [(True, 1), (True, 5), (True, 3)] and loader.loaded == [LONGEST, MOST_AUDIO, MOST_TOKENS]
    assert peak > 10**7
    assert "GB at most, over 1 utterance of up to 30.0 s; 5 utterances of up to 9.0 s; 3 utterances" in caplog.text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can be told to begin a new peak")
def test_what_the_optimiser_will_keep_is_part_of_the_peak(tiny):
    model = tiny.model()
    model.unused = torch.nn.Parameter(torch.zeros(20_000_000))  # of which Adam keeps 160 MB
    optimizer = torch.optim.AdamW(model.parameters())

    def peak():
        forget_peak_memory()
        return scan_memory(model, optimizer, Planned(tiny), 3, encode, tiny.precision("fp32"), DataSettings())

    with_room = peak()
    optimizer.state[model.unused] = {"step": torch.ones(())}  # of a resumed run: what it keeps is there already
    assert with_room - peak() > 140e6


@pytest.mark.parametrize("mode", ["own_output", "professor_forcing"])
def test_a_decoder_samples_on_every_batch_of_the_scan(tiny, mode):
    model = tiny.model()
    share = [[0.0, 0.0], [50.0, 0.5]]
    model.head = Attention(16, 6, num_layers=1, num_heads=2, feed_forward_dim=16,
                           free_running=dict(mode=mode, share=share, every=4))  # fmt: skip
    drawn, sample = [], model.head.sample
    model.head.sample = lambda *given: drawn.append(1) or sample(*given)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    scan_memory(model, optimizer, Planned(tiny), 3, encode, tiny.precision("fp32"), DataSettings())
    assert len(drawn) == 3 and model.head.free_running.batch_count == 0.0
    assert tiny.differences(before, model.state_dict()) == []


@pytest.mark.parametrize("at", ["forward", "backward"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_too_little_memory_is_told_with_what_to_lower(tiny, at, device):
    def exhaust(*arguments):
        if device == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        torch.empty(1 << 60)

    precision, model = tiny.precision("fp32"), tiny.model()
    optimizer = torch.optim.AdamW(model.parameters())
    if at == "forward":
        model.head.register_forward_pre_hook(exhaust)
        model.encoder.register_forward_hook(exhaust)
    else:
        model.head.output.bias.register_hook(exhaust)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError) as caught:
        scan_memory(
            model, optimizer, Planned(tiny), 3, encode, precision, DataSettings(max_duration=100.0, max_utterance=30.0)
        )
    told = str(caught.value)
    assert "precision=fp32 with a batch of 1 utterance of up to 30.0 s (data.max_duration=100)" in told
    assert "data.max_utterance below 30" in told and "precision=amp_bf16" in told
    assert tiny.differences(before, model.state_dict()) == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_errors_are_not_taken_for_it(tiny):
    model = tiny.model()
    model.encoder.register_forward_hook(lambda *arguments: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        scan_memory(model, torch.optim.SGD(model.parameters()), Planned(tiny), 3, encode, tiny.precision("fp32"),
                    DataSettings())  # fmt: skip
