"""Add up gradients over calls, microbatches and ranks. They travel in `Facts.flat_dtype`; `World` adds in rank order.

Gradients arrive one parameter at a time, once for each call of a unit. They are copied into one flat. When all calls of
the unit have delivered and its turn has come, as every rank counts `Turns`, the flat is reduce-scattered while the next
units' backward runs. Which flat it is:

    gradients sharded, or one microbatch    a pooled flat, free again when its reduction is done; two may be under way
    several microbatches, not sharded       `grad`, which adds up microbatches; after the last a pooled flat takes it on
    one rank                                `grad` itself, and nothing is reduced

A unit of which something is still to come sends zeros at its turn. Where a third unit of its size begins to fill, the
oldest is reduced as it stands. So the bits of a sum do not depend on the order of turns.

What comes after a unit's sum has left, as from a second backward in a loop of the user's own, is reduced on its own and
added.

A parameter that was not used has a zero gradient. So has a unit that was not visited: where other ranks visited it,
this one sends zeros.

Sums are in fp32, ranks in rank order; `grad` holds the sum over ranks and microbatches, and the update divides once.
An all-reduce (stage 0) is this reduce-scatter followed by a gather, so every stage adds alike.

On a GPU flats are filled, and their exchange starts, on the stream that computes; sums, and whatever comes after them
until the step's end, are on a stream of their own, "reduce", in the order of reductions. So:

    a flat        is taken by the stream that computes, which waits for the event that it was given back with
    `grad`        belongs to the stream that computes while microbatches are added up in it, and from the start of its
                  reduction to `reduce`, which is entered after what was computed so far; `finish` hands all of it back

Source: Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 7.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.distributed.routes import Routes, partial_numel
from zero.distributed.world import Handle
from zero.engine.gradient import Gradients
from zero.engine.plan import Plan
from zero.engine.reduce_order import Turns
from zero.engine.unit_state import UnitState
from zero.engine.update import Updater
from zero.engine.visit_order import CollectiveLog
from zero.errors import WorldError
from zero.platform.device import PASSED, Event
from zero.platform.timeline import Tape

MOST_UNFINISHED = 2
"""Units of one size that are filled at once before the oldest is reduced as it stands. `Facts.flat_counts` counts one
flat for each, and two for a reduction."""


@dataclass(eq=False)
class GradientFlat:
    """A (P,) buffer that gradients are sent from or arrive in; usable once `free` has passed."""

    flat_P: Tensor
    free: Event


@dataclass(eq=False)
class Reduction:
    """A reduce-scatter under way: which turn it is, what it gives back, if the unit is complete after it."""

    unit: UnitState
    turn: int
    handle: Handle
    flats: tuple[GradientFlat, GradientFlat]
    partial: Tensor | None
    last: bool


class Reducer:
    """Takes gradients from backward, leaves their sum in each unit's `grad`.

    Args:
        gradients: where each unit's `grad` is.
        routes: how sums travel.
        updater: makes a unit's deferred update, which still needs the old gradient, before another one arrives, and
            is given each unit whose `grad` is final for this step.
        first: called before a step's first reduction.
        log: where every collective is noted.
        tape: records reductions.
    """

    def __init__(
        self,
        plan: Plan,
        routes: Routes,
        units: Sequence[UnitState],
        gradients: Gradients,
        updater: Updater,
        *,
        first: Callable[[], None],
        log: CollectiveLog,
        tape: Tape,
    ) -> None:
        self._units, self._routes, self._log, self._tape = units, routes, log, tape
        self._world, self._rank, self._device, self._gradients = plan.world, plan.rank, plan.world.compute, gradients
        self._local = plan.local_sum  # microbatches are added up in `grad`, which is reduced after the last one
        self._full = plan.full_update  # every rank needs the full sum, not its own range
        self._apply, self._measure, self._first = updater.apply, updater.measure, first
        self._rounds = 1 if self._local else plan.accumulate  # of reductions in a step, as far as is known beforehand
        self._flat_dtype = plan.flat_dtype
        self._extra = False  # a flat was made beyond those that the plan counts; `finish` drops it
        self._turns = Turns([unit.index for unit in units if unit.spec.trainable.slots], self._rounds)
        self._flats = {
            numel: [GradientFlat(self._device.zeros(numel, plan.flat_dtype), PASSED) for _ in range(count)]
            for numel, count in plan.flat_counts().items()
        }
        self._sums = {
            numel: [self._device.zeros(numel, torch.float32) for _ in range(count)]
            for numel, count in plan.partial_counts().items()
        }  # of this node, written and read on `reduce` alone
        self._free_all(PASSED)
        self._count = Counter(unit.spec.trainable.P for unit in units if unit.spec.trainable.slots)
        self._filling: dict[int, GradientFlat] = {}  # by unit: delivered to, not yet reduced
        self._unwritten: dict[int, set[int]] = {}  # by unit: slots of its flat in which nothing has arrived
        self._written: list[tuple[Tensor, Tensor]] = []  # places, and gradients that are to be copied there
        self._written_bytes = 0
        self._parted: set[int] = set()  # units of which a part was reduced before all of this microbatch had come
        self._under_way: deque[Reduction] = deque()
        self._unpublished: deque[UnitState] = deque()  # complete after a reduction that has started, oldest first
        self._gathers: dict[int, tuple[UnitState, Handle]] = {}  # by unit: the sums of the other ranks' ranges
        self._closed: set[int] = set()  # units that expect nothing more in this step
        self._sent: set[int] = set()  # units whose microbatches were added up, and reduced: `grad` holds the sum
        self._done = PASSED
        self._last = False

    @property
    def allocated_bytes(self) -> int:
        """Of the pooled flats, between steps."""
        return sum(flat.flat_P.nbytes for flats in self._free.values() for flat in flats)

    @property
    def partial_bytes(self) -> int:
        """Of the sums of this node, between steps."""
        return sum(partial.nbytes for partials in self._partials.values() for partial in partials)

    @property
    def is_busy(self) -> bool:
        """Gradients have arrived, or are on their way, that no step has taken."""
        return bool(self._filling or self._under_way or self._gathers)

    @property
    def has_gradients(self) -> bool:
        """Some rank has one, as of the last `finish`."""
        return self._turns.any_used if self._world.size > 1 else any(unit.filled for unit in self._units)

    def clear(self) -> None:
        """A step starts."""
        self._closed.clear()
        self._sent.clear()
        self._turns.begin()

    def begin(self, *, last: bool) -> None:
        """A microbatch starts; `last` says that no other follows in this step."""
        for index in self._filling:  # each microbatch is added up on its own
            self._turns.ready(index)
        self._take_turns(self._turns.needed(self._filling))
        self._last = last
        self._parted.clear()

    @torch.no_grad()
    def deliver(self, unit: UnitState, slot: int, grad: Tensor) -> None:
        """Add the gradient of one trainable slot, from one call."""
        place = unit.spec.trainable.slots[slot].of(self._open(unit))
        unwritten = self._unwritten.get(unit.index, set())
        if slot in unwritten:
            unwritten.discard(slot)
            self._write(place, grad.to_dense() if grad.is_sparse else grad)
        else:
            self._flush()
            unit.spec.trainable.slots[slot].of(self._open(unit, sums=True)).add_(grad)

    def start_reduce(self, unit: UnitState) -> None:
        """Every call of this microbatch has delivered: `unit` is ready to be reduced, unless more microbatches come."""
        self._flush()
        if self._adds_up(unit):
            if not unit.filled or unit.index in self._unwritten:
                self._complete(unit)
            if not self._last:
                self._gradients.park(unit)
            elif self._world.size == 1:
                self._publish(unit)
            else:
                self._be_ready(unit)
        elif unit.index in self._filling or unit.index not in self._parted:
            self._be_ready(unit)

    def finish(self) -> None:
        """Return when every unit's `grad` is final, on the compute stream; what still comes reopens it. Collective."""
        if self._unwritten:  # no pass has ended for them: a gradient would be missing in silence
            names = ", ".join(self._units[index].spec.name for index in self._unwritten)
            raise AssertionError(f"gradients of {names} have arrived and were never reduced")
        if self._world.size > 1:
            self._first()
            held = self._filling.keys() | {one.index for one in self._units if one.filled and self._adds_up(one)}
            for index in sorted(held, reverse=True):  # as backward comes, so that this is the order which is learned
                self._turns.ready(index)
            self._meet_at_end(self._turns.needed(held))
        while self._unpublished:
            self._publish_oldest()
        while self._under_way:
            self._complete_oldest()
        publish = self._publish_aside if self._world.size > 1 else self._publish  # alone, what computes made the sum
        for unit in [one for one in self._units if one.filled and one.index not in self._closed]:
            publish(unit)
        for index in list(self._gathers):
            with self._device.aside("reduce", after=PASSED) as self._done:
                self._complete_gather(index)
        with self._tape.stream_standing("reduce"):
            self._done.wait()
        if self._extra:
            self._free_all(PASSED)
            self._extra = False

    def forget(self) -> None:
        """Drop what has arrived in this step, on every rank. Collective."""
        if self._world.size > 1:
            self._meet_at_end(self._turns.taken)
        self._drop()
        self._turns.forget()

    def reset(self) -> None:
        """After an exception: wait for what is under way and forget it."""
        self._drop()
        self._turns.begin()

    def _drop(self) -> None:
        handles = [*(one.handle for one in self._under_way), *(handle for _, handle in self._gathers.values())]
        self._done.wait()
        with suppress(WorldError):  # a broken world is what is being reported already
            for handle in handles:
                handle.wait()
        self._free_all(self._device.mark())
        self._gradients.reset()
        for by_unit in (self._filling, self._unwritten, self._gathers, self._parted, self._closed, self._sent):
            by_unit.clear()
        for queue in (self._under_way, self._unpublished, self._written):
            queue.clear()
        self._written_bytes = 0

    def _open(self, unit: UnitState, *, sums: bool = False) -> Tensor:
        """The flat that gradients of `unit` are copied to, (P,), or with `sums` added to."""
        self._apply(unit)  # not visited since the last step: its deferred update needs the gradient that is there
        local = self._adds_up(unit)
        fresh = not unit.filled if local else unit.index not in self._filling
        if fresh:
            self._unwritten[unit.index] = set(range(len(unit.spec.trainable.slots)))
        if local:
            self._closed.discard(unit.index)
            if unit.grad is None:
                self._flush()
            grad = self._gradients.open(unit, fresh=fresh, sums=sums)
            unit.filled = True
            return grad
        if fresh:
            self._filling[unit.index] = self._take_to_fill(unit)
        return self._filling[unit.index].flat_P

    def _adds_up(self, unit: UnitState) -> bool:
        """Gradients of `unit` go straight into `grad`: it holds what this rank has, not yet the sum over ranks."""
        return self._local and unit.index not in self._sent

    def _write(self, place: Tensor, grad: Tensor) -> None:
        """Copy a gradient to its place, with others at once where each copy would be a launch."""
        self._written.append((place, grad))
        self._written_bytes += grad.nbytes
        if self._written_bytes > self._device.batch_bytes:
            self._flush()

    def _flush(self) -> None:
        """Make the copies that were put off; before a gradient is opened too, since that may send another away."""
        if self._written:
            places, grads = zip(*self._written, strict=True)
            torch._foreach_copy_(places, grads)
        self._written.clear()
        self._written_bytes = 0

    @torch.no_grad()
    def _complete(self, unit: UnitState) -> None:
        """Zeros where nothing has arrived: in slots that were not used, and between slots."""
        self._flush()
        flat_P, layout = self._open(unit), unit.spec.trainable
        for slot in self._unwritten.pop(unit.index):
            layout.slots[slot].of(flat_P).zero_()
        for start, stop in layout.gaps:
            flat_P[start:stop].zero_()

    def _be_ready(self, unit: UnitState) -> None:
        if unit.index in self._unwritten:
            self._complete(unit)
        self._turns.ready(unit.index)
        while self._turns.is_due:
            self._take_turn()

    def _take_turn(self, part: int | None = None) -> int:
        """Start the reduction whose turn it is, and return its unit.

        A unit that is not ready sends zeros and goes on filling. So turns are of no account to the bits: the sum of a
        unit does not depend on where its turn comes between its calls.

        Args:
            part: the unit that sends what has arrived so far.
        """
        self._flush()
        if self._turns.taken == 0:
            self._first()
        was_ready = self._turns.is_due
        index, number = self._turns.take()
        unit = self._units[index]
        if self._full:  # starts a gather, so it must not depend on what this rank alone has seen
            last = self._turns.rounds is not None and number + 1 >= max(self._turns.rounds, self._rounds)
        else:
            last = self._last and was_ready
        if index in self._filling and (was_ready or index == part):
            if not was_ready:
                self._parted.add(index)
            if index in self._unwritten:
                self._complete(unit)
            sent = self._filling.pop(index)
        elif self._adds_up(unit):
            if index in self._unwritten:  # in the middle of its calls: what comes after this is reduced on its own
                self._parted.add(index)
            if not unit.filled or index in self._unwritten:
                self._complete(unit)
            sent = self._take(unit.spec.trainable.P)  # the sum lands in `grad`, so it cannot be sent from there
            sent.flat_P.copy_(self._gradients.open(unit, fresh=False))
        else:
            self._apply(unit)
            sent = self._take(unit.spec.trainable.P)
            sent.flat_P.zero_()
        self._start(unit, sent, last=last)
        if self._local:
            self._sent.add(index)
        return index

    def _take_turns(self, count: int) -> None:
        while self._turns.taken < count:
            self._take_turn()

    def _meet_at_end(self, needed: int) -> None:
        """Take as many turns in this step as the rank that needs the most, and go on until no rank needs one more."""
        self._take_turns(max(needed, self._turns.agreed))
        while not self._exchange_reports(needed, at_end=True):
            self._take_turns(self._turns.agreed)
        self._take_turns(self._turns.agreed)
        self._turns.go_on()

    def _exchange_reports(self, needed: int, *, at_end: bool) -> bool:
        self._advance(through=True)
        return self._turns.receive(self._world.exchange(self._turns.report(needed, at_end=at_end), what="turns"))

    def _agree_on(self, turns: int) -> None:
        """Before a wait for the first `turns` turns: have ranks that are at the end of their step take part in them."""
        while self._turns.agreed < turns:
            self._exchange_reports(turns, at_end=False)
        self._advance()

    def _advance(self, *, through: bool = False) -> None:
        """Before a wait that others may not come to: start the second halves of what every rank has begun, or will."""
        if self._routes.are_waiting:
            with self._device.aside("reduce", after=PASSED) as self._done:
                self._routes.advance(self._turns.agreed, through=through)

    def _start(self, unit: UnitState, sent: GradientFlat, *, last: bool) -> None:
        """Reduce one flat into `grad`; `last` says that the unit is then complete."""
        while self._full and len(self._unpublished) > 1:  # by turns, and not by when they are done: see `Turns`
            self._publish_oldest()
        if unit.index in self._gathers:  # closed too early: it had one more call
            self._agree_on(self._turns.taken)
            with self._device.aside("reduce", after=PASSED) as self._done:
                self._gathers.pop(unit.index)[1].wait()
        self._closed.discard(unit.index)
        received = self._take(unit.spec.trainable.P)
        self._log.note(f"reduction of {unit.spec.name}")
        again = unit.filled and not self._adds_up(unit)
        self._advance()
        with self._device.aside("reduce", after=PASSED) as self._done:  # where its sum will be
            self._gradients.open(unit, fresh=not again, held=True)
        sum_S, what = unit.own_grad_S(self._rank), f"the gradient of {unit.spec.name}"
        flats, turn = (sent.flat_P, received.flat_P), self._turns.taken
        of_node = partial_numel(self._world, unit.spec.trainable.P)
        while self._partials and not self._partials[of_node]:
            self._complete_oldest()
        partial = self._partials[of_node].pop() if self._partials else None
        [handle] = self._tape.under_way(
            "reduce",
            unit.spec.name,
            lambda: [self._routes.reduce_scatter(*flats, sum_S, partial, accumulate=again, turn=turn, what=what)],
        )
        unit.filled = True
        self._under_way.append(Reduction(unit, turn, handle, (sent, received), partial, last))
        if self._full and last:
            self._unpublished.append(unit)

    def _complete_oldest(self) -> None:
        reduction = self._under_way[0]
        self._agree_on(reduction.turn)
        with self._device.aside("reduce", after=PASSED) as self._done:
            reduction.handle.wait()
            self._under_way.popleft()
            self._give_back(reduction.flats, self._device.mark())
            if reduction.partial is not None:
                self._partials[reduction.partial.numel()].append(reduction.partial)
            if not reduction.last:
                self._park(reduction.unit)
            elif not self._full and not self._awaited(reduction.unit):
                self._publish(reduction.unit)

    def _publish_oldest(self) -> None:
        unit = self._unpublished.popleft()
        if unit not in self._unpublished:  # else more of it is on its way
            while self._awaited(unit):
                self._complete_oldest()
            self._publish_aside(unit)

    def _publish_aside(self, unit: UnitState) -> None:
        """Where its sum was made: a gather that starts elsewhere could send what is not added yet."""
        with self._device.aside("reduce", after=PASSED) as self._done:
            self._publish(unit)

    def _complete_gather(self, index: int) -> None:
        unit, handle = self._gathers.pop(index)
        self._agree_on(self._turns.taken)  # it was started before the last of them
        handle.wait()
        self._finalise(unit)

    def _finalise(self, unit: UnitState) -> None:
        self._measure(unit)
        self._park(unit)

    def _park(self, unit: UnitState) -> None:
        """Nothing arrives in `grad` for now, unless another reduction of this unit is under way."""
        if not self._awaited(unit):
            self._gradients.park(unit)

    def _awaited(self, unit: UnitState) -> bool:
        """Another reduction of `unit` is under way: what came before it is not final."""
        return any(reduction.unit is unit for reduction in self._under_way)

    def _publish(self, unit: UnitState) -> None:
        """This rank's range is summed: that is all, or every rank gets the others' ranges too."""
        self._closed.add(unit.index)
        grad = self._gradients.open(unit, fresh=False)
        if self._full and self._world.size > 1:
            self._advance()  # between nodes a gather waits for another rank, which may wait for these first
            own_S, what = unit.own_grad_S(self._rank), f"the gradient of {unit.spec.name}"
            turn = self._turns.taken
            [handle] = self._tape.under_way(
                "reduce", unit.spec.name, lambda: [self._routes.gather(own_S, grad, turn=turn, what=what)]
            )
            self._gathers[unit.index] = unit, handle
            if self._gradients.scarce:
                self._complete_gather(unit.index)
        else:
            self._finalise(unit)

    def _take_to_fill(self, unit: UnitState) -> GradientFlat:
        """A flat for a unit to deliver to, leaving those that a reduction needs.

        A stack that is looped over fills many units at once. The oldest is then reduced as it stands. Which, and when,
        depends on what has arrived and on sizes without padding, and so not on turns or the number of ranks.
        """
        self._flush()
        numel, size = unit.spec.trainable.P, unit.spec.trainable.numel
        alike = [index for index in self._filling if self._units[index].spec.trainable.numel == size]
        unfinished = [index for index in alike if not self._turns.is_ready(index)]
        if len(unfinished) == MOST_UNFINISHED:
            while self._take_turn(part=unfinished[0]) != unfinished[0]:
                pass
        while True:
            free, filling = len(self._free[numel]), sum(one.flat_P.numel() == numel for one in self._filling.values())
            coming = sum(len(one.flats) for one in self._under_way if one.flats[0].flat_P.numel() == numel)
            spare = 1 if filling + 1 == self._count[numel] else 2  # to receive in, and zeros of a unit that has nothing
            if free + coming <= spare and self._ready_to_send(numel):
                self._take_turn()
            elif free < 2 and coming:
                self._complete_oldest()
            else:
                return self._take(numel)

    def _ready_to_send(self, numel: int) -> bool:
        """Some flat of this size waits for its turn."""
        return any(
            flat.flat_P.numel() == numel and self._turns.is_ready(index) for index, flat in self._filling.items()
        )

    def _take(self, numel: int) -> GradientFlat:
        while not self._free[numel]:
            if not any(reduction.flats[0].flat_P.numel() == numel for reduction in self._under_way):
                self._extra = True  # zeros of the only unit of its size, which is filling
                return GradientFlat(self._device.zeros(numel, self._flat_dtype), PASSED)
            self._complete_oldest()
        flat = self._free[numel].pop()
        with self._tape.stream_standing("reduce"):
            flat.free.wait()
        return flat

    def _free_all(self, free: Event) -> None:
        """Nobody uses any of them: neither a unit, nor a reduction, nor one that failed before it was under way."""
        self._free: dict[int, list[GradientFlat]] = {numel: [] for numel in self._flats}
        for flats in self._flats.values():
            self._give_back(flats, free)
        self._partials = {numel: list(sums) for numel, sums in self._sums.items()}

    def _give_back(self, flats: Sequence[GradientFlat], free: Event) -> None:
        """Free these flats: the next user waits for `free`."""
        for flat in flats:
            flat.free = free
            self._free[flat.flat_P.numel()].append(flat)
