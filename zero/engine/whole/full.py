"""Read and edit full parameters, gradients and moments by name, whatever their sharding and tier.

Reads apply all deferred updates first and return fp32 copies on the CPU. An edit is written to every place where this
rank holds a part of the value, on any tier, and gathered copies of it become stale. Writing a value back unchanged
changes no bit.

All functions are collective: every rank makes the same call. Ranks compare their edits before anything is written, so
an edit takes effect on all ranks or on none. At most one unit is gathered at a time.

A gradient is the mean over the global batch before clipping. It can be read and edited between backward and the end of
its step. Afterwards the deferred update owns it.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from zero.core.layout import Layout, Slot
from zero.core.master import rounded
from zero.core.suggest import meant, some
from zero.engine.arguments import check_type
from zero.engine.full_flat import full_flat, full_tensors, gather_flat, layouts_of, summed_gradient
from zero.engine.model import ParameterPlaceholder, buffers_of
from zero.engine.state import State
from zero.engine.unit_state import UnitState
from zero.engine.whole.flat_writer import FlatWriter
from zero.errors import ConfigError, StaleStateError, WorldError, if_it_fails
from zero.platform.files import memory_of
from zero.platform.modes import unobserved


class Source(Protocol):
    """An object with a `state`: a `State`, a `Step` before its `finish`, or an engine of `zero.initialize`."""

    @property
    def state(self) -> State: ...


def state_of(source: Source, call: str, line: str) -> State:
    """Return the state of a source.

    Raises:
        ConfigError: `source` has none; the message names `call` and its correct use, `line`.
    """
    state = getattr(source, "state", source)
    check_type(state, State, call, line)
    return cast(State, state)


# -- reading -----------------------------------------------------------------------------------------------------------


def full_state_dict(source: Source, kind: str = "param") -> dict[str, Tensor]:
    """Return the full value of every parameter, on every rank. Collective.

    Args:
        source: a `State`, a `Step` before its `finish`, or an engine of `zero.initialize`.
        kind: "param" (the fp32 master, if the precision has one), "compute" (the values in the dtype of compute),
            "grad", or a moment such as "mu". Frozen parameters have no "grad" and no moments.

    Returns:
        A dict from full name to an fp32 CPU tensor of the parameter's shape.

    Raises:
        ConfigError: the run has no values of this kind; or the model gained, lost or exchanged a parameter.
        StaleStateError: the state is spent; or `kind` is "grad" and no step is between backward and its end.
    """
    return dict(full_values(state_of(source, "zero.full_state_dict", "zero.full_state_dict(state)"), kind))


def full_values(state: State, kind: str, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of `full_state_dict` one by one, except names in `without`. Collective.

    At most one unit is gathered at a time.
    """
    state.runtime.tree.check()
    state.runtime.settle()
    names = set(_names(state, None, kind)) - set(without)
    yield from _values(state, kind, names)


def get_full(source: Source, name: str | Tensor, kind: str = "param") -> Tensor:
    """Return the full value of one parameter, or its gradient or moment, on every rank. Collective.

    Args:
        source: a `State`, a `Step` before its `finish`, or an engine of `zero.initialize`.
        name: the full name of the parameter, or the parameter itself.
        kind: "param", "compute", "grad" or a moment, as in `full_state_dict`.

    Returns:
        An fp32 copy on the CPU, of the parameter's shape.

    Raises:
        ConfigError: no parameter has this name, or it has no value of this kind.
        StaleStateError: the state is spent; or `kind` is "grad" and no step is between backward and its end.
    """
    state = state_of(source, "zero.get_full", "zero.get_full(state, name)")
    state.runtime.settle()
    name = _name(state, name, kind)
    return dict(_values(state, kind, {name}))[name]


@unobserved()
def digest(state: State) -> str:
    """Return the SHA-256 of parameters, moments, buffers, step and loss scale. Collective.

    Equal states have equal digests at every stage, because the full values are hashed.
    """
    plan = state.plan
    checksum = hashlib.sha256(repr((state.step, state.scale)).encode())
    for kind in ("param", "compute", *plan.optimizer.moments):
        for name, tensor in full_values(state, kind):
            checksum.update(f"{kind} {name}".encode())
            checksum.update(memory_of(tensor.contiguous()))
    for name, buffer in buffers_of(state.model).items():
        checksum.update(name.encode())
        checksum.update(memory_of(buffer.detach().cpu().contiguous()))
    return checksum.hexdigest()


# -- editing -----------------------------------------------------------------------------------------------------------


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
            to take the edits of that rank and drop those of the others. False to reject edits.
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
    patterns = None if listed is None else [_text(name) for name in listed]
    fields = {"names": repr(patterns), "modify": repr(modify), "kind": kind}
    state.plan.world.agree(fields, "arguments of zero.gathered")
    wanted = set(_names(state, patterns, kind))
    _check_modify(state, wanted, kind, modify)
    full = dict(_values(state, kind, wanted))
    before = {name: _Seen.of(tensor) for name, tensor in full.items()}

    @unobserved()
    def write() -> None:
        if state.spent_:
            raise StaleStateError(
                "zero.gathered or GatheredParameters: a step or load inside the block made its full values old. Make "
                "steps and loads after the block."
            )
        _write(state, _agreed(state, full, before, kind, modify), kind)

    def write_early() -> None:
        write()
        before.update({name: _Seen.of(tensor) for name, tensor in full.items() if name in before})

    open_edits = state.runtime.open_edits

    def close() -> None:
        full.clear()
        if write_early in open_edits:
            open_edits.remove(write_early)

    try:
        try:
            if modify is not False:
                open_edits.append(write_early)
            yield full
            write()
        finally:
            close()
    finally:
        close()  # again, because an interrupt may come just before the first


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
    name = _name(state, name, kind)
    with gathered(state, [name], modify=True, kind=kind) as full:
        full[name] = value


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


def _agreed(
    state: State, full: Mapping[str, Tensor], before: Mapping[str, _Seen], kind: str, modify: bool | int
) -> dict[str, Tensor]:
    """Return the edits to write, equal on every rank. Collective; raises the errors of `gathered`."""
    world = state.plan.world
    try:
        mine, refused = _edits(state, full, before, kind, modify), ""
    except ConfigError as error:
        mine, refused = {}, str(error)
    prints = {name: _print(tensor) for name, tensor in mine.items()}
    ranks = [json.loads(text) for text in world.gather_texts(json.dumps([refused, prints]), "edits of full values")]
    counting = range(world.size) if isinstance(modify, bool) else [modify]
    first = ranks[counting[0]][1]
    for rank in counting:
        message, edits = ranks[rank]
        if message:
            raise ConfigError(f"zero.gathered changed nothing because of an error on rank {rank}: {message}")
        if odd := sorted(name for name in {*first, *edits} if first.get(name) != edits.get(name)):
            raise WorldError(
                f"zero.gathered: rank {rank} edited {some(odd)} otherwise than rank 0, so nothing was changed. Make "
                "the same edit on every rank, or pass modify=RANK for the edit of one rank."
            )
    if isinstance(modify, bool):
        return mine
    return {name: _from_rank(state, mine.get(name), before[name].shape, modify, name) for name in first}


def _from_rank(state: State, tensor: Tensor | None, shape: torch.Size, rank: int, name: str) -> Tensor:
    world = state.plan.world
    tensor = tensor.contiguous() if tensor is not None and world.rank == rank else torch.empty(shape)
    world.broadcast(tensor, rank, what=f"the edit of {name}").wait()
    return tensor


def _edits(
    state: State, full: Mapping[str, Tensor], before: Mapping[str, _Seen], kind: str, modify: bool | int
) -> dict[str, Tensor]:
    """Return the values that this rank has changed. A name that was removed from the dict counts as unchanged."""
    edits = {}
    coded = {name for unit in state.plan.units for name in _in(unit.expanded)}
    for name, value in full.items():
        if name not in before:
            raise ConfigError(f"{name!r} was put into the dict, but only what was gathered can be edited")
        seen = before[name]
        if not isinstance(value, Tensor) or value.shape != seen.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"{name} was given as {shape}, but must be {tuple(seen.shape)}")
        edited = value.detach().to("cpu", torch.float32).contiguous()
        if _print(edited) == seen.print:
            continue
        if modify is False:
            raise ConfigError(
                f"{name} was edited, but it is a copy, so the edit would be lost. Pass modify=True if every rank makes "
                "the same edit, or modify=RANK for the edit of one rank (GatheredParameters: modifier_rank=RANK)."
            )
        if name in coded:
            raise ConfigError(
                f"{name} cannot be edited, because it is kept as codes. Set precision.frozen=compute, or give other "
                "weights to zero.init."
            )
        narrow = rounded(edited, state.plan.precision.compute) if kind == "param" else edited
        if kind != "grad" and seen.finite and not narrow.isfinite().all():
            raise ConfigError(f"{name} was given a value that is not finite in {narrow.dtype}")
        edits[name] = edited
    return edits


# -- names and kinds ---------------------------------------------------------------------------------------------------


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
        if not names.isdisjoint(_in(unit.spec.trainable)) and not _has_gradient(state, unit):
            raise StaleStateError(f"no backward of this step has reached {unit.spec.name}: it has no gradient to edit")


def _names(state: State, patterns: Iterable[str] | None, kind: str) -> list[str]:
    """Return the full names that match `patterns`, in the plan's order; None matches all.

    Raises:
        ConfigError: the run has no values of this kind, or a name or pattern matches no parameter.
    """
    moments = state.plan.optimizer.moments
    if kind not in ("param", "compute", "grad", *moments):
        raise ConfigError(
            f"kind={kind!r} does not exist here. Choose from {', '.join(['param', 'compute', 'grad', *moments])}."
        )
    names = (name for unit in state.plan.units for layout in layouts_of(unit, kind) for name in _in(layout))
    held = dict.fromkeys(names)  # an ordered set
    if patterns is None:
        return list(held)
    chosen = set()
    for pattern in patterns:
        fitting = [pattern] if pattern in held else [name for name in held if fnmatchcase(name, pattern)]
        if not fitting:
            raise ConfigError(_unknown(state, pattern, kind, list(held)))
        chosen.update(fitting)
    return [name for name in held if name in chosen]


def _text(name: str | Tensor) -> str:
    """Return the full name of a parameter that was given instead of its name, else `name`."""
    return name.full_name if isinstance(name, ParameterPlaceholder) else str(name)


def _name(state: State, name: str | Tensor, kind: str) -> str:
    """Return the full name of one parameter; raise ConfigError if `name` is a pattern or not a parameter's name."""
    name = _text(name)
    if _names(state, [name], kind) != [name]:
        raise ConfigError(f"{name} is a pattern. Name one parameter, or use zero.gathered.")
    return name


def _unknown(state: State, name: str, kind: str, held: list[str]) -> str:
    if name in (slot.name for unit in state.plan.units for slot in unit.frozen_slots):
        return f"{name} is frozen: it has no {kind}"
    aliases, rule = state.plan.facts.splitting.aliases(), state.plan.optimizer.matrix_rule
    if name in aliases and rule is not None:
        return f"{name} is a matrix of {rule.title}: it has no {kind}"
    for full_name, names in aliases.items():
        if name in names:
            return f"{name} is tied to {full_name}. Use the name {full_name}."
    return f"no parameter is named {name}{meant(name, held) or f'. There are {some(held)}'}"


def _in(layout: Layout) -> list[str]:
    return [slot.name for slot in layout.slots]


# -- one unit ----------------------------------------------------------------------------------------------------------


def _values(state: State, kind: str, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    return full_tensors(state.runtime, kind, names, partial(_flat, state))


@torch.no_grad()
def _flat(state: State, unit: UnitState, layout: Layout, kind: str) -> Tensor:
    """Return a unit's full flat tensor: a (P,) fp32 copy on the CPU. Collective."""
    if kind != "grad":
        return full_flat(state.runtime, unit, layout, kind)
    full = gather_flat(state.runtime, unit, _gradient(state, unit), kind)
    return full.to("cpu", torch.float32, copy=True).div_(_divisor(state))


def _gradient(state: State, unit: UnitState) -> Tensor:
    """Return the part of a unit's gradient that this rank updates: a sum over ranks and microbatches."""
    plan = state.plan
    if not _has_gradient(state, unit):  # like a parameter that was not used
        return torch.zeros(plan.sizes.update_numel(unit.spec), dtype=plan.facts.grad_dtype, device=plan.world.device)
    return summed_gradient(state.runtime, unit)


@unobserved()
def _has_gradient(state: State, unit: UnitState) -> bool:
    """Reduce all gradients that have arrived so far; return whether `unit` has one. Collective.

    Raises:
        StaleStateError: no unit has a gradient.
    """
    parts = state.runtime
    parts.backward.reduce_arrived()
    if not parts.reducer.sum_so_far() or all(other.step.squares is None for other in parts.units):
        raise StaleStateError(
            "there is no gradient: gradients exist only between backward and the end of the step. Take the step in "
            "pieces, with zero.Step."
        )
    return unit.step.squares is not None


def _divisor(state: State) -> float:
    """Return the divisor that turns the scaled sum of gradients into their mean."""
    return state.plan.world.size * state.plan.accumulate * state.scale.scale


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
    flat = _flat(state, unit, layout, kind)
    for slot in slots:
        slot.of(flat).copy_(edits[slot.name])
    part = "frozen" if layout is unit.spec.frozen else kind
    writer = FlatWriter(state.plan, state.runtime.store, unit, part)
    writer.write_all(lambda slot, start, stop: slot.of(flat).view(-1)[start:stop])
    if kind == "param":
        unit.mark_changed(resident=True, frozen=layout is unit.spec.frozen)


def _write_gradient(state: State, unit: UnitState, edits: Mapping[str, Tensor]) -> None:
    """Write edits of a unit's gradient.

    Elements whose mean is unchanged keep their old sum, because mean times divisor may round to another value.
    """
    parts, plan, layout = state.runtime, state.plan, unit.spec.trainable
    divisor = _divisor(state)
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
