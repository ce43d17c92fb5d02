"""One store out of several: each page is on the tier, or on the disk, that it was placed on."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from zero.store.base import Page, Pages, Store, Ticket

TOTAL_WEIGHT = 1 / 4
"""The weight of a disk's deficit over all kinds beside that of the page's kind: larger makes kinds uneven."""


def spread(
    sizes: Mapping[Page, int], rates: Sequence[float], room_bytes: Sequence[int] | None = None
) -> dict[Page, str]:
    """Choose a disk for each page, so that after every page each disk has its share of every kind.

    A phase of a step moves some kinds only, for example the parameters that backward gathers; shares of the total alone
    could let it wait for one disk. A page goes to the disk with the largest deficit of its kind; the deficit over all
    kinds, with a small weight, lets kinds begin on different disks. No disk has more of a kind than its share and one
    page of that kind.

    Args:
        sizes: bytes of every page, in the order in which a step uses them.
        rates: of each disk, in any unit, more than 0.
        room_bytes: of each disk; None: no limit. The other disks take what exceeds it, of every kind as much. A page
            that fits on none goes to the disk with most room left, whose store raises.

    Returns:
        Page to the number of its disk, as text.
    """
    left_bytes = [sum(sizes.values())] * len(rates) if room_bytes is None else list(room_bytes)
    shares = _shares(rates, left_bytes, sum(sizes.values()))
    largest: dict[str, int] = {}
    for page, nbytes in sizes.items():
        largest[page.kind] = max(largest.get(page.kind, 1), nbytes)
    largest_bytes = max(largest.values(), default=1)
    deficits = {kind: [0.0] * len(rates) for kind in largest}  # in pages of the kind
    total_deficit, disk_of = [0.0] * len(rates), {}  # in pages of the largest kind
    for page, nbytes in sizes.items():
        deficit, weight = deficits[page.kind], nbytes / largest[page.kind]
        total_weight = nbytes / largest_bytes
        for disk, share in enumerate(shares):
            deficit[disk] += share * weight
            total_deficit[disk] += share * total_weight
        fitting = [disk for disk, left in enumerate(left_bytes) if left >= nbytes]
        fitting = fitting or [left_bytes.index(max(left_bytes))]
        behind = [disk for disk in fitting if deficit[disk] >= weight - 1] or fitting
        chosen = max(behind, key=lambda disk: deficit[disk] + TOTAL_WEIGHT * total_deficit[disk])
        left_bytes[chosen] -= nbytes
        deficit[chosen] -= weight
        total_deficit[chosen] -= total_weight
        disk_of[page] = str(chosen)
    return disk_of


def _shares(rates: Sequence[float], room_bytes: Sequence[int], nbytes: int) -> list[float]:
    """Return each disk's share of all bytes: by its rate, or its room where that is less."""
    taken, left_bytes, open_disks = [0.0] * len(rates), float(nbytes), set(range(len(rates)))
    while open_disks:
        total_rate = sum(rates[disk] for disk in open_disks)
        by_rate = {disk: left_bytes * rates[disk] / total_rate for disk in open_disks}
        full = {disk for disk in open_disks if by_rate[disk] > room_bytes[disk]}
        for disk in full or open_disks:
            taken[disk] = min(by_rate[disk], room_bytes[disk])
            left_bytes -= taken[disk]
        open_disks = open_disks - full if full else set()
    return [share / max(sum(taken), 1.0) for share in taken]


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
