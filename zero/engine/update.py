"""The optimizer's update of a unit, page by page: read, update, write; applied before the unit's next gather.

A step only decides. It computes the norm, captures every number the update needs by value (`Hyper`), and defers each
unit's update. What is on the device is updated by `apply`, just before the unit is next gathered. What is offloaded is
given to the store's threads at once, in the order in which units will be gathered: they read, update and write page by
page while the forward of the units before it computes, and `apply` only waits for the rest. The order cannot change a
bit, because an update is elementwise and reads nothing but its own page,
its own gradient and `Hyper`.

A page passes through in pieces that stay in the cache: unscale, clip, decay, moments, and the cast to the compute dtype
all happen to one piece before the next.

Source: Jiang et al. 2021, "Optimizer Fusion" (forward fusion); Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.
"""

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.layout import Layout, pages
from zero.core.master import cut_as, in_fp32
from zero.core.optim import Hyper
from zero.core.updates import Settings, on_device
from zero.engine.gradient import Gradients
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.errors import StaleStateError
from zero.platform.device import Device, Event
from zero.platform.timeline import Tape
from zero.store import Group, Page, PageKind, PrefetchStore, Ticket


class Part(NamedTuple):
    """What one page number of a unit stands for: a range of this rank's extent, and its pages."""

    start: int
    stop: int
    group: Group
    on_device: bool
    """All of it is on the device: updated in place, by the thread that trains."""
    in_memory: bool
    """All of it is in memory: nothing of it moves from or to a disk."""


class Launched(Ticket):
    """Work of a thread of the store that is over for the host when it is launched, and for a stream after `end`."""

    def __init__(self, ticket: Ticket, end: Event) -> None:
        self._ticket, self._end = ticket, end

    @property
    def ended(self) -> bool:
        return self._ticket.ended

    def wait(self) -> None:
        """Have the current stream wait for it."""
        self._ticket.wait()
        self._end.wait()


class Piece(NamedTuple):
    """What is updated at a time, where it is worked on; all of it of the same K elements."""

    first: int
    """Element of the unit's flat."""
    param_K: Tensor
    """In the dtype of compute."""
    kept: Sequence[Tensor]
    """What is kept of the master, if anything, and the moments."""
    grad_K: Tensor

    def cut(self, start: int, stop: int) -> "Piece":
        """Elements [start, stop) of it."""
        numel = self.grad_K.numel()  # a page may take more than one element of its dtype for each, in proportion
        kept = [one[one.numel() * start // numel : one.numel() * stop // numel] for one in self.kept]
        return Piece(self.first + start, self.param_K[start:stop], kept, self.grad_K[start:stop])


class Updater:
    """Applies deferred updates on this rank.

    Args:
        gradients: where the gradients are.
        tape: records what is updated in place.
    """

    def __init__(
        self,
        plan: Plan,
        store: PrefetchStore,
        units: Sequence[UnitState],
        gradients: Gradients,
        tape: Tape,
    ) -> None:
        self._plan, self._store, self._transform = plan, store, plan.optimizer
        self._device, self._gradients, self._tape = plan.world.compute, gradients, tape
        self._rank, self._full_update, self._master = plan.rank, plan.full_update, plan.precision.master
        self._where = self._device.host if plan.offload.compute == "host" else self._device
        self._kept = plan.kept
        self._kept.prepare(self._where.device)
        self._parts = {unit.index: tuple(self._parts_of(unit)) for unit in units}
        self._order = [unit.index for unit in units]
        self._visited: list[int] = []
        self.sums: dict[int, Tensor] = {}  # by unit: sum of squares of this rank's range, fp64
        self._trains = [True] * len(plan.optimizer.groups)  # in this step
        self._rested = [0] * len(plan.optimizer.groups)  # steps without it
        self._numbers: Mapping[float, Tensor] = {}  # kept until the next decision: other streams read them
        self._expect()

    # -- what a step decides -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: updates are expected in the order of the last one, as far as that is known."""
        self.sums.clear()
        self._trains = [False] * len(self._trains)
        self._order = list(dict.fromkeys([*self._visited, *self._order]))
        self._visited.clear()
        self._expect()

    def train(self, groups: Sequence[Settings]) -> None:
        """A forward comes: what trains in one of a step's forwards has a gradient, and is updated."""
        self._trains = [before or now.trains for before, now in zip(self._trains, groups, strict=True)]

    def measure(self, unit: UnitState) -> None:
        """Take the sum of squares of the unit's gradient, which is final."""
        self.sums[unit.index] = self._sum_of_squares(unit)

    def decide(self, hyper: Hyper) -> Hyper:
        """Add the groups that train in a step to its numbers, each with its own count of updates."""
        self._rested = [n + (not trains) for n, trains in zip(self._rested, self._trains, strict=True)]
        each = zip(hyper.groups, self._trains, self._rested, strict=True)
        groups = tuple(group._replace(trains=trains, step=hyper.step - n) for group, trains, n in each)
        values = {float(hyper.divisor), *(float(group.step) for group in groups)}
        self._numbers = {value: on_device(value, self._device.device) for value in values}
        return hyper._replace(groups=groups, numbers=self._numbers)

    def schedule_update(self, unit: UnitState, hyper: Hyper) -> None:
        """Defer an update with `hyper` to the next gather of `unit`; the store's threads begin their parts of it."""
        unit.deferred = hyper
        parts = [part for part in self._parts[unit.index] if not part.on_device]
        if not parts:
            return
        with self._device.aside("updates") as after:  # also after what was enqueued on side streams
            self._gradients.left(unit).wait()
        place = self._order.index(unit.index)
        unit.tickets = [self._begin(unit, hyper, part, after, place) for part in parts]

    def _begin(self, unit: UnitState, hyper: Hyper, part: Part, after: Event, place: int) -> Ticket:
        """Have one part updated; where the device does it and no disk is behind it, no host waits for the device."""
        end = self._device.event() if part.in_memory and not self._where.shares_memory else None
        work = partial(self._work, unit, hyper, part, after, end)
        ticket = self._store.modify(part.group, work, (place, part.group.number))
        return ticket if end is None else Launched(ticket, end)

    @property
    def rested(self) -> dict[str, int]:
        """Names of parameters to steps in which their group did not train, where there are any."""
        slots = [slot for unit in self._plan.units for slot in unit.trainable.slots]
        return {slot.name: self._rested[slot.group] for slot in slots if self._rested[slot.group]}

    def resume(self, rested: Mapping[str, int]) -> None:
        """Go on with the counts of another run; where a group's parameters differ, as its youngest."""
        self._rested = [0] * len(self._rested)
        for slot in (slot for unit in self._plan.units for slot in unit.trainable.slots):
            self._rested[slot.group] = max(self._rested[slot.group], rested.get(slot.name, 0))

    def hand_off(self, unit: UnitState) -> list[Ticket]:
        """Count the deferred update of `unit` as made, though the store's threads may be at it; returns their tickets.

        For units that are offloaded entirely: the store shows nobody a page before its update.
        """
        tickets = unit.tickets
        self._visited.append(unit.index)
        unit.mark_changed(resident=False)  # first: an interrupt must not leave an old copy that counts as current
        unit.deferred, unit.tickets = None, []
        return tickets

    @torch.no_grad()
    def apply(self, unit: UnitState) -> None:
        """Make the deferred update of `unit`, if it has one: for the current stream it moves on by one step.

        A host that reads its tensors itself has to `join` after it.

        Raises:
            StaleStateError: that update was interrupted before.
        """
        if unit.deferred is None:
            return
        if unit.interrupted:
            raise StaleStateError(
                f"the update of {unit.spec.name} was interrupted half-way, so this state cannot be used; start again "
                "from the last checkpoint"
            )
        for ticket in unit.tickets:
            ticket.wait()
        hyper, unit.interrupted = unit.deferred, True
        self._visited.append(unit.index)
        parts = [part for part in self._parts[unit.index] if part.on_device]
        if parts:
            with self._tape.doing("update", unit.spec.name):
                self._update(unit, hyper, self._device, [self._in_place(unit, part) for part in parts])
        unit.tickets.clear()
        unit.mark_changed(resident=self._full_update)  # first, as in `hand_off`
        unit.deferred, unit.interrupted = None, False

    # -- one part ------------------------------------------------------------------------------------------------------

    def _work(
        self, unit: UnitState, hyper: Hyper, part: Part, after: Event, end: Event | None, tensors: Sequence[Tensor]
    ) -> None:
        """What a thread of the store does with a group in memory: its pages, what is beside, what goes out."""
        name, now = threading.current_thread().name, self._where.shares_memory
        with self._device.paging(name, after, now=now, end=end), self._tape.streaming("update", unit.spec.name):
            self._apply(unit, hyper, part, tensors, self._where)

    def _in_place(self, unit: UnitState, part: Part) -> Piece:
        """All of a part that lies where it is worked on."""
        in_place = [self._store.in_place(page) for page in part.group.pages]
        param_K, grad_K = self._in_memory(unit, part)
        assert param_K is not None
        assert grad_K is not None
        return Piece(self._first(unit, part), param_K, [one_K for one_K in in_place if one_K is not None], grad_K)

    def _apply(self, unit: UnitState, hyper: Hyper, part: Part, tensors: Sequence[Tensor], where: Device) -> None:
        """Update one part on `where`; what lies elsewhere is copied there and back."""
        named = {page.kind: one_K for page, one_K in zip(part.group.all, tensors, strict=True)}
        param_K, grad_K = self._in_memory(unit, part)
        param_K, grad_K = named.pop(PageKind.PARAM, param_K), named.pop(PageKind.GRAD, grad_K)
        assert param_K is not None
        assert grad_K is not None
        kept = list(named.values())
        there = [where.bring(one_K) for one_K in kept]
        param_there = where.bring(param_K) if self._master.reads_params else where.room_for(param_K)
        self._update(unit, hyper, where, [Piece(self._first(unit, part), param_there, there, where.bring(grad_K))])
        for one_K, changed_K in zip((param_K, *kept), (param_there, *there), strict=True):
            if changed_K is not one_K:
                where.copy(one_K, changed_K)

    def _first(self, unit: UnitState, part: Part) -> int:
        """Where in the unit's flat a part begins."""
        return part.start + (0 if self._full_update else unit.spec.trainable.shard(self._rank)[0])

    def _update(self, unit: UnitState, hyper: Hyper, where: Device, pieces: Sequence[Piece]) -> None:
        """As many elements at a time as suit `where`, and of those all of a group at once."""
        layout = unit.spec.trainable
        for some in _batches(pieces, where.piece_numel):
            places = (
                [layout.pieces(one.first, one.first + one.grad_K.numel()) for one in some] if self._kept.draws else []
            )
            params, kept = [one.param_K for one in some], [one.kept for one in some]
            with self._kept.opened(params, kept, places, hyper.step) as tensors:
                self._transform_all(layout, hyper, some, tensors)

    def _transform_all(
        self, layout: Layout, hyper: Hyper, pieces: Sequence[Piece], tensors: Sequence[Sequence[Tensor]]
    ) -> None:
        """Update masters, the first of `tensors`, and moments, the others: for each piece one tensor in fp32."""
        grouped: dict[int, list[list[Tensor]]] = {}  # by number of the group: gradients, masters, moments
        gradients = [piece.grad_K for piece in pieces]
        if gradients[0].dtype != torch.float32:
            gradients = cut_as(gradients, in_fp32(gradients))
        for piece, *state in zip(pieces, gradients, *tensors, strict=True):
            for a, b, number in layout.segments(piece.first, piece.first + piece.grad_K.numel()):
                if hyper.groups[number].trains:
                    lists = grouped.setdefault(number, [[] for _ in state])
                    for parts, tensor in zip(lists, state, strict=True):
                        parts.append(tensor[a - piece.first : b - piece.first])
        for number, (grads, masters, *moments) in grouped.items():
            now = hyper.groups[number]
            self._transform.update(masters, grads, tuple(moments), now, hyper.divisor, hyper.numbers)

    # -- where things are ----------------------------------------------------------------------------------------------

    def _parts_of(self, unit: UnitState) -> list[Part]:
        plan, index = self._plan, unit.index
        found = []
        for number, (start, stop) in enumerate(pages(plan.update_numel(unit.spec), plan.page_numel)):
            group = Group(
                index,
                number,
                tuple(Page(index, kind, number) for kind in plan.state_kinds),
                (Page(index, PageKind.GRAD, number),) if plan.grads_offloaded else (),
                tuple(Page(index, kind, number) for kind in plan.written_kinds),
            )
            in_place = [self._store.in_place(page) for page in group.pages]
            beside = [self._store.in_place(page) for page in (*group.beside, *group.out)]
            on_device = not beside and all(one is not None and self._device.is_home_of(one) for one in in_place)
            found.append(Part(start, stop, group, on_device, all(one is not None for one in (*in_place, *beside))))
        return found

    def _in_memory(self, unit: UnitState, part: Part) -> list[Tensor | None]:
        """Parameters and gradient of a part; None for what is in pages."""
        grad = unit.grad if unit.grad is None or self._full_update else unit.own_grad_S(self._rank)
        own = unit.own_params(full_update=self._full_update), grad
        return [None if one is None else one[part.start : part.stop] for one in own]

    def _expect(self) -> None:
        """Name the coming updates to the store, so that it reads ahead."""
        groups = [part.group for index in self._order for part in self._parts[index] if not part.on_device]
        if groups:
            self._store.expect(groups)

    def _sum_of_squares(self, unit: UnitState) -> Tensor:
        """Of what trains, 0-dim fp64. The ranges are the shard's own, so the bits do not depend on stage, page size or
        tier.
        """
        grad_S = unit.own_grad_S(self._rank)
        found = [self._device.sum_of_squares(grad_S[first:last]) for first, last in self._training(unit)]
        return functools.reduce(torch.add, found) if found else grad_S.new_zeros((), dtype=torch.float64)

    def _training(self, unit: UnitState) -> list[tuple[int, int]]:
        """The longest ranges of this rank's shard in which everything trains."""
        layout = unit.spec.trainable
        if all(self._trains):
            return [(0, layout.S)]
        first, last = layout.shard(self._rank)
        runs = groupby(layout.segments(first, last), key=lambda one: self._trains[one.group])
        adjoining = [list(run) for trains, run in runs if trains]
        return [(run[0].start - first, run[-1].stop - first) for run in adjoining]


def _batches(pieces: Sequence[Piece], most_numel: int) -> Iterator[list[Piece]]:
    """The same elements in the same order, `most_numel` of them at a time."""
    some: list[Piece] = []
    numel = 0
    for piece in pieces:
        done, count = 0, piece.grad_K.numel()
        while done < count:
            stop = min(count, done + most_numel - numel)
            some.append(piece if stop - done == count else piece.cut(done, stop))
            numel, done = numel + stop - done, stop
            if numel == most_numel:
                yield some
                some, numel = [], 0
    if some:
        yield some
