import pickle

import pytest
import torch
from lhotse.utils import fastcopy

from asr.data.augment import change_speed
from asr.data.cuts import load_audio, unreadable_cut
from asr.data.dataset import SpeechDataset
from asr.data.loader import Loader
from asr.data.packed import PackedCuts


@pytest.fixture
def cuts(make_wavs):
    plain = make_wavs([0.5, 1.0, 0.7])
    broken = unreadable_cut("lost", "nowhere.wav", "TEXT", "ann", "missing file", "no such file")
    return [*plain, change_speed(plain[0], 0.9), plain[1].mix(plain[2], snr=10), broken]


def test_cuts_come_back_as_they_were(cuts):
    packed = PackedCuts(iter(cuts))
    assert len(packed) == 6 and list(packed) == cuts
    assert packed[-1] == cuts[-1] and packed[1:3] == cuts[1:3]
    assert list(packed.durations) == [cut.duration for cut in cuts]
    assert list(packed.text_lens) == [2, 2, 2, 2, 4, 4]
    for one, other in zip(cuts[:5], packed, strict=False):
        assert (load_audio(one) == load_audio(other)).all()
    with pytest.raises(IndexError):
        packed[6]
    copy = pickle.loads(pickle.dumps(packed))  # as a worker that is started anew gets it
    assert list(copy) == cuts
    assert len(PackedCuts([])) == 0


def test_they_take_little_room(cuts):
    text = "A TRANSCRIPT OF THE USUAL LENGTH IN WHICH NUMBER {} STANDS SOMEWHERE AND THEN A FEW MORE WORDS ARE SAID"
    many = (
        fastcopy(cuts[index % 4], id=f"utterance-{index}",
                 supervisions=[fastcopy(cuts[0].supervisions[0], text=text.format(index))])
        for index in range(2000)
    )  # fmt: skip
    assert len(pickle.dumps(PackedCuts(many))) < 2000 * 250


def test_a_loader_plans_by_number_and_reads_by_number(cuts, letters, two_features):
    loader = Loader(cuts[:4], SpeechDataset(two_features, 2, letters), max_duration=2.0, num_workers=1)
    assert sorted(index for batch in loader.plan(1) for index in batch) == [0, 1, 2, 3]
    read = {name: batch for batch in loader.epoch(1) for name in batch.ids}
    assert read.keys() == {cut.id for cut in cuts[:4]}
    (first, *_) = loader.plan(1)
    assert torch.equal(loader.load(first, 1).features, read[cuts[first[0]].id].features)
