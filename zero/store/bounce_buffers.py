"""Host memory for tensors that a thread of the store copies to and from a GPU: a buffer for each thread."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


class BounceBuffers:
    """Buffers that threads borrow, (n,) uint8 each; pinned if there is a GPU."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._idle = list(buffers)
        self.nbytes = sum(buffer.nbytes for buffer in buffers)

    @contextmanager
    def borrowed(self) -> Iterator[Tensor]:
        """Lend the calling thread a buffer in the block."""
        memory = self._idle.pop()
        try:
            yield memory
        finally:
            self._idle.append(memory)
