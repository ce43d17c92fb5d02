"""The optimizer's update of a unit, deferred until before the unit's next gather; offloaded state is updated by pages.

The end of a step computes the norm, captures every number that the update needs by value (`Hyper`), and defers each
unit's update. State on the device is updated by `apply_deferred`, just before the unit is next gathered. If a GPU
updates pages of host memory, these pass through `Staging`, a unit ahead. Updates of other offloaded state are queued
for the store's threads immediately, in the order in which units will be gathered. The threads read, update and write
page by page while the forward of earlier units computes, and `apply_deferred` waits for the remaining pages. The order
changes no bit, because an update is elementwise and reads only its page, its gradient and `Hyper`.

An update of whole matrices is not elementwise. `apply_deferred` makes it in two passes over the pages, between which
the ranks exchange whole matrices, so it is collective for such units.

`pieces` has the arithmetic; neighbouring pages on a GPU are one piece. `step_numbers` has the numbers.

Source: Jiang et al. 2021, "Optimizer Fusion" (forward fusion); Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor

from zero.core.optim import Hyper
from zero.core.sizes import round_up
from zero.engine.plan import Part, Plan, parts_of
from zero.engine.unit_state import UnitState
from zero.engine.update.gradient import Gradients
from zero.engine.update.orthogonalize import MatrixPasses
from zero.engine.update.pieces import Piece, Pieces
from zero.engine.update.staging import Staging
from zero.engine.update.step_numbers import StepNumbers
from zero.errors import StaleStateError
from zero.platform.device import PASSED, Device, Event
from zero.platform.tape import Tape
from zero.store import PageKind, PrefetchStore, Ticket

GPU_GROUPS = 4
"""The most groups of pages that a GPU updates at a time, because each has a copy in device memory. Copies to and from
the device are faster than disks, so further groups would not end sooner."""


class Updater:
    """The optimizer of this rank, which schedules and applies deferred updates.

    Args:
        advance: starts the later parts of gathers that this rank does not wait for, see `Routes.advance`.

    Attributes:
        numbers: the numbers of the present step's updates.
        staging: the slots on a GPU for pages of host memory.
        matrices: the passes of units with matrices.
    """

    def __init__(
        self,
        plan: Plan,
        store: PrefetchStore,
        units: Sequence[UnitState],
        gradients: Gradients,
        tape: Tape,
        advance: Callable[[], None],
    ) -> None:
        self._plan, self._store, self._gradients, self._tape = plan, store, gradients, tape
        self._device = plan.world.compute
        self._host = self._device.host
        for device in (self._device, self._host) if plan.slots.by_host else (self._device,):
            plan.passes.kept.prepare(device.device)
        self.matrices = MatrixPasses(plan, advance)
        self.numbers = StepNumbers(plan)
        self._pieces = Pieces(plan, self.numbers)
        for unit in units:
            unit.parts = tuple(parts_of(plan, store, unit.spec))
        self._limit = threading.Semaphore(GPU_GROUPS)
        self._units, self._order = units, list(units)  # `_order` is that of the coming updates
        self._visited: list[UnitState] = []
        self._coming: Iterator[UnitState] = iter(())  # units with staged parts, in the order of the coming updates
        self._make_tables()
        slots = [self._device.zeros(plan.slots.staging_slot_bytes, torch.uint8) for _ in range(plan.slots.staging)]
        self.staging = Staging(self._device, store, slots)

    # -- what a step decides -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: expect updates in the order of the last step, then those of units that had none in it."""
        self.numbers.counts.begin()
        self._order = list(dict.fromkeys([*self._visited, *self._order]))
        self._visited.clear()
        self._expect()

    def schedule_update(self, unit: UnitState, hyper: Hyper) -> None:
        """Defer the update of `unit` to its next gather; queue its offloaded parts for the store's threads now.

        Matrices wait for that gather, because the ranks exchange directions, which they must do in one order.
        """
        unit.deferred = hyper
        if all(part.on_device for part in unit.parts):
            return
        with self._device.aside("updates") as unit.grad_ready:  # includes the gradient's copy on a side stream
            self._gradients.left(unit).wait()
        if not unit.spec.matrices:
            unit.tickets = self._queue(unit, hyper, unit.parts, unit.grad_ready)

    def _queue(self, unit: UnitState, hyper: Hyper, parts: Sequence[Part], after: Event) -> list[Ticket]:
        """Have the store's threads update those parts whose pages are not in memory."""
        return [
            self._store.modify(
                group,
                partial(self._update_in_thread, unit, hyper, part, after),
                (unit.place, part.turn, group.number),
            )
            for part in parts
            if part.lent is None
            for group in part.groups
        ]

    def resume(self, rested: Mapping[str, int]) -> None:
        """Continue with the counts of another run, see `UpdateCounts.resume`."""
        self.numbers.counts.resume(rested)
        self._make_tables()

    @torch.no_grad()
    def hand_off(self, unit: UnitState) -> list[Ticket]:
        """Apply the deferred update of `unit`, but do not wait for the parts that the store's threads update.

        Collective if it has matrices. Only for offloaded parameters, because the store orders each read of a page after
        the page's update.

        Returns:
            The tickets of the update.

        Raises:
            StaleStateError: the update was interrupted before.
        """
        self._update_on_streams(unit)
        tickets = unit.tickets
        self._applied(unit, resident=False)
        return tickets

    @torch.no_grad()
    def apply_deferred(self, unit: UnitState) -> None:
        """Apply the deferred update of `unit`, if it has one, on the current stream. Collective if it has matrices.

        Call the device's `join` before the host reads the updated tensors.

        Raises:
            StaleStateError: the update was interrupted before.
        """
        if unit.deferred is None:
            return
        if unit.spec.matrices:  # nothing is queued yet
            self._update_on_streams(unit)
        for ticket in unit.tickets:
            ticket.wait()
        if not unit.spec.matrices:
            self._update_on_streams(unit)
        self._applied(unit, resident=self._plan.facts.full_update)

    @torch.no_grad()
    def launch_ahead(self) -> None:
        """Launch the staged parts of the next deferred update, so that pages are copied before the unit is gathered."""
        for unit in self._coming:
            if unit.deferred is not None and unit.updated is None and not unit.interrupted:
                self._launch_staged(unit, unit.deferred, unit.parts, PASSED)
                return

    def _update_on_streams(self, unit: UnitState) -> None:
        """Launch the deferred update except for the parts that the store's threads update, for the current stream."""
        if unit.interrupted:
            raise StaleStateError(
                f"the update of {unit.spec.name} was interrupted half-way, so this state cannot be used. Start again "
                "from the last checkpoint."
            )
        assert unit.deferred is not None
        if unit.spec.matrices:
            unit.interrupted = True
            unit.tickets = self.matrices.run(unit, partial(self._launch_pass, unit, unit.deferred))
            return
        if unit.updated is None:
            self._launch_staged(unit, unit.deferred, unit.parts, PASSED)
        unit.interrupted = True  # from here to `_applied`
        self._launch_here(unit, unit.deferred, unit.parts)
        if unit.updated is not None:
            unit.updated.wait()

    def _launch_pass(self, unit: UnitState, hyper: Hyper, parts: Sequence[Part]) -> list[Ticket]:
        """Launch one pass of the update of a unit with matrices; return the tickets of the store's threads."""
        tickets = self._queue(unit, hyper, parts, self._device.mark())
        self._launch_here(unit, hyper, parts)
        self._launch_staged(unit, hyper, parts, None)
        if unit.updated is not None:
            unit.updated.wait()
        return tickets

    def _launch_here(self, unit: UnitState, hyper: Hyper, parts: Sequence[Part]) -> None:
        """Launch the update of the parts on the device on the current stream."""
        pieces = [self._piece(unit, part, part.lent) for part in parts if part.on_device]
        if pieces:
            with self._tape.doing("update", unit.spec.name):
                self._pieces.update(unit, hyper, self._device, pieces, parts[0].turn)

    def _launch_staged(self, unit: UnitState, hyper: Hyper, parts: Sequence[Part], after: Event | None) -> None:
        """Launch the update of the staged parts, unless there are none, on a stream of its own.

        Args:
            after: the event for which that stream waits; None: all work of the current stream so far.
        """
        staged = [part for part in parts if part.staged]
        if not staged:
            return
        with self._device.aside("updates", after=after), self._tape.streaming("update", unit.spec.name):
            for part in staged:
                with self.staging.opened(part, unit.grad_ready) as tensors:
                    unit.interrupted = True
                    self._pieces.update(unit, hyper, self._device, [self._piece(unit, part, tensors)], part.turn)
        unit.updated, unit.interrupted = self.staging.updated, bool(unit.spec.matrices)
        unit.grad_readers.append(unit.updated)

    def _applied(self, unit: UnitState, *, resident: bool) -> None:
        """Note that the deferred update of `unit` is applied, or queued for the store's threads."""
        self._visited.append(unit)
        unit.mark_changed(resident=resident)  # first, so that no old copy is current after an interrupt
        unit.deferred, unit.updated, unit.interrupted, unit.tickets = None, None, False, []

    # -- one part ------------------------------------------------------------------------------------------------------

    def _update_in_thread(
        self, unit: UnitState, hyper: Hyper, part: Part, after: Event, tensors: Sequence[Tensor]
    ) -> None:
        """Update one part on a thread of the store; `tensors` are its pages in memory, in the order of `Group.all`."""
        name, where = threading.current_thread().name, self._where(part)
        if hyper.decision is not None and where.shares_memory:  # the host computes
            divisor = hyper.decision.learn()
            if divisor is None:
                return
            hyper = hyper._replace(divisor=divisor, table=None)
        told = self._tape.streaming("update", unit.spec.name)
        limit = nullcontext() if where.shares_memory else self._limit
        with limit, self._room(where) as room_for, self._device.paging(name, after, now=where.shares_memory), told:
            self._update_offloaded(unit, hyper, self._piece(unit, part, tensors), part.turn, where, room_for)

    def _where(self, part: Part) -> Device:
        """Return the device that updates a part."""
        return self._host if part.by_host else self._device

    @contextmanager
    def _room(self, where: Device) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield a function that returns a tensor if `where` can access it where it is, else room for its values.

        Room in host memory is pinned, so that copies do not pass through other memory.
        """
        if not where.shares_memory or not self._plan.slots.bounce_bytes:
            yield where.room_for
            return
        with self._store.bounce_buffers.borrowed() as memory:
            end = 0

            def room_for(tensor: Tensor) -> Tensor:
                nonlocal end
                if where.is_home_of(tensor):
                    return tensor
                start, end = end, round_up(end + tensor.nbytes)
                return memory[start : start + tensor.nbytes].view(tensor.dtype)

            yield room_for

    def _piece(self, unit: UnitState, part: Part, tensors: Sequence[Tensor] | None) -> Piece:
        """Return the piece for a whole part: `tensors` for its pages, and tensors of the unit for the rest."""
        assert tensors is not None
        start, stop, now = part.start, part.stop, self._plan.passes.of(unit.spec)[part.turn]
        paged = {page.kind: page_K for page, page_K in zip(part.groups[0].all, tensors, strict=True)}
        directions = self.matrices.directions(unit.spec) if unit.spec.matrices else None
        params = unit.own_params(full_update=self._plan.facts.full_update) if now.updates_params else directions
        own = unit.grad if unit.grad is None or self._plan.facts.full_update else unit.own_grad_S(self._plan.rank)
        grad = own if now.reads_grad else directions
        param_K = paged.pop(PageKind.PARAM, None if params is None else params[start:stop])
        grad_K = paged.pop(PageKind.GRAD, None if grad is None else grad[start:stop])
        kept = cast(list[Tensor], [*paged.values()])
        return Piece(part.first, cast(Tensor, param_K), kept, cast(Tensor, grad_K), part.tables)

    def _update_offloaded(
        self,
        unit: UnitState,
        hyper: Hyper,
        piece: Piece,
        turn: int,
        where: Device,
        room_for: Callable[[Tensor], Tensor],
    ) -> None:
        """Update one part on the device that the plan chose, and copy tensors of other devices there and back."""
        changed = [piece.param_K, *piece.kept]
        there = [room_for(tensor) for tensor in changed]
        grad_there = room_for(piece.grad_K)
        reads = self._plan.passes.of(unit.spec)[turn].reads_params
        _copy_all(where, [*there[not reads :], grad_there], [*changed[not reads :], piece.grad_K])
        brought = piece._replace(param_K=there[0], kept=there[1:], grad_K=grad_there)
        self._pieces.update(unit, hyper, where, [brought], turn)
        _copy_all(where, changed, there)

    def _make_tables(self) -> None:
        """Make the tables of each part for the kernel, on the device that updates it."""
        for unit in self._units:
            if not unit.spec.matrices:
                unit.parts = tuple(
                    self._pieces.with_tables(unit.spec.trainable, part, self._where(part)) for part in unit.parts
                )

    def _expect(self) -> None:
        """Tell the store the order of the coming updates, so that it reads pages ahead."""
        for place, unit in enumerate(self._order):
            unit.place = place
        parts = [part for unit in self._order for part in unit.parts if not part.on_device]
        if staged := [part for part in parts if part.staged]:
            self.staging.expect(staged)
            coming = [unit for unit in self._order if any(part.staged for part in unit.parts)]
            self._coming = iter([unit for unit in coming if not unit.spec.matrices])
        if groups := [group for part in parts if not part.staged for group in part.groups]:
            self._store.expect(groups)


def _copy_all(where: Device, into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source, unless it is its own destination; the host waits if it computes with the result."""
    for tensor, source in zip(into, sources, strict=True):
        if tensor is not source:
            where.copy(tensor, source)
