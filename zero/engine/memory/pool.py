"""A fixed set of buffers for gathered units, so that peak memory is known before the first step.

Every buffer has room for every unit, which uses its first elements. The choice of a buffer depends only on the order of
calls, so every rank decides alike. A rank never waits for a free buffer, because the waiting thread is the one that
would free it. When all are pinned, an extra one is allocated, counted in `overflowed`, and dropped when it is unpinned.

An unpinned buffer keeps its unit until another unit takes the buffer, so the last units of a forward are still gathered
when backward begins. A unit of `zero.keep` has a buffer of its own, which no other unit takes.

Buffers are allocated on the compute stream, which uses them last, so memory that is freed is not overwritten too early.
Only `Buffer.unit` and `Buffer.address` say where a unit and its memory are, so no interrupt makes tables disagree.

A view of a buffer may outlive the pin, for example a parameter that user code stored, or a tensor that a checkpoint
recomputed. Before a buffer gets another unit, the pool therefore counts the references to its storage. If other tensors
use the storage, they keep that memory, and the buffer gets fresh memory, counted in `renewed`.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.distributed.world import Handle
from zero.platform.device import Device, Event


class Buffer:
    """A buffer for a gathered unit, with the unit's index and version.

    Attributes:
        flat: the elements that the unit uses.
        extra: whether it was allocated beyond the pool's fixed set.
        owner: the only unit that may use it; None: any unit.
        unit: the index of the unit that it holds; None if it holds none.
        version: the `UnitState.version` that it holds; -1 if its content is not valid.
        pins: the number of uses that have not ended.
        ahead: whether it was gathered ahead and not used since.
        used: a counter that orders the pool's buffers by their last use.
        arrivals: handles of the gathers into it that nothing has waited for.
        ready: the event at the end of the work that was enqueued on the gather stream when the gather started.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: Device, *, extra: bool = False, owner: int | None = None
    ) -> None:
        self._device = device
        self._whole = self.flat = _zeros(numel, dtype, device)
        self.extra, self.owner = extra, owner
        self.unit: int | None = None
        self.version = -1
        self.pins = 0
        self.ahead = False
        self.used = 0
        self.arrivals: list[Handle] = []
        self.ready = Event()
        self._watch()

    @property
    def numel(self) -> int:
        return self._whole.numel()

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes

    @property
    def address(self) -> int:
        return self._storage.data_ptr()

    @property
    def is_free(self) -> bool:
        return self.pins == 0 and not self.ahead

    @property
    def is_seen(self) -> bool:
        """Whether a tensor of somebody else uses the buffer's memory."""
        return torch._C._storage_Use_Count(self._storage._cdata) > self._alone

    def land(self) -> None:
        """Have the current stream wait for the gathers into this buffer."""
        self.ready.wait()  # first, because waiting for an arrival may enqueue further work
        while self.arrivals:
            self.arrivals[-1].wait()  # removed only afterwards, so that it is waited for again after an interrupt
            self.arrivals.pop()

    def renew(self, by_address: dict[int, "Buffer"]) -> None:
        """Allocate fresh memory for the buffer and leave the old memory to the tensors that use it.

        Args:
            by_address: gets the buffer under its new address, before the buffer uses that memory.
        """
        fresh = _zeros(self.numel, self.flat.dtype, self._device)
        by_address[storage_address(fresh)] = self
        self._whole = self.flat = fresh
        self._watch()

    def resize(self, numel: int) -> None:
        """Let the next unit use the first `numel` elements."""
        with torch.inference_mode(False):
            self.flat = self._whole[:numel]
        self._watch()

    def _watch(self) -> None:
        self._storage = self._whole.untyped_storage()
        self._alone = torch._C._storage_Use_Count(self._storage._cdata)


def storage_address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage; 0 if it has no single one: sparse tensors, wrappers like DTensor."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return 0
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def _zeros(numel: int, dtype: torch.dtype, device: Device) -> Tensor:
    with torch.inference_mode(False):  # also inside an evaluation: a later backward uses the buffer
        return device.zeros(numel, dtype)


class Pool:
    """The pooled buffers. A unit takes its own buffer, or the least recently used free buffer.

    Args:
        sizes: the number of elements of each buffer that any unit may use.
        own_sizes: the number of elements of the buffers with an owner, by the owner's index.
    """

    def __init__(
        self, sizes: Iterable[int], dtype: torch.dtype, device: Device, own_sizes: Mapping[int, int] | None = None
    ) -> None:
        self._dtype, self._device = dtype, device
        self._owned = {unit: Buffer(numel, dtype, device, owner=unit) for unit, numel in (own_sizes or {}).items()}
        self.buffers = [*(Buffer(numel, dtype, device) for numel in sizes), *self._owned.values()]
        self._by_address = {buffer.address: buffer for buffer in self.buffers}
        self._clock = 0
        self.overflowed = 0
        self.renewed = 0

    @property
    def pinned(self) -> int:
        """The number of buffers that are pinned or gathered ahead."""
        return sum(not buffer.is_free for buffer in self.buffers)

    @property
    def allocated_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def find(self, unit: int) -> Buffer | None:
        """Return the buffer that holds `unit`, in any version, or None."""
        if (buffer := self._owned.get(unit)) is not None:
            return buffer if buffer.unit == unit else None
        return next((buffer for buffer in self.buffers if buffer.unit == unit), None)

    def holding(self, tensor: Tensor) -> Buffer | None:
        """Return the buffer whose memory `tensor` uses, or None."""
        address = storage_address(tensor)
        buffer = self._by_address.get(address) if address else None
        return buffer if buffer is not None and buffer.address == address else None

    def has_room_for(self, unit: int) -> bool:
        return self._choose(unit) is not None

    def take(self, unit: int, numel: int) -> Buffer:
        """Return a buffer that `unit` may overwrite. Call it on the compute stream."""
        buffer = self._choose(unit) or self._overflow(numel)
        buffer.land()  # an unused earlier gather must end before the next one starts
        buffer.version, buffer.unit = -1, None  # first, so that after an interrupt it holds nothing
        if buffer.is_seen:
            self.renewed += 1
            before = buffer.address
            buffer.renew(self._by_address)
            self._by_address.pop(before, None)
        buffer.resize(numel)
        buffer.unit = unit
        self.touch(buffer)
        return buffer

    def touch(self, buffer: Buffer) -> None:
        self._clock += 1
        buffer.used = self._clock

    def unpin(self, buffer: Buffer) -> None:
        buffer.pins -= 1
        self.drop_extra(buffer)

    def reset(self) -> None:
        """Unpin all buffers after an error, and drop extra ones that no gather writes any more."""
        self.buffers = [buffer for buffer in self.buffers if buffer.arrivals or not buffer.extra]
        self._by_address = {buffer.address: buffer for buffer in self.buffers}
        for buffer in self.buffers:
            buffer.pins, buffer.ahead = 0, False

    def _choose(self, unit: int) -> Buffer | None:
        """Return the buffer that holds `unit`, else the unit's own buffer, else the least recently used free buffer."""
        if (buffer := self._owned.get(unit) or self.find(unit)) is not None:
            return buffer
        shared = (buffer for buffer in self.buffers if buffer.is_free and not buffer.extra and buffer.owner is None)
        return min(shared, key=lambda buffer: buffer.used, default=None)

    def _overflow(self, numel: int) -> Buffer:
        self.overflowed += 1
        buffer = Buffer(numel, self._dtype, self._device, extra=True)
        self._by_address[buffer.address] = buffer
        self.buffers.append(buffer)
        return buffer

    def drop_extra(self, buffer: Buffer) -> None:
        """Drop `buffer` if it is an extra one and neither pinned nor gathered ahead."""
        if buffer.extra and buffer.is_free:
            buffer.land()
            self.buffers.remove(buffer)
            self._by_address.pop(buffer.address, None)
