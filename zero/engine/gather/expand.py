"""Expand the codes of a unit's frozen parameters in its gathered buffer, by one launch of a kernel or by operators."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero.core.formats import EXPANDED_AT_ONCE
from zero.core.fused import expansion
from zero.engine.model import Flat
from zero.engine.plan import Plan

MOST_NUMEL = 16384
"""The most values of a program of the kernel: a tile is in one row of codes."""


def expansion_numel(tile_numel: int) -> int:
    """Return the number of values of a program; an update of `tile_numel` elements takes more registers for each."""
    return min(2 * tile_numel, MOST_NUMEL)


class Expander:
    """The expansion of the flats in a packed format, with the tables that the kernel reads for each unit."""

    def __init__(self, plan: Plan) -> None:
        self._device, self._form = plan.world.compute, plan.precision.frozen
        self._tile_numel = expansion_numel(self._device.tile_numel)
        self._tables: dict[int, Sequence[Tensor]] = {}  # unit -> its tables on the device; empty without a kernel
        if self._form is None:
            return
        of_form = self._form.tables(self._device.device)  # created now, so that streams do not each create one later
        if self._device.tile_numel and self._form.rule:
            for unit in plan.units:
                if (flat := unit.packed) is not None:
                    made = expansion(flat.stored, flat.values, self._tile_numel)
                    self._tables[unit.index] = *map(self._device.upload, made), *of_form

    def expand(self, unit: int, flat: Flat, stored_P: Tensor, values_P: Tensor) -> None:
        """Write the values of a unit's codes, (P,) uint8, to the part of its buffer for them, (P,)."""
        assert self._form is not None
        if tables := self._tables.get(unit):
            torch.ops.zero.expand(values_P, stored_P, tables, self._form.rule, self._tile_numel)
            return
        for stored, slot in zip(flat.stored.slots, flat.values.slots, strict=True):
            codes, values = stored_P[stored.offset : stored.stop], values_P[slot.offset : slot.stop]
            self._form.expand(codes, values, max(EXPANDED_AT_ONCE, self._device.sum_numel))
