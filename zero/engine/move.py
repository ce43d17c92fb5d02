"""Move a state to other settings of memory while it trains (`move`): tiers, stage, activations, gathers.

No bit of the results depends on these settings. The plan of the new settings is made first; then the pools of the old
plan are freed, units are moved one after the other, and the pools of the new plan are made. So memory never holds more
than the larger plan and one unit. If a rank fails, all ranks move the units back.
"""

import gc
import traceback
from collections.abc import Mapping, Sequence, Set
from functools import partial
from os import PathLike, fspath
from typing import Any

import torch

from zero.core import checks
from zero.core.activations import Activations
from zero.core.offload import PRESETS, Offload
from zero.core.sizes import round_up
from zero.core.stage import Stage
from zero.engine.after import After
from zero.engine.arguments import check_type
from zero.engine.open_store import give_slots, host_block, open_disks, tiers_of
from zero.engine.park import park
from zero.engine.plan import Arrangement, Plan, check_settings, policies_of, settings_of, thread_count
from zero.engine.runtime import Runtime, awake
from zero.engine.state import State
from zero.engine.together import on_all_ranks
from zero.engine.unit_move import (
    UnitMove,
    changed_kinds,
    gather_values,
    order_of_units,
    own_values,
    with_room,
)
from zero.engine.whole import add_empty_buffers
from zero.engine.wire import open_routes, rewired, set_activations, unwire
from zero.errors import ConfigError, PlanError, if_it_fails, with_class
from zero.platform.arena import Arena
from zero.platform.host_memory import give_back_memory
from zero.platform.modes import unobserved
from zero.platform.threads import uninterrupted
from zero.store import MemoryStore, Store

PARKING = ("parked", "resident")
"""Values of `offload` that are no placement of a plan: the state leaves the GPU for a while, and comes back."""


@unobserved()
def move(
    state: State,
    *,
    offload: Offload | str | None = None,
    offload_path: str | Sequence[str] | None = None,
    stage: Stage | int | None = None,
    activations: Activations | Mapping[str, Activations] | None = None,
    keep: Sequence[str] | None = None,
    prefetch: int | None = None,
    gather: str | None = None,
) -> State:
    """Return `state` with other settings of memory; `state` itself cannot be used again. Collective.

    Call it between two steps. Settings that are None stay as they are. The results of later steps do not depend on
    moves, to the last bit. The model, its hooks, optimizers, generators, trackers and saves go on.

    Args:
        state: the state after a step.
        offload: as in `zero.Plan`. The name of a preset changes tiers only; with a `zero.Offload` all of its settings
            are used, but without `page` the size of pages stays. Or "parked": all of the state and all buffers leave
            the GPU for host memory, until "resident", or the next use, brings them back. These two return `state`
            itself, which goes on, and take no other settings.
        offload_path: folder, or folders, for pages on disks.
        stage, activations, keep, prefetch, gather: as in `zero.Plan`.

    Raises:
        PlanError: a setting has an unknown value or contradicts another one. Nothing has changed then.
        DoesNotFit: the state does not fit on the new tiers. Nothing has changed then.
        ConfigError: a step is under way, or a block of gathered values is open. Nothing has changed then.
        MachineError: a rank has failed, for example because a disk is full. All units were moved back, and `state` can
            still be used; if that failed too, a note says so.
        HandshakeError: the ranks have different settings.
    """
    check_type(state, State, "zero.move", 'state = zero.move(state, offload="cpu")')
    if offload in PARKING:
        settings = offload_path, stage, activations, keep, prefetch, gather
        if any(setting is not None for setting in settings):
            raise ConfigError(f"zero.move: offload={offload} takes no other settings. Move the state when it is back.")
        if offload == "resident":
            state.runtime.wake()
        elif not state.is_parked:
            park_between_steps(state)
        return state
    runtime, world = state.runtime, state.plan.world
    _check_between_steps(runtime)
    arrangement = _changed(
        state.plan, offload=offload, offload_path=offload_path, stage=stage, activations=activations, keep=keep,
        prefetch=prefetch, gather=gather,
    )  # fmt: skip
    world.agree({"arrangement": str(arrangement)}, "arguments of zero.move")
    return move_to(state, on_all_ranks(world, lambda: state.plan.moved(arrangement)))


@unobserved()
def move_to(state: State, plan: Plan) -> State:
    """Return `state` on the tiers of `plan`, which `Plan.moved` has made of the state's plan. Collective.

    Raises the errors of `move`.
    """
    runtime, world = state.runtime, plan.world
    with runtime.sites.use:
        if plan.facts.local_sum != state.plan.facts.local_sum:
            raise PlanError(
                "zero.move: with several ranks and microbatches stages 0 and 1 add microbatches first, stages 2 and "
                "3 add ranks first, so the last bits would change. Save a checkpoint, and load it at the other stage."
            )
        world.agree(settings_of(plan), "settings of zero.move")
        runtime.tree.check()
        runtime.await_copies()
        if _differ_in_activations(state.plan, plan):
            set_activations(runtime, plan)  # without waiting for updates
            return state.advance(state.after, "zero.move")
        step, scale = state.after.counts
        runtime.finish_step()
        moving = _Move(runtime, plan)
        with uninterrupted():  # after Ctrl-C `state` is valid, and moved
            try:
                moving.run()
            except BaseException:
                if moving.is_lost:
                    state.spent_.append("was lost in a move that failed. Load a checkpoint.")
                raise
    return state.advance(After.known(step, scale), "zero.move")


def _differ_in_activations(old: Plan, new: Plan) -> bool:
    """Return whether two plans differ in activations at the most."""
    arranged = new.arrangement._replace(activations=old.arrangement.activations)
    return arranged == old.arrangement and new.placement == old.placement and new.bytes == old.bytes


@unobserved()
def park_between_steps(state: State, kinds: Set[str] | None = None) -> None:
    """Park the state, see `park`, or raise ConfigError inside of a step."""
    _check_between_steps(state.runtime)
    with state.runtime.sites.use:
        _ = state.after.counts  # the last step may have been skipped, which changes the updates' counts
        state.runtime.await_copies()
        park(state.runtime, kinds)


def _changed(
    plan: Plan, *, offload: Offload | str | None, offload_path: str | Sequence[str] | None, **settings: Any
) -> Arrangement:
    """Return the plan's arrangement with those settings that are not None, checked."""
    changes = {name: value for name, value in settings.items() if value is not None}
    if "stage" in changes:
        changes["stage"] = changes["stage"] if isinstance(changes["stage"], Stage) else Stage(changes["stage"])
    if "activations" in changes:
        changes["activations"] = policies_of(changes["activations"], plan.compile)
    if "keep" in changes:
        changes["keep"] = checks.patterns("zero.keep", changes["keep"], PlanError)
    now = plan.arrangement
    check_settings(
        comparisons=plan.comparisons, update=plan.update, reduce=plan.facts.reduce, shard=plan.facts.shard,
        gather=changes.get("gather", now.gather), prefetch=changes.get("prefetch", now.prefetch),
    )  # fmt: skip
    there = now.offload
    if isinstance(offload, Offload):
        there = offload
    elif offload is not None:
        Offload(offload)  # raises an error for an unknown preset
        there = there.model_copy(update=dict(zip(("optimizer", "param", "grad"), PRESETS[offload], strict=True)))
    if offload_path is not None:
        path = offload_path if isinstance(offload_path, str | PathLike) else [*map(fspath, offload_path)]
        there = Offload(**(there.model_dump() | {"path": fspath(path) if isinstance(path, PathLike) else path}))
    if there.page_bytes is None:
        there = there.model_copy(update={"page_bytes": plan.offload.page_bytes})
    return now._replace(**changes, offload=there)


def _check_between_steps(runtime: Runtime) -> None:
    """Raise ConfigError inside a step, a block of gathered values, or a capture of a CUDA graph."""
    placeholders = [placeholder for unit in runtime.units for placeholder in unit.placeholders.values()]
    if runtime.open_blocks or any(placeholder.full_value is not None for placeholder in placeholders):
        raise ConfigError("zero.move: a block of gathered values is open. Move the state after the block.")
    if not runtime.reducer.ended:
        raise ConfigError("zero.move: a step is under way. Move the state after its end, or after step.abandon().")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ConfigError("zero.move: a CUDA graph is being captured. Move the state before or after the capture.")


class _Move:
    """The move of a runtime, which has no deferred update, to the plan `new`.

    Attributes:
        is_lost: whether the state could be moved neither there nor back.
    """

    def __init__(self, runtime: Runtime, new: Plan) -> None:
        self._runtime, self._old, self._new, self._world = runtime, runtime.plan, new, new.world
        self._tiers, self._done = tiers_of(runtime.store), list[int]()
        self._before, self._wire = {**self._tiers.stores}, rewired(runtime)
        self.is_lost = False

    def run(self) -> None:
        """Move all units. Collective."""
        runtime, plan = self._runtime, self._new
        disk: dict[str, Store] = {}
        with if_it_fails(lambda: [store.close() for store in disk.values()]):
            on_all_ranks(self._world, lambda: disk.update(self._open_disk()))
        unwire(runtime)
        try:
            emptied = {"nvme"} if self._old.offload.paths != plan.offload.paths else set()
            self._tiers.refit(plan.tier, disk, emptied - self._tiers.lent)
            self._use_host_memory(plan)
            on_all_ranks(self._world, self._begin)
            self._move_units(order_of_units(runtime, self._old, plan), plan)
            open_routes(runtime, plan)
            on_all_ranks(self._world, lambda: self._finish(plan))
        except BaseException as error:
            self._go_back(error)
            raise
        finally:
            self._tiers.trim()  # only now, because the units may have had to go back
            give_back_memory()

    def _open_disk(self) -> dict[str, Store]:
        """Open files for pages that are not on a disk yet, so that a full disk is noticed before anything moves."""
        old, new = self._old, self._new
        if "nvme" in self._tiers.lent:
            return {}
        stay = old.offload.paths == new.offload.paths and old.pages.page_numel == new.pages.page_numel
        before = old.pages.store_pages() if stay and old.facts.full_update == new.facts.full_update else {}
        pages = [
            page
            for page, spec in new.pages.store_pages().items()
            if new.tier(page) == "nvme" and not (before.get(page) == spec and old.tier(page) == "nvme")
        ]
        return {"nvme": open_disks(new, pages)} if pages else {}

    def _use_host_memory(self, plan: Plan) -> None:
        """Pin the host memory of further pages, or not, as the plan says."""
        host = self._tiers.stores["host"]
        assert isinstance(host, MemoryStore)
        host.block = partial(host_block, plan)

    def _begin(self) -> None:
        """Free the slots of the old plan, and make slots for pages that move between a disk and a GPU."""
        plans, device = (self._old, self._new), self._world.compute
        slot_bytes = round_up(max(plan.slots.nbytes for plan in plans))
        count = 0 if device.shares_memory else max(plan.slots.arena * plan.slots.nbytes for plan in plans) // slot_bytes
        threads = max(thread_count(plan.offload) for plan in plans)
        self._runtime.store.refit(threads=threads)
        arena = Arena(count * slot_bytes, device, pin=self._new.offload.pin)
        slots = [arena.take(slot_bytes) for _ in range(count)]
        self._runtime.store.refit(slots, threads=threads, release=arena.close)

    def _move_units(self, order: Sequence[int], new: Plan) -> None:
        """Move units on all ranks; each is complete when the copies of the next one are under way. Collective."""
        under_way: list[UnitMove] = []
        try:
            for index in order:
                with self._runtime.tape.doing("move", self._runtime.units[index].spec.name):
                    under_way.append(self._begun(index, new))
                    on_all_ranks(self._world, under_way[-1].start)
                if len(under_way) > 1:
                    self._completed(under_way)
            while under_way:
                self._completed(under_way)
            self._runtime.store.drain()
        except BaseException:
            self._runtime.store.refit(threads=1)  # ends threads that may still write
            for moving in reversed(under_way):
                moving.undo()
            raise

    def _begun(self, index: int, new: Plan) -> UnitMove:
        """Return the move of one unit, with the values that are written anew. Collective."""
        runtime, unit = self._runtime, self._runtime.units[index]
        kinds = changed_kinds(runtime.plan, new, unit.spec)
        prepared = on_all_ranks(self._world, lambda: with_room(runtime, unit, new, own_values(runtime, unit, kinds)))
        return UnitMove(runtime, unit, new, kinds, gather_values(runtime, unit, prepared))

    def _completed(self, under_way: list[UnitMove]) -> None:
        """Wait for the first of the moves on all ranks, and commit it. Collective."""
        with self._runtime.tape.doing("move", self._runtime.units[under_way[0].index].spec.name):
            on_all_ranks(self._world, under_way[0].wait)
        moving = under_way.pop(0)
        moving.commit()
        self._done.append(moving.index)

    @unobserved()  # also called as `Runtime.wake`
    def _finish(self, plan: Plan) -> None:
        """Make the memory of the plan beside units and pages, and the parts of the runtime."""
        give_slots(plan, self._runtime.store)
        for unit in self._runtime.units:
            add_empty_buffers(plan, self._runtime.store, unit)
        self._wire(plan)
        self._runtime.wake = self._runtime.sites.wake = awake

    def _go_back(self, error: BaseException) -> None:
        """Move back the units that have moved, after an error."""
        runtime = self._runtime
        traceback.clear_frames(error.__traceback__)  # they have tensors of the new plan
        if runtime.is_wired:  # another rank has failed
            unwire(runtime)
        gc.collect()
        try:
            if self._done:
                on_all_ranks(self._world, self._begin)  # the store's threads do no more work after an error
            self._tiers.refit(self._old.tier, self._before)
            self._use_host_memory(self._old)
            for store in self._before.values():
                store.trim()  # pages that go back need the space that they had
            runtime.plan = self._new
            self._move_units(self._done[::-1], self._old)
            runtime.plan = self._old
            open_routes(runtime, self._old)
        except BaseException as another:
            self.is_lost = True
            error.add_note(f"The state could not be moved back, so it is lost: {with_class(another)}")
            return
        try:
            on_all_ranks(self._world, lambda: self._finish(self._old))
        except Exception as another:
            runtime.wake = runtime.sites.wake = lambda: self._finish(self._old)
            error.add_note(f"The next use of the state makes its buffers again: {with_class(another)}")
