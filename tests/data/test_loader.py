import multiprocessing
import random
import time
import warnings
from collections import Counter
from itertools import chain

import pytest
import torch
from lhotse.cut import MonoCut

from asr.data.augment import random_volume
from asr.data.dataset import SpeechDataset
from asr.data.loader import Loader


def cuts_of(durations):
    return [MonoCut(f"c{index}", 0, duration, 0) for index, duration in enumerate(durations)]


def some_durations(count, shortest=0.3, longest=10.0):
    rng = random.Random(count)
    return [round(rng.uniform(shortest, longest), 3) for _ in range(count)]


def planner(durations, **options):
    """A loader of which only the plan is asked for."""
    return Loader(cuts_of(durations), None, **{"max_duration": 20.0, "shuffle": True, **options})


def ids(batches):
    return [[cut.id for cut in batch] for batch in batches]


def padded(batch):
    return len(batch) * max(cut.duration for cut in batch)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("max_duration", [0.1, 15.0, 100.0, 1e6])
@pytest.mark.parametrize("count", [1, 3, 25, 400])
def test_every_cut_once_within_max_duration_and_without_warnings(count, max_duration, shuffle):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = planner(some_durations(count), max_duration=max_duration, shuffle=shuffle).batches(1)
    assert sorted(chain(*ids(batches))) == sorted(f"c{i}" for i in range(count))
    assert all(len(batch) == 1 or padded(batch) <= max_duration for batch in batches)


def test_a_cut_longer_than_max_duration_is_a_batch_of_its_own():
    batches = planner([1.0] * 30 + [120.0]).batches(1)
    assert ["c30"] in ids(batches)


def test_batches_are_full():
    batches = planner([1.0] * 1000).batches(1)
    assert Counter(map(len, batches)) == {20: 50}


def test_buckets_leave_little_padding():
    durations = some_durations(2000)

    def padding(**options):
        batches = planner(durations, max_duration=100.0, **options).batches(1)
        return 1 - sum(durations) / sum(map(padded, batches))

    assert padding(num_buckets=30) < 0.06
    assert padding(shuffle=False) < 0.02
    assert padding(num_buckets=1) > 0.3


def test_without_shuffling_from_long_to_short_the_same_in_every_epoch():
    loader = planner([3.0, 1.0, 2.0, 1.0], max_duration=4.0, shuffle=False)
    assert ids(loader.batches(1)) == [["c0"], ["c2", "c1"], ["c3"]] == ids(loader.batches(2))


def test_order_is_a_function_of_seed_and_epoch():
    def plan(seed, epoch):
        return ids(planner(some_durations(300), num_buckets=5, seed=seed).batches(epoch))

    first = plan(1, 1)
    assert first == plan(1, 1)
    for other in (plan(1, 2), plan(2, 1)):
        # Other batches, not the same ones in another order.
        assert len(set(map(frozenset, first)) & set(map(frozenset, other))) < 5
    assert plan(1, 2) != plan(2, 1)


def test_the_whole_set_is_shuffled_however_large():
    """A shuffling buffer would read speed copies, which follow one another in the manifest, one after the other."""
    order = [int(name[1:]) for name in chain(*ids(planner([1.0] * 30_000).batches(1)))]
    assert 14_000 < sum(order[:1000]) / 1000 < 16_000


def test_durations_are_mixed_over_an_epoch():
    batches = planner(some_durations(2000), max_duration=50.0).batches(1)
    half = len(batches) // 2
    means = [
        sum(c.duration for b in part for c in b) / sum(map(len, part)) for part in (batches[:half], batches[half:])
    ]
    assert abs(means[0] - means[1]) < 1.5


@pytest.mark.parametrize(("count", "world_size"), [(5, 2), (4, 2), (1, 2), (2, 5), (7, 3)])
def test_ranks_make_the_same_number_of_steps(count, world_size):
    def plan(rank):
        return planner([1.0] * count, max_duration=1.0, rank=rank, world_size=world_size)

    parts = [ids(plan(rank).batches(1)) for rank in range(world_size)]
    rounds = -(-count // world_size)
    assert [len(part) for part in parts] == [rounds] * world_size
    assert all(plan(rank).count_batches() == rounds for rank in range(world_size))
    seen = Counter(chain(*chain(*parts)))
    assert len(seen) == count and sum(seen.values()) == rounds * world_size


def test_nothing_to_load_is_refused():
    with pytest.raises(ValueError, match="nothing to load"):
        planner([])


@pytest.fixture
def make_loader(make_wavs, two_features, letters):
    cuts = make_wavs([0.1 + 0.01 * i for i in range(20)])

    def make(num_workers=0, **options):
        dataset = SpeechDataset(two_features, 2, letters, seed=3, cut_augments=(random_volume,))
        return Loader(cuts, dataset, max_duration=0.5, num_workers=num_workers, shuffle=True, seed=3, **options)

    return make


def features_by_id(batches):
    return {
        name: batch.features[row, : batch.feature_lens[row]] for batch in batches for row, name in enumerate(batch.ids)
    }


def test_order_and_augmentation_do_not_depend_on_workers(make_loader):
    alone, with_workers = make_loader(), make_loader(num_workers=2)
    for epoch in (1, 2):
        here, there = list(alone.epoch(epoch)), list(with_workers.epoch(epoch))
        assert [batch.ids for batch in here] == [batch.ids for batch in there]
        assert all(torch.equal(a.features, b.features) for a, b in zip(here, there, strict=True))
    before, after = features_by_id(alone.epoch(1)), features_by_id(alone.epoch(2))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_continues_where_it_was_left_and_the_next_is_whole(make_loader, num_workers):
    whole = [batch.ids for batch in make_loader().epoch(1)]
    assert len(whole) > 5
    loader = make_loader(num_workers)
    begun = loader.epoch(1)
    seen = [next(begun).ids for _ in range(4)]
    # The same loader, its read-ahead unfinished, and a new one, as after a crash.
    for continued in (loader, make_loader(num_workers)):
        rest = [batch.ids for batch in continued.epoch(1, start_batch=4)]
        assert seen + rest == whole
        assert len(list(continued.epoch(2))) == len(make_loader().batches(2))
        assert list(continued.epoch(1, start_batch=len(whole))) == []


def test_an_epoch_that_was_asked_for_is_not_changed_by_the_next_call(make_loader):
    loader = make_loader()
    first, _ = loader.epoch(1), loader.epoch(2, start_batch=3)
    assert [batch.ids for batch in first] == ids(loader.batches(1))


def test_workers_end_with_their_loader(make_loader):
    loader = make_loader(num_workers=2)
    begun = loader.epoch(1)
    next(begun)
    workers = multiprocessing.active_children()
    started = time.monotonic()
    del begun, loader
    assert time.monotonic() - started < 4
    assert workers and not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_leaves_the_global_generator_alone(make_loader, num_workers):
    loader = make_loader(num_workers)
    before = torch.get_rng_state()
    list(loader.epoch(1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_corrupt_file_is_named_with_its_path(make_loader, tmp_path, num_workers):
    (tmp_path / "c07.wav").write_bytes(b"RIFF no audio")
    batches = list(make_loader(num_workers).epoch(1))
    skipped = [item for batch in batches for item in batch.skipped]
    assert [item.id for item in skipped] == ["c07"] and "c07.wav" in skipped[0].reason
    assert sum(map(len, batches)) == 19
