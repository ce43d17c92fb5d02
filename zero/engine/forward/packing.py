"""Replace saved tensors that are views of gathered buffers by their positions, so that the buffers can be released.

While a site computes, a pair of saved-tensor hooks receives every tensor that autograd saves. A tensor in a gathered
buffer is replaced by (unit, version, offset, size, stride); the first use in backward gathers the unit again.
Activations are not recomputed, but kept by `zero.engine.memory.saved_tensors`. If the user wraps the site in a
checkpoint, these hooks are not installed, because torch runs only the innermost hooks. The checkpoint then drops all
saved tensors and recomputes the forward.

Source: research prototypes of saved-tensor regather.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.core.tree import replaced, tensors_in
from zero.distributed.mesh import is_dtensor, local_part, spec_of, with_spec
from zero.engine.forward.graph import check_same_parameters
from zero.engine.memory import Buffer, InPlace, KeptTensor, Pool, storage_address
from zero.engine.unit_state import UnitState
from zero.platform.modes import unobserved


class Packed(NamedTuple):
    """A saved tensor as a view of its unit's gathered buffer; `offset` counts elements from the buffer's start."""

    unit: int
    version: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class PackedPlaced(NamedTuple):
    """A saved DTensor whose local part is a view of its unit's gathered buffer."""

    local: Packed
    spec: Any


class Packing:
    """The saved-tensor hooks of sites.

    Args:
        pool: the buffers that are released; None if all units stay gathered.
        activations: keeps activations until backward.
        hold: gathers a unit for the running backward pass, and returns its buffer.
        has_dtensors: whether the model has DTensors.
    """

    def __init__(
        self,
        units: Sequence[UnitState],
        pool: Pool | None,
        activations: InPlace,
        hold: Callable[[UnitState], Buffer],
        *,
        has_dtensors: bool,
    ) -> None:
        self._units, self._pool, self._activations, self._hold = units, pool, activations, hold
        self._has_dtensors = has_dtensors
        self._sends = False  # whether the running site's activations are offloaded
        self._resident_addresses = {unit.resident.address for unit in units if unit.resident is not None}

    @contextmanager
    def hooks(self, *, offloads: bool) -> Iterator[None]:
        """Receive what autograd saves in the block, in which a site runs.

        Args:
            offloads: whether the site's activations go to host memory.
        """
        sent, self._sends = self._sends, offloads
        try:
            with self._hooks():
                yield
        finally:
            self._sends = sent

    def _hooks(self) -> AbstractContextManager[Any]:
        released = self._pool is not None or self._activations.offloads
        if not released or not torch.is_grad_enabled():
            return nullcontext()  # no buffer is ever released, so autograd may save all tensors itself
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return nullcontext()  # an outer unit's hooks handle all buffers; a checkpoint's hooks must not be hidden
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def own(self, outputs: Any) -> Any:
        """Copy outputs that are views of a gathered buffer, because the buffer is released before they are used."""
        if self._pool is None:
            return outputs
        borrowed = (t for t in tensors_in(outputs) if self._pool.holding(t) is not None)
        return replaced(outputs, {id(t): t.clone() for t in borrowed})

    def _pack(self, tensor: Tensor) -> Any:
        if self._has_dtensors and is_dtensor(tensor):
            with unobserved():
                local = local_part(tensor)
            if self._pool is None or self._pool.holding(local) is None:
                return KeptTensor(tensor, tensor._version)
            return PackedPlaced(self._pack(local), spec_of(tensor))
        buffer = None if self._pool is None else self._pool.holding(tensor)
        if buffer is None:
            stays = not self._sends or storage_address(tensor) in self._resident_addresses
            return KeptTensor(tensor, tensor._version) if stays else self._activations.keep(tensor)
        assert buffer.unit is not None
        offset = int(tensor.storage_offset()) - int(buffer.flat.storage_offset())
        return Packed(buffer.unit, buffer.version, offset, tensor.shape, tensor.stride())

    @unobserved()
    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, PackedPlaced):
            return with_spec(self._unpack(packed.local), packed.spec)
        if not isinstance(packed, Packed):
            return packed.unchanged() if isinstance(packed, KeptTensor) else self._activations.find(packed)
        unit = self._units[packed.unit]
        check_same_parameters([(unit, packed.version)])
        buffer = self._hold(unit)
        offset = int(buffer.flat.storage_offset()) + packed.offset
        return buffer.flat.as_strided(packed.size, packed.stride, offset)
