"""Which bytes of a plan's state are in which rank's file: the same answer on every rank, for every rank.

Each rank's file has what its shard covers, whatever the rank keeps beside: for every unit this range of the fp32
parameters (the master, where there is one), of each moment, and of the frozen parameters. Buffers are in the file of
rank 0. Stage, tiers and pages are not in it, and a flat's gaps are left out, so what is written is a list of ranges of
named tensors.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from zero.checkpoint.manifest import Entry, Piece
from zero.core.layout import Layout
from zero.engine.plan import Plan
from zero.errors import CheckpointError
from zero.platform.safetensors_files import NAMES, Part, by_width, offsets

PARAMETER, FROZEN, BUFFER = "parameter", "frozen", "buffer"


class Held(NamedTuple):
    """Elements [start, stop) of a named tensor, row-major, in one rank's file."""

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    stop: int

    @property
    def part(self) -> Part:
        return part_of(self.name, self.kind, self.dtype, self.shape, self.stop - self.start)


def part_of(name: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...], numel: int) -> Part:
    """How `numel` elements of a tensor of `shape` stand in a file: with its shape if that is all of them, else flat."""
    return Part(f"{kind}/{name}", dtype, shape if numel == prod(shape) else (numel,))


class Stretch(NamedTuple):
    """What of one flat goes into one rank's file: elements [start, stop) of it, without its gaps."""

    unit: int
    kind: str
    layout: Layout
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def held(self) -> tuple[Held, ...]:
        pieces = self.layout.pieces(self.start, self.stop)
        return tuple(Held(slot.name, self.kind, self.dtype, slot.shape, first, last) for slot, first, last, _ in pieces)


def stretches(plan: Plan, rank: int) -> Iterator[Stretch]:
    """What `rank` writes of its units, the widest dtype first."""
    for unit in plan.units:
        for kind, dtype in _kinds(plan).items():
            yield Stretch(unit.index, kind, unit.trainable, dtype, *_range(plan, unit.trainable, rank))
    for unit in plan.units:
        yield Stretch(unit.index, FROZEN, unit.frozen, plan.precision.compute, *_range(plan, unit.frozen, rank))


def _range(plan: Plan, layout: Layout, rank: int) -> tuple[int, int]:
    """Where each node has a copy of the state, the nodes share the writing of it."""
    start, stop = layout.shard(rank % plan.sharers)
    copy, copies = rank // plan.sharers, plan.world.size // plan.sharers
    return start + (stop - start) * copy // copies, start + (stop - start) * (copy + 1) // copies


def _kinds(plan: Plan) -> dict[str, torch.dtype]:
    """What is written of a trainable parameter: the fp32 master, and moments, to the bit."""
    return {PARAMETER: torch.float32} | {kind: plan.optimizer.form(kind).saved for kind in plan.optimizer.moments}


def parts(plan: Plan, buffers: Mapping[str, Tensor], rank: int) -> list[tuple[Held, Stretch | None]]:
    """What the file of `rank` holds, in its order; None for a buffer."""
    found: list[tuple[Held, Stretch | None]] = [(held, one) for one in stretches(plan, rank) for held in one.held]
    for name, buffer in buffers.items() if rank == 0 else ():
        if buffer.numel():
            found.append((Held(name, BUFFER, buffer.dtype, tuple(buffer.shape), 0, buffer.numel()), None))
    return sorted(found, key=lambda one: by_width(one[0].part))


def entries(plan: Plan, buffers: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    """Every tensor of the checkpoint, and where in which file its pieces are."""
    pieces: dict[tuple[str, str], list[Piece]] = {}
    for rank in range(plan.world.size):
        held = [one for one, _ in parts(plan, buffers, rank)]
        for one, offset in zip(held, offsets([one.part for one in held]), strict=True):
            pieces.setdefault((one.name, one.kind), []).append(Piece(rank, one.start, one.stop, offset))
    for own in pieces.values():
        own.sort(key=lambda piece: piece.start)  # of copies on nodes those of the second one come in between
    return tuple(
        Entry(name, kind, str(dtype).removeprefix("torch."), shape, tuple(pieces.get((name, kind), ())))
        for name, kind, dtype, shape in tensors(plan, buffers)
    )


def check(plan: Plan, buffers: Mapping[str, Tensor]) -> None:
    """Refuse at once what every save of this plan would refuse.

    Raises:
        CheckpointError: a buffer of a dtype that no file holds.
    """
    for name, kind, dtype, _ in tensors(plan, buffers):
        if dtype not in NAMES:
            raise CheckpointError(
                f"{kind} {name} is {dtype}, which a checkpoint cannot hold; register it with persistent=False if it "
                "can be computed again, or set checkpoint.every=0"
            )


def tensors(plan: Plan, buffers: Mapping[str, Tensor]) -> Iterator[tuple[str, str, torch.dtype, tuple[int, ...]]]:
    """(name, kind, dtype, shape) of everything that the state of a plan has, empty tensors too."""
    for unit in plan.units:
        for kind, dtype in _kinds(plan).items():
            for slot in unit.trainable.slots:
                yield slot.name, kind, dtype, slot.shape
        for slot in unit.frozen.slots:
            yield slot.name, FROZEN, plan.precision.compute, slot.shape
    for name, buffer in buffers.items():
        yield name, BUFFER, buffer.dtype, tuple(buffer.shape)
