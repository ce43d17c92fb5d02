"""The optimizer step: norm, clip coefficient, and page by page read, update, write.

A step only decides. It computes the norm, captures every number the update needs by value (`Hyper`), and marks each
unit as waiting. `force` does the work, later: just before the unit is next gathered, so that paging and arithmetic hide
behind the forward of the units before it. The order of forcing cannot change a bit, because an update is elementwise
and reads nothing but its own page, its own gradient and `Hyper`.

A page passes through in pieces that stay in the cache: unscale, clip, decay, moments, and the cast to the compute dtype
all happen to one piece before the next.

Source: Jiang et al. 2021, "Optimizer Fusion" (forward fusion); Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zero.errors import StaleStateError
from zero.layout import pages
from zero.optim import Hyper, Transform
from zero.store import Page, Store
from zero.unit_state import UnitState

PIECE_NUMEL = 256 * 1024
"""Elements that the update takes at a time: fp32 parameter, gradient and two moments are 4 MiB."""

SQUARES_NUMEL = 65_536
"""Elements whose squares are added at a time, counted from the shard's start."""


class Updater:
    """Applies waiting updates on this rank.

    Args:
        decays: for each optimizer group, whether weight decay applies.
        page_numel: elements of a page.
        has_master: the store holds an fp32 master apart from the parameters.
        whole: this rank updates the whole flat, not its own range.
        rank: whose range of a unit this process updates.
    """

    def __init__(
        self,
        store: Store,
        transform: Transform,
        *,
        decays: tuple[bool, ...],
        page_numel: int,
        has_master: bool,
        whole: bool,
        rank: int,
        device: torch.device,
    ) -> None:
        self._store, self._transform, self._decays = store, transform, decays
        self._page_numel, self._has_master, self._whole, self._rank = page_numel, has_master, whole, rank
        self._device = device
        self.sums: dict[int, Tensor] = {}  # by unit: sum of squares of this rank's range, fp64
        self.at_once: Hyper | None = None  # eager: what to update with as soon as a gradient is final

    def final(self, unit: UnitState) -> None:
        """The unit's gradient is final: take its sum of squares, and update at once if that was asked for.

        Raises:
            StaleStateError: an eager update was made already, and then more gradient came.
        """
        if self.at_once is not None and unit.index in self.sums:
            raise StaleStateError(
                f"{unit.spec.name} got a gradient after zero.update=eager had updated it; use zero.update=lazy"
            )
        self.sums[unit.index] = self._sum_of_squares(unit.own_grad_S(self._rank))
        if self.at_once is not None:
            unit.waiting = self.at_once
            self.force(unit)

    @torch.no_grad()
    def force(self, unit: UnitState) -> None:
        """Apply the waiting update of `unit`: its shard, master and moments move on by one step."""
        if unit.torn:
            raise StaleStateError(
                f"the update of {unit.spec.name} was interrupted half-way, so this state is no state; start again from "
                "the last checkpoint"
            )
        hyper, unit.torn = unit.waiting, True
        assert hyper is not None
        parameters, grad, first = self._extent(unit)
        for number, (start, stop) in enumerate(pages(parameters.numel(), self._page_numel)):
            with self._open(unit.index, number, parameters[start:stop]) as (master_K, moments_K):
                for a, b, group in unit.spec.trainable.segments(first + start, first + stop):
                    decay = hyper.weight_decay if self._decays[group] else 0.0
                    segment = slice(a - first - start, b - first - start)
                    self._update(
                        master_K[segment],
                        grad[start:stop][segment],
                        tuple(moment_K[segment] for moment_K in moments_K),
                        hyper._replace(weight_decay=decay),
                        parameters[start:stop][segment],
                    )
        unit.waiting, unit.torn = None, False
        unit.version += 1
        if self._whole:
            assert unit.resident is not None
            unit.resident.version = unit.version

    def _extent(self, unit: UnitState) -> tuple[Tensor, Tensor, int]:
        """What this rank updates: parameters in the compute dtype, their gradient, and where they start in the flat."""
        layout = unit.spec.trainable
        if self._whole:
            assert unit.resident is not None
            assert unit.grad is not None
            return unit.resident.flat[: layout.P], unit.grad, 0
        return unit.shard_S, unit.own_grad_S(self._rank), layout.shard(self._rank)[0]

    def _update(
        self, master_K: Tensor, grad_K: Tensor, moments_K: tuple[Tensor, ...], hyper: Hyper, parameters_K: Tensor
    ) -> None:
        for start in range(0, master_K.numel(), PIECE_NUMEL):
            piece = slice(start, min(start + PIECE_NUMEL, master_K.numel()))
            grad = grad_K[piece]
            if grad.dtype != torch.float32:
                grad = grad.float()
            self._transform.update(master_K[piece], grad, tuple(moment[piece] for moment in moments_K), hyper)
            if self._has_master:
                parameters_K[piece].copy_(master_K[piece])

    @contextmanager
    def _open(self, unit: int, number: int, parameters_K: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """The master and moments of a page, to be changed in place: lent by the store, or read and written back."""
        kinds = ("master", *self._transform.moments) if self._has_master else self._transform.moments
        opened: list[Tensor] = []
        borrowed: list[tuple[Page, Tensor]] = []
        tickets = []
        for kind in kinds:
            page = Page(unit, kind, number)
            here = self._store.in_place(page)
            if here is None:
                here = torch.empty(parameters_K.numel(), dtype=torch.float32, device=self._device)
                tickets.append(self._store.read(page, here))
                borrowed.append((page, here))
            opened.append(here)
        for ticket in tickets:
            ticket.wait()
        yield (opened[0], tuple(opened[1:])) if self._has_master else (parameters_K, tuple(opened))
        for ticket in [self._store.write(page, here) for page, here in borrowed]:
            ticket.wait()

    def _sum_of_squares(self, grad_S: Tensor) -> Tensor:
        """The sum of squares, 0-dim fp64. Chunks are counted from the shard's start and added in order, so the bits do
        not depend on stage, page size or tier; integers are exact. An fp32 number's square cannot overflow in fp64.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        squares = torch.empty(min(SQUARES_NUMEL, grad_S.numel()), dtype=torch.float64, device=self._device)
        for start in range(0, grad_S.numel(), SQUARES_NUMEL):
            chunk = grad_S[start : start + SQUARES_NUMEL]
            wide = squares[: chunk.numel()].copy_(chunk)
            total += torch.dot(wide, wide)
        return total
