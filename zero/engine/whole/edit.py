"""Edit full parameters, gradients and moments by name, whatever their sharding and tier.

An edit is written to every place where this rank holds a part of the value, on any tier, and gathered copies of it
become stale. Writing a value back unchanged changes no bit.

All functions are collective: every rank makes the same call. Ranks compare their edits before anything is written, so
an edit takes effect on all ranks or on none. A gradient can be edited between backward and the end of its step.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.layout import Layout, Slot
from zero.core.master import rounded
from zero.core.suggest import some
from zero.engine.full_flat import layouts_of
from zero.engine.model import ParameterPlaceholder
from zero.engine.state import State
from zero.engine.unit_state import UnitState
from zero.engine.whole.flat_writer import FlatWriter
from zero.engine.whole.names import Source, name_of, names_of, slot_names, state_of, text_of
from zero.engine.whole.read import divisor_of, flat_of, has_gradient, values_of_kind
from zero.errors import ConfigError, StaleStateError, WorldError, if_it_fails
from zero.platform.files import memory_of
from zero.platform.modes import unobserved
from zero.store import PageKind


@contextmanager
def gathered(
    source: Source,
    names: str | Tensor | Iterable[str | Tensor] | None = None,
    modify: bool | int = False,
    *,
    kind: str = "param",
) -> Iterator[dict[str, Tensor]]:
    """Context manager that yields full values by name, on every rank; with `modify` it writes edits of them back.

        with zero.gathered(state, ["blocks.*.gain"], modify=True) as full:
            for tensor in full.values():
                tensor.clamp_(min=0.1)

    Collective. The dict is emptied at the end of the block, which frees tensors that are not referenced elsewhere.
    Edits are written at the end of the block, and also before a save or another collective read inside it. If the block
    raises, edits that were not written yet are dropped.

    Args:
        source: a `State`, a `Step` before its `finish`, or an engine of `zero.initialize`.
        names: exact names, fnmatch patterns or parameters; None for all parameters that have this kind.
        modify: True if every rank makes the same edits, in place or by replacing a tensor in the dict. A rank's number
            to take the edits of that rank and drop those of other ranks. False to reject edits.
        kind: "param", "grad", a moment, or "compute", which cannot be edited.

    Errors are raised on every rank, and then nothing has changed.

    Raises:
        ConfigError: a name does not exist; or an edit was made without `modify`, is of a parameter that is kept as
            codes, has another shape, or brings an infinite or NaN value into a tensor that had none (allowed in
            gradients: the step is skipped then).
        HandshakeError: the ranks called this with different arguments.
        StaleStateError: a step or load was made inside the block, or a gradient does not exist.
        WorldError: the ranks made different edits.
    """
    state = state_of(source, "zero.gathered", "with zero.gathered(state, names) as full:")
    state.runtime.settle()
    listed = [names] if isinstance(names, str | ParameterPlaceholder) else names
    patterns = None if listed is None else [text_of(name) for name in listed]
    fields = {"names": repr(patterns), "modify": repr(modify), "kind": kind}
    state.plan.world.agree(fields, "arguments of zero.gathered")
    wanted = set(names_of(state, patterns, kind))
    _check_modify(state, wanted, kind, modify)
    edited = _Block(state, dict(values_of_kind(state, kind, wanted)), kind, modify)
    try:
        try:
            if modify is not False:
                edited.open()
            yield edited.full
            edited.write()
        finally:
            edited.close()
    finally:
        edited.close()  # again, because an interrupt may come just before the first


def set_full(source: Source, name: str | Tensor, value: Tensor, kind: str = "param") -> None:
    """Set one parameter, or its gradient or moment, to `value`, which must be equal on all ranks. Collective.

    Args:
        source: a `State`, a `Step` before its `finish`, or an engine of `zero.initialize`.
        name: the full name of the parameter, or the parameter itself.
        value: a tensor of the parameter's shape, any dtype and device. For a frozen parameter it is rounded to the
            dtype of compute.
        kind: "param", "grad" or a moment.

    Raises the errors of `gathered`.
    """
    state = state_of(source, "zero.set_full", "zero.set_full(state, name, value)")
    name = name_of(state, name, kind)
    with gathered(state, [name], modify=True, kind=kind) as full:
        full[name] = value


def _check_modify(state: State, names: set[str], kind: str, modify: bool | int) -> None:
    """Raise an error, before anything is gathered, if these values cannot be edited."""
    world = state.plan.world
    if not isinstance(modify, bool) and not 0 <= modify < world.size:
        raise ConfigError(
            f"modify={modify}: the world has ranks 0 to {world.size - 1}. Pass modify=True for all edits."
        )
    if modify is not False and kind == "compute":
        raise ConfigError("kind='compute' is made from the parameters and cannot be edited. Edit kind='param'.")
    for unit in state.runtime.units if modify is not False and kind == "grad" else ():
        if not names.isdisjoint(slot_names(unit.spec.trainable)) and not has_gradient(state, unit):
            raise StaleStateError(f"no backward of this step has reached {unit.spec.name}: it has no gradient to edit")


class _Block:
    """An open block of `gathered`.

    Attributes:
        full: the full values by name, which the user reads and edits.
    """

    def __init__(self, state: State, full: dict[str, Tensor], kind: str, modify: bool | int) -> None:
        self.full, self._state, self._kind, self._modify = full, state, kind, modify
        self._open_edits, self._open_blocks = state.runtime.open_edits, state.runtime.open_blocks
        self._open_blocks.append(self)
        self._seen = {name: _Seen.of(tensor) for name, tensor in full.items()}

    def open(self) -> None:
        """Have edits also written before the state is read or saved inside the block."""
        self._open_edits.append(self.write_within)

    @unobserved()
    def write(self) -> None:
        """Write the edits since the beginning or the last write. Collective; raises the errors of `gathered`."""
        if self._state.spent_:
            raise StaleStateError(
                "zero.gathered or GatheredParameters: a step or load inside the block made its full values old. Make "
                "steps and loads after the block."
            )
        _write(self._state, self._agreed(), self._kind)

    def write_within(self) -> None:
        """Write the edits so far, inside the block."""
        self.write()
        self._seen |= {name: _Seen.of(tensor) for name, tensor in self.full.items() if name in self._seen}

    def close(self) -> None:
        """Free the full values. Calling it twice is allowed."""
        self.full.clear()
        if self in self._open_blocks:
            self._open_blocks.remove(self)
        if self.write_within in self._open_edits:
            self._open_edits.remove(self.write_within)

    def _agreed(self) -> dict[str, Tensor]:
        """Return the edits to write, equal on every rank. Collective; raises the errors of `gathered`."""
        world = self._state.plan.world
        try:
            mine, refused = self._edits(), ""
        except ConfigError as error:
            mine, refused = {}, str(error)
        prints = {name: _print(tensor) for name, tensor in mine.items()}
        ranks = [json.loads(text) for text in world.gather_texts(json.dumps([refused, prints]), "edits of full values")]
        counting = range(world.size) if isinstance(self._modify, bool) else [self._modify]
        first = ranks[counting[0]][1]
        for rank in counting:
            message, edits = ranks[rank]
            if message:
                raise ConfigError(f"zero.gathered changed nothing because of an error on rank {rank}: {message}")
            if odd := sorted(name for name in {*first, *edits} if first.get(name) != edits.get(name)):
                raise WorldError(
                    f"zero.gathered: rank {rank} edited {some(odd)} otherwise than rank 0, so nothing was changed. "
                    "Make the same edit on every rank, or pass modify=RANK for the edit of one rank."
                )
        if isinstance(self._modify, bool):
            return mine
        return {
            name: _from_rank(self._state, mine.get(name), self._seen[name].shape, self._modify, name) for name in first
        }

    def _edits(self) -> dict[str, Tensor]:
        """Return the values that this rank has changed. A name that was removed from the dict counts as unchanged."""
        edits = {}
        packed = self._state.plan.facts.splitting.packed_shapes()
        for name, value in self.full.items():
            if name not in self._seen:
                raise ConfigError(f"{name!r} was put into the dict, but only what was gathered can be edited")
            seen = self._seen[name]
            if not isinstance(value, Tensor) or value.shape != seen.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(f"{name} was given as {shape}, but must be {tuple(seen.shape)}")
            edited = value.detach().to("cpu", torch.float32).contiguous()
            if _print(edited) == seen.print:
                continue
            if self._modify is False:
                raise ConfigError(
                    f"{name} was edited, but it is a copy, so the edit would be lost. Pass modify=True if every rank "
                    "makes the same edit, or modify=RANK for the edit of one rank (GatheredParameters: "
                    "modifier_rank=RANK)."
                )
            if name in packed:
                raise ConfigError(
                    f"{name} cannot be edited, because it is kept as codes. Set precision.frozen=compute, or give "
                    "other weights to zero.init."
                )
            narrow = rounded(edited, self._state.plan.precision.compute) if self._kind == "param" else edited
            if self._kind != "grad" and seen.finite and not narrow.isfinite().all():
                raise ConfigError(f"{name} was given a value that is not finite in {narrow.dtype}")
            edits[name] = edited
        return edits


class _Seen(NamedTuple):
    """Shape, SHA-256 and finiteness of a tensor when it was yielded, to detect edits."""

    shape: torch.Size
    print: str
    finite: bool

    @classmethod
    @unobserved()
    def of(cls, tensor: Tensor) -> "_Seen":
        tensor = tensor.detach().to("cpu", torch.float32)
        return cls(tensor.shape, _print(tensor), bool(tensor.isfinite().all()))


def _print(tensor: Tensor) -> str:
    tensor = tensor.contiguous()  # keeps the copy alive while its memory is read
    return hashlib.sha256(memory_of(tensor)).hexdigest()


def _from_rank(state: State, tensor: Tensor | None, shape: torch.Size, rank: int, name: str) -> Tensor:
    world = state.plan.world
    tensor = tensor.contiguous() if tensor is not None and world.rank == rank else torch.empty(shape)
    world.broadcast(tensor, rank, what=f"the edit of {name}").wait()
    return tensor


@torch.no_grad()
def _write(state: State, edits: Mapping[str, Tensor], kind: str) -> None:
    with if_it_fails(state.spend):  # a partly written edit makes the state unusable
        for unit in state.runtime.units:
            for layout in layouts_of(unit.spec, kind):
                slots = [slot for slot in layout.slots if slot.name in edits]
                if slots and kind == "grad":
                    _write_gradient(state, unit, edits)
                elif slots:
                    _write_flat(state, unit, layout, slots, edits, kind)


def _write_flat(
    state: State, unit: UnitState, layout: Layout, slots: Sequence[Slot], edits: Mapping[str, Tensor], kind: str
) -> None:
    """Write edits of parameters or moments through a `FlatWriter`, with the rest of the flat unchanged."""
    state.runtime.await_copies()
    flat = flat_of(state, unit, layout, kind)
    for slot in slots:
        slot.of(flat).copy_(edits[slot.name])
    frozen = layout is not unit.spec.trainable
    part = PageKind.FROZEN if frozen else kind
    writer = FlatWriter(state.plan, state.runtime.store, unit, part)
    writer.write_all(lambda slot, start, stop: slot.of(flat).view(-1)[start:stop])
    if kind == "param":
        unit.mark_changed(resident=True, frozen=frozen)


def _write_gradient(state: State, unit: UnitState, edits: Mapping[str, Tensor]) -> None:
    """Write edits of a unit's gradient.

    Elements whose mean is unchanged keep their old sum, because mean times divisor may round to another value.
    """
    parts, plan, layout = state.runtime, state.plan, unit.spec.trainable
    divisor = divisor_of(state)
    first, last = (0, layout.P) if plan.facts.full_update else layout.shard(plan.rank)
    grad = parts.gradients.open(unit, fresh=False)
    updated = grad if plan.facts.full_update else unit.own_grad_S(plan.rank)
    for slot, a, b, place in layout.pieces(first, last):
        if slot.name in edits:
            held, wanted = updated[place : place + b - a], edits[slot.name].view(-1)[a:b]
            now = held.to("cpu", torch.float32)
            held.copy_(torch.where(wanted == now / divisor, now, wanted * divisor))
    parts.updater.numbers.measure(unit)  # the norm must be of the written gradient
    parts.gradients.park(unit)
