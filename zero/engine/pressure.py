"""Move pages between tiers when memory runs short while a run trains, and back when it is free again.

At the end of each step every rank reads its free memory. Two bits of each rank travel with the step's totals, so all
ranks know them and decide alike. If a memory is short on any rank, the ranks make the plan of the present settings for
the memory that they have now, in which the pages that are used last are one tier lower, and move to it. After
`CALM_STEPS` steps in which no rank was short they do the same, and pages come back.

Only the kinds of state that are `auto` move. Between the mark below which memory is short and the mark that a move
leaves free is a gap, so that pages do not go back and forth.
"""

import logging
from collections.abc import Callable, Collection
from functools import cached_property

import torch

from zero.core.offload import Offload
from zero.core.placement import NO_LIMIT, TIERS, Placement, Room
from zero.core.sizes import GiB, size_text
from zero.engine.move import move_to
from zero.engine.plan import Plan, between_steps
from zero.engine.state import State
from zero.errors import ConfigError, WorldError, one_line
from zero.platform.gauges import HostGauge

log = logging.getLogger("zero")

CALM_STEPS = 20
"""Steps without a shortage after which pages may come back."""

GAP = 2
"""The bytes that a move leaves free, as a multiple of those below which a memory is short."""

LEAST_HOST_SHARE = 1 / 50
"""The share of host memory below which it is short by default. Of a GPU it is half of `offload.reserve`."""

DEVICE, HOST = 1, 2
"""Bits of what a rank is short of."""


def watches(offload: Offload) -> bool:
    """Return whether pages move under pressure: if a kind of state is `auto`, and the setting is not off."""
    return offload.pressure != "off" and "auto" in offload.kinds


class Pressure:
    """The watch of one rank over its memory.

    Args:
        note: called with a line about each move, on rank 0.
        gauge: reads the host's free memory.
    """

    def __init__(self, plan: Plan, gauge: HostGauge | None = None, note: Callable[[str], None] = log.warning) -> None:
        self._given_gauge, self._note, self._first = gauge, note, plan.placement
        self._calm, self._is_stuck = 0, False

    def read(self, plan: Plan) -> int:
        """Return the bits of the memories of which this rank is short; 0 if nothing is watched."""
        if not watches(plan.offload):
            return 0
        least_device, least_host = self._least(plan)
        short = 0
        if not plan.facts.device_is_host and plan.world.compute.free_bytes() < least_device:
            short |= DEVICE
        if self._gauge.free_bytes(GAP * least_host) < least_host:
            short |= HOST
        return short

    @cached_property
    def _gauge(self) -> HostGauge:
        return self._given_gauge or HostGauge()

    def _least(self, plan: Plan) -> tuple[int, int]:
        """Return the free bytes below which the device and the host are short."""
        offload, device = plan.offload, plan.world.compute
        if isinstance(offload.pressure, int):
            return offload.pressure, offload.pressure
        reserve = GiB + device.total_bytes() // 50 if offload.reserve_bytes is None else offload.reserve_bytes
        return reserve // 2, int(LEAST_HOST_SHARE * self._gauge.total_bytes())

    def react(self, state: State, shortages: Collection[int]) -> State:
        """Return the state, moved if a rank is short of memory or has been calm. Collective.

        Args:
            shortages: the bits of all ranks.
        """
        if not watches(state.plan.offload):
            return state
        if any(shortages):
            self._calm = 0
            return state if self._is_stuck else self._moved(state, shortages)
        self._calm += 1
        if self._calm < CALM_STEPS:
            return state
        self._calm, self._is_stuck = 0, False
        return state if state.plan.placement == self._first else self._moved(state, ())

    def _moved(self, state: State, shortages: Collection[int]) -> State:
        """Return the state in the plan for the memory of now; the same state if that plan has the same tiers."""
        plan, short = state.plan, any(shortages)
        try:
            following = plan.moved(plan.arrangement, self._room(plan))
        except ConfigError as error:
            return self._stuck(state, short, one_line(error))
        if following.placement == plan.placement:
            return self._stuck(state, short, "nothing of the state that is auto can move")
        if not short and not _is_between(following, plan.placement, self._first):
            return state
        before = state.runtime.moved_bytes
        try:
            state = move_to(state, following)
        except Exception as error:
            if state.spent_ or isinstance(error, WorldError):
                raise
            return self._stuck(state, short, one_line(error))
        memories = {bit for shortage in shortages for bit in (DEVICE, HOST) if shortage & bit}
        names = " and ".join({DEVICE: "device", HOST: "host"}[bit] for bit in sorted(memories))
        why = f"{names} memory is short" if short else f"memory was free for {CALM_STEPS} steps"
        self._say(state, f"{why}: {size_text(state.runtime.moved_bytes - before)} moved {'down' if short else 'up'}")
        return state

    def _room(self, plan: Plan) -> Room:
        """Return the bytes that every rank may use, so that each memory keeps the gap free. Collective."""
        held = between_steps(plan.bytes)
        on_device, on_host = held.get("device", 0), held.get("host", 0)
        device_free = plan.world.compute.free_bytes()
        host_free = self._gauge.free_bytes(2**62) // plan.world.whole.local_size
        if plan.facts.device_is_host:
            on_device, on_host = 0, on_device + on_host
        least_device, least_host = self._least(plan)
        mine = [on_device + device_free - GAP * least_device, on_host + host_free - GAP * least_host]
        everyone = plan.world.exchange(torch.tensor(mine, dtype=torch.int64, device="cpu"), what="free memory")
        device, host = (max(0, int(least)) for least in everyone.min(0).values)
        given = plan.origin.room or NO_LIMIT
        return Room(min(device, given.device), min(host, given.host), given.disk)

    def _stuck(self, state: State, short: bool, why: str) -> State:
        """Say once that memory is short and nothing can move."""
        if short:
            self._is_stuck = True
            self._say(state, f"memory is short, but the state stays where it is: {why}")
        return state

    def _say(self, state: State, line: str) -> None:
        if state.plan.world.whole.rank == 0:
            self._note(f"step {state.tried}: {line}")


def _is_between(plan: Plan, now: Placement, first: Placement) -> bool:
    """Return whether a plan's pages are on no slower tier than now, and on no faster one than at first."""
    ranks = {tier: rank for rank, tier in enumerate(TIERS)}
    tiers, cuts = plan.placement.optimizer, (now.optimizer, first.optimizer)
    if any(tiers.keys() != pages.keys() for pages in cuts):
        return False
    return all(
        ranks[first.optimizer[page]] <= ranks[tier] <= ranks[now.optimizer[page]] for page, tier in tiers.items()
    )
