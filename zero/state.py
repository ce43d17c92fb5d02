"""The tensors of a run, and the `State` that moves from step to step.

A unit on one rank is a `UnitState`:

    full_P     trainable and frozen flats in one buffer, in the compute dtype: resident, or borrowed from the pool
    shard_S    this rank's range of the trainable flat in the compute dtype; a view of full_P where that is resident
    frozen_S   the same for the frozen flat
    grad       the gradient that the update will read: this rank's range, or the whole flat
    pages      master (half precision only) and moments, in the store

A `State` is a value: `step` takes one and returns the next, and the old one is spent. The tensors are the same memory,
so a state costs nothing, and a spent one says so instead of showing numbers of a later step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zero.errors import StaleStateError
from zero.optim import Hyper
from zero.order import CollectiveLog
from zero.pool import Buffer
from zero.precision import LossScale
from zero.store import Store
from zero.unit import UnitSpec

if TYPE_CHECKING:
    from zero.gather import Gatherer
    from zero.plan import Plan
    from zero.reduce import Reducer
    from zero.update import Updater


@dataclass(eq=False)
class UnitState:
    """One unit's tensors on this rank, and what is owed to it.

    Attributes:
        resident: the buffer that always holds the full unit; None when the unit is gathered into the pool.
        shard_S: (S,) trainable, compute dtype.
        frozen_S: (S of the frozen flat,), compute dtype.
        grad: (P,) or (S,), see `Plan.gradients`; None when nothing is trainable.
        waiting: the update that the next gather must force, or None.
        version: how many times the parameters changed.
        calls: the autograd nodes of this microbatch's forward calls, until all their gradients have arrived.
        returned: how many of them have.
        filled: `grad` holds a part of this step's gradient.
    """

    spec: UnitSpec
    resident: Buffer | None
    shard_S: Tensor
    frozen_S: Tensor
    grad: Tensor | None
    waiting: Hyper | None = None
    version: int = 0
    calls: list[Any] = field(default_factory=list)
    returned: int = 0
    filled: bool = False

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def full_numel(self) -> int:
        return self.spec.trainable.P + self.spec.frozen.P

    def own_grad_S(self, rank: int) -> Tensor:
        """(S,): the range of `grad` that `rank` owns, whether the rest is here or not."""
        assert self.grad is not None
        if self.grad.numel() == self.spec.trainable.S:
            return self.grad
        start, stop = self.spec.trainable.shard(rank)
        return self.grad[start:stop]


@dataclass(frozen=True, eq=False)
class Machinery:
    """What every state of one run shares: the copied model and the parts that run it."""

    plan: Plan
    model: nn.Module
    store: Store
    units: tuple[UnitState, ...]
    gatherer: Gatherer
    reducer: Reducer
    updater: Updater
    log: CollectiveLog


@dataclass(frozen=True, eq=False)
class State:
    """The training state after `step` updates.

    Attributes:
        step: updates made, the skipped ones not counted.
        scale: the loss scale and its counters.
        skipped: steps that changed nothing because a gradient was not finite.
    """

    machinery_: Machinery = field(repr=False)
    step_: int
    scale_: LossScale
    spent_: list[int] = field(default_factory=list, repr=False)

    @property
    def step(self) -> int:
        return self._live().step_

    @property
    def scale(self) -> LossScale:
        return self._live().scale_

    @property
    def skipped(self) -> int:
        return self.scale.skipped

    @property
    def machinery(self) -> Machinery:
        return self._live().machinery_

    @property
    def plan(self) -> Plan:
        return self.machinery.plan

    @property
    def model(self) -> nn.Module:
        """The copy that runs on gathered parameters; its own parameters cannot be read outside their modules."""
        return self.machinery.model

    def advance(self, *, scale: LossScale, finite: bool) -> State:
        """The state after one more step; this one is spent."""
        live = self._live()
        self.spent_.append(live.step_ + live.scale_.skipped + 1)
        return replace(live, step_=live.step_ + finite, scale_=scale, spent_=[])

    def _live(self) -> State:
        if self.spent_:
            raise StaleStateError(
                f"this State was already consumed by step {self.spent_[0]}; "
                "write `state, metrics = step(state, microbatches)` and keep the new one"
            )
        return self
