"""The device tier and the host tier: pages in memory.

`in_place` lends the pages themselves. Where they lie on the device that computes, the optimizer works on them and
nothing is ever copied; host pages of a run on a GPU are copied from and to directly, because they lie in its pinned
arena.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zero.errors import StoreError
from zero.platform.handle import Done
from zero.store.base import Page, Store, Ticket


class MemoryStore(Store):
    """Pages as tensors.

    Args:
        device: where they are.
        take: gives (n,) uint8 of zeros for n bytes, to cut pages from; None: torch's own.
        copy: (into, source) between a page and memory of the device that computes.
    """

    def __init__(
        self,
        device: torch.device,
        take: Callable[[int], Tensor] | None = None,
        *,
        copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
    ) -> None:
        self._device, self._take, self._copy = device, take, copy
        self._pages: dict[Page, Tensor] | None = {}

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        pages = self._open()
        if page in pages:
            raise StoreError(f"{page} is allocated already")
        if self._take is None:
            pages[page] = torch.zeros(numel, dtype=dtype, device=self._device)
        else:
            pages[page] = self._take(numel * dtype.itemsize).view(dtype)

    def read(self, page: Page, into: Tensor) -> Ticket:
        self._copy(into, self._matching(page, into))
        return Done()

    def write(self, page: Page, source: Tensor) -> Ticket:
        self._copy(self._matching(page, source), source)
        return Done()

    def in_place(self, page: Page) -> Tensor | None:
        return self._find(page)

    @property
    def allocated_bytes(self) -> int:
        return sum(page.nbytes for page in self._open().values())

    def close(self) -> None:
        self._pages = None

    def _open(self) -> dict[Page, Tensor]:
        if self._pages is None:
            raise StoreError("this store is closed")
        return self._pages

    def _find(self, page: Page) -> Tensor:
        try:
            return self._open()[page]
        except KeyError:
            raise StoreError(f"{page} was never allocated") from None

    def _matching(self, page: Page, other: Tensor) -> Tensor:
        mine = self._find(page)
        if mine.shape != other.shape or mine.dtype != other.dtype:
            raise StoreError(
                f"{page} holds {tuple(mine.shape)} {mine.dtype}, the other side is {tuple(other.shape)} {other.dtype}"
            )
        return mine
