"""A store over several tiers or disks, and the choice of the disk of each page."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from zero.store.base import Page, Pages, Store, Ticket


def spread(
    sizes: Mapping[Page, int], rates: Sequence[float], room_bytes: Sequence[int] | None = None
) -> dict[Page, str]:
    """Choose a disk for each page, so that all disks take equally long for each kind of page.

    Kinds are balanced separately because a phase of a step moves only some of them, for example the parameters that
    backward gathers. A page is placed on the disk that would finish first with the pages of its kind; among equal
    disks, on the one that would finish first with the pages of all kinds.

    Args:
        sizes: bytes of every page, in the order in which a step uses them.
        rates: speed of each disk, in any unit, more than 0.
        room_bytes: free bytes of each disk; None: no limit. Pages that do not fit on a disk are placed on the others. A
            page that fits on none is placed on the disk with most room left, whose store raises.

    Returns:
        Page -> index of its disk, as text.
    """
    left_bytes = [sum(sizes.values())] * len(rates) if room_bytes is None else list(room_bytes)
    of_kind: dict[str, list[int]] = {page.kind: [0] * len(rates) for page in sizes}
    of_all, disk_of = [0] * len(rates), {}
    for page, nbytes in sizes.items():
        taken = of_kind[page.kind]
        fitting = [disk for disk, left in enumerate(left_bytes) if left >= nbytes]
        fitting = fitting or [left_bytes.index(max(left_bytes))]
        chosen = min(fitting, key=lambda disk: ((taken[disk] + nbytes) / rates[disk], of_all[disk] / rates[disk]))
        left_bytes[chosen] -= nbytes
        taken[chosen] += nbytes
        of_all[chosen] += nbytes
        disk_of[page] = str(chosen)
    return disk_of


class Tiers(Store):
    """A store that passes every page to the store of its tier, or of its disk.

    Args:
        stores: name of a tier -> its store; closed with this store.
        where: returns the name of a page's tier, always the same for one page.
        release: called when all stores are closed.
    """

    def __init__(
        self, stores: Mapping[str, Store], where: Callable[[Page], str], release: Callable[[], None] = lambda: None
    ) -> None:
        self._stores, self._where, self._release = dict(stores), where, release
        self._pages = Pages[Store]()

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        self._pages.check_new(page)
        store = self._stores[self._where(page)]
        store.allocate(page, numel, dtype)
        self._pages[page] = store

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
        with ExitStack() as closing:  # if one close raises, the other stores are closed nevertheless
            closing.callback(self._release)
            for store in self._stores.values():
                closing.callback(store.close)
