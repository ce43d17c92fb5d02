"""Device buffers that gradients borrow: a fixed set, so that their memory is known before the first step.

A borrower uses the first elements of the smallest free buffer that is large enough. On a GPU a buffer is given back
while work that uses it is still enqueued, together with an event for which the next borrower waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.platform.device import Device, Event


@dataclass(eq=False)
class Scratch:
    """A borrowed buffer.

    Attributes:
        whole: the buffer.
        flat: (n,) its first elements, which the borrower uses.
        free: the event after which it may be overwritten.
        extra: whether it is not of the fixed set.
    """

    whole: Tensor
    flat: Tensor
    free: Event
    extra: bool = False


class ScratchPool:
    """A fixed set of buffers.

    Args:
        sizes: the number of elements of each.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: Device) -> None:
        self._device, self._dtype = device, dtype
        wholes = [device.zeros(numel, dtype) for numel in sizes]
        made = device.mark()
        self._all = [Scratch(whole, whole, made) for whole in wholes]
        self._free = list(self._all)
        self._lent = 0

    @property
    def is_lent(self) -> bool:
        """Whether a buffer has not been given back."""
        return self._lent > 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that are not lent: of all of them, between steps."""
        return sum(scratch.whole.nbytes for scratch in self._free)

    def take(self, numel: int, dtype: torch.dtype | None = None) -> Scratch | None:
        """Lend a buffer of at least `numel` elements, or None.

        Args:
            dtype: that of the buffer; None: that of the fixed set.
        """
        alike = (scratch for scratch in self._free if scratch.whole.dtype == (dtype or self._dtype))
        fits = (scratch for scratch in alike if scratch.whole.numel() >= numel)
        scratch = min(fits, key=lambda scratch: scratch.whole.numel(), default=None)
        if scratch is not None:
            self._lent += 1
            self._free.remove(scratch)
            scratch.flat = scratch.whole[:numel]
        return scratch

    def extra(self, numel: int, dtype: torch.dtype | None = None) -> Scratch:
        """Lend a new buffer, which `drop_extra` drops. Arguments as in `take`."""
        self._lent += 1
        flat = self._device.zeros(numel, dtype or self._dtype)
        return Scratch(flat, flat, self._device.mark(), extra=True)

    def give_back(self, scratch: Scratch, free: Event) -> None:
        scratch.free = free
        self._lent -= 1
        self._free.append(scratch)

    def drop_extra(self) -> None:
        """Drop the buffers that were given back and are not of the fixed set."""
        for scratch in [scratch for scratch in self._free if scratch.extra]:
            scratch.free.finish()  # the memory's next user cannot wait for this event
            self._free.remove(scratch)

    def reset(self, free: Event) -> None:
        """Mark all buffers as given back, after an error, and drop those that are not of the fixed set."""
        self._free, self._lent = list(self._all), 0
        for scratch in self._all:
            scratch.free = free
