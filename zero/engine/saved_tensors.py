"""Keep autograd's saved tensors between forward and backward, where autograd made them or in host memory.

`OnHost` copies a storage to host memory as soon as a tensor in it is saved, beside forward, and copies it back one
storage ahead of the backward that needs it. It copies storages, because saved tensors are often views: query, key and
value of one product are one copy. A storage of less than `LEAST_BYTES` stays. On a CPU everything is in host memory
already.

The host never waits. A storage that is copied out is held until the compute stream has a wait for the copy, which
happens `MOST_LEAVING` storages later; so is a storage that was copied back and not used.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zero.core.sizes import BLOCK_BYTES, round_up
from zero.platform.device import Arena, Device, Event

LEAST_BYTES = 1 << 20
"""Smaller storages stay: they are not worth two copies."""

MOST_LEAVING = 2
"""Storages that are copied to the host at a time."""


class Kept(NamedTuple):
    """A saved tensor that stays. With hooks in place torch does not check versions, so this does."""

    tensor: Tensor
    version: int

    def unchanged(self) -> Tensor:
        """Return the tensor; raise, as torch without hooks, if it was written to since."""
        _same_version(self.tensor, self.version, self.tensor.shape)
        return self.tensor


def _same_version(tensor: Tensor, version: int, shape: torch.Size) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(shape)} is at version {tensor._version}, expected {version}"
        )


class InPlace:
    """Keeps every tensor where it is.

    Attributes:
        offloads: tensors are copied elsewhere, so every unit's forward needs hooks.
        allocated_bytes: bytes of host memory.
    """

    offloads = False
    allocated_bytes = 0

    def keep(self, tensor: Tensor) -> Any:
        """Return what autograd keeps in place of `tensor`."""
        return Kept(tensor, tensor._version)

    def find(self, kept: Any) -> Tensor:
        """Return the tensor that was kept."""
        tensor: Tensor = kept.unchanged()
        return tensor

    def release_all(self) -> None:
        """Hold no storage any longer: a pass is over, or was interrupted."""


class _Home:
    """A copy of one storage in host memory, and on the device again while backward needs it."""

    def __init__(self, storage: Any, block: Tensor, before: "_Home | None") -> None:
        self.nbytes, self.block = storage.nbytes(), block
        self.origin = StorageWeakRef(storage)  # no other storage gets its address as long as this lives
        self.before = None if before is None else weakref.ref(before)
        self.left, self.ready = Event(), Event()
        self.back: Tensor | None = None
        self.kept = self.found = self.passes = 0


class Sent(NamedTuple):
    """A saved tensor as a view of a storage that was copied to the host.

    `witness` shares the tensor's version counter and none of its memory.
    """

    home: _Home
    witness: Tensor
    version: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class OnHost(InPlace):
    """Copies large storages of the device to host memory and back.

    Args:
        pin: lock host memory for the GPU's copy engines.
        least_bytes: smaller storages stay.
        new_block: makes host memory, (n,) uint8 of n bytes; None: an arena for each block.
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
        self._free: dict[int, list[Tensor]] = {}  # blocks of host memory that are not used
        self._leaving: deque[tuple[Event, Tensor]] = deque()
        self._coming: deque[tuple[Event, Tensor]] = deque()

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

    @torch.no_grad()
    def find(self, kept: Any) -> Tensor:
        if isinstance(kept, Kept):
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
        if home.found == home.kept:  # the last of this pass; another pass over the graph fetches it once more
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
        self._let_go(self._coming, 0)  # a block may be filled again while its last content is on the way
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
        """Free memory that a side stream works on, after a wait of the compute stream for that."""
        while len(held) > limit:
            event, _memory = held.popleft()  # held until the wait is enqueued
            event.wait()

    def _take(self, nbytes: int) -> Tensor:
        """Return a block of host memory, of a size rounded up by an eighth at most.

        So lengths that differ from step to step share blocks. It is free again when its home is gone.
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
