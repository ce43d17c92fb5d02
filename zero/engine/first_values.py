"""First values, one parameter at a time, the same for every stage, world and choice of units.

A model that was built with values keeps them. Values of parameters on meta are made on the CPU in fp32: each
owner (a module that holds parameters directly) gets real parameters for a moment, its `reset_parameters` runs with a
generator seeded from (seed, owner's path), and the values are taken out. A tied parameter is made by its first owner.
Where a module around it has `_init_weights(module)`, as models of transformers do, that has the last word: it is called
with the owner and with every module around it, as `apply` would, and what it does to others than the owner is dropped.

Values run through as a stream: every rank makes them all, each keeps its own range, page by page, and nothing larger
than one owner ever exists.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zero.core.layout import Layout, pages
from zero.core.master import rounded
from zero.core.suggest import meant, some
from zero.distributed.world import World
from zero.engine.empty import BEGIN, write_again
from zero.engine.module_copy import buffers_of
from zero.engine.page_table import SECONDARY
from zero.engine.placeholder import ParameterPlaceholder
from zero.engine.plan import Plan
from zero.engine.pool import Buffer
from zero.engine.unit import Owner, Splitting, UnitSpec
from zero.engine.unit_state import UnitState
from zero.errors import PlanError
from zero.platform.device import Device, aligned_zeros
from zero.platform.files import memory_of
from zero.platform.safetensors_files import StoredWeights
from zero.store import Page, Store

ZEROS = torch.zeros(64)
"""What gaps are filled with, as often as it takes."""

Weights = Mapping[str, Tensor] | str | PathLike[str] | Callable[[str, Tensor], None] | None

Values = Callable[[str], Tensor]
"""A parameter's full name to its first value, fp32 or as given, on any device, in the parameter's shape."""


def values_of(
    splitting: Splitting, given: Mapping[str, Tensor], model: nn.Module, seed: int, weights: Weights, world: World
) -> Values:
    """First values, one parameter at a time: call it in the order of the layouts, and keep none.

    Args:
        given: see `values_in`; taken as they are, unless `weights` says otherwise.
        model: the one that will run, whose parameters are placeholders; its owners' `reset_parameters` are called.
            Persistent buffers that `weights` has by name are filled at once.

    Raises:
        PlanError: weights that are missing, all of them named; and from the function that is returned, an owner without
            `reset_parameters`, or a weight of another shape.
    """
    shapes = {slot.name: slot.shape for unit in splitting.units for layout in unit.layouts for slot in layout.slots}
    if weights is None:
        reset = _Reset(splitting, model, seed, world)
        return lambda name: given[name] if name in given else reset(name)
    if callable(weights):
        return lambda name: _filled(weights, name, shapes[name])
    found = weights if isinstance(weights, Mapping) else StoredWeights(Path(weights).expanduser())
    aliases = splitting.aliases()  # a file may know any of them
    _refuse_missing(found, aliases.values())
    _fill_buffers(model, found)
    return lambda name: _named(found, aliases[name], shapes[name])


@torch.no_grad()
def stream(layout: Layout, values: Values, sinks: Sequence["Sink"]) -> int:
    """Send a flat of first values through `sinks`, slot by slot; returns a checksum of all of it."""
    check, end = 0, 0
    for slot in layout.slots:
        value = values(slot.name).detach().to("cpu", torch.float32).contiguous().view(-1)
        check = zlib.crc32(memory_of(value), zlib.crc32(slot.name.encode(), check))
        for sink in sinks:
            sink.zeros(slot.offset - end)
            sink.take(value)
        end = slot.offset + value.numel()
    for sink in sinks:
        sink.zeros(layout.P - end)
    return check


class Sink:
    """Receives a flat from its beginning to its end and keeps a range of it, in pages.

    Args:
        start, stop: the range.
        cuts: the pages, as (start, stop) within the range.
        keep: called with the number and the fp32 values, (K,), of each page that is complete; they are valid only then.
        host: whose memory a page is put together in.
        at: the flat's element that `take` begins with.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        cuts: Sequence[tuple[int, int]],
        keep: Callable[[int, Tensor], None],
        *,
        host: Device,
        at: int = 0,
    ) -> None:
        self.start, self.stop = start, stop
        self._cuts, self._keep = cuts, keep
        self._page_K = host.zeros(max((b - a for a, b in cuts), default=0), torch.float32)
        self._at, self._number = at, 0

    def zeros(self, numel: int) -> None:
        """Receive a gap of `numel` elements."""
        for first in range(0, numel, ZEROS.numel()):
            self.take(ZEROS[: numel - first])

    def take(self, values: Tensor) -> None:
        """Receive the next elements of the flat, (n,) fp32."""
        first, last = max(self.start - self._at, 0), min(self.stop - self._at, values.numel())
        while first < last:
            a, b = (self.start + edge for edge in self._cuts[self._number])
            count = min(last - first, b - self._at - first)
            begin = self._at + first - a
            self._page_K[begin : begin + count].copy_(values[first : first + count])
            first += count
            if self._at + first == b:
                self._keep(self._number, self._page_K[: b - a])
                self._number += 1
        self._at += values.numel()


def empty_unit(plan: Plan, store: Store, spec: UnitSpec) -> UnitState:
    """A unit with this rank's memory for it, all zeros."""
    compute, device, rank = plan.precision.compute, plan.world.compute, plan.rank
    resident = Buffer(spec.full_numel, compute, device) if plan.resident else None
    shards: list[Tensor | None] = [None, None]
    if resident is not None:
        resident.version = 0
        for number, (layout, first) in enumerate(((spec.trainable, 0), (spec.frozen, spec.trainable.P))):
            start, stop = layout.shard(rank)
            shards[number] = resident.flat[first + start : first + stop]
    elif not plan.params_offloaded:
        shards = [device.zeros(layout.S, compute) for layout in spec.layouts]
    keeps_grad = spec.trainable.slots and not plan.grads_offloaded
    grad = device.zeros(plan.grad_numel(spec), plan.grad_dtype) if keeps_grad else None
    trainable, frozen = (
        store.in_place(Page(spec.index, SECONDARY, number)) if plan.secondary_numel(layout) else None
        for number, layout in enumerate(spec.layouts)
    )
    return UnitState(spec, resident, shards[0], shards[1], grad, (trainable, frozen))


def fill(plan: Plan, store: Store, unit: UnitState, values: Values) -> str:
    """Give a unit its first values, in memory and in the store; returns a checksum of all of it."""
    checks = []
    copies = [sink for kind in plan.optimizer.copies for sink in sinks_of(plan, store, unit, kind)]
    for kind, layout, further in (("param", unit.spec.trainable, copies), ("frozen", unit.spec.frozen, [])):
        checks.append(f"{stream(layout, values, [*sinks_of(plan, store, unit, kind), *further]):08x}")
    return " ".join(checks)


def sinks_of(plan: Plan, store: Store, unit: UnitState, kind: str, *, at: int | None = 0) -> list[Sink]:
    """Where this rank keeps values of one kind of one unit.

    Args:
        kind: "param" (the master as well, where there is one), "frozen", or a moment's name.
        at: the element that the sinks begin with; None: the first that any of them wants.
    """
    spec = unit.spec
    layout = spec.frozen if kind == "frozen" else spec.trainable
    own, full = layout.shard(plan.rank), (0, layout.P)
    updated = full if plan.full_update else own
    wanted: list[tuple[tuple[int, int], Callable[[int, Tensor], None]]] = []
    if kind not in ("param", "frozen"):
        wanted.append((updated, _to_pages(store, unit.index, kind, plan.optimizer.form(kind).page_of)))
    elif plan.params_offloaded:
        narrow = partial(rounded, dtype=plan.precision.compute)
        wanted.append((own, _to_pages(store, unit.index, kind, narrow)))
    elif unit.resident is not None:
        first = spec.trainable.P if kind == "frozen" else 0
        wanted.append((full, _to_memory(unit.resident.flat[first : first + layout.P], plan.page_numel)))
    else:
        shard_S = unit.frozen_S if kind == "frozen" else unit.shard_S
        assert shard_S is not None
        wanted.append((own, _to_memory(shard_S, plan.page_numel)))
    master = plan.precision.master
    if kind == "param" and master.kind is not None:
        wanted.append((updated, _to_pages(store, unit.index, master.kind, master.page_of)))
    first = min(extent[0] for extent, _ in wanted) if at is None else at
    return [
        Sink(*extent, pages(extent[1] - extent[0], plan.page_numel), keep, host=plan.world.compute.host, at=first)
        for extent, keep in wanted
    ]


def _to_memory(flat: Tensor, page_numel: int) -> Callable[[int, Tensor], None]:
    parts = flat.split(page_numel)

    def keep(number: int, page_K: Tensor) -> None:
        parts[number].copy_(rounded(page_K, flat.dtype))

    return keep


def _to_pages(store: Store, unit: int, kind: str, page_of: Callable[[Tensor], Tensor]) -> Callable[[int, Tensor], None]:
    """`page_of` makes of fp32 values what a page holds."""

    def keep(number: int, page_K: Tensor) -> None:
        store.write(Page(unit, kind, number), page_of(page_K)).wait()

    return keep


def values_in(model: nn.Module, splitting: Splitting) -> dict[str, Tensor]:
    """The values of parameters that are not on meta, by full name."""
    given: dict[str, Tensor] = {}
    for owner in splitting.owners:
        held = model.get_submodule(owner.path)._parameters
        for own, name in owner.slots:
            parameter = held[own]
            if parameter is not None and not parameter.is_meta:
                given.setdefault(name, parameter.detach())
    return given


class _Reset:
    """Values that owners make with their own methods; those of the last owner are kept until another is needed."""

    def __init__(self, splitting: Splitting, copied: nn.Module, seed: int, world: World) -> None:
        self._copied, self._seed, self._world = copied, seed, world
        self._owner_of: dict[str, Owner] = {}
        for owner in splitting.owners:
            for _, name in owner.slots:
                self._owner_of.setdefault(name, owner)
        self._last: tuple[str, dict[str, Tensor]] | None = None

    def __call__(self, name: str) -> Tensor:
        owner = self._owner_of[name]
        if self._last is None or self._last[0] != owner.path:
            self._last = None  # freed before the next are made
            with self._world.exclusive(), torch.random.fork_rng(devices=[]):
                digest = hashlib.sha256(f"{self._seed}/{owner.path}".encode()).digest()
                # not torch.manual_seed: it seeds every kind of device, a millisecond each time where there is none
                torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
                self._last = owner.path, _made_by(owner, self._copied)
        return self._last[1][name]


def _made_by(owner: Owner, copied: nn.Module) -> dict[str, Tensor]:
    """Give the owner real parameters, have them filled, and take them away again."""
    module = copied.get_submodule(owner.path)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    after = list(_initialisers(copied, owner.path))
    placeholders = dict(module._parameters)
    filled: dict[int, nn.Parameter] = {}  # a parameter under two names is one
    try:
        for own, parameter in placeholders.items():
            if parameter is not None:
                zeros = aligned_zeros(parameter.numel(), torch.float32, torch.device("cpu")).view(parameter.shape)
                module._parameters[own] = filled.setdefault(id(parameter), nn.Parameter(zeros))
        with torch.no_grad():
            for parameter in filled.values():
                parameter.fill_(torch.nan)  # shows who was left out
        _write_again(module._parameters, placeholders, begin=True)
        if reset is not None:
            reset()
        with torch.no_grad(), _OthersUntouched():
            for initialise in after:
                initialise()
        _write_again(module._parameters, placeholders, begin=False)
        made = {name: one.detach() for own, name in owner.slots if (one := module._parameters[own]) is not None}
    finally:
        module._parameters.update(placeholders)
    left_out = [name for name, value in made.items() if value.isnan().any()]
    if left_out:
        made_by = "its reset_parameters() leaves it out" if reset is not None else "has no reset_parameters()"
        who = "_init_weights around it leaves it out" if after and reset is None else made_by
        raise PlanError(
            f"{type(module).__name__} at {owner.path or '(root)'} holds {', '.join(left_out)} and {who}; "
            "give it a reset_parameters(), or pass weights= to zero.init"
        )
    return made


def _write_again(
    filled: Mapping[str, nn.Parameter | None], placeholders: Mapping[str, nn.Parameter | None], *, begin: bool
) -> None:
    """What the parameters began with, or what the constructor wrote into them later, in its order."""
    writes = [
        (one.number, own, one)
        for own, parameter in placeholders.items()
        if isinstance(parameter, ParameterPlaceholder)
        for one in parameter.writes
        if (one.number == BEGIN) == begin
    ]
    for _, own, one in sorted(writes, key=lambda each: each[0]):
        target = filled[own]
        assert target is not None
        write_again(target, [one])


def _initialisers(copied: nn.Module, path: str) -> Iterator[Callable[[], None]]:
    """Each module from `path` up to the root, with the nearest `_init_weights` at or above it."""
    around = [copied]
    for name in path.split(".") if path else ():
        around.append(around[-1].get_submodule(name))
    nearest_one: Callable[[nn.Module], None] | None = None
    found = []
    for module in around:
        nearest_one = getattr(module, "_init_weights", None) or nearest_one
        if nearest_one is not None:
            found.append(partial(nearest_one, module))
    return reversed(found)


class _OthersUntouched(TorchFunctionMode):
    """What is written into a placeholder, or into a part of one, goes nowhere and draws nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(iter((*args, *(kwargs or {}).values())), None)
        if not isinstance(first, ParameterPlaceholder) and not (isinstance(first, Tensor) and first.is_meta):
            return func(*args, **(kwargs or {}))
        name = func.__name__
        if (name.endswith("_") and not name.endswith("__")) or name in ("__set__", "__setitem__"):
            return first
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _named(weights: Mapping[str, Tensor], names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    known = next(name for name in names if name in weights)
    value = _checked(known, weights[known], shape).detach()
    if value.itemsize == 1 or value.is_complex():
        raise PlanError(f"weights hold {known} as {value.dtype}: give them in bf16 or fp32, scales applied")
    return value


def _refuse_missing(weights: Mapping[str, Tensor], wanted: Iterable[tuple[str, ...]]) -> None:
    missing = [names[0] for names in wanted if not any(name in weights for name in names)]
    if missing:
        hint = meant(missing[0], weights) if len(missing) == 1 else ""
        raise PlanError(f"weights hold nothing named {some(missing)}{hint}")


def _checked(name: str, found: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    if tuple(found.shape) != tuple(shape):
        raise PlanError(f"weights hold {name} as {tuple(found.shape)}, the model has {tuple(shape)}")
    return found


@torch.no_grad()
def _fill_buffers(copied: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Fill buffers too: running statistics and the like were learnt."""
    for name, buffer in buffers_of(copied).items():
        if name in weights:
            buffer.copy_(_checked(name, weights[name], buffer.shape))


def _filled(fill: Callable[[str, Tensor], None], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.zeros(shape, dtype=torch.float32)
    fill(name, tensor)
    return tensor
