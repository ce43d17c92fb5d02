"""Copies of gradients into flats, executed in batches; on a GPU this launches fewer kernels."""

from collections.abc import Iterable

import torch
from torch import Tensor

from zero.platform.device import Device


class BatchedCopies:
    """Pending copies of gradients. Call `execute` before anything else uses their destinations."""

    def __init__(self, device: Device) -> None:
        self._limit_bytes = device.batch_bytes
        self._pending: list[tuple[Tensor, Tensor]] = []  # (destination, gradient)
        self._pending_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add copies, each as (destination, gradient), and execute all if they are larger than a batch."""
        for destination, grad in pairs:
            dense = grad.to_dense() if grad.is_sparse else grad
            self._pending.append((destination, dense))
            self._pending_bytes += dense.nbytes
        if self._pending_bytes > self._limit_bytes:
            self.execute()

    def execute(self) -> None:
        if self._pending:
            destinations, grads = zip(*self._pending, strict=True)
            torch._foreach_copy_(destinations, grads)
        self.clear()

    def clear(self) -> None:
        """Drop all pending copies."""
        self._pending.clear()
        self._pending_bytes = 0
