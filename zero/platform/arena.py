"""One block of host memory from which a rank takes its buffers."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from zero.core.sizes import BLOCK_BYTES, round_up
from zero.platform.device import Device, work_alone
from zero.platform.host_memory import map_anonymous

MOST_TOUCHING = 16
"""Limit of the threads that touch an arena, because every rank of a node touches its own at the same time."""


class Arena:
    """One block of host memory from which a rank takes its buffers: page aligned, and pinned if there is a GPU.

    torch's allocator for pinned memory rounds every block up to a power of two, which would waste memory. A page of the
    system takes physical memory only after it has been touched or pinned.

    Args:
        nbytes: size of the block.
        pin: pin the memory, so that copies overlap with compute.
    """

    def __init__(self, nbytes: int, device: Device, *, pin: bool = True) -> None:
        memory = map_anonymous(max(nbytes, BLOCK_BYTES))
        if not device.shares_memory:
            _advise(memory)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._taken, self.nbytes, self._device = 0, nbytes, device
        device.adopt(self._bytes)
        if pin and nbytes and not device.shares_memory:
            _touch(self._bytes[:nbytes])
        self.pinned = pin and nbytes > 0 and device.pin(self._bytes[:nbytes])

    def take(self, nbytes: int) -> Tensor:
        """Return the next `nbytes` bytes of the arena as an (nbytes,) uint8 tensor, page aligned.

        Raises:
            MemoryError: fewer bytes are left, because the plan made the arena too small.
        """
        start = self._taken
        self._taken = round_up(start + nbytes)
        if self._taken > round_up(self.nbytes):
            raise MemoryError(f"the arena of {self.nbytes} bytes has less than {nbytes} bytes left")
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Wait for all copies and unpin the memory. It is freed when the last tensor in it is freed."""
        if self.pinned:
            try:
                self._device.join()
            finally:
                self.pinned = False
                self._device.unpin(self._bytes)


def _advise(memory: mmap.mmap) -> None:
    """Exclude memory that a GPU reads by address from forked children, and use large pages, which are faster to pin.

    If the pages were shared after a fork, for example with a data loader's worker, copy-on-write would move this
    process's pages to other physical addresses.
    """
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(advice)


def _touch(memory: Tensor) -> None:
    """Have the system provide all of `memory`, (n,) uint8, with a thread per core; pinning would use one thread.

    torch's own threads are not enough, because torchrun sets OMP_NUM_THREADS=1.
    """
    count = min(len(os.sched_getaffinity(0)), MOST_TOUCHING)
    with ThreadPoolExecutor(count, initializer=work_alone) as threads:
        list(threads.map(Tensor.zero_, memory[::BLOCK_BYTES].chunk(4 * count)))
