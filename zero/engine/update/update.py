"""The optimizer's update of a unit, deferred until before the unit's next gather; offloaded state is updated by pages.

The end of a step computes the norm, captures every number that the update needs by value (`Hyper`), and defers each
unit's update. State on the device is updated by `apply_deferred`, just before the unit is next gathered. If a GPU
updates pages of host memory, these pass through `Staging`, a unit ahead. Updates of other offloaded state are queued
for the store's threads immediately, in the order in which units will be gathered. The threads read, update and write
page by page while the forward of earlier units computes, and `apply_deferred` waits for the remaining pages. The order
changes no bit, because an update is elementwise and reads only its page, its gradient and `Hyper`.

Muon's update of matrices is not elementwise. `apply_deferred` makes it in two passes over the pages, between which the
ranks exchange whole matrices, so it is collective for such units.

On a CPU a page is updated in pieces that fit in the cache: one piece is unscaled, clipped, decayed, updated with its
moments and cast to the compute dtype before the next piece begins. On a GPU one kernel does all this for a piece, and
neighbouring pages on the device are one piece.

Source: Jiang et al. 2021, "Optimizer Fusion" (forward fusion); Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor

from zero.core.fused import numbers, optimizer_of, signed, tables
from zero.core.kept import Kept, Pass
from zero.core.layout import Layout, Slot
from zero.core.master import cut_as, in_fp32
from zero.core.moments import permutation
from zero.core.optim import Hyper
from zero.core.sizes import round_up
from zero.core.update_counts import UpdateCounts
from zero.core.updates import PageBatch, Settings, on_device
from zero.engine.plan import Part, Plan, parts_of
from zero.engine.unit_state import UnitState
from zero.engine.update.gradient import Gradients
from zero.engine.update.orthogonalize import Orthogonalizer
from zero.engine.update.staging import Staging
from zero.errors import StaleStateError
from zero.platform.device import PASSED, Device, Event
from zero.platform.timeline import Tape
from zero.store import PageKind, PrefetchStore, Ticket

GPU_GROUPS = 4
"""The most groups of pages that a GPU updates at a time, because each has a copy in device memory. Copies to and from
the device are faster than disks, so further groups would not end sooner."""


class Piece(NamedTuple):
    """K elements that are updated together, as tensors on the device that updates them."""

    first: int
    """The index of the first element in the unit's trainable flat."""
    param_K: Tensor
    """The parameters, (K,), in the dtype of compute."""
    kept: Sequence[Tensor]
    """The master, if it is stored separately, and the moments, in the formats of their pages."""
    grad_K: Tensor
    tables: Sequence[Tensor] = ()
    """`zero.core.fused.tables` of the piece; empty without a kernel."""

    @property
    def range(self) -> tuple[int, int]:
        """The (start, stop) of its elements in the unit's trainable flat."""
        return self.first, self.first + self.grad_K.numel()

    def cut(self, start: int, stop: int) -> "Piece":
        """Return the piece with elements [start, stop) of this one."""
        numel = self.grad_K.numel()
        # a page may have several elements per parameter, or one for several parameters
        kept = [page[page.numel() * start // numel : page.numel() * stop // numel] for page in self.kept]
        return Piece(self.first + start, self.param_K[start:stop], kept, self.grad_K[start:stop])


class Updater:
    """The optimizer of this rank, which schedules and applies deferred updates.

    Args:
        advance: starts the second halves of gathers that this rank does not wait for, see `Routes.advance`.
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
        self._plan, self._store, self._transform = plan, store, plan.optimizer
        self._device, self._gradients, self._tape = plan.world.compute, gradients, tape
        self._rank, self._full_update = plan.rank, plan.facts.full_update
        self._where = self._device.host if plan.offload.compute == "host" else self._device
        plan.passes.kept.prepare(self._where.device)
        self._orthogonalizer, self._advance = Orthogonalizer(plan), advance
        self._readers, self._read = list[Ticket](), self._device.mark()  # of the directions of the last unit
        self._fused = optimizer_of(plan.optimizer) if self._device.tile_numel else None
        for unit in units:
            unit.parts = tuple(parts_of(plan, store, unit.spec, self._where))
        self._limit = nullcontext() if self._where.shares_memory else threading.Semaphore(GPU_GROUPS)
        self._units, self._order = units, list(units)  # the latter in the order of the coming updates
        self._visited: list[UnitState] = []
        self._coming: Iterator[UnitState] = iter(())  # units with staged parts, in the order of the coming updates
        counted = (slot for unit in plan.units if not unit.matrices for slot in unit.trainable.slots)
        self._counts = UpdateCounts(counted, len(plan.optimizer.groups))
        self._decided: Hyper | None = None  # kept until the next `decide`, because other streams read its tensors
        self._make_tables()
        slots = [self._device.zeros(plan.slots.staging_slot_bytes, torch.uint8) for _ in range(plan.slots.staging)]
        self._staging = Staging(self._device, store, slots)

    @property
    def staging_bytes(self) -> int:
        return self._staging.allocated_bytes

    @property
    def matrix_bytes(self) -> int:
        return self._orthogonalizer.allocated_bytes

    # -- what a step decides -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: expect updates in the order of the last step, and units without an update there at the end."""
        self._counts.begin()
        self._order = list(dict.fromkeys([*self._visited, *self._order]))
        self._visited.clear()
        self._expect()

    def train(self, groups: Sequence[Settings]) -> None:
        """Note which groups train in the next forward, see `UpdateCounts.train`."""
        self._counts.train(groups)

    def measure(self, unit: UnitState) -> None:
        """Compute the sum of squares of the unit's final gradient, over this rank's shard and groups that train.

        It is always added over ranges of the shard, so the bits do not depend on stage, page size or tier. Parameters
        that count on another rank of a norm group add 0, or NaN if they are not finite.
        """
        grad_S = unit.own_grad_S(self._rank)
        groups, squares = self._plan.beside.groups, list[Tensor]()
        equal = [grad_S.new_zeros((), dtype=torch.float64) for _ in groups]
        for first, last, equal_on in self._training(unit):
            squares.append(self._device.sum_of_squares(grad_S[first:last]))
            for number in equal_on:
                equal[number] = equal[number] + squares[-1]
            if any(groups[number].rank > 0 for number in equal_on):
                squares[-1] = squares[-1] * 0.0
        unit.step.equal_squares = equal
        if squares:
            unit.step.squares = functools.reduce(torch.add, squares)
        else:
            unit.step.squares = grad_S.new_zeros((), dtype=torch.float64)

    def decide(self, hyper: Hyper) -> Hyper:
        """Return `hyper` with the groups that trained in this step, and each number of updates."""
        hyper = self._counts.decide(hyper)
        if self._fused is not None:
            muon = self._transform.muon
            first = 0 if muon is None else muon.groups
            table = self._device.upload(numbers(self._fused, self._transform.constants, hyper, first))
            self._decided = hyper._replace(table=table)
        else:
            values = {float(hyper.divisor), *(float(group.step) for group in hyper.groups)}
            self._decided = hyper._replace(numbers={value: on_device(value, self._device.device) for value in values})
        return self._decided

    def schedule_update(self, unit: UnitState, hyper: Hyper) -> None:
        """Defer the update of `unit` to its next gather; queue its offloaded parts for the store's threads now.

        Parts of Muon wait for that gather, because the ranks exchange directions, which they must do in one order.
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

    @property
    def rested(self) -> dict[str, int]:
        """The number of steps in which a parameter was not updated, by its name; zeros are left out."""
        return self._counts.rested

    def resume(self, rested: Mapping[str, int]) -> None:
        """Continue with the counts of another run, see `UpdateCounts.resume`."""
        self._counts.resume(rested)
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
        self._applied(unit, resident=self._full_update)

    @torch.no_grad()
    def launch_ahead(self) -> None:
        """Launch the staged parts of the next deferred update, so that its pages travel before the unit is gathered."""
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
            self._update_matrices(unit, unit.deferred)
            return
        if unit.updated is None:
            self._launch_staged(unit, unit.deferred, unit.parts, PASSED)
        unit.interrupted = True  # from here to `_applied`
        self._launch_here(unit, unit.deferred, unit.parts)
        if unit.updated is not None:
            unit.updated.wait()

    def _update_matrices(self, unit: UnitState, hyper: Hyper) -> None:
        """Launch the update of a unit whose directions are orthogonalized, for the current stream. Collective.

        The host waits for the momentum that the store's threads update; then they get the parameters.
        """
        unit.interrupted = True
        unit.grad_ready.wait()
        self._read.wait()
        self._advance()  # because this rank waits for others, which may wait for those gathers
        for turn in range(2):
            parts = [part for part in unit.parts if part.turn == turn]
            for ticket in self._readers:  # of the directions of the unit before, or writers of this one's
                ticket.wait()
            if turn == 1:
                self._orthogonalizer.run(unit.spec)
            self._readers = self._queue(unit, hyper, parts, self._device.mark())
            self._launch_here(unit, hyper, parts)
            self._launch_staged(unit, hyper, parts, None)
            if unit.updated is not None:
                unit.updated.wait()
        unit.tickets, self._read = self._readers, self._device.mark()

    def _launch_here(self, unit: UnitState, hyper: Hyper, parts: Sequence[Part]) -> None:
        """Launch the update of the parts on the device on the current stream."""
        pieces = [self._piece(unit, part, part.lent) for part in parts if part.on_device]
        if pieces:
            with self._tape.doing("update", unit.spec.name):
                self._update_pieces(unit, hyper, self._device, pieces, parts[0].turn)

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
                with self._staging.opened(part, unit.grad_ready) as tensors:
                    unit.interrupted = True
                    self._update_pieces(unit, hyper, self._device, [self._piece(unit, part, tensors)], part.turn)
        unit.updated, unit.interrupted = self._staging.updated, bool(unit.spec.matrices)
        unit.grad_readers.append(unit.updated)

    def _applied(self, unit: UnitState, *, resident: bool) -> None:
        """Note that the deferred update of `unit` is applied, or in the hands of the store's threads."""
        self._visited.append(unit)
        unit.mark_changed(resident=resident)  # first, so that no old copy is current after an interrupt
        unit.deferred, unit.updated, unit.interrupted, unit.tickets = None, None, False, []

    # -- one part ------------------------------------------------------------------------------------------------------

    def _update_in_thread(
        self, unit: UnitState, hyper: Hyper, part: Part, after: Event, tensors: Sequence[Tensor]
    ) -> None:
        """Update one part on a thread of the store; `tensors` are its pages in memory, in the order of `Group.all`."""
        name, now = threading.current_thread().name, self._where.shares_memory
        told = self._tape.streaming("update", unit.spec.name)
        with self._limit, self._room() as room_for, self._device.paging(name, after, now=now), told:
            self._update_offloaded(unit, hyper, self._piece(unit, part, tensors), part.turn, room_for)

    @contextmanager
    def _room(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield a function that returns a tensor if the update can access it where it is, else room for its values.

        Room in host memory is pinned, so that copies do not pass through other memory.
        """
        if not self._plan.slots.bounce_bytes:
            yield self._where.room_for
            return
        with self._store.bounce_buffer() as memory:
            end = 0

            def room_for(tensor: Tensor) -> Tensor:
                nonlocal end
                if self._where.is_home_of(tensor):
                    return tensor
                start, end = end, round_up(end + tensor.nbytes)
                return memory[start : start + tensor.nbytes].view(tensor.dtype)

            yield room_for

    def _piece(self, unit: UnitState, part: Part, tensors: Sequence[Tensor] | None) -> Piece:
        """Return the piece for a whole part: `tensors` for its pages, and tensors of the unit for the rest."""
        assert tensors is not None
        start, stop, now = part.start, part.stop, self._plan.passes.of(unit.spec)[part.turn]
        paged = {page.kind: page_K for page, page_K in zip(part.groups[0].all, tensors, strict=True)}
        directions = self._orthogonalizer.directions(unit.spec) if unit.spec.matrices else None
        params = unit.own_params(full_update=self._full_update) if now.updates_params else directions
        own = unit.grad if unit.grad is None or self._full_update else unit.own_grad_S(self._rank)
        grad = own if now.reads_grad else directions
        param_K = paged.pop(PageKind.PARAM, None if params is None else params[start:stop])
        grad_K = paged.pop(PageKind.GRAD, None if grad is None else grad[start:stop])
        kept = cast(list[Tensor], [*paged.values()])
        return Piece(part.first, cast(Tensor, param_K), kept, cast(Tensor, grad_K), part.tables)

    def _update_offloaded(
        self, unit: UnitState, hyper: Hyper, piece: Piece, turn: int, room_for: Callable[[Tensor], Tensor]
    ) -> None:
        """Update one part on the device that the plan chose, and copy tensors of other devices there and back."""
        changed = [piece.param_K, *piece.kept]
        there = [room_for(tensor) for tensor in changed]
        grad_there = room_for(piece.grad_K)
        reads = self._plan.passes.of(unit.spec)[turn].reads_params
        self._copy_all([*there[not reads :], grad_there], [*changed[not reads :], piece.grad_K])
        brought = piece._replace(param_K=there[0], kept=there[1:], grad_K=grad_there)
        self._update_pieces(unit, hyper, self._where, [brought], turn)
        self._copy_all(changed, there)

    def _copy_all(self, into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy each source that is another tensor; the host waits where it computes with the result."""
        for tensor, source in zip(into, sources, strict=True):
            if tensor is not source:
                self._where.copy(tensor, source)

    def _update_pieces(
        self, unit: UnitState, hyper: Hyper, where: Device, pieces: Sequence[Piece], turn: int = 0
    ) -> None:
        """Update pieces on the device `where`: by a kernel for each, or in batches of at most its `piece_numel`."""
        layout, now = unit.spec.trainable, self._plan.passes.of(unit.spec)[turn]
        if self._fused is not None and where.tile_numel and not unit.spec.matrices:
            for piece in pieces:
                run_kernel(self._fused, now.kept, hyper, where, piece)
            return
        for batch in _batches(pieces, where.piece_numel):
            places = [layout.pieces(*piece.range) for piece in batch] if now.kept.draws else []
            params, kept = [piece.param_K for piece in batch], [piece.kept for piece in batch]
            with now.kept.opened(params, kept, places, hyper.step) as tensors:
                self._transform_all(now, layout, hyper, batch, tensors)

    def _transform_all(
        self, now: Pass, layout: Layout, hyper: Hyper, pieces: Sequence[Piece], tensors: Sequence[Sequence[Tensor]]
    ) -> None:
        """Update the masters and moments of some pieces, group by group.

        Args:
            tensors: first the masters, then each moment, as one fp32 tensor for each piece.
        """
        grouped: dict[tuple[int, float], list[list[Tensor]]] = {}  # (group, factor) -> gradients, masters, moments
        gradients = [piece.grad_K for piece in pieces]
        if gradients[0].dtype != torch.float32:
            gradients = cut_as(gradients, in_fp32(gradients))
        for piece, *state in zip(pieces, gradients, *tensors, strict=True):
            start, stop = piece.range
            for a, b, key in now.segments(layout, start, stop, self._counts.settings):
                if hyper.groups[key[0]].trains:
                    lists = grouped.setdefault(key, [[] for _ in state])
                    for parts, tensor in zip(lists, state, strict=True):
                        parts.append(tensor[a - piece.first : b - piece.first])
        for (number, factor), (grads, masters, *moments) in grouped.items():
            settings = hyper.groups[number]
            now.update(PageBatch(masters, grads, tuple(moments), settings, hyper.divisor, hyper.numbers, factor))

    def _make_tables(self) -> None:
        """Make the tables of each part for the kernel, on the device that updates it; none without a kernel."""
        for unit in self._units if self._fused is not None else ():
            if not unit.spec.matrices:
                unit.parts = tuple(self._with_tables(unit.spec.trainable, part) for part in unit.parts)

    def _with_tables(self, layout: Layout, part: Part) -> Part:
        device = self._device if part.on_device else self._where
        if not device.tile_numel:
            return part
        stop = part.first + part.stop - part.start
        made = tables(layout, part.first, stop, device.tile_numel, self._counts.settings)
        return part._replace(tables=tuple(device.upload(table) for table in made))

    def _expect(self) -> None:
        """Tell the store the order of the coming updates, so that it reads pages ahead."""
        for place, unit in enumerate(self._order):
            unit.place = place
        parts = [part for unit in self._order for part in unit.parts if not part.on_device]
        if staged := [part for part in parts if part.staged]:
            self._staging.expect(staged)
            coming = [unit for unit in self._order if any(part.staged for part in unit.parts)]
            self._coming = iter([unit for unit in coming if not unit.spec.matrices])
        if groups := [group for part in parts if not part.staged for group in part.groups]:
            self._store.expect(groups)

    def _training(self, unit: UnitState) -> list[tuple[int, int, Sequence[int]]]:
        """Return the maximal ranges of this rank's shard in which all groups train.

        Returns:
            (start, stop) in the shard, and the numbers of the norm groups on whose ranks the range is equal.
        """
        layout, equal = unit.spec.trainable, self._plan.beside.equal_over
        if all(self._counts.trains) and not equal:
            return [(0, layout.S, ())]
        first, last = layout.shard(self._rank)

        def key(extent: tuple[Slot, int, int]) -> tuple[bool, Sequence[int]]:
            return self._counts.trains[extent[0].group], equal.get(extent[0].name, ())

        runs = ((*keys, list(run)) for keys, run in groupby(layout.extents(first, last), key=key))
        return [(run[0][1] - first, run[-1][2] - first, numbers) for trains, numbers, run in runs if trains]


def run_kernel(optimizer: str, kept: Kept, hyper: Hyper, device: Device, piece: Piece) -> None:
    """Update a piece by one launch of the kernel for `optimizer`, see `zero.platform.kernels`."""
    assert hyper.table is not None
    tables = [*piece.tables, hyper.table, permutation(device.device) if kept.draws else hyper.table]
    keys = [signed(key) for key in kept.keys(hyper.step)]
    torch.ops.zero.update(piece.param_K, piece.kept, piece.grad_K, tables, keys, optimizer, device.tile_numel)


def _batches(pieces: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    """Yield the elements of `pieces` in the same order, in batches of `limit` elements; the last may have fewer."""
    batch: list[Piece] = []
    numel = 0
    for piece in pieces:
        done, count = 0, piece.grad_K.numel()
        while done < count:
            stop = min(count, done + limit - numel)
            batch.append(piece if stop - done == count else piece.cut(done, stop))
            numel, done = numel + stop - done, stop
            if numel == limit:
                yield batch
                batch, numel = [], 0
    if batch:
        yield batch
