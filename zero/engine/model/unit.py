"""Units, sites and owners: what the engine knows of a model's parameters, as names and sizes.

A **unit** owns parameters. A **site** is a module whose forward needs one or more units. Usually a site has one unit
and a unit one site. Small neighbours may share a unit, which saves messages. A tied weight is one slot in one unit that
several sites need. `zero.engine.model.split` decides which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.formats import PackedFormat
from zero.core.layout import Layout, Slot
from zero.core.matrices import Matrices, owners
from zero.store import PageKind

ROOT = "(root)"
"""The name of the model itself as a site and as a unit."""


def first_to_last(names: Sequence[str]) -> str:
    """Return the text for names that follow each other, such as "blocks.0 to blocks.3"."""
    return names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"


class Flat(NamedTuple):
    """A flat tensor of a unit.

    Attributes:
        kind: the kind of its pages.
        stored: the layout of what the ranks keep: of bytes in a packed format, else `values`.
        values: the layout of the gathered parameters; not cut between ranks if they are packed.
        first: the first element of `values` in the unit's gathered buffer.
        form: the format of the stored bytes; None if the ranks keep the values themselves, in the dtype of compute.
    """

    kind: PageKind
    stored: Layout
    values: Layout
    first: int
    form: PackedFormat | None = None

    def of(self, full: Tensor) -> Tensor:
        """Return the gathered values, (P,), in the unit's buffer."""
        return full[self.first : self.first + self.values.P]

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which the ranks keep and gather the flat."""
        return compute if self.form is None else torch.uint8


@dataclass(frozen=True)
class UnitSpec:
    """The parameters of one unit.

    Attributes:
        members: the names of the modules whose parameters it has; several if small units were merged.
        flats: the flat tensors in the order of the gathered buffer: of trainable parameters, of frozen ones, and of
            frozen ones in a packed format, if the plan has one.
        lookup: whether all parameters belong to `nn.Embedding`, so that backward does not read their values.
        moments: the moments that the optimizer keeps of the trainable parameters.
        matrices: the trainable parameters in batches, if they are updated as whole matrices; else empty.
        shared: whether it has the norms and biases of many sites; it stays gathered from the first site to the last.
    """

    index: int
    name: str
    members: tuple[str, ...]
    flats: tuple[Flat, ...]
    lookup: bool = False
    moments: tuple[str, ...] = ()
    matrices: tuple[Matrices, ...] = ()
    shared: bool = False

    @cached_property
    def trainable(self) -> Layout:
        """The layout of the trainable parameters."""
        return self.flats[0].values

    @cached_property
    def packed(self) -> Flat | None:
        """The flat in a packed format, which comes last; None if no parameter is in one."""
        last = self.flats[-1]
        return last if last.form is not None and last.values.slots else None

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The begin of each rank's whole matrices in the trainable flat, and the end of the flat."""
        return owners(self.matrices, self.trainable)

    def stored(self, kind: str) -> Layout:
        """Return the layout in which ranks keep a kind: `Flat.stored` of its flat; for moments the trainable layout."""
        return next((flat.stored for flat in self.flats if flat.kind == kind), self.trainable)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the parameters' values; each parameter is in one of them."""
        return tuple(flat.values for flat in self.flats)

    @cached_property
    def frozen_slots(self) -> tuple[Slot, ...]:
        return tuple(slot for flat in self.flats[1:] for slot in flat.values.slots)

    @cached_property
    def _frozen_flats(self) -> tuple[Flat, ...]:
        """The flat of each of `frozen_slots`."""
        return tuple(flat for flat in self.flats[1:] for _ in flat.values.slots)

    @property
    def full_numel(self) -> int:
        """The number of elements of the gathered parameters."""
        return sum(flat.values.P for flat in self.flats)

    def gathered(self, full: Tensor) -> list[Tensor]:
        """Return the parts of the gathered buffer that a gather writes, without gaps of expanded parameters."""
        parts = [full]
        if self.packed is not None:
            expanded = (slot.of(self.packed.of(full)) for slot in self.packed.values.slots)
            parts = [full[: self.packed.first], *expanded, full[self.full_numel :]]
        return [part for part in parts if part.numel()]

    def frozen_view(self, slot: int, full: Tensor) -> Tensor:
        """Return a view of one of `frozen_slots` in the gathered buffer."""
        return self.frozen_slots[slot].of(self._frozen_flats[slot].of(full))


@dataclass(frozen=True)
class Binding:
    """The position in the units of one parameter of a site.

    Attributes:
        local: the parameter's name relative to the site's module.
        unit: the index of its unit.
        slot: the number of its slot in the unit's trainable flat, or in its `frozen_slots`.
        trainable: whether the slot is in the trainable flat.
    """

    local: str
    unit: int
    slot: int
    trainable: bool


@dataclass(frozen=True)
class Site:
    """A module, at `path` in the model, whose forward needs `units`; they are gathered in that order.

    `contains_sites` says whether modules inside of it are sites too.
    """

    path: str
    bindings: tuple[Binding, ...]
    contains_sites: bool

    @property
    def name(self) -> str:
        return self.path or ROOT

    @cached_property
    def units(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(binding.unit for binding in self.bindings))

    @cached_property
    def slots(self) -> dict[tuple[int, bool], tuple[int, ...]]:
        """The slots that the module uses of each unit's trainable (True) and frozen (False) parameters."""
        return {
            (unit, trainable): tuple(
                dict.fromkeys(
                    bound.slot for bound in self.bindings if (bound.unit, bound.trainable) == (unit, trainable)
                )
            )
            for unit in self.units
            for trainable in (True, False)
        }

    @property
    def is_block(self) -> bool:
        """Whether the module is in a `ModuleList` or a `Sequential`, whose elements are named by numbers."""
        return any(name.isdecimal() for name in self.path.split("."))


@dataclass(frozen=True)
class Owner:
    """A module that holds parameters directly; `slots` has (local name, full name) of each parameter."""

    path: str
    slots: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Splitting:
    """The units, sites and owners of a model.

    `depth` is the largest number of units in use at the same time, the shared one not counted, minus one. It exceeds 0
    if sites are nested, or a site needs several units.
    """

    units: tuple[UnitSpec, ...]
    sites: tuple[Site, ...]
    owners: tuple[Owner, ...]
    depth: int

    @property
    def trains(self) -> bool:
        """Whether the model has a trainable parameter."""
        return any(unit.trainable.slots for unit in self.units)

    @property
    def numel(self) -> int:
        """The number of elements of all parameters; a tied parameter counts once."""
        return sum(layout.numel for unit in self.units for layout in unit.layouts)

    @property
    def trainable_numel(self) -> int:
        return sum(unit.trainable.numel for unit in self.units)

    def count_text(self) -> str:
        """Return the number of parameters as text, with the number of those that train if others are frozen."""
        trained, total = self.trainable_numel, self.numel
        if trained in (0, total):
            return f"{total:,} parameters"
        return f"trains {trained:,} of {total:,} parameters ({100 * trained / total:.3g} %)"

    @cached_property
    def has_packed(self) -> bool:
        """Whether frozen parameters are stored in a packed format."""
        return any(unit.packed for unit in self.units)

    @property
    def names(self) -> tuple[str, ...]:
        """The full name of every parameter."""
        return tuple(self.shapes())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by full name."""
        slots = (slot for unit in self.units for layout in unit.layouts for slot in layout.slots)
        return {slot.name: slot.shape for slot in slots}

    def packed_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter in a packed format by full name."""
        return {slot.name: slot.shape for unit in self.units if unit.packed for slot in unit.packed.values.slots}

    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Return all names of each parameter, by its full name, which comes first. Tied parameters have several."""
        aliases: dict[str, dict[str, None]] = {name: {name: None} for name in self.names}
        for owner in self.owners:
            for local, name in owner.slots:
                aliases[name][f"{owner.path}.{local}".lstrip(".")] = None
        return {name: tuple(names) for name, names in aliases.items()}
