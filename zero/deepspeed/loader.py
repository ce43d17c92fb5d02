"""The loader that `zero.initialize` makes of a dataset: each rank sees its own rows, another order every epoch."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from zero.distributed.world import World

log = logging.getLogger("zero")


class Loader:
    """Microbatches of this rank; every `iter` is an epoch, shuffled by (seed, epoch) alike on all ranks.

    An IterableDataset is read as it is: which rows are this rank's, and in what order, it has to say itself.

    Attributes:
        epoch: the one that the next `iter` runs through; set it to go on from somewhere.
    """

    def __init__(
        self,
        data: Dataset[Any],
        world: World,
        *,
        rows: int,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        self.epoch = 0
        self._sampler: DistributedSampler[Any] | None = None
        if not isinstance(data, IterableDataset):
            order: dict[str, Any] = {"shuffle": True, "seed": seed, "drop_last": drop_last}
            self._sampler = DistributedSampler(data, world.size, world.rank, **order)
        elif world.size > 1 and world.rank == 0:
            log.warning(
                "training_data is an IterableDataset: it has to give each rank its own rows; nobody does it for it"
            )
        self.batches: DataLoader[Any] = DataLoader(
            data, batch_size=rows, sampler=self._sampler, collate_fn=collate, drop_last=drop_last
        )

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.batches)
