"""Offsets of a unit's parameters in one flat tensor.

A flat tensor (a flat) consists of slots in order, one per parameter, with gaps of zeros between them. Every slot starts
at a multiple of 64 elements (a vector), and the flat is padded so that every rank's shard is a multiple of 64 too,
because fused kernels give the same bits only if a flat is cut at multiples of 64. Offsets do not depend on the world
size, only the padding at the end does, so a range of a flat means the same in every world.

Sizes and ranks are integers, and nothing here communicates. No other file divides by the world size.

Letters: P padded elements, W world size, S = P / W elements of one shard, K elements of one page.
Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from zero.core.sizes import round_up
from zero.errors import LayoutError

ONE_SETTING: Mapping[str, int] = MappingProxyType({})

VECTOR = 64
"""Alignment of slots and shards, in elements: 128 bytes in a 2-byte dtype, at least one cache line in every dtype."""


@dataclass(frozen=True)
class Slot:
    """The range of one parameter: elements [offset, stop) of the flat, row-major.

    Parameters with the same `group` number share settings.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int = 0

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def stop(self) -> int:
        return self.offset + self.numel

    @cached_property
    def key(self) -> int:
        """The 32-bit seed of this parameter's random bits."""
        return key_of(self.name)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def of(self, full_P: Tensor) -> Tensor:
        """Return a view of this parameter in a flat tensor, in the parameter's shape."""
        # Every gather calls this, and as_strided, one operator, takes a third of the time of slice and view.
        return full_P.as_strided(self.shape, self.stride, full_P.storage_offset() + self.offset)


class SlotPiece(NamedTuple):
    """The part of a slot that lies in a range of the flat.

    The part is elements [slot_start, slot_stop) of the slot, and starts at element `start_in_range` of the range.
    """

    slot: Slot
    slot_start: int
    slot_stop: int
    start_in_range: int


class Segment(NamedTuple):
    """A range [start, stop) of the flat whose parameters share settings: by default those of their group."""

    start: int
    stop: int
    settings: int


@dataclass(frozen=True)
class Layout:
    """The slots of one flat tensor, in order, and the number of ranks that share it. Create it with `Layout.of`."""

    slots: tuple[Slot, ...]
    world_size: int

    @classmethod
    def of(
        cls, shapes: Mapping[str, Sequence[int]], *, world_size: int, groups: Mapping[str, int] | None = None
    ) -> Layout:
        """Lay out parameters one after another, in the order of `shapes`.

        Args:
            shapes: name -> shape. A 0-dim parameter takes 1 element, one with a size of zero takes none.
            groups: name -> group number, 0 where missing.
        """
        groups = groups or {}
        slots, end = [], 0
        for name, shape in shapes.items():
            slot = Slot(name, tuple(int(size) for size in shape), round_up(end, VECTOR), groups.get(name, 0))
            slots.append(slot)
            end = slot.stop
        return cls(tuple(slots), world_size)

    @cached_property
    def P(self) -> int:
        """Elements of the flat, padding included: a multiple of 64 W, 0 when no slot has an element."""
        return round_up(self.slots[-1].stop if self.slots else 0, VECTOR * self.world_size)

    @cached_property
    def S(self) -> int:
        """Elements of each rank's shard: a multiple of 64."""
        return self.P // self.world_size

    @cached_property
    def numel(self) -> int:
        """Elements of the parameters, without gaps."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The (start, stop) ranges that no slot covers, in order. They are zeros in a flat."""
        ends = [0, *(slot.stop for slot in self._filled)]
        begins = [*(slot.offset for slot in self._filled), self.P]
        return tuple((end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The begin of each rank's shard, and the end of the flat: W + 1 indices."""
        return tuple(rank * self.S for rank in range(self.world_size + 1))

    def shard(self, rank: int) -> tuple[int, int]:
        """Return the (start, stop) range of the flat that `rank` owns."""
        return rank * self.S, (rank + 1) * self.S

    def own_S(self, kept: Tensor, rank: int) -> Tensor:
        """Return the shard of `rank`, (S,), from `kept`: the shard itself, (S,), or the whole flat, (P,)."""
        return kept if kept.numel() == self.S else kept[slice(*self.shard(rank))]

    def views(self, full_P: Tensor) -> dict[str, Tensor]:
        """Return views of the parameters in a flat tensor, (P,) and contiguous, by name in the layout's order."""
        return {slot.name: slot.of(full_P) for slot in self.slots}

    def pieces(self, start: int, stop: int) -> list[SlotPiece]:
        """Return the parts of slots that lie in [start, stop) of the flat, in order.

        Raises:
            LayoutError: the range is not inside the flat.
        """
        pieces = []
        for slot in self._filled_from(start, stop):
            first, last = max(start, slot.offset), min(stop, slot.stop)
            if first < last:
                pieces.append(SlotPiece(slot, first - slot.offset, last - slot.offset, first - start))
        return pieces

    def extents(self, start: int, stop: int) -> list[tuple[Slot, int, int]]:
        """Split [start, stop) at the beginnings of slots; return (slot, start, stop) of each part, gaps included.

        A gap belongs to the slot before it, so a part may consist of a gap only.

        Raises:
            LayoutError: the range is not inside the flat.
        """
        slots = self._filled_from(start, stop)
        firsts = [max(start, slot.offset) for slot in slots]
        return list(zip(slots, firsts, [*firsts[1:], stop], strict=False))

    def segments(self, start: int, stop: int, settings: Mapping[str, int] = ONE_SETTING) -> tuple[Segment, ...]:
        """Split [start, stop) into the longest segments of equal settings; a gap belongs to the slot before it.

        Cuts are at multiples of 64 elements, so a fused kernel may process each segment alone and give the same bits.

        Args:
            settings: name of a parameter -> index of its settings, if that is not its group.

        Raises:
            LayoutError: the range is not inside the flat.
        """
        segments: list[Segment] = []
        for slot, first, last in self.extents(start, stop):
            number = settings.get(slot.name, slot.group)
            if segments and segments[-1].settings == number:
                segments[-1] = segments[-1]._replace(stop=last)
            else:
                segments.append(Segment(first, last, number))
        return tuple(segments)

    @cached_property
    def _filled(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.numel)

    def _filled_from(self, start: int, stop: int) -> tuple[Slot, ...]:
        """Return the slots with elements that begin before `stop`, from the last that begins at or before `start`."""
        if not 0 <= start <= stop <= self.P:
            raise LayoutError(f"[{start}, {stop}) is not a range of a flat of {self.P} elements")
        if start == stop:
            return ()
        first = bisect_right(self._filled, start, key=lambda slot: slot.offset) - 1
        last = bisect_right(self._filled, stop - 1, key=lambda slot: slot.offset)
        return self._filled[first:last]


def key_of(text: str) -> int:
    """Return a 32-bit hash of `text`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def pages(numel: int, page_numel: int) -> tuple[tuple[int, int], ...]:
    """Split `numel` elements into (start, stop) pages of `page_numel` elements; the last one may be shorter."""
    return tuple((start, min(start + page_numel, numel)) for start in range(0, numel, page_numel))
