"""Park a state in host memory while another program needs the GPU, and bring it back.

Its pages and shards on the device are copied to host memory, and its buffers are freed. `Runtime.wake` copies them back
and makes the buffers; every use of the state calls it. The plan does not change, and nothing is sent between ranks
except the check of host memory.
"""

from collections.abc import Set
from functools import partial

from torch import Tensor

from zero.core.sizes import round_up, size_text
from zero.engine.open_store import give_slots, tiers_of
from zero.engine.plan import thread_count
from zero.engine.runtime import Runtime, awake
from zero.engine.together import on_all_ranks
from zero.engine.unit_move import WITHOUT_CONTENTS, UnitMove
from zero.engine.unit_state import UnitState
from zero.engine.whole import add_empty_buffers, empty_shards
from zero.engine.wire import rewired, unwire
from zero.errors import MachineError, if_it_fails
from zero.platform.arena import Arena
from zero.platform.host_memory import free_host_bytes
from zero.platform.modes import unobserved
from zero.platform.threads import uninterrupted
from zero.store import PARAMETER_KINDS, Page

FLATS: frozenset[str] = frozenset(PARAMETER_KINDS)


def park(runtime: Runtime, kinds: Set[str] | None = None) -> None:
    """Copy the state from the device to host memory, and free its buffers. Collective.

    Args:
        kinds: the kinds of values that leave the device: `FLATS`, the master and moments; None: all. Buffers are freed
            in any case.

    Raises:
        MachineError: host memory is too small on a rank. Nothing has changed then.
    """
    plan = runtime.plan
    chosen = FLATS | plan.passes.kept.dtypes.keys() if kinds is None else frozenset(kinds)
    on_all_ranks(plan.world, partial(_check_memory, runtime, chosen))
    runtime.finish_step()
    parked = _Parked(runtime, chosen)
    with uninterrupted():
        unwire(runtime)
        runtime.wake = runtime.sites.wake = parked.wake
        with if_it_fails(parked.wake):
            parked.send()


class _Parked:
    """The values of a parked state that were on the device.

    Args:
        kinds: the kinds of values that leave the device.
    """

    def __init__(self, runtime: Runtime, kinds: Set[str]) -> None:
        self._runtime, self._plan, self._kinds = runtime, runtime.plan, kinds
        self._device = self._plan.world.compute
        self._flats: dict[int, tuple[Arena, list[Tensor]]] = {}
        self._rewired = rewired(runtime)

    def send(self) -> None:
        """Copy the values to host memory and free those on the device."""
        runtime, plan = self._runtime, self._plan
        runtime.store.refit(threads=thread_count(plan.offload))
        tiers_of(runtime.store).refit(self._tier, {})
        for unit in runtime.units:
            self._move_pages(unit)
            if FLATS & self._kinds and (flats := _flats(unit)) and not self._device.shares_memory:
                arena = Arena(sum(round_up(flat.nbytes) for flat in flats), self._device, pin=plan.offload.pin)
                copies = [arena.take(flat.nbytes).view(flat.dtype) for flat in flats]
                for copy, flat in zip(copies, flats, strict=True):
                    self._device.copy(copy, flat)
                self._flats[unit.index] = arena, copies
                unit.resident, unit.shards = None, (None,) * len(unit.shards)
        self._device.join()
        self._device.give_back_memory(cached=True)

    @unobserved()
    def wake(self) -> None:
        """Copy the values back and make buffers. An interrupt waits for the end."""
        runtime, plan = self._runtime, self._plan
        with uninterrupted():
            tiers_of(runtime.store).refit(plan.tier, {})
            for unit in runtime.units:
                self._move_pages(unit)
                if unit.index in self._flats:
                    arena, copies = self._flats[unit.index]
                    unit.resident, unit.shards = empty_shards(plan, unit.spec)
                    for flat, copy in zip(_flats(unit), copies, strict=True):
                        self._device.copy(flat, copy)
                    unit.mark_changed(resident=True)
                    arena.close()
                    del self._flats[unit.index]
                add_empty_buffers(plan, runtime.store, unit)
            give_slots(plan, runtime.store)
            self._rewired(plan)
            runtime.wake = runtime.sites.wake = awake

    def _move_pages(self, unit: UnitState) -> None:
        moving = UnitMove(self._runtime, unit, self._plan, frozenset(), {})
        with if_it_fails(moving.undo):
            moving.start()
            moving.wait()
        moving.commit()

    def _tier(self, page: Page) -> str:
        """Return the tier of a page while the state is parked."""
        tier = self._plan.tier(page)
        leaves = page.kind in self._kinds or page.kind in WITHOUT_CONTENTS
        return "host" if leaves and tier == "device" and not self._device.shares_memory else tier


def _flats(unit: UnitState) -> list[Tensor]:
    """Return the tensors that hold a unit's flats on the device: the resident buffer, or the shards."""
    return [flat for flat in unit.shards if flat is not None] if unit.resident is None else [unit.resident.flat]


def _check_memory(runtime: Runtime, kinds: Set[str]) -> None:
    plan = runtime.plan
    needs_bytes = sum(flat.nbytes for unit in runtime.units for flat in _flats(unit)) if FLATS & kinds else 0
    specs = plan.pages.store_pages().items()
    leaving = {*kinds, *WITHOUT_CONTENTS}
    needs_bytes += sum(spec.block_bytes for page, spec in specs if page.kind in leaving and plan.tier(page) == "device")
    free_bytes = free_host_bytes() // plan.world.whole.local_size
    if needs_bytes > free_bytes and not plan.world.compute.shares_memory:
        raise MachineError(
            f"parking takes {size_text(needs_bytes)} of host memory for each rank, but {size_text(free_bytes)} is "
            'free. Move the state to a disk: zero.move(state, offload="infinity").'
        )
