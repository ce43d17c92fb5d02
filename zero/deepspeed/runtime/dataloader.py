"""The loader that `zero.initialize` makes of a dataset, and DeepSpeed's loader without an end."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from zero.distributed.world import World

log = logging.getLogger("zero")


class Loader(DataLoader[Any]):
    """The microbatches of this rank. Each `iter` is an epoch, shuffled by (seed, epoch) alike on all ranks.

    If the number of ranks does not divide the rows, the first rows of the epoch are used twice.

    An IterableDataset is read as it is, so it must give each rank different rows.

    Args:
        data: the dataset.
        world: the ranks that share it.
        rows: rows of a microbatch.
        seed: of the order.
        collate: makes a batch of a list of rows; None: torch's.
        drop_last: leave out the last, smaller batch.

    Attributes:
        epoch: number of the epoch that the next `iter` runs through, from 0; set it to go on from an epoch.
    """

    def __init__(
        self,
        data: Dataset[Any],
        world: World,
        *,
        rows: int,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        drop_last: bool,
    ) -> None:
        self.epoch = 0
        sampler: DistributedSampler[Any] | None = None
        if not isinstance(data, IterableDataset):
            sampler = DistributedSampler(data, world.size, world.rank, shuffle=True, seed=seed)
        elif world.size > 1 and world.rank == 0:
            log.warning("training_data is an IterableDataset: it has to give each rank its own rows")
        # without a generator of its own each epoch would draw from the global one
        generator = torch.Generator().manual_seed(seed)
        super().__init__(
            data, batch_size=rows, sampler=sampler, collate_fn=collate, drop_last=drop_last, generator=generator
        )

    def __iter__(self) -> Any:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return super().__iter__()


class RepeatingLoader:
    """Batches of `loader` without an end: after the last one it starts again.

    Args:
        loader: anything that can be iterated more than once.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
