"""One store out of several: each page is on the tier, or on the disk, that it was placed on."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from zero.store.base import Page, Pages, Store, Ticket

TOTAL_WEIGHT = 1 / 4
"""Of what a disk lacks over all kinds, beside what it lacks of the page's own kind: heavier, and kinds are uneven."""


def spread(
    sizes: Mapping[Page, int], rates: Sequence[float], room_bytes: Sequence[int] | None = None
) -> dict[Page, str]:
    """Which of several disks each page is on. Of every kind, each disk has its share after every page.

    A phase of a step moves some kinds only, a backward's gathers for one, so a total alone would let it wait for one
    disk. A page goes to the disk that lacks most of its kind, and kinds begin on different disks because it also counts
    what a disk lacks of all kinds together. No disk has more of a kind than its share and one page of that kind, so of
    two disks none has less by more than that either.

    Args:
        sizes: bytes of every page, in the order in which a step uses them.
        rates: of each disk, in any unit, more than 0.
        room_bytes: what each disk can take; None: all of it. What one cannot take goes to the others, of every kind as
            much. A page that none can take goes to the disk with most room left, which has to refuse it.

    Returns:
        Page to the number of its disk, as text.
    """
    left_bytes = [sum(sizes.values())] * len(rates) if room_bytes is None else list(room_bytes)
    shares = _shares(rates, left_bytes, sum(sizes.values()))
    largest: dict[str, int] = {}
    for page, nbytes in sizes.items():
        largest[page.kind] = max(largest.get(page.kind, 1), nbytes)
    largest_bytes = max(largest.values(), default=1)
    lacking_of = {kind: [0.0] * len(rates) for kind in largest}
    lacking_in_all, found = [0.0] * len(rates), {}
    for page, nbytes in sizes.items():
        page_bytes, lacking = largest[page.kind], lacking_of[page.kind]
        for disk, share in enumerate(shares):
            lacking[disk] += nbytes * share / page_bytes
            lacking_in_all[disk] += nbytes * share / largest_bytes
        fitting = [disk for disk, left in enumerate(left_bytes) if left >= nbytes] or [
            left_bytes.index(max(left_bytes))
        ]
        below = [disk for disk in fitting if lacking[disk] >= nbytes / page_bytes - 1] or fitting
        chosen = max(below, key=lambda one: lacking[one] + TOTAL_WEIGHT * lacking_in_all[one])
        left_bytes[chosen] -= nbytes
        lacking[chosen] -= nbytes / page_bytes
        lacking_in_all[chosen] -= nbytes / largest_bytes
        found[page] = str(chosen)
    return found


def _shares(rates: Sequence[float], room_bytes: Sequence[int], nbytes: int) -> list[float]:
    """Of all bytes, what each disk takes: by its rate, and where that is more than its room, as much as there is."""
    taken, left_bytes, others = [0.0] * len(rates), float(nbytes), set(range(len(rates)))
    while others:
        by_rate = {disk: left_bytes * rates[disk] / sum(rates[one] for one in others) for disk in others}
        full = {disk for disk in others if by_rate[disk] > room_bytes[disk]}
        for disk in full or others:
            taken[disk] = min(by_rate[disk], room_bytes[disk])
            left_bytes -= taken[disk]
        others = others - full if full else set()
    return [one / max(sum(taken), 1.0) for one in taken]


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
