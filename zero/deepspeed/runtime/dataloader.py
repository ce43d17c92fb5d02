"""The data loader that `zero.initialize` makes from a dataset, and DeepSpeed's endless loader."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from zero.distributed.world import World

log = logging.getLogger("zero")


class Loader(DataLoader[Any]):
    """A DataLoader of this rank's microbatches. Each `iter` is an epoch, shuffled by (seed, epoch) on all ranks alike.

    If the number of ranks does not divide the number of samples, the first samples of the epoch are used twice.

    An IterableDataset is not split between ranks, so it must give each rank different samples itself.

    Args:
        data: the dataset.
        world: the ranks between which the samples are split.
        rows: number of samples in a microbatch.
        seed: seed of the samples' order.
        collate: function from a list of samples to a batch; None: torch's.
        drop_last: whether to leave out the last, smaller batch.

    Attributes:
        epoch: number of the epoch of the next `iter`, from 0; set it to resume at an epoch.
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
        # without its own generator, the loader would draw from torch's global generator at each epoch
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
    """An endless iterator over the batches of `loader`, which starts again after the last batch.

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
