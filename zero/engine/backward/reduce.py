"""Add up a unit's gradient over ranks, overlapped with backward, and measure the final sum.

A flat with this rank's gradient is reduce-scattered. Gradients are sent in `Facts.flat_dtype`, and each rank adds the
received ones in fp32 and in rank order, if `zero.reduce` is exact. A unit is published when its last planned reduction
has ended, or before its gradient is read. An all-reduce (stage 0) is this reduce-scatter followed by an all-gather at
that time, so all stages add in the same order.

On a GPU the compute stream fills flats and starts their exchange. Sums, and all work after them until the step's end,
run on the side stream "reduce", in the order of the reductions. So:

    a flat        is taken by the compute stream, after it has waited for the flat's `free` event
    `grad`        is used by the compute stream while microbatches are added up in it, and by "reduce" from the start of
                  its reduction; `settle` makes the compute stream wait for "reduce"

Source: Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 7.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from zero.distributed.routes import Routes, partial_numel
from zero.distributed.world import Handle
from zero.engine.checksums import Checksums
from zero.engine.gather import CollectiveLog
from zero.engine.memory import Scratch, ScratchPool
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.engine.update import Gradients
from zero.errors import WorldError
from zero.platform.device import PASSED
from zero.platform.tape import Tape


@dataclass(eq=False)
class Reduction:
    """A started reduce-scatter.

    Attributes:
        flats: the flat that is sent, and the one in which other ranks' gradients are received.
        partial: the fp32 buffer for the sum within the node; None if sums are not by node.
        last: whether the unit's sum is complete after this reduction, unless a rank has an extra flat.
    """

    unit: UnitState
    handle: Handle
    flats: tuple[Scratch, Scratch]
    partial: Scratch | None
    last: bool


class Reductions:
    """The reductions of one rank: those under way, and the flats that they use.

    Args:
        measure: computes the sum of squares of a unit's final `grad`.

    Attributes:
        flats: the pooled flats.
        partials: the buffers for sums within the node, which only the stream "reduce" uses.
    """

    def __init__(
        self,
        plan: Plan,
        routes: Routes,
        gradients: Gradients,
        measure: Callable[[UnitState], None],
        log: CollectiveLog,
        tape: Tape,
        checksums: Checksums,
    ) -> None:
        self._plan, self._routes, self._gradients, self._measure = plan, routes, gradients, measure
        self._log, self._tape, self._checksums, self._device = log, tape, checksums, plan.world.compute
        self._full = plan.facts.full_update and plan.world.size > 1  # every rank needs the full sum
        self.flats = ScratchPool(plan.sizes.flat_sizes(), plan.facts.flat_dtype, self._device)
        self.partials = ScratchPool(plan.sizes.partial_sizes(), torch.float32, self._device)
        self._under_way: deque[Reduction] = deque()
        self._unpublished: deque[UnitState] = deque()  # whose last reduction has started, oldest first
        self._gathering: deque[tuple[UnitState, Handle]] = deque()  # with the all-gathers of their sums, oldest first
        self._done = PASSED  # the event at the end of the last work on "reduce"

    @property
    def are_pending(self) -> bool:
        """Whether a flat is in use or an all-gather under way."""
        return self.flats.is_lent or bool(self._gathering)

    def take(self, numel: int, dtype: torch.dtype | None = None) -> Scratch:
        """Return a flat of `numel` elements, for the compute stream.

        If none is free, wait for a reduction. If none is under way, because all flats are being filled, allocate one.

        Args:
            dtype: dtype of the flat; None: the plan's.
        """
        while (flat := self.flats.take(numel, dtype)) is None:
            if not self._under_way:
                return self.flats.extra(numel, dtype)
            self._complete_oldest()
        with self._tape.stream_standing("reduce"):
            flat.free.wait()
        return flat

    def start(self, unit: UnitState, sent: Scratch, *, last: bool) -> None:
        """Start the reduction of one flat into `grad`.

        Args:
            sent: the flat with this rank's gradients.
            last: whether it is the unit's last planned reduction of the step.
        """
        while len(self._unpublished) > 1:  # counted, not timed: all ranks must start alike
            self._publish_oldest()
        self.advance()
        unit.step.squares = None
        received = self.take(self._plan.sizes.received_numel(unit.spec.trainable), sent.flat.dtype)
        self._log.note(f"reduction of {unit.spec.name}")
        self._checksums.note(unit.spec.name, "gradient of this rank", [sent.flat])
        again, unit.step.summed = unit.step.summed, True
        with self._device.aside("reduce", after=PASSED) as self._done:  # the stream that computes the sum
            self._gradients.open(unit, fresh=not again, held=True)
        sum_S, what = unit.own_grad_S(self._plan.rank), f"the gradient of {unit.spec.name}"
        of_node = partial_numel(self._plan.world, unit.spec.trainable.P)
        while (partial := self.partials.take(of_node)) is None and self._plan.facts.sum_route.by_node:
            self._complete_oldest()
        flats, of_node_N = (sent.flat, received.flat), None if partial is None else partial.flat
        [handle] = self._tape.under_way(
            "reduce",
            unit.spec.name,
            lambda: [self._routes.reduce_scatter(*flats, sum_S, of_node_N, accumulate=again, what=what)],
        )
        unit.step.filled = True
        self._under_way.append(Reduction(unit, handle, (sent, received), partial, last))
        if self._full and last:
            self._unpublished.append(unit)

    def advance(self, *, through: bool = False) -> None:
        """Start the later parts of started collectives, see `zero.distributed.routes`.

        Must be called before a wait, because other ranks may need these halves before they reach the same wait.
        """
        if self._routes.are_waiting:
            with self._device.aside("reduce", after=PASSED) as self._done:
                self._routes.advance(through=through)

    def publish(self, unit: UnitState) -> None:
        """Finish a unit whose own range is reduced; if every rank needs the full sum, start its all-gather first."""
        grad = self._gradients.open(unit, fresh=False)
        if not self._full:
            self._finalise(unit)
            return
        self.advance()  # other ranks may need these halves before they join this all-gather
        own_S, what = unit.own_grad_S(self._plan.rank), f"the gradient of {unit.spec.name}"
        [handle] = self._tape.under_way(
            "reduce", unit.spec.name, lambda: [self._routes.gather(own_S, grad, of_sum=True, what=what)]
        )
        self._gathering.append((unit, handle))
        if self._gradients.scarce:
            self._complete_gather()

    def settle(self, units: Sequence[UnitState]) -> None:
        """Complete all started operations, finish every unit's `grad`, and have the compute stream wait for them."""
        while self._unpublished:
            self._publish_oldest()
        while self._under_way:
            self._complete_oldest()
        gathering = {unit for unit, _ in self._gathering}
        filled = [unit for unit in units if unit.step.filled and unit.step.squares is None and unit not in gathering]
        if self._plan.world.size == 1:  # the sum was made on the compute stream
            for unit in filled:
                self.publish(unit)
        else:
            for unit in filled:
                with self._device.aside("reduce", after=PASSED) as self._done:
                    self.publish(unit)
        while self._gathering:
            with self._device.aside("reduce", after=PASSED) as self._done:
                self._complete_gather()
        with self._tape.stream_standing("reduce"):
            self._done.wait()
        self.flats.drop_extra()

    def drop(self) -> None:
        """Wait for all started operations, and drop all gradients."""
        handles = [*(reduction.handle for reduction in self._under_way), *(handle for _, handle in self._gathering)]
        # on the stream of sums, because further parts of a sum allocate on it
        with self._device.aside("reduce", after=PASSED) as self._done, suppress(WorldError):  # the caller handles it
            for handle in handles:
                handle.wait()
        self._done.wait()
        free = self._device.mark()
        self.flats.reset(free)
        self.partials.reset(free)
        self._gradients.reset()
        for queue in (self._under_way, self._unpublished, self._gathering):
            queue.clear()

    # -- completion, oldest first --------------------------------------------------------------------------------------

    def _complete_oldest(self) -> None:
        reduction = self._under_way[0]
        self.advance()
        with self._device.aside("reduce", after=PASSED) as self._done:
            reduction.handle.wait()
            self._under_way.popleft()
            free = self._device.mark()
            for flat in reduction.flats:
                self.flats.give_back(flat, free)
            if reduction.partial is not None:
                self.partials.give_back(reduction.partial, free)
            if not reduction.last:
                self._park(reduction.unit)
            elif not self._full and not self._is_under_way(reduction.unit):
                self.publish(reduction.unit)

    def _publish_oldest(self) -> None:
        unit = self._unpublished.popleft()
        while self._is_under_way(unit):
            self._complete_oldest()
        with self._device.aside("reduce", after=PASSED) as self._done:  # the all-gather must start after the sum
            self.publish(unit)

    def _complete_gather(self) -> None:
        unit, handle = self._gathering[0]
        self.advance()
        handle.wait()
        self._gathering.popleft()
        self._finalise(unit)

    def _finalise(self, unit: UnitState) -> None:
        self._measure(unit)
        self._park(unit)

    def _park(self, unit: UnitState) -> None:
        """Park the unit's gradient, unless another reduction will write into it."""
        if not self._is_under_way(unit):
            self._gradients.park(unit)

    def _is_under_way(self, unit: UnitState) -> bool:
        return any(reduction.unit is unit for reduction in self._under_way)
