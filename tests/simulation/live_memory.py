"""The live bytes of a simulated GPU: what torch's allocator would hold at the least."""

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


class LiveMemory:
    """A count of the bytes of live storages, and of allocations.

    Args:
        limit_bytes: an allocation beyond these live bytes raises torch.OutOfMemoryError; None: no limit.

    Attributes:
        nbytes, peak_bytes: live bytes now, and the most of them.
        allocations: the number of allocations so far.
        fails_at: the number of an allocation that fails, whatever its size; 0: none.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = self.allocations = self.fails_at = 0
        self._sizes: dict[int, int] = {}
        self._live_bytes = 0
        self._freed: deque[int] = deque()  # by finalizers, which may run inside any lock

    @property
    def nbytes(self) -> int:
        while self._freed:
            self._live_bytes -= self._freed.popleft()
        return self._live_bytes

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Count the storages of tensors that were allocated just now.

        Raises:
            torch.OutOfMemoryError: they exceed the limit, or it is their turn to fail. They are not counted then.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address, nbytes = storage.data_ptr(), storage.nbytes()
            if not nbytes or address in self._sizes:
                continue
            self.allocations += 1
            total = self.nbytes + nbytes
            if self.allocations == self.fails_at or (self.limit_bytes is not None and total > self.limit_bytes):
                raise torch.OutOfMemoryError(f"the simulated GPU is out of memory: {nbytes} bytes beyond {self.nbytes}")
            self._sizes[address] = nbytes
            self._live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, total)
            weakref.finalize(storage, self._free, address).atexit = False

    def release(self, tensor: Tensor) -> None:
        """Stop counting a tensor that is host memory."""
        self._free(tensor.untyped_storage().data_ptr())

    def _free(self, address: int) -> None:
        if nbytes := self._sizes.pop(address, 0):
            self._freed.append(nbytes)
