"""Full values out of shards and back in, by name: for looking, comparing, exporting and editing.

What is given out are fp32 copies on the CPU, read after all deferred updates are made. An edit goes to wherever this
rank keeps a part of the value, on any tier, and makes gathered copies of it stale. Setting a value to what it was
changes no bit.

Everything here is collective: every rank makes the same call. Ranks compare what they want to write before anything is
written, so an edit happens on all of them or on none. At most one unit is gathered at a time.

A gradient is the mean over the global batch, not clipped yet. It is there between backward and the end of its step:
afterwards it belongs to the update.
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
from zero.engine.first_values import sinks_of
from zero.engine.full_flat import full_flat, full_tensors, gather_flat, layouts_of, updated_range
from zero.engine.placeholder import ParameterPlaceholder
from zero.engine.state import State
from zero.engine.takeover import buffers_of
from zero.engine.unit_state import UnitState
from zero.errors import ConfigError, StaleStateError, WorldError, if_it_fails
from zero.platform.files import memory_of


class Source(Protocol):
    """A holder of a state: a `State` itself, a `Step` under way, or an engine."""

    @property
    def state(self) -> State: ...


def _state_of(source: Source, call: str, line: str) -> State:
    """Return the state of a source; reject another object with the line to write."""
    state = getattr(source, "state", source)
    check_type(state, State, call, line)
    return cast(State, state)


# -- reading -----------------------------------------------------------------------------------------------------------


def full_state_dict(source: Source, kind: str = "param") -> dict[str, Tensor]:
    """Every parameter's full value, on every rank. Collective.

    Args:
        source: a `State`, a `Step` under way, or an engine of `zero.initialize`.
        kind: "param" (the master where there is one), "compute" (what the model computes with), "grad", or a moment
            such as "mu". Gradients and moments are those of trainable parameters.

    Returns:
        Full name to an fp32 tensor of the parameter's shape on the CPU.

    Raises:
        ConfigError: nothing of this kind is held; or the model gained, lost or exchanged a parameter.
        StaleStateError: the state is spent; a gradient, and no step is between backward and its end.
    """
    return dict(full_values(_state_of(source, "zero.full_state_dict", "zero.full_state_dict(state)"), kind))


def full_values(state: State, kind: str, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """The same, one after the other: no more than a unit is gathered at a time, and none for names in `without`."""
    state.runtime.tree.check()
    state.runtime.settle()
    names = set(_names(state, None, kind)) - set(without)
    yield from _values(state, kind, names)


def get_full(source: Source, name: str | Tensor, kind: str = "param") -> Tensor:
    """The full value of one parameter, or its gradient or moment, on every rank. Collective.

    Args:
        source: a `State`, a `Step` under way, or an engine of `zero.initialize`.
        name: as in `full_state_dict`, or the parameter itself.
        kind: "param", "compute", "grad" or a moment, as there.

    Returns:
        An fp32 copy on the CPU, of the parameter's shape.

    Raises:
        ConfigError: there is no such name, or nothing of this kind is held for it.
        StaleStateError: a gradient, and no step is between backward and its end.
    """
    state = _state_of(source, "zero.get_full", "zero.get_full(state, name)")
    state.runtime.settle()
    name = _name(state, name, kind)
    return dict(_values(state, kind, {name}))[name]


def digest(state: State) -> str:
    """SHA-256 of parameters, moments, buffers, step and loss scale: equal for equal states, whatever the stage."""
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
    """Full values by name, on every rank, for the length of the block; with `modify` edits of them persist.

        with zero.gathered(state, ["blocks.*.gain"], modify=True) as full:
            for tensor in full.values():
                tensor.clamp_(min=0.1)

    The dict is emptied at the end, so what was not kept elsewhere is freed. Edits are written at the end, and before a
    save or another collective read within the block. An exception writes nothing. Collective.

    Args:
        source: a `State`, a `Step` under way, or an engine of `zero.initialize`.
        names: exact names, fnmatch patterns or parameters; None for all that hold this kind.
        modify: True if every rank makes the same edits, in place or by putting another tensor in the dict. Or the
            number of a rank: its edits count, what the others wrote is dropped.
        kind: "param", "grad", a moment, or, only to read, "compute".

    An error is raised on every rank, and then nothing has changed.

    Raises:
        ConfigError: a name that does not exist; an edit without `modify`, of another shape, or that brings a value that
            is not finite where all were (a gradient may: its step is skipped).
        HandshakeError: the ranks called this with different arguments.
        StaleStateError: the state was spent within the block; a gradient that is not there.
        WorldError: the ranks made different edits.
    """
    state = _state_of(source, "zero.gathered", "with zero.gathered(state, names) as full:")
    state.runtime.settle()
    listed = [names] if isinstance(names, str | ParameterPlaceholder) else names
    patterns = None if listed is None else [_text(name) for name in listed]
    fields = {"names": repr(patterns), "modify": repr(modify), "kind": kind}
    state.plan.world.agree(fields, "arguments of zero.gathered")
    wanted = set(_names(state, patterns, kind))
    _check_modify(state, wanted, kind, modify)
    full = dict(_values(state, kind, wanted))
    before = {name: _Seen.of(tensor) for name, tensor in full.items()}

    def write() -> None:
        _write(state, _agreed(state, full, before, kind, modify), kind)

    def write_early() -> None:
        write()
        before.update({name: _Seen.of(tensor) for name, tensor in full.items() if name in before})

    open_edits = state.runtime.open_edits
    if modify is not False:
        open_edits.append(write_early)
    try:
        yield full
        write()
    finally:
        full.clear()
        if modify is not False:
            open_edits.remove(write_early)


def set_full(source: Source, name: str | Tensor, value: Tensor, kind: str = "param") -> None:
    """Give one parameter, or its gradient or moment, another value; every rank passes the same one. Collective.

    Args:
        source: a `State`, a `Step` under way, or an engine of `zero.initialize`.
        name: of the parameter, or the parameter itself.
        value: of the parameter's shape, any dtype and device. A frozen parameter is held in the dtype of compute.
        kind: "param", "grad" or a moment.

    Errors are those of `gathered`.
    """
    state = _state_of(source, "zero.set_full", "zero.set_full(state, name, value)")
    name = _name(state, name, kind)
    with gathered(state, [name], modify=True, kind=kind) as full:
        full[name] = value


class _Seen(NamedTuple):
    """A tensor when it was given out: to find out what was edited."""

    shape: torch.Size
    print: str
    finite: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "_Seen":
        tensor = tensor.detach().to("cpu", torch.float32)
        return cls(tensor.shape, _print(tensor), bool(tensor.isfinite().all()))


def _print(tensor: Tensor) -> str:
    tensor = tensor.contiguous()  # held for as long as its memory is read
    return hashlib.sha256(memory_of(tensor)).hexdigest()


def _agreed(
    state: State, full: Mapping[str, Tensor], before: Mapping[str, _Seen], kind: str, modify: bool | int
) -> dict[str, Tensor]:
    """Return the edits to write, the same on every rank. Collective.

    Raises:
        as `gathered`.
    """
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
            raise ConfigError(f"zero.gathered on rank {rank}: {message}; nothing was changed")
        if odd := sorted(name for name in {*first, *edits} if first.get(name) != edits.get(name)):
            raise WorldError(
                f"zero.gathered: rank {rank} edited {some(odd)} otherwise than rank 0, so nothing was changed; make "
                "the same edit on every rank, or pass modify=RANK to take that rank's"
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
    """Return the values that this rank has changed; a name that was removed from the dict was not."""
    edits = {}
    for name, value in full.items():
        if name not in before:
            raise ConfigError(f"{name!r} was put into the dict, but only what was gathered can be edited")
        seen = before[name]
        if not isinstance(value, Tensor) or value.shape != seen.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"{name} was given as {shape}; it is {tuple(seen.shape)}")
        edited = value.detach().to("cpu", torch.float32).contiguous()
        if _print(edited) == seen.print:
            continue
        if modify is False:
            raise ConfigError(
                f"{name} was edited, but it is a copy; pass modify=True if every rank makes the same edit, modify=RANK "
                "to take that rank's, or modifier_rank=0 to GatheredParameters"
            )
        narrow = rounded(edited, state.plan.precision.compute) if kind == "param" else edited
        if kind != "grad" and seen.finite and not narrow.isfinite().all():
            raise ConfigError(f"{name} was given a value that is not finite in {narrow.dtype}")
        edits[name] = edited
    return edits


# -- names and kinds ---------------------------------------------------------------------------------------------------


def _check_modify(state: State, names: set[str], kind: str, modify: bool | int) -> None:
    """Refuse, before anything is gathered, what cannot be written."""
    world = state.plan.world
    if not isinstance(modify, bool) and not 0 <= modify < world.size:
        raise ConfigError(f"modify={modify}: the world has ranks 0 to {world.size - 1}; modify=True takes every rank's")
    if modify is not False and kind == "compute":
        raise ConfigError("kind='compute' is made from the parameters and cannot be edited; edit kind='param'")
    for unit in state.runtime.units if modify is not False and kind == "grad" else ():
        if not names.isdisjoint(_in(unit.spec.trainable)) and unit.index not in _summed(state):
            raise StaleStateError(f"no backward of this step has reached {unit.spec.name}: it has no gradient to edit")


def _names(state: State, patterns: Iterable[str] | None, kind: str) -> list[str]:
    """The full names that are meant, in the plan's order.

    Raises:
        ConfigError: nothing of this kind is held; a name or pattern that fits none.
    """
    moments = state.plan.optimizer.moments
    if kind not in ("param", "compute", "grad", *moments):
        raise ConfigError(f"{kind!r} is not held: param, compute, grad, {', '.join(moments)}")
    names = (name for unit in state.plan.units for layout in layouts_of(unit, kind) for name in _in(layout))
    held = dict.fromkeys(names)  # as a set, and in order
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
    """A parameter may be given in place of its name."""
    return name.full_name if isinstance(name, ParameterPlaceholder) else str(name)


def _name(state: State, name: str | Tensor, kind: str) -> str:
    """One exact name; raises as `_names`."""
    name = _text(name)
    if _names(state, [name], kind) != [name]:
        raise ConfigError(f"{name} is a pattern; name one parameter, or use zero.gathered")
    return name


def _unknown(state: State, name: str, kind: str, held: list[str]) -> str:
    if name in (frozen for unit in state.plan.units for frozen in _in(unit.frozen)):
        return f"{name} is frozen: it has no {kind}"
    for full_name, names in state.plan.splitting.aliases().items():
        if name in names:
            return f"{name} is tied to {full_name}; use that name"
    return f"no parameter is named {name}{meant(name, held) or f'; there are {some(held)}'}"


def _in(layout: Layout) -> list[str]:
    return [slot.name for slot in layout.slots]


# -- one unit ----------------------------------------------------------------------------------------------------------


def _values(state: State, kind: str, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    return full_tensors(state.runtime, kind, names, partial(_flat, state))


@torch.no_grad()
def _flat(state: State, unit: UnitState, layout: Layout, kind: str) -> Tensor:
    """(P,) fp32 on the CPU, in memory of its own. Collective."""
    if kind != "grad":
        return full_flat(state.runtime, unit, layout, kind)
    full = gather_flat(state.runtime, unit, _gradient(state, unit), kind)
    return full.to("cpu", torch.float32, copy=True).div_(_divisor(state))


def _gradient(state: State, unit: UnitState) -> Tensor:
    """Return this rank's part of a unit's gradient: the sum over ranks and microbatches."""
    plan = state.plan
    if unit.index not in _summed(state):  # as where a parameter is not used
        return torch.zeros(plan.update_numel(unit.spec), dtype=plan.grad_dtype, device=plan.world.device)
    if unit.grad is None:
        state.runtime.gradients.left(unit).wait()
        return updated_range(state.runtime, unit, "grad", plan.grad_dtype)
    return unit.grad if plan.full_update else unit.own_grad_S(plan.rank)


def _summed(state: State) -> Collection[int]:
    """The units that have a gradient, all of what has come so far.

    Raises:
        StaleStateError: none has.
    """
    parts = state.runtime
    parts.gatherer.reduce_arrived()
    if not parts.reducer.sum_so_far() or not parts.updater.sums:
        raise StaleStateError(
            "there is no gradient: it is there between backward and the end of the step, so take the step in pieces, "
            "with zero.Step"
        )
    return parts.updater.sums.keys()


def _divisor(state: State) -> float:
    """Return the number that makes the sum of gradients a mean."""
    return state.plan.world.size * state.plan.accumulate * state.scale.scale


@torch.no_grad()
def _write(state: State, edits: Mapping[str, Tensor], kind: str) -> None:
    with if_it_fails(state.spend):  # half an edit must not pass for a state
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
    """Parameters or moments go the way of first values, the rest of the flat as it is."""
    flat = _flat(state, unit, layout, kind)
    for slot in slots:
        slot.of(flat).copy_(edits[slot.name])
    part = "frozen" if layout is unit.spec.frozen else kind
    for sink in sinks_of(state.plan, state.runtime.store, unit, part):
        sink.take(flat)
    if kind == "param":
        unit.mark_changed(resident=True, frozen=True)


def _write_gradient(state: State, unit: UnitState, edits: Mapping[str, Tensor]) -> None:
    """Elements that are what they were keep their bits, though a sum is not always its mean times the count."""
    parts, plan, layout = state.runtime, state.plan, unit.spec.trainable
    divisor = _divisor(state)
    first, last = (0, layout.P) if plan.full_update else layout.shard(plan.rank)
    grad = parts.gradients.open(unit, fresh=False)
    updated = grad if plan.full_update else unit.own_grad_S(plan.rank)
    for slot, a, b, place in layout.pieces(first, last):
        if slot.name in edits:
            held, wanted = updated[place : place + b - a], edits[slot.name].view(-1)[a:b]
            now = held.to("cpu", torch.float32)
            held.copy_(torch.where(wanted == now / divisor, now, wanted * divisor))
    parts.updater.measure(unit)  # the norm must be of the written gradient
    parts.gradients.park(unit)
