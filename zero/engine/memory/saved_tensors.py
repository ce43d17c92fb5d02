"""Keep autograd's saved tensors between forward and backward, on the device (`InPlace`) or in host memory (`OnHost`).

`OnHost` starts to copy a storage to host memory when a tensor in it is saved, overlapped with forward. Each storage is
copied back one storage ahead of the backward that needs it. Whole storages are copied, because saved tensors are often
views: query, key and value of one matrix product share a storage. A storage of less than `LEAST_BYTES` stays on the
device.

The host never waits for a copy. A storage that is copied out stays allocated until the compute stream waits for the
copy, which is enqueued `MOST_LEAVING` storages later. The same holds for a storage that was copied back and not used.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zero.core.sizes import BLOCK_BYTES, round_up
from zero.platform.arena import Arena
from zero.platform.device import Device, Event
from zero.platform.modes import unobserved

LEAST_BYTES = 1 << 20
"""Smaller storages stay on the device, because two copies would cost more than their memory is worth."""

MOST_LEAVING = 2
"""The largest number of storages whose copies the compute stream has not waited for."""


class KeptTensor(NamedTuple):
    """A saved tensor that stays on the device, with its version, because torch checks no versions under hooks."""

    tensor: Tensor
    version: int

    def unchanged(self) -> Tensor:
        """Return the tensor; raise RuntimeError, as torch does without hooks, if it was written to since."""
        _same_version(self.tensor, self.version, self.tensor.shape)
        return self.tensor


def _same_version(tensor: Tensor, version: int, shape: torch.Size) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(shape)} is at version {tensor._version}, expected {version}"
        )


class InPlace:
    """Saved tensors that stay on the device.

    Attributes:
        offloads: whether tensors are copied to host memory, so that every unit's forward needs saved-tensor hooks.
        allocated_bytes: bytes of host memory for copies.
    """

    offloads = False
    allocated_bytes = 0

    def keep(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves in place of `tensor`."""
        return KeptTensor(tensor, tensor._version)

    def find(self, kept: Any) -> Tensor:
        """Return the tensor again in backward.

        Args:
            kept: the object that autograd saved in its place, see `keep`.
        """
        tensor: Tensor = kept.unchanged()
        return tensor

    def release_all(self) -> None:
        """Release all storages that are held for copies, because a pass has ended or was interrupted."""


class _Home:
    """The copy of one storage in host memory, and on the device again while backward needs it.

    Attributes:
        block: the host memory, uint8.
        origin: prevents that another storage gets the same address while this object exists.
        before: the storage that was copied out just before this storage.
        left, ready: the events at the end of the copy out, and of the copy back.
        back: the copy on the device, uint8; None while there is none.
        kept: the number of saved tensors in the storage.
        found: how many of them the running backward pass has used.
        passes: the number of backward passes that have used all of them.
    """

    def __init__(self, storage: Any, block: Tensor, before: "_Home | None") -> None:
        self.nbytes, self.block = storage.nbytes(), block
        self.origin = StorageWeakRef(storage)
        self.before = None if before is None else weakref.ref(before)
        self.left, self.ready = Event(), Event()
        self.back: Tensor | None = None
        self.kept = self.found = self.passes = 0


class Sent(NamedTuple):
    """A saved tensor as a view of a storage that was copied to host memory.

    `witness` is an empty tensor that shares the tensor's version counter, to detect writes.
    """

    home: _Home
    witness: Tensor
    version: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class OnHost(InPlace):
    """Saved tensors whose large storages are copied to host memory in forward, and back in backward.

    Args:
        pin: use page-locked host memory, which the GPU copies asynchronously.
        least_bytes: smaller storages stay on the device; None: `LEAST_BYTES`.
        new_block: allocates host memory: a number of bytes to a uint8 tensor; None: an `Arena` for each block.
    """

    offloads = True

    def __init__(
        self,
        device: Device,
        *,
        pin: bool = True,
        least_bytes: int | None = None,
        new_block: Callable[[int], Tensor] | None = None,
    ) -> None:
        self._device, self._pin = device, pin
        self._least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        self._new_block = new_block or self._arena
        self._homes: weakref.WeakValueDictionary[tuple[int, int], _Home] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Home] | None = None
        self._free: dict[int, list[Tensor]] = {}  # by size: unused blocks of host memory
        self._leaving: deque[tuple[Event, Tensor]] = deque()
        self._coming: deque[tuple[Event, Tensor]] = deque()

    @unobserved()
    def keep(self, tensor: Tensor) -> Any:
        if not self._is_worth_it(tensor):
            return super().keep(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = self._send(storage)
        home.kept += 1
        witness = tensor.detach()
        witness.data = witness.new_empty(0)
        where = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return Sent(home, witness, tensor._version, tensor.dtype, *where)

    @unobserved()
    @torch.no_grad()
    def find(self, kept: Any) -> Tensor:
        if isinstance(kept, KeptTensor):
            return super().find(kept)
        _same_version(kept.witness, kept.version, kept.size)
        home = kept.home
        back = self._fetch(home)
        home.ready.wait()
        before = home.before and home.before()
        if before is not None and before.back is None and not before.found and before.passes == home.passes:
            coming = self._fetch(before)
            self._coming.append((before.ready, coming))
            self._let_go(self._coming, MOST_LEAVING)
        home.found += 1
        if home.found == home.kept:  # all used in this pass; another pass copies it back again
            home.found, home.back, home.passes = 0, None, home.passes + 1
        view = torch.empty(0, dtype=kept.dtype, device=back.device)
        return view.set_(back.untyped_storage(), kept.offset, kept.size, kept.stride)

    def release_all(self) -> None:
        self._let_go(self._leaving, 0)
        self._let_go(self._coming, 0)
        self._last = None

    def _is_worth_it(self, tensor: Tensor) -> bool:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        return plain and self._device.is_home_of(tensor) and tensor.untyped_storage().nbytes() >= self._least_bytes

    @torch.no_grad()
    def _send(self, storage: Any) -> _Home:
        self._let_go(self._coming, 0)  # else a block could be overwritten while it is still copied back
        home = _Home(storage, self._take(storage.nbytes()), None if self._last is None else self._last())
        weakref.finalize(home, self._free[home.block.numel()].append, home.block).atexit = False
        self._last = weakref.ref(home)
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        with self._device.aside("activations out") as home.left:
            self._device.copy(home.block[: home.nbytes], memory)
        self._leaving.append((home.left, memory))
        self._let_go(self._leaving, MOST_LEAVING)
        return home

    def _fetch(self, home: _Home) -> Tensor:
        if home.back is None:
            back = torch.empty(home.nbytes, dtype=torch.uint8, device=self._device.device)
            with self._device.aside("activations in") as home.ready:
                home.left.wait()
                self._device.copy(back, home.block[: home.nbytes])
            home.back = back
        return home.back

    def _let_go(self, held: deque[tuple[Event, Tensor]], limit: int) -> None:
        """Release all but the last `limit` storages of `held`, each after the compute stream waits for its copy."""
        while len(held) > limit:
            event, _memory = held.popleft()  # held until the wait is enqueued
            event.wait()

    def _take(self, nbytes: int) -> Tensor:
        """Return a block of host memory of at least `nbytes`, rounded up by at most an eighth.

        Rounding lets sequence lengths that differ from step to step share blocks. The block is free again when its
        `_Home` is deleted.
        """
        size = round_up(nbytes, max(BLOCK_BYTES, 1 << max(nbytes.bit_length() - 4, 0)))
        free = self._free.setdefault(size, [])
        if not free:
            self.allocated_bytes += size
            free.append(self._new_block(size))
        return free.pop()

    def _arena(self, nbytes: int) -> Tensor:
        arena = Arena(nbytes, self._device, pin=self._pin)
        weakref.finalize(self, arena.close).atexit = False
        return arena.take(nbytes)
