"""Fill a unit with its first values, which are the same for every stage, number of ranks and choice of units.

A model that was built with values keeps them, `recorded_values` computes those of parameters on meta, and weights come
from tensors, files or a function. A rank reads its own range of each parameter: also in safetensors files, and in
blocks of recorded values.

Every rank also reads the first 64 elements of each parameter, and the ranks compare them; ranks that keep the same
range compare all that they have read.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn

from zero.core.suggest import meant, some
from zero.distributed.mesh import local_part
from zero.distributed.world import World
from zero.engine.memory import Buffer
from zero.engine.meta import is_meta
from zero.engine.model import (
    ParameterPlaceholder,
    RecordedValues,
    Splitting,
    UnitSpec,
    buffers_of,
    reached,
)
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.engine.whole.flat_writer import FlatWriter
from zero.errors import ConfigError, HandshakeError, PlanError
from zero.platform.files import memory_of
from zero.platform.safetensors_files import RangedWeights, StoredWeights
from zero.store import Page, PageKind, Store

SAMPLE = 64
"""Elements at the beginning of each parameter that all ranks read and compare."""

Weights = Mapping[str, Tensor] | str | PathLike[str] | Callable[[str, Tensor], None] | None

Values = Callable[[str, int, int], Tensor]
"""A function of a parameter's full name, start and stop: elements [start, stop) of its first value, flattened.

The result may be on any device and of any dtype.
"""


def values_of(
    splitting: Splitting, built: Mapping[str, Tensor], model: nn.Module, seed: int, weights: Weights, world: World
) -> Values:
    """Return a function to the first values of parameters.

    Call it in the order of the layouts, on every rank for every parameter, because a function `weights` may communicate
    when it is called. The returned function keeps the whole value of the last parameter or owner only.

    Args:
        built: the values that the model was built with, from `values_in`; used unless `weights` is given.
        model: the model that will run, whose parameters are placeholders. Owners' `reset_parameters` are called on it.
            Its persistent buffers are filled immediately from `weights`, if that is a mapping or a file.
        weights: as in `init`.

    Raises:
        PlanError: weights are missing (the message names them), or peft's first values of an adapter are not recorded
            or depend on weights.
            By the returned function: an owner has no `reset_parameters`, or a weight has another shape.
    """
    shapes = splitting.shapes()
    if weights is None:
        return _of_model(splitting, built, model, seed, world)
    if callable(weights):

        def filled(name: str) -> Tensor:
            tensor = torch.zeros(shapes[name])
            weights(name, tensor)
            return tensor

        return by_range(filled)
    stored = weights if isinstance(weights, Mapping) else StoredWeights(Path(weights).expanduser())
    aliases = splitting.aliases()  # a file may have a tied parameter under any of its names
    fresh = stored.fresh if isinstance(stored, RangedWeights) else frozenset()
    new = {name: names for name, names in aliases.items() if not any(alias in stored for alias in names)}
    _refuse_missing(stored, [name for name, names in new.items() if fresh.isdisjoint(names)])
    _refuse_unmade(built, model, aliases, new)
    _fill_buffers(model, stored)
    if not isinstance(stored, RangedWeights):
        return by_range(lambda name: _named(stored, aliases[name], shapes[name]))

    def read(name: str, start: int, stop: int) -> Tensor:
        return _read(stored, _known(stored, aliases[name]), shapes[name], start, stop)

    if not new:
        return read
    made = _of_model(splitting, built, model, seed, world)
    return lambda name, start, stop: (made if name in new else read)(name, start, stop)


def _of_model(splitting: Splitting, built: Mapping[str, Tensor], model: nn.Module, seed: int, world: World) -> Values:
    """Return a function to the values that the model was built with, or that its initialization makes."""
    made, kept = RecordedValues(splitting, model, built, seed, world), by_range(built.__getitem__)
    return lambda name, start, stop: (kept if name in built else made)(name, start, stop)


def by_range(whole: Callable[[str], Tensor]) -> Values:
    """Return a function to ranges of the values of `whole`, which is called once for each parameter in turn."""
    last: tuple[str, Tensor] | None = None

    def values(name: str, start: int, stop: int) -> Tensor:
        nonlocal last
        if last is None or last[0] != name:
            last = None  # freed before the next value is made
            last = name, whole(name).detach().reshape(-1)
        return last[1][start:stop]

    return values


def empty_unit(plan: Plan, store: Store, spec: UnitSpec) -> UnitState:
    """Return a unit with this rank's tensors allocated and zero."""
    unit = UnitState(spec, *empty_shards(plan, spec), None, ())
    add_empty_buffers(plan, store, unit)
    return unit


def empty_shards(plan: Plan, spec: UnitSpec) -> tuple[Buffer | None, tuple[Tensor | None, ...]]:
    """Return `UnitState.resident` and `UnitState.shards`, allocated and zero."""
    compute, device = plan.precision.compute, plan.world.compute
    if plan.facts.is_resident(spec):
        resident = Buffer(spec.full_numel, compute, device)
        resident.version = 0
        return resident, tuple(flat.of(resident.flat)[slice(*flat.stored.shard(plan.rank))] for flat in spec.flats)
    if plan.facts.params_offloaded:
        return None, (None,) * len(spec.flats)
    shards = [device.zeros(plan.sizes.kept_numel(flat), flat.dtype(compute)) for flat in spec.flats]
    return None, tuple(shards)


def add_empty_buffers(plan: Plan, store: Store, unit: UnitState) -> None:
    """Give a unit memory for its gradient, and its secondary shards, which are empty."""
    spec = unit.spec
    keeps_grad = spec.trainable.slots and not plan.facts.grads_offloaded
    unit.grad = plan.world.compute.zeros(plan.sizes.grad_numel(spec), plan.facts.grad_dtype) if keeps_grad else None
    unit.secondary_versions = ()
    unit.secondary = tuple(
        store.in_place(Page(spec.index, PageKind.SECONDARY, number))
        if plan.sizes.secondary_numel(flat.stored)
        else None
        for number, flat in enumerate(spec.flats)
    )


@dataclass
class Check:
    """Checksums of the first values that a rank has read.

    Attributes:
        samples: unit -> checksum of the names and first elements of its parameters.
        parameters: parameter -> checksum of its first elements.
        ranges: hash of the ranges that the rank keeps.
        values: checksum of the values in them.
        error: the first error in these values, which other ranks may not have read; nothing is written after it.
    """

    samples: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    ranges: Any = field(default_factory=hashlib.sha256)
    values: int = 0
    error: ConfigError | None = None


@torch.no_grad()
def fill(plan: Plan, store: Store, unit: UnitState, values: Values, codes: Mapping[str, Tensor], check: Check) -> None:
    """Write a unit's first values to memory and to the store, and add them to `check`.

    Args:
        codes: the codes of parameters that are taken over, by name.
    """

    def read(name: str, start: int, stop: int) -> Tensor:
        return values(name, start, stop).detach().to("cpu", torch.float32).contiguous()

    def kept(name: str, start: int, stop: int) -> Tensor:
        return noted(read(name, start, stop))

    def taken(name: str, start: int, stop: int) -> Tensor:
        return noted(codes[name][start:stop].to("cpu").contiguous())

    def noted(value: Tensor) -> Tensor:
        check.values = crc32(memory_of(value), check.values)
        return value

    sample = 0
    for flat in unit.spec.flats:
        copies = plan.optimizer.copies if flat.kind == PageKind.PARAM else ()
        writer = FlatWriter(plan, store, unit, flat.kind, copies=copies)
        check.ranges.update(f"{writer.start} {writer.stop} ".encode())
        for stored, slot in zip(flat.stored.slots, flat.values.slots, strict=True):
            first = read(slot.name, 0, min(SAMPLE, slot.numel))
            sample = crc32(memory_of(first), crc32(slot.name.encode(), sample))
            check.parameters[slot.name] = f"{crc32(memory_of(first)):08x}"
            if check.error is not None:
                continue
            source: Callable[[int, int], Tensor] = partial(kept, slot.name)
            if flat.form is not None and slot.name in codes:
                source = flat.form.checked(slot.name, slot.numel, partial(taken, slot.name))
            elif flat.form is not None:
                source = flat.form.bytes_of(slot.name, slot.numel, source)
            try:
                writer.write(stored, source)
            except ConfigError as error:  # raised in `compare`, because the other ranks wait there
                check.error = error
        if check.error is None:
            writer.close()
    check.samples[unit.spec.name] = f"{sample:08x}"


def compare(world: World, check: Check) -> None:
    """Compare the first values of all ranks. Collective.

    Raises:
        ConfigError: a rank has an error in `check`; raised on every rank.
        HandshakeError: the samples of a unit differ, or values of ranks that keep the same ranges.
    """
    world.agree(check.samples, "first values")
    failed = int(check.error is not None)
    numbers = torch.tensor([int.from_bytes(check.ranges.digest()[:7]), check.values, failed], device="cpu")
    rows = world.exchange(numbers, what="first values").tolist()
    if any(failed for *_, failed in rows):
        errors = world.gather_texts(str(check.error or ""), "errors in first values")
        raise ConfigError(next(error for error in errors if error)) from check.error
    seen: dict[int, tuple[int, int]] = {}  # ranges -> the first rank that keeps them, and its values
    for rank, (ranges, values, _) in enumerate(rows):
        other, expected = seen.setdefault(ranges, (rank, values))
        if values != expected:
            raise HandshakeError(
                f"the ranks have different first values: those of rank {other} and rank {rank}, which keep the same "
                "part of the model. Give all ranks the same weights."
            )


def values_in(model: nn.Module, splitting: Splitting) -> dict[str, Tensor]:
    """Return the values of all parameters that are not on meta, by full name."""
    parameters = {name: model.get_parameter(name) for name in splitting.names}
    local = {name: local_part(parameter) for name, parameter in parameters.items()}
    return {name: parameter.detach() for name, parameter in local.items() if not is_meta(parameter)}


def _known(weights: Mapping[str, Tensor], names: tuple[str, ...]) -> str:
    """Return the first of a parameter's names that `weights` has."""
    return next(name for name in names if name in weights)


def _named(weights: Mapping[str, Tensor], names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    known = _known(weights, names)
    value = weights[known].detach()
    _check_shape(known, value.shape, shape)
    return _real(known, value)


def _read(weights: RangedWeights, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    _check_shape(name, weights.shape(name), shape)
    return _real(name, weights.read(name, start, stop))


def _real(name: str, value: Tensor) -> Tensor:
    if value.itemsize == 1 or value.is_complex():
        raise PlanError(f"weights have {name} in {value.dtype}. Give them in bf16 or fp32, with scales applied.")
    return value


def _refuse_missing(weights: Mapping[str, Tensor], missing: Sequence[str]) -> None:
    if missing:
        hint = meant(missing[0], weights) if len(missing) == 1 else ""
        raise PlanError(f"weights have no {some(missing)}{hint}")


def _refuse_unmade(built: Mapping[str, Tensor], model: nn.Module, names: Iterable[str], new: Collection[str]) -> None:
    """Raise PlanError for a parameter in `new` whose first value cannot be made.

    Its operations are not recorded, or they depend on a parameter whose value comes from weights instead of operations.
    """
    recipes = {name: cast(ParameterPlaceholder, model.get_parameter(name)).recipe for name in names}
    replaced = reached(recipe.root for name, recipe in recipes.items() if recipe is not None and name not in new)
    for name in new:
        recipe = recipes[name]
        if name not in built and (recipe is None or not recipe.root.is_written):
            raise PlanError(
                f"{name} has no first values: it was built on meta, and weights do not have it. "
                "Build it inside of zero.empty(), without low_cpu_mem_usage."
            )
        if recipe is not None and not replaced.keys().isdisjoint(reached([recipe.root])):
            raise PlanError(
                f"{name} was computed from a parameter whose value comes from weights. Build the model with its "
                "values, or choose other first values, such as init_lora_weights=True without DoRA."
            )


def _check_shape(name: str, stored: Sequence[int], shape: Sequence[int]) -> None:
    if tuple(stored) != tuple(shape):
        raise PlanError(f"weights have {name} in shape {tuple(stored)}, but the model has {tuple(shape)}")


@torch.no_grad()
def _fill_buffers(copied: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy persistent buffers, such as running statistics, from `weights` into the model, if it has them."""
    for name, buffer in buffers_of(copied).items():
        if name in weights:
            value = weights[name]
            _check_shape(name, value.shape, buffer.shape)
            buffer.copy_(value)
