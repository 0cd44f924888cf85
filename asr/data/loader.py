"""Batches of similar durations, in an order that is a function of seed and epoch alone.

That is the whole secret of exact resume: an interrupted epoch is planned again and its first batches are passed
over, without reading their audio, whatever the number of workers was or is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from lhotse import CutSet
from lhotse.cut import Cut
from lhotse.dataset.sampling import DynamicBucketingSampler, SimpleCutSampler
from torch.utils.data import DataLoader

from asr.data.dataset import SpeechDataset
from asr.types import Batch

# Bucketing needs a few cuts a bucket before its batches are worth more than those of plain order.
CUTS_PER_BUCKET = 10
PREFETCH = 4


class Loader:
    """Batches of a set of cuts.

    Args:
        cuts: what to load; every rank is given the same.
        num_cuts: how many there are (a lazy set does not know).
        dataset: turns cuts into a Batch.
        max_duration: seconds of audio per batch, padding included. A longer cut makes a batch of its own.
        num_buckets: of similar duration; fewer are used where there are few cuts.
        num_workers: processes that read ahead; 0 reads in this one.
        shuffle: a new order every epoch.
        seed: of the order.
        rank, world_size: this process takes every world_size-th batch. The first batches of an epoch fill up its
            last round, so that all ranks make the same number of steps.
    """

    def __init__(
        self,
        cuts: CutSet,
        num_cuts: int,
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
        if num_cuts < 1:
            raise ValueError("there is nothing to load: no utterance is left in this set")
        self.cuts = cuts
        self.max_duration = max_duration
        self.num_buckets = min(num_buckets, num_cuts // CUTS_PER_BUCKET)
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._plan = _Plan(self)
        self._loader: DataLoader = DataLoader(
            dataset,
            batch_size=None,
            sampler=self._plan,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            prefetch_factor=PREFETCH if num_workers > 0 else None,
            worker_init_fn=_start_worker,
            pin_memory=pin_memory,
        )

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Batches of this rank in `epoch`, from its `start_batch`-th on."""
        self._plan.epoch, self._plan.start_batch = epoch, start_batch
        return iter(self._loader)

    def batches(self, epoch: int) -> Iterator[list[Cut]]:
        """Cuts of each of this rank's batches in `epoch`; nothing is read."""
        first: list[list[Cut]] = []
        count = 0
        for count, cuts in enumerate(self._all_batches(epoch), start=1):
            if count <= self.world_size:
                first.append(cuts)
            if (count - 1) % self.world_size == self.rank:
                yield cuts
        if count % self.world_size:
            while len(first) < self.world_size:
                first = first + first
            filled = (first[i] for i in range(self.world_size - count % self.world_size))
            for offset, cuts in enumerate(filled, start=count):
                if offset % self.world_size == self.rank:
                    yield cuts

    def count_batches(self, epoch: int = 1) -> int:
        """Number of batches of this rank in `epoch`, found by planning it."""
        return sum(1 for _ in self.batches(epoch))

    def _all_batches(self, epoch: int) -> Iterator[list[Cut]]:
        # One sampler an epoch, as rank 0 of 1: lhotse's own division would end an epoch early on some ranks.
        common = dict(max_duration=self.max_duration, shuffle=self.shuffle, rank=0, world_size=1, drop_last=False)
        if self.num_buckets > 1:
            with warnings.catch_warnings():
                # It advises lazy manifests; these are in memory already, since the filters have read them.
                warnings.filterwarnings("ignore", message="You are using DynamicBucketingSampler with an eagerly")
                sampler = DynamicBucketingSampler(
                    self.cuts, num_buckets=self.num_buckets, seed=self.seed + epoch, buffer_size=10_000, **common
                )
        else:
            sampler = SimpleCutSampler(self.cuts, seed=self.seed + epoch, **common)
        for cuts in sampler:
            yield list(cuts)


class _Plan(torch.utils.data.Sampler):
    """What the DataLoader hands to its workers: (cuts, epoch) of every batch that is still to come."""

    def __init__(self, owner: Loader):
        self.owner = owner
        self.epoch = 1
        self.start_batch = 0

    def __iter__(self) -> Iterator[tuple[list[Cut], int]]:
        epoch, start = self.epoch, self.start_batch
        for index, cuts in enumerate(self.owner.batches(epoch)):
            if index >= start:
                yield cuts, epoch


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    # Handles of shared tensors would otherwise be open files, of which a machine may allow few.
    torch.multiprocessing.set_sharing_strategy("file_system")
