"""The objects that all states of one run share: plan, model, store, units and the parts that train them."""

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from zero.distributed.routes import Routes
from zero.engine.backward import BackwardPass, Reducer
from zero.engine.checksums import Checksums
from zero.engine.forward import SiteRunner
from zero.engine.gather import CollectiveLog, Residency
from zero.engine.model import ModuleTree, Takeover
from zero.engine.plan import Plan
from zero.engine.step_losses import StepLosses
from zero.engine.unit_state import UnitState
from zero.engine.update import Gradients, Updater
from zero.platform.handle import Handle
from zero.platform.modes import unobserved
from zero.platform.tape import Tape
from zero.store import PrefetchStore


@dataclass(eq=False)
class Streamed:
    """The weights that the last complete `zero.stream_weights` with `keep` has yielded.

    Attributes:
        step: the step of these weights; None if there are none, or the stream was not read to its end.
        shards: this rank's shard of each trainable flat by unit index, (S,), compute dtype, in host memory.
        frozen_versions: `UnitState.frozen_version` by unit index.
    """

    step: int | None = None
    shards: dict[int, Tensor] = field(default_factory=dict)
    frozen_versions: dict[int, int] = field(default_factory=dict)


@dataclass
class Lineage:
    """The saves of a run and of all runs that continued from one of them.

    Attributes:
        name: a random text, which a load replaces by the checkpoint's. Rank 0's text is saved.
        saved_ns: the time of the last save, in nanoseconds since 1970; 0: none yet.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    saved_ns: int = 0


class PressureWatch(Protocol):
    """The watch of this rank over its memory, see `zero.engine.pressure`."""

    def read(self, plan: Plan) -> int:
        """Return the bits of the memories of which this rank is short."""
        ...

    def react(self, state: Any, shortages: Collection[int]) -> Any:
        """Return the state, moved if a rank is short of memory or has been calm. Collective."""
        ...


def awake() -> None:
    """Do nothing, because the state is not parked."""


@dataclass(eq=False)
class Runtime:
    """The objects that all states of one run share.

    The plan, and the parts that depend on it, are set by `wire`: at first, and again when a state was moved.

    Attributes:
        takeover: the conversion of the model to sharded training, and back.
        tree: detects parameters that the model gained, lost or exchanged since the first state was made.
        log: the collectives of the step, to compare ranks.
        tape: the recorder of timelines.
        checksums: the recorder of steps that are made twice.
        losses: the losses of the step that is under way, or of the last one.
        open_blocks: the open blocks of `zero.gathered`.
        open_edits: one function for each open block of `zero.gathered` with `modify`: it writes the block's edits so
            far. Collective.
        copying: handles of saves that still copy the state in threads of their own.
        streamed: the weights that an inference engine has.
        lineage: names the run in its checkpoints.
        route_names: the settings gather, reduce and shard for which `routes` was made.
        moved_bytes: bytes of pages and shards that moves have made on other tiers or in other forms.
        pressure: the watch over memory; None: pages stay where they are.
        wake: brings a parked state back, see `zero.engine.park`; else it does nothing.
    """

    takeover: Takeover
    tree: ModuleTree
    store: PrefetchStore
    units: tuple[UnitState, ...]
    sites: SiteRunner
    log: CollectiveLog
    tape: Tape
    checksums: Checksums
    plan: Plan = field(init=False)
    routes: Routes = field(init=False)
    route_names: tuple[str, str, str] = ("", "", "")
    residency: Residency = field(init=False)
    reducer: Reducer = field(init=False)
    backward: BackwardPass = field(init=False)
    gradients: Gradients = field(init=False)
    updater: Updater = field(init=False)
    losses: StepLosses = field(default_factory=StepLosses)
    open_blocks: list[object] = field(default_factory=list)
    open_edits: list[Callable[[], None]] = field(default_factory=list)
    copying: list[Handle] = field(default_factory=list)
    streamed: Streamed = field(default_factory=Streamed)
    lineage: Lineage = field(default_factory=Lineage)
    moved_bytes: int = 0
    pressure: PressureWatch | None = None
    wake: Callable[[], None] = awake

    @property
    def decides_on_device(self) -> bool:
        """Whether a step is decided by the device, so that the host need not wait for it.

        Its updates must read the decision from memory, which those by a kernel do; those by the store's threads wait
        for it themselves.
        """
        plan, numbers = self.plan, self.updater.numbers
        can_wait = plan.optimizer.matrix_rule is None and not plan.beside.groups
        return can_wait and not plan.world.compute.shares_memory and numbers.fused is not None

    @property
    def is_wired(self) -> bool:
        """Whether the parts that depend on the plan exist; not while a state moves."""
        return "updater" in vars(self)

    def present(self) -> tuple[Plan, int]:
        """Return the present plan, and `moved_bytes`."""
        return self.plan, self.moved_bytes

    @unobserved()
    def gather_changed(self) -> None:
        """Start to gather all resident units that have changed. Collective.

        Afterwards all ranks have started the same gathers. Before, a rank may be ahead of others, because it ran
        forwards that they did not run.
        """
        self.wake()
        with self.sites.use:
            self.residency.complete()

    @unobserved()
    def make_updates(self) -> None:
        """Apply all deferred updates, and wait for the device. Collective."""
        self.gather_changed()
        for unit in self.units:
            self.updater.apply_deferred(unit)
        self.residency.gathers.land()
        self.plan.world.compute.join()  # `apply_deferred` returns when the update is launched

    def finish_step(self) -> None:
        """Apply all deferred updates, and wait until all pages are written. Collective."""
        self.make_updates()
        self.store.drain()

    def await_copies(self) -> None:
        """Wait until saves have copied the state. Call it before parameters, masters or moments change."""
        while self.copying:
            self.copying[-1].wait()  # removed only afterwards, so that the save is waited for again after an interrupt
            self.copying.pop()

    def settle(self) -> None:
        """Write open edits of `zero.gathered`, apply all deferred updates, and wait for the device. Collective.

        Call it before reading or writing pages or parameters outside of a step.
        """
        self.write_edits()
        self.make_updates()

    def write_edits(self) -> None:
        """Write open edits of `zero.gathered`, when saves have copied the state. Collective."""
        self.wake()
        self.await_copies()
        for write in self.open_edits:
            write()
