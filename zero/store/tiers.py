"""One store out of several: each page is on the tier, or on the disk, that it was placed on."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from zero.store.base import Page, Pages, Store, Ticket


def spread(sizes: Mapping[Page, int], rates: Sequence[float]) -> dict[Page, str]:
    """Which of several disks each page is on, so that all disks take as long for theirs; neighbours are apart.

    Args:
        sizes: bytes of every page.
        rates: of each disk, in any unit, more than 0.

    Returns:
        Page to the number of its disk, as text.
    """
    given = [0.0] * len(rates)
    found = {}
    for page, nbytes in sizes.items():
        disk = min(range(len(rates)), key=lambda one: (given[one] + nbytes) / rates[one])
        given[disk] += nbytes
        found[page] = str(disk)
    return found


class Tiers(Store):
    """Routes every page to the store of its tier, or of its disk.

    Args:
        stores: tier to store; closed with this one.
        where: page to tier, and always the same one.
        release: called when all of them are closed.
    """

    def __init__(
        self, stores: Mapping[str, Store], where: Callable[[Page], str], release: Callable[[], None] = lambda: None
    ) -> None:
        self._stores, self._where, self._release = dict(stores), where, release
        self._pages = Pages[Store]()

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        self._pages.refuse_known(page)
        store = self._stores[self._where(page)]
        store.allocate(page, numel, dtype)
        self._pages.add(page, store)

    def read(self, page: Page, into: Tensor) -> Ticket:
        return self._pages[page].read(page, into)

    def write(self, page: Page, source: Tensor) -> Ticket:
        return self._pages[page].write(page, source)

    def in_place(self, page: Page) -> Tensor | None:
        return self._pages[page].in_place(page)

    @property
    def allocated_bytes(self) -> int:
        return sum(store.allocated_bytes for store in self._stores.values())

    def close(self) -> None:
        self._pages.close()
        with ExitStack() as closing:  # one that fails does not keep the others open
            closing.callback(self._release)
            for store in self._stores.values():
                closing.callback(store.close)
