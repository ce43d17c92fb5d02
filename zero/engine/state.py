"""The `State` that moves from step to step.

A `State` is a value: `step` takes one and returns the next, and the old one is spent. The tensors are the same memory
(the `UnitState` of each unit, and pages in the store), so a state costs nothing, and a spent one says so instead of
showing numbers of a later step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from zero.core.loss_scale import LossScale
from zero.distributed.routes import Routes
from zero.engine.gather import Gatherer
from zero.engine.gradient import Gradients
from zero.engine.module_tree import ModuleTree
from zero.engine.plan import Plan
from zero.engine.reduce import Reducer
from zero.engine.unit_state import UnitState
from zero.engine.update import Updater
from zero.engine.visit_order import CollectiveLog
from zero.errors import StaleStateError
from zero.platform.timeline import Tape
from zero.store import PrefetchStore


@dataclass(frozen=True, eq=False)
class Runtime:
    """What every state of one run shares: the copied model and the parts that run it.

    Attributes:
        tree: compares the model with what it was when the state was made.
        originals: parameters of the model that was given, by name, which a gradient could reach by mistake.
        open_edits: of blocks of `zero.gathered` that edit, each writes what was edited so far. Collective.
    """

    plan: Plan
    model: nn.Module
    tree: ModuleTree
    originals: Mapping[str, nn.Parameter]
    store: PrefetchStore
    units: tuple[UnitState, ...]
    routes: Routes
    gatherer: Gatherer
    gradients: Gradients
    reducer: Reducer
    updater: Updater
    log: CollectiveLog
    tape: Tape
    open_edits: list[Callable[[], None]] = field(default_factory=list)

    def gather_changed(self) -> None:
        """Start to gather resident units that have changed: a rank may have run forwards of its own. Collective."""
        with self.gatherer.use:
            self.gatherer.residency.complete()

    def make_updates(self) -> None:
        """Make all deferred updates, and wait for the device. Collective."""
        self.gather_changed()
        for unit in self.units:
            self.updater.apply_deferred(unit)
        self.gatherer.residency.land()
        self.plan.world.compute.join()  # for the host an update was made when it was launched

    def settle(self) -> None:
        """Write open edits, make all deferred updates, and wait for the device. Collective.

        Call it before pages and parameters are read or written outside of a step, also by the host.
        """
        for write in self.open_edits:
            write()
        self.make_updates()


@dataclass(frozen=True, eq=False)
class State:
    """The training state after `step` updates. `zero.init` makes the first one, and every step the next.

    One thread of one process may use it at a time; another thread gets ConfigError.

    Attributes:
        step: updates made, the skipped ones not counted.
        scale: the loss scale and its counters.
        skipped: steps that changed nothing because a gradient was not finite.
        tried: `step` and `skipped` together.
        plan: that it was made from.
        model: the model that trains: a copy of the plan's, or that model itself with `Plan(in_place=True)`.

    Raises:
        StaleStateError: an attribute was read of a state that a later step has consumed.
    """

    machinery_: Runtime = field(repr=False)
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
    def tried(self) -> int:
        """Steps that were made, the skipped ones counted."""
        return self.step + self.skipped

    @property
    def runtime(self) -> Runtime:
        return self._live().machinery_

    @property
    def state(self) -> State:
        """Itself: whatever has a state gives it by this name."""
        return self._live()

    @property
    def plan(self) -> Plan:
        return self.runtime.plan

    @property
    def model(self) -> nn.Module:
        """The model that runs on gathered parameters; reading one of its parameters elsewhere gathers its unit."""
        return self.runtime.model

    def advance(self, *, scale: LossScale, finite: bool) -> State:
        """The state after one more step; this one is spent, and so are its gradients, which the update may use up."""
        live = self._live()
        live.machinery_.updater.sums.clear()
        self.spent_.append(live.tried + 1)
        return replace(live, step_=live.step_ + finite, scale_=scale, spent_=[])

    def restored(self, *, step: int, scale: LossScale) -> State:
        """The state that a checkpoint is about to put in this one's memory; this one is spent."""
        return replace(self.advance(scale=scale, finite=False), step_=step)

    def spend(self) -> None:
        """Something changed that cannot go back: nothing may take this for the state that it was."""
        self.advance(scale=self.scale, finite=False)

    def _live(self) -> State:
        if self.spent_:
            raise StaleStateError(
                f"this State was already consumed by step {self.spent_[0]}; "
                "write `state, metrics = step(state, microbatches)` and keep the new one"
            )
        return self
