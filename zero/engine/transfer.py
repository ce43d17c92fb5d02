"""Copy one page between the store and the device's memory.

The store's threads move host memory, which is enough where the device is the host. On a GPU a page of a disk passes
through a slot of the pinned arena, and a thread of the store copies it on a stream of its own.
"""

import threading
from collections.abc import Callable

from torch import Tensor

from zero.platform.device import Device
from zero.platform.handle import Done
from zero.store import Group, Page, PrefetchStore, Ticket


def load(store: PrefetchStore, device: Device, page: Page, into: Tensor) -> Ticket:
    """Read `page` to `into`, (K,), on the device, after what is enqueued there now."""
    narrower = _narrower(store, page, into)
    if narrower is not None:
        device.copy(into, narrower)
        return Done()
    if device.shares_memory or store.in_place(page) is not None:
        return store.read(page, into)
    group = Group(page.unit, page.number, (), beside=(page,))
    return _through_slot(store, device, group, lambda slot_K: device.copy(into, slot_K))


def save(store: PrefetchStore, device: Device, page: Page, source: Tensor) -> Ticket:
    """Write `source`, (K,), on the device, after what is enqueued there now; it may change after `wait`.

    A page in memory takes a narrower dtype than its own, too, and must be read in that.
    """
    narrower = _narrower(store, page, source)
    if narrower is not None:
        device.copy(narrower, source)
        return Done()
    if device.shares_memory or store.in_place(page) is not None:
        return store.write(page, source)
    group = Group(page.unit, page.number, (), out=(page,))
    return _through_slot(store, device, group, lambda slot_K: device.copy(slot_K, source))


def _narrower(store: PrefetchStore, page: Page, like: Tensor) -> Tensor | None:
    """Return the first bytes of a page in memory in the dtype of `like`, if that is narrower than the page's."""
    in_place = store.in_place(page)
    if in_place is None or in_place.dtype.itemsize <= like.dtype.itemsize:
        return None
    return in_place.view(like.dtype)[: like.numel()]


def _through_slot(store: PrefetchStore, device: Device, group: Group, copy: Callable[[Tensor], None]) -> Ticket:
    after = device.mark()

    def work(tensors: tuple[Tensor, ...]) -> None:
        with device.paging(threading.current_thread().name, after):
            copy(tensors[0])

    return store.modify(group, work)
