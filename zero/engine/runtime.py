"""The parts that all states of one run share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from zero.distributed.routes import Routes
from zero.engine.gather import Gatherer
from zero.engine.gradient import Gradients
from zero.engine.module_tree import ModuleTree
from zero.engine.plan import Plan
from zero.engine.reduce import Reducer
from zero.engine.takeover import Takeover
from zero.engine.unit_state import UnitState
from zero.engine.update import Updater
from zero.engine.visit_order import CollectiveLog
from zero.platform.timeline import Tape
from zero.store import PrefetchStore


@dataclass(frozen=True, eq=False)
class Runtime:
    """The model of a run and the parts that train it.

    Attributes:
        tree: compares the model with what it was when the state was made.
        open_edits: of blocks of `zero.gathered` that edit: each writes the edits so far. Collective.
    """

    plan: Plan
    takeover: Takeover
    tree: ModuleTree
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
        self.plan.world.compute.join()  # the host considers an update made as soon as it is launched

    def finish_step(self) -> None:
        """Make all deferred updates, to the last page written. Collective."""
        self.make_updates()
        self.store.drain()

    def settle(self) -> None:
        """Write open edits, make all deferred updates, and wait for the device. Collective.

        Call it before pages and parameters are read or written outside of a step, also by the host.
        """
        for write in self.open_edits:
            write()
        self.make_updates()
