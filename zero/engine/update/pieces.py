"""Update pieces of a unit: ranges of its elements with their gradient, master and moments, on the device that updates.

On a CPU a page is updated in pieces that fit in the cache: one piece is unscaled, clipped, decayed, updated with its
moments and cast to the compute dtype before the next piece begins. On a GPU one kernel does all this for a piece. The
host beside a GPU with kernels computes as they do, see `zero.platform.host_rule`. A CPU alone calls torch's fused
kernels.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.fused import signed, tables
from zero.core.kept import Kept, Pass
from zero.core.layout import Layout
from zero.core.master import cut_as, in_fp32
from zero.core.moments import ROW_NUMEL, permutation
from zero.core.optim import SQUARES, Fused, Hyper
from zero.core.updates import PageBatch
from zero.engine.plan import Part, Plan
from zero.engine.unit_state import UnitState
from zero.engine.update.step_numbers import StepNumbers
from zero.platform.device import Device
from zero.platform.host_rule import update_on_host


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
        """Return the piece with elements [start, stop) of this piece; `start` is a multiple of `ROW_NUMEL`."""
        numel = self.grad_K.numel()
        # a page may have several elements per parameter, or one for several parameters
        kept = [page[page.numel() * start // numel : page.numel() * stop // numel] for page in self.kept]
        return Piece(self.first + start, self.param_K[start:stop], kept, self.grad_K[start:stop])


class Pieces:
    """The arithmetic of this rank's updates."""

    def __init__(self, plan: Plan, numbers: StepNumbers) -> None:
        self._plan, self._numbers = plan, numbers

    def update(self, unit: UnitState, hyper: Hyper, where: Device, pieces: Sequence[Piece], turn: int = 0) -> None:
        """Update pieces on the device `where`: by a kernel each, or in batches of at most `where.piece_numel`."""
        layout, now = unit.spec.trainable, self._plan.passes.of(unit.spec)[turn]
        if self._numbers.fused is not None and not unit.spec.matrices:
            if where.tile_numel:
                for piece in pieces:
                    run_kernel(self._numbers.fused, now.kept, hyper, where, piece)
                return
            now = now._replace(update=partial(update_on_host, self._numbers.fused))
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
            for a, b, key in now.segments(layout, start, stop, self._numbers.counts.settings):
                if hyper.groups[key[0]].trains:
                    lists = grouped.setdefault(key, [[] for _ in state])
                    for parts, tensor in zip(lists, state, strict=True):
                        parts.append(tensor[a - piece.first : b - piece.first])
        for (number, factor), (grads, masters, *moments) in grouped.items():
            settings, row = hyper.groups[number], None if hyper.table is None else hyper.table[number]
            now.update(PageBatch(masters, grads, tuple(moments), settings, hyper.divisor, row, factor))

    def with_tables(self, layout: Layout, part: Part, device: Device) -> Part:
        """Return `part` with the tables for the kernel that updates it on `device`; unchanged without a kernel."""
        if self._numbers.fused is None or not device.tile_numel:
            return part
        stop = part.first + part.stop - part.start
        made = tables(layout, part.first, stop, device.tile_numel, self._numbers.counts.settings)
        return part._replace(tables=tuple(device.upload(table) for table in made))


def run_kernel(fused: Fused, kept: Kept, hyper: Hyper, device: Device, piece: Piece) -> None:
    """Update a piece by one launch of the kernel, see `zero.platform.kernels`."""
    assert hyper.table is not None
    tables = [*piece.tables, hyper.table, permutation(device.device) if kept.draws else hyper.table]
    keys = [signed(key) for key in kept.keys(hyper.step)]
    squares = [moment == SQUARES for moment in kept.moments]
    averages, tensors = fused.average is not None, (piece.param_K, piece.kept, piece.grad_K, tables)
    torch.ops.zero.update(*tensors, keys, squares, averages, fused.rule, device.tile_numel)


def _batches(pieces: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    """Yield the elements of `pieces` in the same order, in batches of at most `limit` elements, cut at rows of moments.

    Args:
        limit: a multiple of the elements of a row.
    """
    batch: list[Piece] = []
    numel = 0
    for piece in pieces:
        done, count = 0, piece.grad_K.numel()
        while done < count:
            stop = min(count, done + (limit - numel) // ROW_NUMEL * ROW_NUMEL)
            if stop > done:
                batch.append(piece if stop - done == count else piece.cut(done, stop))
            numel, done = numel + stop - done, stop
            if done < count:
                yield batch
                batch, numel = [], 0
    if batch:
        yield batch
