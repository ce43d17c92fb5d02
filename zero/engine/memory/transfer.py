"""Copy one page between the store and device memory.

The store's threads read and write host memory. If the device is a CPU, nothing else is needed. On a GPU a page on disk
is copied through a slot of the pinned arena, by a thread of the store on its own stream.
"""

import threading
from collections.abc import Callable

from torch import Tensor

from zero.platform.device import Device
from zero.platform.handle import Done
from zero.store import Page, PageGroup, PrefetchStore, Ticket


def load_page(store: PrefetchStore, device: Device, page: Page, into: Tensor) -> Ticket:
    """Start to read `page` into `into`, (K,), on the device, after the work that is enqueued now; return the ticket."""
    narrower = _narrower(store, page, into)
    if narrower is not None:
        device.copy(into, narrower)
        return Done()
    if device.shares_memory or store.in_place(page) is not None:
        return store.read(page, into)
    group = PageGroup(page.unit, page.number, (), beside=(page,))
    return _through_slot(store, device, group, lambda slot_K: device.copy(into, slot_K))


def save_page(store: PrefetchStore, device: Device, page: Page, source: Tensor) -> Ticket:
    """Start to write `source`, (K,) on the device, to `page`, after the work that is enqueued now; return the ticket.

    `source` may be changed after `wait` of the ticket. A page in memory accepts a narrower dtype than its own; it must
    then be read in that dtype.
    """
    narrower = _narrower(store, page, source)
    if narrower is not None:
        device.copy(narrower, source)
        return Done()
    if device.shares_memory or store.in_place(page) is not None:
        return store.write(page, source)
    group = PageGroup(page.unit, page.number, (), out=(page,))
    return _through_slot(store, device, group, lambda slot_K: device.copy(slot_K, source))


def _narrower(store: PrefetchStore, page: Page, like: Tensor) -> Tensor | None:
    """Return the first bytes of a page in memory, viewed in the dtype of `like`, or None.

    None means that the page is not in memory, or that its dtype is not wider.
    """
    in_place = store.in_place(page)
    if in_place is None or in_place.dtype.itemsize <= like.dtype.itemsize:
        return None
    return in_place.view(like.dtype)[: like.numel()]


def _through_slot(store: PrefetchStore, device: Device, group: PageGroup, copy: Callable[[Tensor], None]) -> Ticket:
    after = device.mark()

    def work(tensors: tuple[Tensor, ...]) -> None:
        with device.paging(threading.current_thread().name, after):
            copy(tensors[0])

    return store.modify(group, work)
