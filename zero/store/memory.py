"""The device tier and the host tier: pages in memory.

`in_place` returns the pages themselves. Pages on the compute device are updated in place, without a copy. In a run on a
GPU, host pages are copied directly, because they are in the pinned arena.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from zero.platform.handle import Done
from zero.store.base import Page, Pages, Store, Ticket, check_matching


class MemoryStore(Store):
    """A store of pages in memory.

    Args:
        device: the device of the pages.
        take: allocates n bytes as (n,) uint8 of zeros; None: torch's allocator.
        copy: copies (into, source) between a page and memory of the compute device.
    """

    def __init__(
        self,
        device: torch.device,
        take: Callable[[int], Tensor] | None = None,
        *,
        copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
    ) -> None:
        self._take, self._copy = take or partial(torch.zeros, dtype=torch.uint8, device=device), copy
        self._pages = Pages[Tensor]()

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        self._pages.check_new(page)
        self._pages[page] = self._take(numel * dtype.itemsize).view(dtype)

    def read(self, page: Page, into: Tensor) -> Ticket:
        self._copy(into, self._matching(page, into))
        return Done()

    def write(self, page: Page, source: Tensor) -> Ticket:
        self._copy(self._matching(page, source), source)
        return Done()

    def in_place(self, page: Page) -> Tensor | None:
        return self._pages[page]

    @property
    def allocated_bytes(self) -> int:
        self._pages.check_open()
        return sum(memory.nbytes for memory in self._pages.values())

    def close(self) -> None:
        self._pages.close()

    def _matching(self, page: Page, other: Tensor) -> Tensor:
        mine = self._pages[page]
        check_matching(page, mine.numel(), mine.dtype, other)
        return mine
