"""Add up gradients over calls, microbatches and ranks, overlapped with backward.

Gradients are sent in `Facts.flat_dtype`, and each rank adds the received ones in fp32 and in rank order, if
`zero.reduce` is exact. They arrive for each call of a unit, the large ones one at a time, and are copied into one flat
tensor. When all calls of the unit have delivered and it is the unit's turn, the flat is reduce-scattered while the next
units' backward runs. The flat is:

    gradients sharded, or one microbatch    a pooled flat, free again after its reduction; two reductions may run
    several microbatches, not sharded       `grad`, which adds up microbatches and is copied to a pooled flat at the end
    one rank                                `grad` itself, and nothing is reduced

Reductions are organized in rounds. A round reduces every trainable unit once, in an order that all ranks share. A step
has one round per microbatch of the plan, or a single round if microbatches are added up first. A unit that is ready
early waits for its turn. When the microbatch ends, the remaining units of the round are reduced, with zeros where this
rank has no gradient. Gradients that arrive for a unit after it was ready (from a second backward, or more microbatches
than planned) are added up in an extra flat, in fp32, because there may be many. If the step's totals show that any rank
has an extra flat, all ranks run one more round, in fp32.

So every rank starts the same operations in the same order, whichever units it used, and waits only for operations that
it has started. A step cannot deadlock: consider the earliest operation that any rank waits for. A rank that has not
started it has started only earlier ones, so it waits for none, and it will start this one.

The first order is the plan's, reversed. If units became ready in another order in a step, and this order was the same
on all ranks, the next steps use it. The order changes no bit of a sum, because a unit's flat contains exactly the
gradients that arrived until it was ready.

`grad` is the sum over ranks and microbatches, and the update divides it once. An all-reduce (stage 0) is this
reduce-scatter followed by an all-gather, so all stages add in the same order.

On a GPU the compute stream fills flats and starts their exchange. Sums, and all work after them until the step's end,
run on the side stream "reduce", in the order of the reductions. So:

    a flat        is taken by the compute stream, after it has waited for the flat's `free` event
    `grad`        is used by the compute stream while microbatches are added up in it, and by "reduce" from the start of
                  its reduction; `finish` makes the compute stream wait for "reduce"

Source: Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 7; Li et al. 2020, "PyTorch Distributed", section 3.2.3, for
the order of buckets that ranks must share.
"""

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.distributed.routes import Routes, partial_numel
from zero.distributed.world import Handle
from zero.engine.checksums import Checksums
from zero.engine.gather import CollectiveLog
from zero.engine.memory import Scratch, ScratchPool
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.engine.unit_step import Phase, UnitStep
from zero.engine.update import Gradients, Updater
from zero.errors import WorldError
from zero.platform.device import PASSED
from zero.platform.timeline import Tape


@dataclass(eq=False)
class Reduction:
    """A started reduce-scatter.

    Attributes:
        flats: the flat that is sent, and the one in which other ranks' gradients are received.
        partial: the fp32 buffer for the sum within the node; None if sums are not by node.
        last: whether the unit's sum is complete after it, unless a rank has an extra flat.
    """

    unit: UnitState
    handle: Handle
    flats: tuple[Scratch, Scratch]
    partial: Scratch | None
    last: bool


class Reducer:
    """Receiver of gradients from backward, which leaves their sum in each unit's `grad`.

    Args:
        routes: the collectives, plain or by node.
        gradients: the memory of each unit's `grad`.
        updater: applies a unit's deferred update, which needs the old gradient, before a new gradient arrives. It also
            measures each final `grad` for the norm.
        first: a callback, called before a step's first reduction.
        log: records every collective, to compare ranks.
        tape: records reductions in the timeline.
        checksums: records each gradient that is sent, if a step is made twice.
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
        checksums: Checksums,
    ) -> None:
        self._units, self._routes, self._log, self._tape, self._checksums = units, routes, log, tape, checksums
        self._world, self._rank, self._device, self._gradients = plan.world, plan.rank, plan.world.compute, gradients
        self._alone = plan.world.size == 1
        self._local = plan.facts.local_sum  # microbatches are added up in `grad`, which is reduced after the last one
        self._full = plan.facts.full_update and not self._alone  # every rank needs the full sum
        self._apply, self._measure, self._first = updater.apply_deferred, updater.numbers.measure, first
        self._by_node, self._received_numel = plan.facts.sum_route.by_node, plan.sizes.received_numel
        self._flats = ScratchPool(plan.sizes.flat_sizes(), plan.facts.flat_dtype, self._device)
        self._partials = ScratchPool(
            plan.sizes.partial_sizes(), torch.float32, self._device
        )  # for the stream "reduce" only
        self._backward = [unit for unit in reversed(units) if unit.spec.trainable.slots]
        self._order = self._backward
        self._planned = len(self._order) * (1 if self._local else plan.accumulate)  # reductions of a step
        self._turns = 0  # reductions that this step has started
        self._seen: list[UnitState] = []  # units in the order in which they were ready in the first round
        self._extras: list[UnitState] = []  # units with an extra flat
        self._written: list[tuple[Tensor, Tensor]] = []  # pending copies: (destination, gradient)
        self._written_bytes = 0
        self._under_way: deque[Reduction] = deque()
        self._unpublished: deque[UnitState] = deque()  # their last reduction has started, oldest first
        self._gathering: deque[tuple[UnitState, Handle]] = deque()  # with the all-gathers of their sums, oldest first
        self._done = PASSED
        self._last = self._arrived = self._ended = False
        self._dtype = plan.facts.flat_dtype  # of the flats of this round

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pooled flats, measured between steps."""
        return self._flats.free_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes of the buffers for sums within the node, measured between steps."""
        return self._partials.free_bytes

    @property
    def has_extra(self) -> bool:
        """Whether this rank has an extra flat, so that all ranks need one more round than planned."""
        return bool(self._extras)

    @property
    def order_seen(self) -> int:
        """A number for the order in which units became ready in this step; 0 if it is the present order."""
        seen = self._next_order()
        return 0 if seen == self._order else zlib.crc32(repr([unit.index for unit in seen]).encode()) + 1

    def adopt_order(self) -> None:
        """Use the order in which units became ready in this step for the next steps.

        It must have been the same on all ranks.
        """
        self._order = self._next_order()

    def _next_order(self) -> list[UnitState]:
        return list(dict.fromkeys((*self._seen, *self._backward)))

    def begin_step(self) -> None:
        """Begin a step: make new records. Gradients of a backward outside of any step are dropped."""
        if self._flats.is_lent or self._gathering or self._written:
            self._drain()
        self._gradients.drop_open()
        self._renew(lambda _: UnitStep())
        self._ended = False

    def end_step(self) -> None:
        """End the step: its gradients cannot be read any more, because the update may overwrite them."""
        self._ended = True

    def begin_microbatch(self, *, last: bool) -> None:
        """Begin a microbatch.

        Args:
            last: whether it is the last planned microbatch of the step.
        """
        self._last = last
        if not self._local:
            self._take_turns(self._round_end)
        self._open_planned_round()

    @torch.no_grad()
    def deliver(self, unit: UnitState, grads: Mapping[int, Tensor]) -> None:
        """Add gradients of trainable slots, by slot, from one call of the unit."""
        if not grads:
            return
        self._arrived, beyond_plan = True, unit.step.published and self._adds_up(unit)
        flat_P, slots = self._open(unit), unit.spec.trainable.slots
        unwritten = unit.step.unwritten or set()
        for slot in unwritten.intersection(grads):
            grad = grads[slot].to_dense() if grads[slot].is_sparse else grads[slot]
            self._written.append((slots[slot].of(flat_P), grad))
            self._written_bytes += grad.nbytes
        if self._written_bytes > self._device.batch_bytes:
            self._flush()
        added = grads.keys() - unwritten
        unwritten.difference_update(grads)
        if added:
            self._flush()
            flat_P = self._open(unit, sums=True)
            if beyond_plan:
                flat_P = self._gradients.widen(unit)
        for slot in added:
            slots[slot].of(flat_P).add_(grads[slot])

    def start_reduce(self, unit: UnitState) -> None:
        """Mark `unit` as ready: all its calls of this microbatch have delivered. It is reduced when its turn comes."""
        self._flush()
        adds_up = self._adds_up(unit)
        if unit.step.unwritten is not None or (adds_up and not unit.step.filled):
            self._complete(unit)
        if adds_up and not self._last:
            self._gradients.park(unit)
        elif self._alone:
            self._publish(unit)
        elif self._is_open(unit):
            unit.step.go(Phase.READY)
            if self._turns < len(self._order):
                self._seen.append(unit)
            while self._is_round_open and self._next.step.phase is Phase.READY:
                self._take_turn()

    def finish(self) -> None:
        """Start and complete all planned reductions. Collective.

        If no rank `has_extra`, every unit's `grad` is then final and may be read on the compute stream.
        """
        self._check_complete()
        if not self._alone:
            self._take_turns(self._planned)
        self._settle()

    def finish_extra(self) -> None:
        """Run one more round with the extra flats, because a rank `has_extra`. Collective."""
        for unit in self._extras:
            unit.step.flat, unit.step.extra = unit.step.extra, None
        self._extras.clear()
        planned, self._dtype = self._dtype, torch.float32
        try:
            self._take_turns(self._turns + len(self._order))
        finally:
            self._dtype = planned
        self._settle()

    def sum_so_far(self) -> bool:
        """Reduce all gradients that have arrived in this step, so that `grad` can be read; more may arrive. Collective.

        Returns:
            Whether any rank has a gradient.
        """
        self._check_complete()
        if self._ended:
            return False
        if self._alone:
            self._settle()
            return any(unit.step.filled for unit in self._units)
        some_extra, some_arrived = self._meet(self._round_end)
        self._settle()
        if some_extra:
            self.finish_extra()
        return some_arrived

    def forget(self) -> None:
        """Drop all gradients that have arrived in this step, on every rank. Collective."""
        in_microbatch = self._turns > 0 or self._is_round_open
        if not self._alone:
            self._meet(self._turns)
        self._drain()
        self._renew(UnitStep.emptied)  # forwards that have run may still be followed by their backward
        if in_microbatch:
            self._open_planned_round()

    def reset(self) -> None:
        """Clean up after an exception: wait for started operations, drop all gradients and records."""
        self._drain()
        self._renew(lambda _: UnitStep())

    def _drain(self) -> None:
        handles = [*(reduction.handle for reduction in self._under_way), *(handle for _, handle in self._gathering)]
        # on the stream of sums, because further parts of a sum allocate on it
        with self._device.aside("reduce", after=PASSED) as self._done, suppress(WorldError):  # the caller handles it
            for handle in handles:
                handle.wait()
        self._done.wait()
        free = self._device.mark()
        self._flats.reset(free)
        self._partials.reset(free)
        self._gradients.reset()
        for queue in (self._under_way, self._unpublished, self._gathering, self._written):
            queue.clear()
        self._written_bytes = 0

    def _renew(self, renewed: Callable[[UnitStep], UnitStep]) -> None:
        for unit in self._units:
            unit.step = renewed(unit.step)
        self._seen.clear()
        self._extras.clear()
        self._turns, self._arrived = 0, False

    # -- what arrives --------------------------------------------------------------------------------------------------

    def _adds_up(self, unit: UnitState) -> bool:
        """Return whether gradients of `unit` are added directly to `grad`, which is not reduced over ranks yet."""
        return self._local and not unit.step.summed and unit.step.phase is not Phase.READY

    def _is_open(self, unit: UnitState) -> bool:
        """Return whether gradients that arrive for `unit` now are still part of this round."""
        return unit.step.phase in (Phase.EMPTY, Phase.FILLING)

    def _open(self, unit: UnitState, *, sums: bool = False) -> Tensor:
        """Return the flat, (P,), that gradients of `unit` are copied into.

        Args:
            sums: a gradient will be added to the flat instead, so it must be in the dtype of sums.
        """
        # a unit that was not gathered since the last step still has its deferred update, which reads the old gradient
        self._apply(unit)
        record = unit.step
        if record.phase is Phase.EMPTY:
            record.go(Phase.FILLING)
        if self._adds_up(unit):
            fresh, record.published = not record.filled, False
            if unit.grad is None:
                self._flush()
            grad = self._gradients.open(unit, fresh=fresh, sums=sums)
            record.filled = True
        elif self._is_open(unit):
            fresh = record.flat is None
            record.flat = record.flat or self._take(unit.spec.trainable.P)
            grad = record.flat.flat
        else:
            fresh = record.extra is None
            if record.extra is None:
                record.extra = self._take(unit.spec.trainable.P, torch.float32)
                self._extras.append(unit)
            grad = record.extra.flat
        if fresh:
            record.unwritten = set(range(len(unit.spec.trainable.slots)))
        return grad

    def _flush(self) -> None:
        """Execute the batched copies of gradients to their flats; on a GPU this launches fewer kernels.

        Must also be called before a gradient is opened, because that may park another one, to which copies are pending.
        """
        if self._written:
            places, grads = zip(*self._written, strict=True)
            torch._foreach_copy_(places, grads)
        self._written.clear()
        self._written_bytes = 0

    @torch.no_grad()
    def _complete(self, unit: UnitState) -> None:
        """Write zeros into the slots without a gradient and into the gaps between slots."""
        flat_P, layout = self._open(unit), unit.spec.trainable
        for slot in unit.step.unwritten or ():
            layout.slots[slot].of(flat_P).zero_()
        unit.step.unwritten = None
        for start, stop in layout.gaps:
            flat_P[start:stop].zero_()

    def _check_complete(self) -> None:
        names = ", ".join(unit.spec.name for unit in self._backward if unit.step.unwritten is not None)
        if names:  # never reduced: a gradient would be missing silently
            raise AssertionError(f"gradients of {names} have arrived and were never reduced")

    # -- turns ---------------------------------------------------------------------------------------------------------

    @property
    def _next(self) -> UnitState:
        """The unit whose turn is next."""
        return self._order[self._turns % len(self._order)]

    @property
    def _is_round_open(self) -> bool:
        """Whether reductions of this round have not started. A round is open as long as its last unit is."""
        return bool(self._order) and self._order[-1].step.phase is not Phase.CLOSED

    @property
    def _round_end(self) -> int:
        """The value of `_turns` at the end of this round."""
        return self._turns + sum(unit.step.phase is not Phase.CLOSED for unit in self._order)

    def _open_planned_round(self) -> None:
        if not self._alone and self._turns < self._planned:
            self._open_round()

    def _open_round(self) -> None:
        """Begin the next round, if this one has ended."""
        if not self._is_round_open:
            for unit in self._order:
                unit.step.go(Phase.EMPTY)

    def _take_turns(self, count: int) -> None:
        while self._turns < count:
            self._open_round()
            self._take_turn()

    def _take_turn(self) -> None:
        """Start the next reduction of this round, whether its unit is ready or not."""
        self._flush()
        if not self._turns:
            self._first()
        unit = self._next
        self._turns += 1
        unit.step.go(Phase.CLOSED)
        sent, unit.step.flat = unit.step.flat or self._copied(unit), None
        self._start(unit, sent, last=self._turns > self._planned - len(self._order))

    def _copied(self, unit: UnitState) -> Scratch:
        """Return a pooled flat with the unit's sum of microbatches, or with zeros if it has no gradient.

        `grad` cannot be sent itself, because the sum over ranks is written into it.
        """
        self._apply(unit)
        sent = self._take(unit.spec.trainable.P)
        if self._local and not unit.step.summed:
            # on the compute stream, because opening may park another gradient, which was written on it
            grad = self._gradients.open(unit, fresh=not unit.step.filled)
            if unit.step.filled:
                sent.flat.copy_(grad)
                return sent
        sent.flat.zero_()
        return sent

    def _meet(self, turns: int) -> tuple[bool, bool]:
        """Agree with the other ranks on the largest number of turns, and take turns up to it. Collective.

        Args:
            turns: the number of turns of this step that this rank needs.

        Returns:
            (whether any rank has an extra flat, whether any rank has a gradient).
        """
        self._advance(through=True)
        report = torch.tensor([turns, self.has_extra, self._arrived], dtype=torch.int64, device="cpu")
        most, some_extra, some_arrived = self._world.exchange(report, what="turns").amax(0).tolist()
        self._take_turns(most)
        return bool(some_extra), bool(some_arrived)

    def _advance(self, *, through: bool = False) -> None:
        """Start the second halves of started collectives, see `zero.distributed.routes`.

        Must be called before a wait, because other ranks may need these halves before they reach the same wait.
        """
        if self._routes.are_waiting:
            with self._device.aside("reduce", after=PASSED) as self._done:
                self._routes.advance(through=through)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def _start(self, unit: UnitState, sent: Scratch, *, last: bool) -> None:
        """Start the reduction of one flat into `grad`.

        Args:
            sent: the flat with this rank's gradients.
            last: whether it is the unit's last planned reduction of the step.
        """
        while len(self._unpublished) > 1:  # counted, not timed: all ranks must start alike
            self._publish_oldest()
        self._advance()
        unit.step.published = False
        received = self._take(self._received_numel(unit.spec.trainable))
        self._log.note(f"reduction of {unit.spec.name}")
        self._checksums.note(unit.spec.name, "gradient of this rank", [sent.flat])
        again, unit.step.summed = unit.step.summed, True
        with self._device.aside("reduce", after=PASSED) as self._done:  # the stream that computes the sum
            self._gradients.open(unit, fresh=not again, held=True)
        sum_S, what = unit.own_grad_S(self._rank), f"the gradient of {unit.spec.name}"
        of_node = partial_numel(self._world, unit.spec.trainable.P)
        while (partial := self._partials.take(of_node)) is None and self._by_node:
            self._complete_oldest()
        flats, of_node_N = (sent.flat, received.flat), None if partial is None else partial.flat
        [handle] = self._tape.under_way(
            "reduce",
            unit.spec.name,
            lambda: [self._routes.reduce_scatter(*flats, sum_S, of_node_N, accumulate=again, what=what)],
        )
        unit.step.filled = True
        unit.step.reductions += 1
        self._under_way.append(Reduction(unit, handle, (sent, received), partial, last))
        if self._full and last:
            self._unpublished.append(unit)

    def _complete_oldest(self) -> None:
        reduction = self._under_way[0]
        self._advance()
        with self._device.aside("reduce", after=PASSED) as self._done:
            reduction.handle.wait()
            self._under_way.popleft()
            reduction.unit.step.reductions -= 1
            free = self._device.mark()
            for flat in reduction.flats:
                self._flats.give_back(flat, free)
            if reduction.partial is not None:
                self._partials.give_back(reduction.partial, free)
            if not reduction.last:
                self._park(reduction.unit)
            elif not self._full and not reduction.unit.step.reductions:
                self._publish(reduction.unit)

    def _publish_oldest(self) -> None:
        unit = self._unpublished.popleft()
        while unit.step.reductions:
            self._complete_oldest()
        with self._device.aside("reduce", after=PASSED) as self._done:  # the all-gather must start after the sum
            self._publish(unit)

    def _settle(self) -> None:
        """Complete all started operations, finish every unit's `grad`, and have the compute stream wait for them."""
        while self._unpublished:
            self._publish_oldest()
        while self._under_way:
            self._complete_oldest()
        unpublished = [unit for unit in self._units if unit.step.filled and not unit.step.published]
        if self._alone:  # the sum was made on the compute stream
            for unit in unpublished:
                self._publish(unit)
        else:
            for unit in unpublished:
                with self._device.aside("reduce", after=PASSED) as self._done:
                    self._publish(unit)
        while self._gathering:
            with self._device.aside("reduce", after=PASSED) as self._done:
                self._complete_gather()
        with self._tape.stream_standing("reduce"):
            self._done.wait()
        self._flats.drop_extra()

    def _publish(self, unit: UnitState) -> None:
        """Finish a unit whose own range is reduced; if every rank needs the full sum, start its all-gather first."""
        unit.step.published = True
        grad = self._gradients.open(unit, fresh=False)
        if not self._full:
            self._finalise(unit)
            return
        self._advance()  # other ranks may need these halves before they join this all-gather
        own_S, what = unit.own_grad_S(self._rank), f"the gradient of {unit.spec.name}"
        [handle] = self._tape.under_way(
            "reduce", unit.spec.name, lambda: [self._routes.gather(own_S, grad, of_sum=True, what=what)]
        )
        self._gathering.append((unit, handle))
        if self._gradients.scarce:
            self._complete_gather()

    def _complete_gather(self) -> None:
        unit, handle = self._gathering[0]
        self._advance()
        handle.wait()
        self._gathering.popleft()
        self._finalise(unit)

    def _finalise(self, unit: UnitState) -> None:
        self._measure(unit)
        self._park(unit)

    def _park(self, unit: UnitState) -> None:
        """Park the unit's gradient, unless another reduction will write into it."""
        if not unit.step.reductions:
            self._gradients.park(unit)

    # -- flats ---------------------------------------------------------------------------------------------------------

    def _take(self, numel: int, dtype: torch.dtype | None = None) -> Scratch:
        """Return a flat of `numel` elements.

        If none is free, wait for a reduction. If none is under way, because all flats are being filled, allocate one.

        Args:
            dtype: that of the flat; None: that of this round.
        """
        dtype = dtype or self._dtype
        while (flat := self._flats.take(numel, dtype)) is None:
            if not self._under_way:
                return self._flats.extra(numel, dtype)
            self._complete_oldest()
        with self._tape.stream_standing("reduce"):
            flat.free.wait()
        return flat
