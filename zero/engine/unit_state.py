"""One unit's tensors on this rank, and its deferred update."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero.core.optim import Hyper
from zero.engine.memory import Buffer
from zero.engine.model import ParameterPlaceholder, UnitSpec
from zero.engine.plan import Part
from zero.engine.unit_step import UnitStep
from zero.platform.device import PASSED, Event
from zero.platform.handle import Handle
from zero.store import Ticket


@dataclass(eq=False, slots=True)
class UnitState:
    """One unit's tensors on this rank, and its deferred update.

    The store has the rest in pages: moments, the fp32 master of half precision, offloaded shards and gradients.

    Attributes:
        resident: the buffer that permanently holds the full unit, first the trainable flat and then the frozen one, in
            the compute dtype; None if the unit is gathered into the pool.
        shards: (S,) this rank's shard of each flat; a view of `resident` if there is one, else (P,) of the trainable
            flat if this rank updates the whole flat; None if parameters are offloaded.
        grad: (P,) or (S,), see `Plan.grad_numel`; None if nothing is trainable, or while the gradient is offloaded.
        secondary: secondary shards of each flat, ((N - 1) x S,) each for N nodes, in the flat's dtype. They are copies,
            kept in the store, of other nodes' shards; see `zero.distributed.routes`.
        secondary_versions: the `versions` of the secondary shards after the last started gather; () if they are empty.
        deferred: the numbers of the update that must be applied before the next gather, or None.
        grad_ready: the event at the end of the work that makes the gradient of that update.
        updated: the event at the end of that update's staged parts; None if they are not launched.
        tickets: tickets of the parts of that update that the store's threads execute.
        interrupted: whether that update has started and an exception interrupted it.
        version: the number of changes of the parameters.
        frozen_version: the number of changes that included frozen parameters, which steps do not change.
        grad_readers: handles of updates that still read `grad`, see `await_grad_readers`.
        place: the unit's place in the order of the coming updates.
        parts: the ranges of this rank's elements that are updated together.
        placeholders: the model's trainable parameters, by slot.
        step: the record of this step.
    """

    spec: UnitSpec
    resident: Buffer | None
    shards: tuple[Tensor | None, ...]
    grad: Tensor | None
    secondary: tuple[Tensor | None, ...]
    secondary_versions: tuple[int, ...] = ()
    deferred: Hyper | None = None
    grad_ready: Event = PASSED
    updated: Event | None = None
    tickets: list[Ticket] = field(default_factory=list)
    interrupted: bool = False
    version: int = 0
    frozen_version: int = 0
    grad_readers: list[Handle] = field(default_factory=list)
    place: int = 0
    parts: tuple[Part, ...] = ()
    placeholders: dict[int, ParameterPlaceholder] = field(default_factory=dict)
    step: UnitStep = field(default_factory=UnitStep)

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the flats."""
        return self.version, *(self.frozen_version for _ in self.shards[1:])

    def secondary_is_current(self, number: int) -> bool:
        """Return whether the secondary shards of a flat are copies of the current shards."""
        return bool(self.secondary_versions) and self.secondary_versions[number] == self.versions[number]

    @property
    def shard_S(self) -> Tensor | None:
        """This rank's shard of the trainable flat."""
        return self.shards[0]

    @property
    def waits_in_update(self) -> bool:
        """Whether the host waits for the store's threads inside the deferred update, between passes over matrices."""
        return self.deferred is not None and bool(self.spec.matrices) and any(part.lent is None for part in self.parts)

    def trains(self, slots: Iterable[int]) -> list[bool]:
        """Return `requires_grad` of the parameters of some trainable slots."""
        with torch._C.DisableTorchFunctionSubclass():  # this takes a fifth of the time
            return [self.placeholders[slot].requires_grad for slot in slots]

    def await_grad_readers(self) -> None:
        """Have the current stream wait for the last update, which reads `grad` on another stream or thread.

        The next gradient must not be written earlier. The gather of a unit waits for its update, but nothing else waits
        for the update of a unit that is not gathered in a step.
        """
        while self.grad_readers:
            self.grad_readers[-1].wait()  # removed only afterwards: waited for again after an interrupt
            self.grad_readers.pop()

    def mark_changed(self, *, resident: bool, frozen: bool = False) -> None:
        """Note that the parameters changed, so that gathered copies are stale.

        Args:
            resident: whether the resident buffer was changed too and stays current.
            frozen: whether frozen parameters changed too.
        """
        self.version += 1
        self.frozen_version += frozen
        if resident and self.resident is not None:
            self.resident.version = self.version

    def own_params(self, *, full_update: bool) -> Tensor | None:
        """Return the trainable parameters that this rank updates, (P,) or (S,), compute dtype; None if offloaded."""
        if full_update and self.resident is not None:
            return self.resident.flat[: self.spec.trainable.P]
        return self.shard_S

    def own_grad_S(self, rank: int) -> Tensor:
        """Return the (S,) range of `grad` that `rank` owns."""
        assert self.grad is not None
        return self.spec.trainable.own_S(self.grad, rank)
