"""Batches of similar durations, in an order that is a function of seed and epoch alone.

That is the whole secret of exact resume: an interrupted epoch is planned again and its first batches are passed
over, without reading their audio, whatever the number of workers was or is.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence

import torch
from lhotse.cut import Cut
from torch.utils.data import DataLoader

from asr.data.dataset import SpeechDataset
from asr.data.packed import PackedCuts
from asr.types import Batch

# A bucket needs a few cuts before its batches are worth more than those of plain order.
CUTS_PER_BUCKET = 10
PREFETCH = 4


class Loader:
    """Batches of a set of cuts.

    Args:
        cuts: what to load; every rank is given the same. They are read once and kept packed.
        dataset: turns cuts into a Batch.
        max_duration: seconds of audio per batch, padding included. Only a longer cut, alone in its batch, exceeds it.
        num_buckets: of similar duration, from which batches are drawn; fewer are used where there are few cuts.
        num_workers: processes that read ahead; 0 reads in this one.
        shuffle: a new order every epoch; otherwise from the longest to the shortest cut.
        seed: of the order.
        rank, world_size: this process takes every world_size-th batch. The first batches of an epoch fill up its
            last round, so that all ranks make the same number of steps.
    """

    def __init__(
        self,
        cuts: Iterable[Cut],
        dataset: SpeechDataset,
        max_duration: float,
        num_buckets: int = 30,
        num_workers: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool = False,
    ):
        self.cuts = cuts if isinstance(cuts, PackedCuts) else PackedCuts(cuts)
        self._plan = _Plan(self.cuts.durations, max_duration, num_buckets, shuffle, seed, rank, world_size)
        self._dataset = _ByIndex(self.cuts, dataset)
        self._loader: DataLoader = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self._plan,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            prefetch_factor=PREFETCH if num_workers > 0 else None,
            worker_init_fn=_start_worker,
            pin_memory=pin_memory,
            # It draws a seed whenever an epoch begins or is continued; from the global generator, a resumed run would
            # draw one more than the undisturbed one and go on with other dropout.
            generator=torch.Generator(),
        )

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Batches of this rank in `epoch`, from its `start_batch`-th on."""
        self._plan.epoch, self._plan.start_batch = epoch, start_batch
        return iter(self._loader)

    def batches(self, epoch: int) -> list[list[Cut]]:
        """Cuts of each of this rank's batches in `epoch`; nothing is read."""
        return [[self.cuts[index] for index in batch] for batch in self.plan(epoch)]

    def plan(self, epoch: int) -> list[list[int]]:
        """Which of `cuts` each of this rank's batches in `epoch` holds."""
        return self._plan.batches(epoch)

    def load(self, indices: list[int], epoch: int) -> Batch:
        """The batch of these cuts, read in this process."""
        return self._dataset[indices, epoch]

    def count_batches(self, epoch: int = 1) -> int:
        """Number of batches of this rank in `epoch`, found by planning it."""
        return len(self._plan.batches(epoch))


class _ByIndex(torch.utils.data.Dataset):
    """Batches by the indices of their cuts, which are unpacked where the audio is read."""

    def __init__(self, cuts: PackedCuts, dataset: SpeechDataset):
        self.cuts = cuts
        self.dataset = dataset

    def __getitem__(self, item: tuple[list[int], int]) -> Batch:
        indices, epoch = item
        return self.dataset[[self.cuts[index] for index in indices], epoch]


class _Plan(torch.utils.data.Sampler):
    """What the DataLoader hands to its workers: (indices of cuts, epoch) of every batch of an epoch still to come.

    Knows nothing of its Loader: with a reference cycle, the garbage collector would end the workers, in an order that
    makes them miss the word and be waited for.
    """

    def __init__(
        self,
        durations: Sequence[float],
        max_duration: float,
        num_buckets: int,
        shuffle: bool,
        seed: int,
        rank: int,
        world_size: int,
    ):
        if not durations:
            raise ValueError("there is nothing to load: no utterance is left in this set")
        self.durations = durations
        self.buckets = _buckets(durations, min(num_buckets, len(durations) // CUTS_PER_BUCKET))
        self.max_duration = max_duration
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 1
        self.start_batch = 0

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        epoch = self.epoch
        return iter([(batch, epoch) for batch in self.batches(epoch)[self.start_batch :]])

    def batches(self, epoch: int) -> list[list[int]]:
        batches = self._of_all_ranks(epoch)
        own = range(self.rank, -(-len(batches) // self.world_size) * self.world_size, self.world_size)
        return [batches[position % len(batches)] for position in own]

    def _of_all_ranks(self, epoch: int) -> list[list[int]]:
        order = list(range(len(self.durations)))
        if not self.shuffle:
            order.sort(key=lambda index: -self.durations[index])
            return self._pack(order)
        rng = random.Random(f"{self.seed} {epoch}")
        rng.shuffle(order)
        order.sort(key=self.buckets.__getitem__)
        batches = self._pack(order)
        rng.shuffle(batches)
        return batches

    def _pack(self, order: list[int]) -> list[list[int]]:
        """`order` cut into batches, each as large as max_duration allows."""
        batches: list[list[int]] = []
        longest = 0.0
        for index in order:
            longest = max(longest, self.durations[index])
            if batches and (len(batches[-1]) + 1) * longest <= self.max_duration:
                batches[-1].append(index)
            else:
                batches.append([index])
                longest = self.durations[index]
        return batches


def _buckets(durations: Sequence[float], num_buckets: int) -> Sequence[int]:
    """The bucket of each cut: ranges of duration, each with the same share of the audio."""
    buckets = array("L", [0]) * len(durations)
    total, before = sum(durations), 0.0
    for index in sorted(range(len(durations)), key=durations.__getitem__):
        buckets[index] = int(num_buckets * before / total) if total else 0
        before += durations[index]
    return buckets


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    # Handles of shared tensors would otherwise be open files, of which a machine may allow few.
    torch.multiprocessing.set_sharing_strategy("file_system")
