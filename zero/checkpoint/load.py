"""Load a checkpoint into a state of the same model; stage, tier, world size, page size and units may differ.

Every name, shape and dtype is compared before the first value is written, see `match`. Then each rank reads the ranges
that its flats cover, and a `FlatWriter` writes them to shards and pages.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Set
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.agreement import gather_reports
from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER, flats, saved_kind
from zero.checkpoint.format.facts import StateFacts, lineage_of, numbers_of
from zero.checkpoint.format.manifest import Entry, files_of, frozen_kinds, held
from zero.checkpoint.format.random_generators import set_random
from zero.checkpoint.frozen_file import frozen_version, remember
from zero.checkpoint.match import Match, TensorKey, match
from zero.checkpoint.tensors import Checkpoint, Tensors, index_of
from zero.core.checks import type_text
from zero.core.formats import PACKED_FORMATS
from zero.core.layout import Slot
from zero.engine.arguments import check_type
from zero.engine.full_flat import own_stored
from zero.engine.model import UnitSpec, buffers_of
from zero.engine.plan import Plan
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.engine.whole import FlatWriter, full_values
from zero.errors import CheckpointError, ConfigError
from zero.platform.modes import unobserved
from zero.progress import Progress, reported, silent


@unobserved()
def load(
    state: State,
    checkpoint: Checkpoint,
    *,
    partial: Iterable[str] = (),
    convert: Iterable[str] = (),
    moments: bool = True,
    weights: str = PARAMETER,
    note: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
) -> State:
    """Return `state` with the checkpoint's values; `state` itself cannot be used again. Collective.

    Args:
        state: a state of the same model. Stage, tier and world size need not be those of the checkpoint.
        checkpoint: from `open_checkpoint` or `open_latest`.
        partial: names, or patterns such as `head.*`, of tensors that keep their present values. They may be missing in
            the model or in the checkpoint, or differ in shape. A kind in front, as in `nu/*`, limits a pattern to
            tensors of that kind. A parameter that keeps a moment also keeps its number of updates, by which Adam
            corrects its moments.
        convert: names or patterns of tensors whose dtype may change. Moments may always change dtype.
        moments: False keeps the state's own moments and ignores those of the checkpoint, for a state that is not
            trained.
        weights: "parameter" (default), or "ema" to load the parameters' exponential moving average as the parameters.
        note: called with a line about the tensors that keep their values because of `partial`.
        progress: called with the number of units loaded so far.

    Raises:
        CheckpointError: names, shapes, dtypes or coordinates do not match, a pattern of `partial` matches nothing, or
            the checkpoint has no such `weights`; nothing was changed. Also if a file was damaged after the checkpoint
            was opened; then the state cannot be used again.
    """
    check_type(state, State, "zero.load", "state = zero.load(state, checkpoint)")
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigError(
            f"zero.load takes a Checkpoint as its second argument, not {type_text(checkpoint)}. Write "
            "state = zero.load(state, zero.open_checkpoint(world, folder))."
        )
    runtime, plan = state.runtime, state.plan
    _check_coordinates(checkpoint.folder, checkpoint.manifest.facts.get("coordinates", {}), plan.world.coordinates)
    runtime.tree.check()
    runtime.settle()
    buffers, patterns = buffers_of(state.model), {"partial": tuple(partial), "convert": tuple(convert)}
    matched = match(checkpoint, plan, buffers, **patterns, moments=moments, weights=weights, note=note)
    return _loaded(state, checkpoint, matched, buffers, progress)


def _loaded(
    state: State, checkpoint: Checkpoint, matched: Match, buffers: Mapping[str, Tensor], progress: Progress
) -> State:
    runtime, plan, kept = state.runtime, state.plan, matched.kept
    numbers = numbers_of(checkpoint.folder, checkpoint.manifest)
    values = _current(state, kept - _untouched(plan, kept))
    scale = plan.precision.scale.resumed(numbers.scale, dynamic=numbers.dynamic)
    rested = _rested(state, numbers, kept)
    following = state.restored(step=numbers.step, scale=scale)
    generators: list[dict[str, Any] | None] = []

    def fill() -> dict[str, Any]:
        if checkpoint.manifest.world == plan.world.size:
            generators.append(index_of(checkpoint, plan.world.rank).random)
        _fill(following, checkpoint, matched, values, buffers, progress)
        return {}

    gather_reports(plan.world, fill)
    runtime.updater.resume(rested)
    if (lineage := lineage_of(checkpoint.folder, checkpoint.manifest)) is not None:
        runtime.lineage.name, runtime.lineage.saved_ns = lineage.name, lineage.saved_ns
    for unit in runtime.units:
        unit.mark_changed(resident=True, frozen=True)
    _remember_frozen(runtime, checkpoint, kept)
    for random in generators:
        if random is not None:
            set_random(random)
    return following


def _check_coordinates(folder: Path, saved: object, coordinates: Mapping[str, int]) -> None:
    """Raise CheckpointError if the checkpoint in `folder`, with coordinates `saved`, is of other coordinates."""
    if saved != coordinates:
        raise CheckpointError(
            f"{folder}: has coordinates {saved}, but this rank {dict(coordinates)}. Pass the folder that zero.save got "
            "to zero.open_latest, which opens each rank's own."
        )


def _rested(state: State, numbers: StateFacts, kept: Set[TensorKey]) -> dict[str, int]:
    """Return the steps without an update by parameter. If a parameter keeps a moment, it keeps its number of updates.

    Where that number is larger than the checkpoint's step, the steps without an update are negative.
    """
    before, counted = (
        state.runtime.updater.numbers.counts.rested,
        {*state.plan.optimizer.moments} - {*state.plan.optimizer.copies},
    )
    names = {name for name, kind in kept if kind in counted}
    return numbers.rested | {name: numbers.step - state.step + before.get(name, 0) for name in names}


def _remember_frozen(runtime: Runtime, checkpoint: Checkpoint, kept: Set[TensorKey]) -> None:
    """Note that a checkpoint has the file of frozen values that this rank would save."""
    manifest, world, listed = checkpoint.manifest, runtime.plan.world, flats(runtime.plan, {})
    numbers = files_of(listed, world.rank, world.size)
    alike = manifest.world == world.size and files_of(manifest.flats, world.rank, world.size) == numbers
    if not alike or not manifest.finite or not frozen_kinds().isdisjoint(kind for _, kind in kept):
        return
    for number in numbers[1:]:
        saved, own = (held(several, number, world.size) for several in (manifest.flats, listed))
        if [(piece.part, piece.start) for piece in saved] == [(piece.part, piece.start) for piece in own]:
            remember(runtime, checkpoint.folder, manifest.files[number], frozen_version(runtime))


def _untouched(plan: Plan, kept: Set[TensorKey]) -> set[TensorKey]:
    """Return the keys of all flats in which every tensor is kept; such a flat is neither read nor written."""
    flats = [(unit.stored(page_kind), kind) for unit in plan.units for kind, page_kind in _kinds(plan, unit)]
    by_flat = [{(slot.name, kind) for slot in layout.slots} for layout, kind in flats]
    return {key for keys in by_flat if keys <= kept for key in keys}


def _fill(
    state: State,
    checkpoint: Checkpoint,
    matched: Match,
    current: Mapping[TensorKey, Tensor],
    buffers: Mapping[str, Tensor],
    progress: Progress,
) -> None:
    entries, kept = matched
    plan, store = state.plan, state.runtime.store
    untouched, shapes = _untouched(plan, kept), plan.facts.splitting.shapes()
    with Tensors(checkpoint) as files, torch.no_grad():

        def values(kind: str, own_S: Tensor, first: int, slot: Slot, start: int, stop: int) -> Tensor:
            key = (slot.name, kind)
            if key in current:
                return current[key].view(-1)[start:stop]
            if key in kept:
                return own_S[slot.offset + start - first : slot.offset + stop - first]
            read = functools.partial(files.read, entries[key])
            numel = prod(shapes[slot.name])
            return _converted(read, entries[key], kind, numel, plan.precision.compute)(start, stop)

        for unit in reported(state.runtime.units, "loading", progress):
            for kind, page_kind in _kinds(plan, unit.spec):
                keys = {(slot.name, kind) for slot in unit.spec.stored(page_kind).slots}
                if not untouched.isdisjoint(keys):
                    continue
                writer = FlatWriter(plan, store, unit, page_kind)
                packed = next((n for n, flat in enumerate(unit.spec.flats) if flat.form and flat.kind == page_kind), 0)
                keeps_packed = packed and not kept.isdisjoint(keys)
                own_S = own_stored(state.runtime, unit, packed) if keeps_packed else torch.empty(0)
                writer.write_all(functools.partial(values, kind, own_S, writer.start))
        for name, buffer in buffers.items():
            if (name, BUFFER) not in kept:
                buffer.copy_(files.read(entries[name, BUFFER], 0, buffer.numel()).view(buffer.shape))


def _kinds(plan: Plan, unit: UnitSpec) -> list[tuple[str, str]]:
    """Return the kinds of a unit's flats in a checkpoint of the plan, each with the kind of its pages."""
    trainable, *frozen = [(saved_kind(flat), str(flat.kind)) for flat in unit.flats]
    return [trainable, *((kind, kind) for kind in unit.moments), *frozen]


def _converted(
    read: Callable[[int, int], Tensor], entry: Entry, kind: str, numel: int, compute: torch.dtype
) -> Callable[[int, int], Tensor]:
    """Return a function to ranges of a parameter as `kind`, which may be packed, from its entry in a checkpoint.

    Args:
        read: function to ranges of the entry.
        numel: the number of values of the parameter.
        compute: the dtype in which packed values are read, rounded as a gather rounds them; for another format fp32.
    """
    saved, wanted = PACKED_FORMATS.get(entry.kind), PACKED_FORMATS.get(kind)
    if saved is not None and saved is wanted:
        return wanted.checked(entry.name, numel, read)
    if saved is not None:
        read = saved.values_of(read, numel, compute if wanted is None else torch.float32)
    return read if wanted is None else wanted.bytes_of(entry.name, numel, read)


def _current(state: State, kept: Set[TensorKey]) -> dict[TensorKey, Tensor]:
    """Return the full values of the kept tensors, except buffers and packed parameters, on the host. Collective."""
    values = dict[TensorKey, Tensor]()
    kinds = {kind for _, kind in kept} - {BUFFER, *PACKED_FORMATS}
    for kind in sorted(kinds):  # a set's order differs between ranks
        source = {PARAMETER: "param", FROZEN: "param"}.get(kind, kind)
        values |= {(name, kind): tensor for name, tensor in full_values(state, source) if (name, kind) in kept}
    return values
