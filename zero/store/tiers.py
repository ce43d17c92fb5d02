"""A store over several tiers or disks, and the choice of the disk of each page."""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from itertools import groupby

import torch
from torch import Tensor

from zero.errors import if_it_fails
from zero.platform.threads import BackgroundThread
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
        where: returns the name of the tier on which a page is allocated.
        lent: the names of stores that the caller has passed in, so that no other one replaces them.
    """

    def __init__(self, stores: Mapping[str, Store], where: Callable[[Page], str], lent: Set[str] = frozenset()) -> None:
        self.stores, self._where, self.lent = dict(stores), where, lent
        self._replaced: list[Store] = []
        self._emptied: Set[str] = frozenset()
        self._pages = Pages[tuple[str, Store]]()

    def allocate_all(self, sizes: Mapping[Page, tuple[int, torch.dtype]]) -> None:
        for page in sizes:
            self._pages.check_new(page)
        made = list[Page]()

        def undo() -> None:
            for page in made:
                self.free(page)

        with if_it_fails(undo):
            for tier, pages in groupby(sizes, self._where):
                together = {page: sizes[page] for page in pages}
                self.stores[tier].allocate_all(together)
                self._pages |= dict.fromkeys(together, (tier, self.stores[tier]))
                made += together

    def rename(self, page: Page, name: Page) -> None:
        self._pages.check_new(name)
        self._pages[page][1].rename(page, name)
        self._pages.rename(page, name)

    def free(self, page: Page) -> None:
        self._pages.take(page)[1].free(page)

    def read(self, page: Page, into: Tensor) -> Ticket:
        return self._pages[page][1].read(page, into)

    def write(self, page: Page, source: Tensor) -> Ticket:
        return self._pages[page][1].write(page, source)

    def in_place(self, page: Page) -> Tensor | None:
        return self._pages[page][1].in_place(page)

    @property
    def allocated_bytes(self) -> int:
        return sum(store.allocated_bytes for store in (*self.stores.values(), *self._replaced))

    def close(self) -> None:
        self._pages.close()
        with ExitStack() as closing:  # if one close raises, the other stores are closed nevertheless
            for store in (*self.stores.values(), *self._replaced):
                closing.callback(store.close)

    # -- pages that move from tier to tier --

    def refit(self, where: Callable[[Page], str], stores: Mapping[str, Store], emptied: Set[str] = frozenset()) -> None:
        """Allocate further pages by `where`, on `stores` in place of those of the same names; other pages stay.

        Args:
            emptied: the names of tiers whose pages must move to other stores.
        """
        before = [*self.stores.values(), *self._replaced]
        self._where, self.stores, self._emptied = where, self.stores | dict(stores), emptied
        self._replaced = [store for store in before if store not in self.stores.values()]

    def is_at_home(self, page: Page) -> bool:
        """Return whether a page is on the tier on which it would be allocated now."""
        tier, store = self._pages[page]
        return tier == self._where(page) and (tier not in self._emptied or store is self.stores[tier])

    def trim(self) -> None:
        """Close the stores that have no pages and that nothing else needs, and return the space of freed pages."""
        used = {id(store) for _, store in self._pages.values()}
        if "nvme" in self.stores.keys() - self.lent and id(self.stores["nvme"]) not in used:
            self._replaced.append(self.stores.pop("nvme"))
        for store in [store for store in self._replaced if id(store) not in used]:
            self._replaced.remove(store)
            BackgroundThread(store.close, name="closing").start()  # a file system takes its time to free a file
        for store in (*self.stores.values(), *self._replaced):
            store.trim()
