"""Add up gradients over calls, microbatches and ranks. They travel in `Facts.flat_dtype`; `World` adds in rank order.

Gradients arrive one parameter at a time, once for each call of a unit, and are copied into one flat. When all calls of
the unit have delivered and its turn has come, the flat is reduce-scattered while the next units' backward runs:

    gradients sharded, or one microbatch    a pooled flat, free again when its reduction is done; two may be under way
    several microbatches, not sharded       `grad`, which adds up microbatches; after the last a pooled flat takes it on
    one rank                                `grad` itself, and nothing is reduced

Reductions come in rounds: every trainable unit once, in one order that all ranks share. A step has one round for each
microbatch of the plan, or a single one where microbatches are added up first. A unit that is ready early waits for its
turn. When the microbatch ends the rest of its round is sent, zeros where this rank has nothing. Gradients that arrive
for a unit after it was ready (a second backward, more microbatches than planned) are added up in an extra flat. The
step's totals say whether any rank has one; then one more round follows.

So every rank starts the same operations in the same order, whatever it used, and waits only for operations that it has
started itself. Of all ranks that wait, one waits for the earliest operation; the ranks that have not started it yet
wait for nothing and will come to it. No step can hang.

The order begins as the plan's, backward. After a step in which units became ready in another order, which was the same
on all ranks, it is that one. What a unit sends in a round is what arrived until it was ready, so no bit of a sum
depends on the order.

Sums are in fp32, ranks in rank order; `grad` holds the sum over ranks and microbatches, and the update divides once.
An all-reduce (stage 0) is this reduce-scatter followed by a gather, so every stage adds alike.

On a GPU flats are filled, and their exchange starts, on the stream that computes; sums, and whatever comes after them
until the step's end, are on a stream of their own, "reduce", in the order of reductions. So:

    a flat        is taken by the stream that computes, which waits for the event that it was given back with
    `grad`        belongs to the stream that computes while microbatches are added up in it, and from the start of its
                  reduction to `reduce`, which is entered after what was computed so far; `finish` hands all of it back

Source: Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 7; Li et al. 2020, "PyTorch Distributed", section 3.2.3, for
the order of buckets that ranks must share.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.distributed.routes import Routes, partial_numel
from zero.distributed.world import Handle
from zero.engine.gradient import Gradients
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.engine.update import Updater
from zero.engine.visit_order import CollectiveLog
from zero.errors import WorldError
from zero.platform.device import PASSED, Event
from zero.platform.timeline import Tape


@dataclass(eq=False)
class GradientFlat:
    """A (P,) buffer that gradients are sent from or arrive in; usable once `free` has passed."""

    flat_P: Tensor
    free: Event


@dataclass(eq=False)
class Reduction:
    """A reduce-scatter under way.

    Attributes:
        last: the unit is complete after it, unless a rank has an extra flat.
    """

    unit: UnitState
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
        self._alone = plan.world.size == 1
        self._local = plan.local_sum  # microbatches are added up in `grad`, which is reduced after the last one
        self._full = plan.full_update and not self._alone  # every rank needs the full sum, not its own range
        self._apply, self._measure, self._first = updater.apply_deferred, updater.measure, first
        self._flat_dtype = plan.flat_dtype
        self._backward = tuple(unit.index for unit in reversed(units) if unit.spec.trainable.slots)
        self._order = self._backward
        self._planned = len(self._order) * (1 if self._local else plan.accumulate)  # turns of a step
        self._flats = {
            numel: [GradientFlat(self._device.zeros(numel, plan.flat_dtype), PASSED) for _ in range(count)]
            for numel, count in plan.flat_counts().items()
        }
        self._sums = {
            numel: [self._device.zeros(numel, torch.float32) for _ in range(count)]
            for numel, count in plan.partial_counts().items()
        }  # of this node, written and read on `reduce` alone
        self._free_all(PASSED)
        self._turns = 0  # taken in this step
        self._waiting: dict[int, None] = {}  # units whose turn in this round is still to come, in order
        self._ready: set[int] = set()  # those of them to whose part of this round nothing is added any more
        self._seen: dict[int, None] = {}  # units in the order in which they were ready in this step
        self._filling: dict[int, GradientFlat] = {}  # by unit: what it sends in this round
        self._extra: dict[int, GradientFlat] = {}  # by unit: what arrived after it was ready
        self._unwritten: dict[int, set[int]] = {}  # by unit: slots of its flat in which nothing has arrived
        self._written: list[tuple[Tensor, Tensor]] = []  # places, and gradients that are to be copied there
        self._written_bytes = 0
        self._under_way: deque[Reduction] = deque()
        self._unpublished: deque[UnitState] = deque()  # complete after a reduction that has started, oldest first
        self._gathers: dict[int, tuple[UnitState, Handle]] = {}  # by unit: the sums of the other ranks' ranges
        self._summed: set[int] = set()  # units of which `grad` holds a sum over ranks
        self._closed: set[int] = set()  # units that expect nothing more in this step
        self._done = PASSED
        self._last = self._arrived = False

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
        return bool(self._filling or self._extra or self._under_way or self._gathers)

    @property
    def has_extra(self) -> bool:
        """This rank needs one more round than planned."""
        return bool(self._extra)

    @property
    def order_seen(self) -> int:
        """A fingerprint of the order in which units were ready in this step."""
        return zlib.crc32(repr([*self._seen]).encode())

    def adopt_order(self) -> None:
        """Reduce units in the order in which they were ready in this step; it must have been the same on all ranks."""
        self._order = (*dict.fromkeys((*self._seen, *self._backward)),)

    def clear(self) -> None:
        """Begin a step."""
        for by_unit in (self._waiting, self._ready, self._seen, self._summed, self._closed):
            by_unit.clear()
        self._turns, self._arrived = 0, False

    def begin(self, *, last: bool) -> None:
        """Begin a microbatch.

        Args:
            last: no other one follows in this step.
        """
        self._last = last
        if not self._local:
            self._take_turns(self._round_end)
        self._open_round()

    @torch.no_grad()
    def deliver(self, unit: UnitState, slot: int, grad: Tensor) -> None:
        """Add the gradient of one trainable slot, from one call."""
        self._arrived = True
        place = unit.spec.trainable.slots[slot].of(self._open(unit))
        unwritten = self._unwritten.get(unit.index, set())
        if slot in unwritten:
            unwritten.discard(slot)
            self._write(place, grad.to_dense() if grad.is_sparse else grad)
        else:
            self._flush()
            unit.spec.trainable.slots[slot].of(self._open(unit, sums=True)).add_(grad)

    def start_reduce(self, unit: UnitState) -> None:
        """Reduce `unit` when its turn comes: every call of this microbatch has delivered."""
        self._flush()
        adds_up = self._adds_up(unit)
        if unit.index in self._unwritten or (adds_up and not unit.filled):
            self._complete(unit)
        if adds_up and not self._last:
            self._gradients.park(unit)
        elif self._alone:
            self._publish(unit)
        elif self._is_open(unit):
            self._seen.setdefault(unit.index)
            self._ready.add(unit.index)
            while self._waiting and next(iter(self._waiting)) in self._ready:
                self._take_turn()

    def finish(self) -> None:
        """Take all turns that are planned. Collective.

        Every unit's `grad` is then final, on the compute stream, if no rank `has_extra`.
        """
        self._check_complete()
        if not self._alone:
            self._take_turns(self._planned)
        self._settle()

    def finish_extra(self) -> None:
        """Take one more turn with each unit, because some rank `has_extra`. Collective."""
        self._filling, self._extra = self._extra, {}
        self._take_turns(self._turns + len(self._order))
        self._settle()

    def sum_so_far(self) -> bool:
        """Have in `grad` the sum of what has arrived in this step, for a read; more may come. Collective.

        Returns:
            whether any rank has a gradient.
        """
        self._check_complete()
        if self._alone:
            self._settle()
            return any(unit.filled for unit in self._units)
        some_extra, some_arrived = self._meet(self._round_end)
        self._settle()
        if some_extra:
            self.finish_extra()
        return some_arrived

    def forget(self) -> None:
        """Drop what has arrived in this step, on every rank. Collective."""
        in_microbatch = bool(self._turns or self._waiting)
        if not self._alone:
            self._meet(self._turns)
        self.reset()
        if in_microbatch:
            self._open_round()

    def reset(self) -> None:
        """After an exception: wait for what is under way and forget it."""
        handles = [
            *(reduction.handle for reduction in self._under_way),
            *(gather[1] for gather in self._gathers.values()),
        ]
        self._done.wait()
        with suppress(WorldError):  # a broken world is what is being reported already
            for handle in handles:
                handle.wait()
        self._free_all(self._device.mark())
        self._gradients.reset()
        for by_unit in (self._filling, self._extra, self._unwritten, self._gathers):
            by_unit.clear()
        for queue in (self._under_way, self._unpublished, self._written):
            queue.clear()
        self._written_bytes = 0
        self.clear()

    # -- what arrives --------------------------------------------------------------------------------------------------

    def _adds_up(self, unit: UnitState) -> bool:
        """Gradients of `unit` go straight into `grad`: it holds what this rank has, not yet the sum over ranks."""
        return self._local and unit.index not in self._summed and unit.index not in self._ready

    def _is_open(self, unit: UnitState) -> bool:
        """Gradients that arrive for `unit` are sent in this round."""
        return unit.index in self._waiting and unit.index not in self._ready

    def _open(self, unit: UnitState, *, sums: bool = False) -> Tensor:
        """The flat that gradients of `unit` are copied to, (P,), or with `sums` added to."""
        self._apply(unit)  # not visited since the last step: its deferred update needs the gradient that is there
        adds_up = self._adds_up(unit)
        flats = self._filling if self._is_open(unit) else self._extra
        fresh = not unit.filled if adds_up else unit.index not in flats
        if fresh:
            self._unwritten[unit.index] = set(range(len(unit.spec.trainable.slots)))
        if adds_up:
            self._closed.discard(unit.index)
            if unit.grad is None:
                self._flush()
            grad = self._gradients.open(unit, fresh=fresh, sums=sums)
            unit.filled = True
            return grad
        if fresh:
            flats[unit.index] = self._take(unit.spec.trainable.P)
        return flats[unit.index].flat_P

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
        flat_P, layout = self._open(unit), unit.spec.trainable
        for slot in self._unwritten.pop(unit.index):
            layout.slots[slot].of(flat_P).zero_()
        for start, stop in layout.gaps:
            flat_P[start:stop].zero_()

    def _check_complete(self) -> None:
        if self._unwritten:  # no pass has ended for them: a gradient would be missing in silence
            names = ", ".join(self._units[index].spec.name for index in self._unwritten)
            raise AssertionError(f"gradients of {names} have arrived and were never reduced")

    # -- turns ---------------------------------------------------------------------------------------------------------

    @property
    def _round_end(self) -> int:
        """Turns that are taken when this round has ended."""
        return self._turns + len(self._waiting)

    def _open_round(self) -> None:
        """Begin the next round, if one is planned and this one has ended."""
        if not self._alone and not self._waiting and self._turns < self._planned:
            self._waiting = dict.fromkeys(self._order)

    def _take_turns(self, count: int) -> None:
        while self._turns < count:
            self._waiting = self._waiting or dict.fromkeys(self._order)
            self._take_turn()

    def _take_turn(self) -> None:
        """Start the next reduction of this round."""
        self._flush()
        if not self._turns:
            self._first()
        index = next(iter(self._waiting))
        del self._waiting[index]
        self._turns += 1
        unit = self._units[index]
        sent = self._filling.pop(index) if index in self._filling else self._copied(unit)
        self._ready.discard(index)
        self._start(unit, sent, last=self._turns > self._planned - len(self._order))

    def _copied(self, unit: UnitState) -> GradientFlat:
        """Return the sum of microbatches in a flat, because the sum over ranks lands in `grad`; zeros without one."""
        self._apply(unit)
        sent = self._take(unit.spec.trainable.P)
        if self._local and unit.index not in self._summed:
            grad = self._gradients.open(unit, fresh=not unit.filled)  # on the stream that wrote what this parks
            if unit.filled:
                sent.flat_P.copy_(grad)
                return sent
        sent.flat_P.zero_()
        return sent

    def _meet(self, turns: int) -> tuple[bool, bool]:
        """Take at least so many turns, as many as the rank that needs the most.

        Returns:
            whether any rank has an extra flat, and a gradient.
        """
        self._advance(through=True)
        report = torch.tensor([turns, self.has_extra, self._arrived], dtype=torch.int64, device="cpu")
        most, some_extra, some_arrived = self._world.exchange(report, what="turns").amax(0).tolist()
        self._take_turns(most)
        return bool(some_extra), bool(some_arrived)

    def _advance(self, *, through: bool = False) -> None:
        """Before a wait that others may not come to: start the second halves of what every rank has begun, or will."""
        if self._routes.are_waiting:
            with self._device.aside("reduce", after=PASSED) as self._done:
                self._routes.advance(through=through)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def _start(self, unit: UnitState, sent: GradientFlat, *, last: bool) -> None:
        """Reduce one flat into `grad`; `last` says that the unit is then complete."""
        while len(self._unpublished) > 1:  # by turns, and not by when they are done: all ranks must start alike
            self._publish_oldest()
        self._advance()
        self._closed.discard(unit.index)
        received = self._take(unit.spec.trainable.P)
        self._log.note(f"reduction of {unit.spec.name}")
        again = unit.index in self._summed
        self._summed.add(unit.index)
        with self._device.aside("reduce", after=PASSED) as self._done:  # where its sum will be
            self._gradients.open(unit, fresh=not again, held=True)
        sum_S, what = unit.own_grad_S(self._rank), f"the gradient of {unit.spec.name}"
        of_node = partial_numel(self._world, unit.spec.trainable.P)
        while self._partials and not self._partials[of_node]:
            self._complete_oldest()
        partial = self._partials[of_node].pop() if self._partials else None
        flats = sent.flat_P, received.flat_P
        [handle] = self._tape.under_way(
            "reduce",
            unit.spec.name,
            lambda: [self._routes.reduce_scatter(*flats, sum_S, partial, accumulate=again, what=what)],
        )
        unit.filled = True
        self._under_way.append(Reduction(unit, handle, (sent, received), partial, last))
        if self._full and last:
            self._unpublished.append(unit)

    def _complete_oldest(self) -> None:
        reduction = self._under_way[0]
        self._advance()
        with self._device.aside("reduce", after=PASSED) as self._done:
            reduction.handle.wait()
            self._under_way.popleft()
            self._give_back(reduction.flats, self._device.mark())
            if reduction.partial is not None:
                self._partials[reduction.partial.numel()].append(reduction.partial)
            if not reduction.last:
                self._park(reduction.unit)
            elif not self._full and not self._is_under_way(reduction.unit):
                self._publish(reduction.unit)

    def _publish_oldest(self) -> None:
        unit = self._unpublished.popleft()
        while self._is_under_way(unit):
            self._complete_oldest()
        with self._device.aside("reduce", after=PASSED) as self._done:  # a gather elsewhere could start too early
            self._publish(unit)

    def _settle(self) -> None:
        """Complete what is under way, and have the compute stream wait for it."""
        while self._unpublished:
            self._publish_oldest()
        while self._under_way:
            self._complete_oldest()
        unpublished = [unit for unit in self._units if unit.filled and unit.index not in self._closed]
        if self._alone:  # what computes made the sum
            for unit in unpublished:
                self._publish(unit)
        else:
            for unit in unpublished:
                with self._device.aside("reduce", after=PASSED) as self._done:
                    self._publish(unit)
        for index in list(self._gathers):
            with self._device.aside("reduce", after=PASSED) as self._done:
                self._complete_gather(index)
        with self._tape.stream_standing("reduce"):
            self._done.wait()
        if not self._extra:
            self._free_all(PASSED)  # and drop the flats that were made beyond the plan's

    def _publish(self, unit: UnitState) -> None:
        """This rank's range is summed: that is all, or every rank gets the others' ranges too."""
        self._closed.add(unit.index)
        grad = self._gradients.open(unit, fresh=False)
        if not self._full:
            self._finalise(unit)
            return
        self._advance()  # between nodes a gather waits for another rank, which may wait for these first
        own_S, what = unit.own_grad_S(self._rank), f"the gradient of {unit.spec.name}"
        [handle] = self._tape.under_way(
            "reduce", unit.spec.name, lambda: [self._routes.gather(own_S, grad, of_sum=True, what=what)]
        )
        self._gathers[unit.index] = unit, handle
        if self._gradients.scarce:
            self._complete_gather(unit.index)

    def _complete_gather(self, index: int) -> None:
        unit, handle = self._gathers.pop(index)
        self._advance()
        handle.wait()
        self._finalise(unit)

    def _finalise(self, unit: UnitState) -> None:
        self._measure(unit)
        self._park(unit)

    def _park(self, unit: UnitState) -> None:
        """Nothing arrives in `grad` for now, unless another reduction of this unit is under way."""
        if not self._is_under_way(unit):
            self._gradients.park(unit)

    def _is_under_way(self, unit: UnitState) -> bool:
        return any(reduction.unit is unit for reduction in self._under_way)

    # -- flats ---------------------------------------------------------------------------------------------------------

    def _take(self, numel: int) -> GradientFlat:
        """A flat of this size; where all of them are filling a further one, until the step ends."""
        while not self._free[numel]:
            if not any(reduction.flats[0].flat_P.numel() == numel for reduction in self._under_way):
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
