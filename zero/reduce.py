"""Gradients on their way from autograd to the tensor that the update reads.

Each call of a unit delivers gradients by parameter. They are copied into one flat, and when all calls of the unit have
delivered, the flat is reduce-scattered while the next units' backward runs. Which flat it is:

    gradients sharded, or one microbatch    a pooled flat, free again when its reduction is done; two may be under way
    several microbatches, not sharded       `grad`, which adds up microbatches; after the last a pooled flat takes it on
    one rank                                `grad` itself, and nothing is reduced

A parameter that was not used has a zero gradient. So has a unit that was not visited.

Sums are in fp32, ranks in rank order; `grad` holds the sum over ranks and microbatches, and the update divides once.
An all-reduce (stage 0) is this reduce-scatter followed by a gather, so every stage adds alike.

Source: Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 7.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.device import Device, Event
from zero.errors import WorldError
from zero.layout import Layout
from zero.order import CollectiveLog
from zero.unit_state import UnitState
from zero.world import Handle, World


@dataclass(eq=False)
class GradientFlat:
    """A (P,) buffer that gradients are sent from or arrive in; usable once `free` has passed."""

    flat_P: Tensor
    free: Event


@dataclass(eq=False)
class Reduction:
    """A reduce-scatter under way and the flats that it gives back."""

    unit: UnitState
    handle: Handle
    flats: tuple[GradientFlat, GradientFlat]


class Reducer:
    """Takes gradients from backward, leaves their sum in each unit's `grad`.

    Args:
        counts: how many pooled flats there are of each size.
        dtype: of the pooled flats.
        local: add up microbatches in `grad` and reduce after the last one.
        whole: every rank wants the whole sum, not its own range.
        force: applies a unit's waiting update, which still needs the old gradient.
        final: called when a unit's `grad` is final for this step.
        log: where every collective is noted.
    """

    def __init__(
        self,
        *,
        world: World,
        device: Device,
        counts: Mapping[int, int],
        dtype: torch.dtype,
        local: bool,
        whole: bool,
        force: Callable[[UnitState], None],
        final: Callable[[UnitState], None],
        log: CollectiveLog,
    ) -> None:
        self._log = log
        self._world, self._device, self._dtype = world, device, dtype
        self._local, self._whole = local, whole
        self._force, self._final = force, final
        self._free = {numel: [self._allocate(numel) for _ in range(count)] for numel, count in counts.items()}
        self._filling: dict[int, GradientFlat] = {}  # by unit: delivered to, not yet reduced
        self._under_way: deque[Reduction] = deque()
        self._gathers: deque[tuple[UnitState, Handle]] = deque()
        self._done = Event()
        self._last = False
        self.overflowed = 0

    def begin(self, *, last: bool) -> None:
        """A microbatch starts; `last` says that no other follows in this step."""
        self._last = last

    @torch.no_grad()
    def deliver(self, unit: UnitState, grads: Sequence[Tensor | None]) -> None:
        """Add one call's gradients: one for each trainable slot, None where a parameter was not used."""
        if unit.waiting is not None:  # not visited since the last step: its update needs the gradient that is there
            self._force(unit)
        if self._local:
            assert unit.grad is not None
            _add(unit.spec.trainable, unit.grad, grads, overwrite=not unit.filled)
            unit.filled = True
            return
        overwrite = unit.index not in self._filling
        if overwrite:
            self._filling[unit.index] = self._take(unit.spec.trainable.P)
        _add(unit.spec.trainable, self._filling[unit.index].flat_P, grads, overwrite=overwrite)

    def settle(self, unit: UnitState) -> None:
        """Every call of this microbatch has delivered: start the reduction, unless more microbatches come first."""
        layout = unit.spec.trainable
        if not (unit.filled if self._local else unit.index in self._filling):
            self.deliver(unit, [None] * len(layout.slots))
        if not self._local:
            self._start(unit, self._filling.pop(unit.index), accumulate=unit.filled)
        elif self._last and self._world.size > 1:
            assert unit.grad is not None
            sent = self._take(layout.P)  # the sum lands in `grad`, so it cannot be sent from there
            sent.flat_P.copy_(unit.grad)
            self._start(unit, sent, accumulate=False)
        elif self._last:
            self._final(unit)

    def finish(self) -> None:
        """Return when every unit's `grad` is final, on the compute stream."""
        while self._under_way:
            self._complete_oldest()
        while self._gathers:
            unit, handle = self._gathers.popleft()
            with self._device.aside("reduce") as self._done:
                handle.wait()
                self._final(unit)
        self._done.wait()

    def reset(self) -> None:
        """After an exception: wait for what is under way and forget it."""
        handles = [*(reduction.handle for reduction in self._under_way), *(handle for _, handle in self._gathers)]
        with suppress(WorldError):  # a broken world is what is being reported already
            for handle in handles:
                handle.wait()
        for reduction in self._under_way:
            self._give_back(reduction.flats)
        self._give_back(tuple(self._filling.values()))
        self._filling.clear()
        self._under_way.clear()
        self._gathers.clear()

    def _start(self, unit: UnitState, sent: GradientFlat, *, accumulate: bool) -> None:
        received = self._take(unit.spec.trainable.P)
        self._log.note(f"reduction of {unit.spec.name}")
        sum_S, what = unit.own_grad_S(self._world.rank), f"the gradient of {unit.spec.name}"
        handle = self._world.reduce_scatter(sent.flat_P, received.flat_P, sum_S, accumulate=accumulate, what=what)
        unit.filled = True
        self._under_way.append(Reduction(unit, handle, (sent, received)))

    def _complete_oldest(self) -> None:
        reduction = self._under_way.popleft()
        unit, last = reduction.unit, self._last
        with self._device.aside("reduce") as self._done:
            reduction.handle.wait()
            if self._whole and last:
                assert unit.grad is not None
                what = f"the gradient of {unit.spec.name}"
                self._gathers.append(
                    (unit, self._world.gather(unit.own_grad_S(self._world.rank), unit.grad, what=what))
                )
            elif last and not any(other.unit is unit for other in self._under_way):
                self._final(unit)
        for flat in reduction.flats:
            flat.free = self._done
        self._give_back(reduction.flats)

    def _take(self, numel: int) -> GradientFlat:
        free = self._free[numel]
        while not free and self._under_way:
            self._complete_oldest()
        if not free:  # more units are being filled at once than there are flats: nested ones, or calls without gradient
            self.overflowed += 1
            return self._allocate(numel)
        flat = free.pop()
        flat.free.wait()
        return flat

    def _give_back(self, flats: Sequence[GradientFlat]) -> None:
        for flat in flats:
            self._free[flat.flat_P.numel()].append(flat)

    def _allocate(self, numel: int) -> GradientFlat:
        return GradientFlat(torch.zeros(numel, dtype=self._dtype, device=self._device.device), Event())


def _add(layout: Layout, flat_P: Tensor, grads: Sequence[Tensor | None], *, overwrite: bool) -> None:
    for slot, grad in zip(layout.slots, grads, strict=True):
        place = flat_P[slot.offset : slot.stop].view(slot.shape)
        if grad is not None and overwrite:
            place.copy_(grad.to_dense() if grad.is_sparse else grad)
        elif grad is not None:
            place.add_(grad)
        elif overwrite:
            place.zero_()
    if overwrite:
        for start, stop in layout.gaps:
            flat_P[start:stop].zero_()
