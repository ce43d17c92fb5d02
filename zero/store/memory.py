"""The device tier and the host tier: pages in memory.

`in_place` returns the pages themselves. Pages on the compute device are updated in place, without a copy. In a run on a
GPU, host pages are copied directly, because they are in pinned arenas.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zero.platform.handle import Done
from zero.store.base import Page, Pages, Store, Ticket, check_matching


class MemoryBlock(Protocol):
    """Memory from which adjacent pages are taken."""

    def take(self, nbytes: int) -> Tensor:
        """Return the next `nbytes` bytes as (nbytes,) uint8; they are zeros."""
        ...

    def close(self) -> None:
        """Return the memory to the system when the last tensor in it is freed."""
        ...


class ZerosBlock:
    """A block of torch's allocator."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._rest = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def take(self, nbytes: int) -> Tensor:
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return taken

    def close(self) -> None:
        self._rest = self._rest[:0]


class _Entry(NamedTuple):
    memory: Tensor
    block: MemoryBlock


class MemoryStore(Store):
    """A store of pages in memory. Pages that are allocated together are in one block, which is closed with the last.

    Args:
        device: the device of the pages.
        block: makes a block from which pages with these numbers of bytes can be taken; None: of torch's allocator.
        copy: copies (into, source) between a page and memory of the compute device.

    Attributes:
        block: makes the blocks of further pages.
    """

    def __init__(
        self,
        device: torch.device,
        block: Callable[[list[int]], MemoryBlock] | None = None,
        *,
        copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
    ) -> None:
        self.block, self._copy = block or partial(_zeros_block, device), copy
        self._pages, self._used = Pages[_Entry](), Counter[MemoryBlock]()

    def allocate_all(self, sizes: Mapping[Page, tuple[int, torch.dtype]]) -> None:
        for page in sizes:
            self._pages.check_new(page)
        block = self.block([numel * dtype.itemsize for numel, dtype in sizes.values()])
        for page, (numel, dtype) in sizes.items():
            self._pages[page] = _Entry(block.take(numel * dtype.itemsize).view(dtype), block)
            self._used[block] += 1

    def rename(self, page: Page, name: Page) -> None:
        self._pages.rename(page, name)

    def free(self, page: Page) -> None:
        block = self._pages.take(page).block
        self._used[block] -= 1
        if not self._used[block]:
            del self._used[block]
            block.close()

    def read(self, page: Page, into: Tensor) -> Ticket:
        self._copy(into, self._matching(page, into))
        return Done()

    def write(self, page: Page, source: Tensor) -> Ticket:
        self._copy(self._matching(page, source), source)
        return Done()

    def in_place(self, page: Page) -> Tensor | None:
        return self._pages[page].memory

    @property
    def allocated_bytes(self) -> int:
        self._pages.check_open()
        return sum(entry.memory.nbytes for entry in self._pages.values())

    def close(self) -> None:
        self._pages.close()
        with ExitStack() as closing:  # if one close raises, the others are closed nevertheless
            for block in self._used:
                closing.callback(block.close)
            self._used = Counter()

    def _matching(self, page: Page, other: Tensor) -> Tensor:
        mine = self._pages[page].memory
        check_matching(page, mine.numel(), mine.dtype, other)
        return mine


def _zeros_block(device: torch.device, sizes: list[int]) -> MemoryBlock:
    return ZerosBlock(sum(sizes), device)
