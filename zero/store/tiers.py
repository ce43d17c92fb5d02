"""One store out of several: each page is on the tier, or on the disk, that it was placed on."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from zero.store.base import Page, Pages, Store, Ticket


def spread(
    sizes: Mapping[Page, int], rates: Sequence[float], room_bytes: Sequence[int] | None = None
) -> dict[Page, str]:
    """Choose a disk for each page, so that all disks take as long for each kind.

    A phase of a step moves some kinds only, for example the parameters that backward gathers. So a page goes to the
    disk that would be done first with the pages of its kind; of disks that are alike, to the one with less of all.

    Args:
        sizes: bytes of every page, in the order in which a step uses them.
        rates: of each disk, in any unit, more than 0.
        room_bytes: of each disk; None: no limit. The other disks take what exceeds it. A page that fits on none goes to
            the disk with most room left, whose store raises.

    Returns:
        Page to the number of its disk, as text.
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
    """Routes every page to the store of its tier, or of its disk.

    Args:
        stores: tier to store; closed with this one.
        where: page to tier, always the same.
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
        with ExitStack() as closing:  # a failure does not keep the others open
            closing.callback(self._release)
            for store in self._stores.values():
                closing.callback(store.close)
