"""Initialize parameters, one at a time, with the same values for every stage, number of ranks and choice of units.

A model that was built with values keeps them. Parameters on meta are initialized on the CPU in fp32, one owner (a
module that holds parameters directly) after another, with a generator seeded from (seed, owner's path). The operations
that `empty` recorded run in their order. A tied parameter is initialized by its first owner.

Parameters without recorded writes, such as those of a model built under `torch.device("meta")`, are initialized by
their owner's `reset_parameters`. If the owner or a module that contains it has `_init_weights(module)`, as models of
transformers do, that is called next with the owner and then with each containing module, as `apply` would. These calls
cannot change parameters of other owners.

The values are streamed: every rank computes all of them and keeps its own range, page by page. A rank has the
values of one owner in memory at a time, and values of other owners only if the recorded operations need them.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from zero.engine.empty import Recipe, Root, is_meta
from zero.engine.placeholder import ParameterPlaceholder
from zero.engine.plan import Plan
from zero.engine.pool import Buffer
from zero.engine.takeover import buffers_of
from zero.engine.unit import Owner, Splitting, UnitSpec
from zero.engine.unit_state import UnitState
from zero.errors import PlanError
from zero.platform.device import Device, aligned_zeros
from zero.platform.files import memory_of
from zero.platform.safetensors_files import StoredWeights
from zero.store import Page, PageKind, Store

ZEROS = torch.zeros(64)
"""The chunk of zeros that fills gaps between slots."""

Weights = Mapping[str, Tensor] | str | PathLike[str] | Callable[[str, Tensor], None] | None

Values = Callable[[str], Tensor]
"""A function that returns the first value of the parameter with a given full name.

The value has the parameter's shape, and any device and dtype.
"""


def values_of(
    splitting: Splitting, built: Mapping[str, Tensor], model: nn.Module, seed: int, weights: Weights, world: World
) -> Values:
    """Return a function from a parameter's name to its first value.

    Call it in the order of the layouts and do not keep the results, because only the last owner's values are cached.

    Args:
        built: the values that the model was built with, from `values_in`; used unless `weights` is given.
        model: the model that will run, whose parameters are placeholders. Owners' `reset_parameters` are called on it.
            Its persistent buffers are filled immediately from `weights`, if that is a mapping or a file.
        weights: as in `init`.

    Raises:
        PlanError: weights are missing (the message names them). By the returned function: an owner has no
            `reset_parameters`, or a weight has another shape than its parameter.
    """
    shapes = splitting.shapes()
    if weights is None:
        made = _Made(splitting, model, built, seed, world)
        return lambda name: built[name] if name in built else made(name)
    if callable(weights):

        def filled(name: str) -> Tensor:
            tensor = torch.zeros(shapes[name])
            weights(name, tensor)
            return tensor

        return filled
    stored = weights if isinstance(weights, Mapping) else StoredWeights(Path(weights).expanduser())
    aliases = splitting.aliases()  # a file may have a tied parameter under any of its names
    _refuse_missing(stored, aliases.values())
    _fill_buffers(model, stored)
    return lambda name: _named(stored, aliases[name], shapes[name])


@torch.no_grad()
def stream(layout: Layout, values: Values, sinks: Sequence["Sink"]) -> int:
    """Send the first values of a flat tensor to all `sinks`, slot by slot; return a CRC-32 of names and values."""
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
    """A receiver that gets a flat tensor in order and passes one range of it on, page by page.

    Args:
        start, stop: the range, in elements of the flat tensor.
        cuts: the pages, as (start, stop) within the range.
        keep: called for each complete page with its number and its fp32 values, (K,), which are overwritten afterwards.
        host: the device whose memory holds the page that is being filled.
        at: the index in the flat tensor of the first element that `take` receives.
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
        """Accept the next n elements of the flat, (n,) fp32; calls follow each other until the flat is complete."""
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
    """Return a unit with this rank's tensors allocated and zero."""
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
        store.in_place(Page(spec.index, PageKind.SECONDARY, number)) if plan.secondary_numel(layout) else None
        for number, layout in enumerate(spec.layouts)
    )
    return UnitState(spec, resident, shards[0], shards[1], grad, (trainable, frozen))


def fill(plan: Plan, store: Store, unit: UnitState, values: Values) -> str:
    """Write a unit's first values to memory and to the store; return a checksum of the whole unit."""
    checks = []
    copies = [sink for kind in plan.optimizer.copies for sink in sinks_of(plan, store, unit, kind)]
    for kind, layout, further in (
        (PageKind.PARAM, unit.spec.trainable, copies),
        (PageKind.FROZEN, unit.spec.frozen, []),
    ):
        checks.append(f"{stream(layout, values, [*sinks_of(plan, store, unit, kind), *further]):08x}")
    return " ".join(checks)


def sinks_of(plan: Plan, store: Store, unit: UnitState, kind: str, *, at: int | None = 0) -> list[Sink]:
    """Return the sinks that write values of one kind of one unit to this rank's memory and pages.

    Args:
        kind: "param" (also writes the master, if the precision has one), "frozen", or a moment's name.
        at: the index in the flat tensor of the first element that will be sent; None: the first that any sink keeps.
    """
    spec = unit.spec
    layout = spec.frozen if kind == PageKind.FROZEN else spec.trainable
    shard, full = layout.shard(plan.rank), (0, layout.P)
    updated = full if plan.full_update else shard
    wanted: list[tuple[tuple[int, int], Callable[[int, Tensor], None]]] = []
    if kind not in (PageKind.PARAM, PageKind.FROZEN):
        wanted.append((updated, _to_pages(store, unit.index, kind, plan.optimizer.form(kind).page_of)))
    elif plan.params_offloaded:
        narrow = partial(rounded, dtype=plan.precision.compute)
        wanted.append((shard, _to_pages(store, unit.index, kind, narrow)))
    elif unit.resident is not None:
        first = spec.trainable.P if kind == PageKind.FROZEN else 0
        wanted.append((full, _to_memory(unit.resident.flat[first : first + layout.P], plan.page_numel)))
    else:
        shard_S = unit.frozen_S if kind == PageKind.FROZEN else unit.shard_S
        assert shard_S is not None
        wanted.append((shard, _to_memory(shard_S, plan.page_numel)))
    master = plan.precision.master
    if kind == PageKind.PARAM and master.kind is not None:
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
    """Return a function that writes fp32 values to pages of the store; `page_of` converts them to the page's format."""

    def keep(number: int, page_K: Tensor) -> None:
        store.write(Page(unit, kind, number), page_of(page_K)).wait()

    return keep


def values_in(model: nn.Module, splitting: Splitting) -> dict[str, Tensor]:
    """Return the values of all parameters that are not on meta, by full name."""
    parameters = {name: model.get_parameter(name) for name in splitting.names}
    return {name: parameter.detach() for name, parameter in parameters.items() if not is_meta(parameter)}


class _Made:
    """The first values of parameters, computed from their recorded operations; only the last owner's are cached.

    A root that belongs to no parameter, such as an intermediate result, is assigned to the first owner whose values
    depend on it.
    """

    def __init__(
        self, splitting: Splitting, model: nn.Module, built: Mapping[str, Tensor], seed: int, world: World
    ) -> None:
        self._model, self._seed, self._world = model, seed, world
        self._owner_of: dict[str, Owner] = {}
        self._recipes: dict[str, Recipe] = {}
        self._path_of: dict[Root, str] = {}
        self._roots_of: dict[str, list[Root]] = {}
        for owner in splitting.owners:
            for local, name in owner.slots:
                if name in self._owner_of:
                    continue
                self._owner_of[name] = owner
                placeholder = model.get_submodule(owner.path)._parameters[local]
                assert isinstance(placeholder, ParameterPlaceholder)
                recipe = placeholder.recipe or Recipe.of(Root(placeholder.shape, begin=built.get(name)))
                self._recipes[name] = recipe
                self._assign(recipe.root, owner.path)
        for root, path in list(self._path_of.items()):
            for further in _reached([root]):
                self._assign(further, path)
        self._last: tuple[str, dict[str, Tensor]] | None = None

    def _assign(self, root: Root, path: str) -> None:
        if self._path_of.setdefault(root, path) == path:
            self._roots_of.setdefault(path, []).append(root)

    def __call__(self, name: str) -> Tensor:
        owner = self._owner_of[name]
        if self._last is None or self._last[0] != owner.path:
            self._last = None  # free the last owner's values before the next are computed
            with self._world.exclusive(), torch.random.fork_rng(devices=[]), torch.no_grad():
                self._last = owner.path, self._made_by(owner)
        return self._last[1][name]

    def _made_by(self, owner: Owner) -> dict[str, Tensor]:
        """Run all operations that the owner's values depend on and return the values by name.

        If another owner's values are needed, all of them are computed, because that owner's generator must draw in the
        same order as when its own values are computed.
        """
        paths = {owner.path}
        while further := {self._path_of[root] for path in paths for root in _reached(self._roots_of[path])} - paths:
            paths |= further
        values = {root.number: _begun(root) for path in paths for root in self._roots_of[path] if not root.is_made}
        operations = {
            operation: path for path in paths for root in self._roots_of[path] for operation in root.operations
        }
        generators = {path: self._generator(path) for path in paths}
        module = self._model.get_submodule(owner.path)
        recipes = {name: self._recipes[name] for _, name in owner.slots if self._owner_of[name] is owner}
        if unwritten := {recipe.root for recipe in recipes.values() if not recipe.root.is_written}:
            views = dict.fromkeys(operation for root in unwritten for operation in root.operations)
            for view in sorted(views, key=lambda each: each.number):
                view.run(values)
                operations.pop(view, None)
            with _drawing(generators, owner.path):
                begun = {name: values[recipe.number] for name, recipe in recipes.items() if recipe.number in values}
                _reset(module, owner, self._model, begun)
        for operation, path in sorted(operations.items(), key=lambda each: each[0].number):
            with _drawing(generators, path):
                operation.run(values)
        made = {name: values[recipe.number].detach() for name, recipe in recipes.items()}
        _refuse_left_out(module, owner, made)
        return made

    def _generator(self, path: str) -> Tensor:
        """Return the state of torch's generator with which the owner at `path` begins."""
        digest = hashlib.sha256(f"{self._seed}/{path}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")).get_state()


def _reached(roots: Iterable[Root]) -> Iterable[Root]:
    """Return `roots` and all roots that their operations read, directly or indirectly."""
    reached = dict.fromkeys(roots)
    waiting = list(reached)
    while waiting:
        for operation in waiting.pop().operations:
            new = [root for root in operation.reads if root not in reached]
            reached.update(dict.fromkeys(new))
            waiting += new
    return reached


@contextmanager
def _drawing(states: dict[str, Tensor], path: str) -> Iterator[None]:
    """Context manager in which torch draws from the generator of the owner at `path`; its state is kept in `states`."""
    torch.default_generator.set_state(states[path])
    yield
    states[path] = torch.default_generator.get_state()


def _begun(root: Root) -> Tensor:
    """Return fp32 memory for `root` with the value that its parameter was registered with, or else NaN.

    A NaN that remains shows that nothing has initialized the element.
    """
    if not root.kept:
        raise PlanError(
            "parameters of deepspeed.zero.Init() have their values on rank 0 only. Pass the model to zero.initialize."
        )
    memory = aligned_zeros(root.shape.numel(), torch.float32, torch.device("cpu")).view(root.shape)
    return memory.fill_(torch.nan) if root.begin is None else memory.copy_(root.begin)


def _reset(module: nn.Module, owner: Owner, model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Fill `values` by the owner's `reset_parameters` and by the `_init_weights` of the modules that contain it."""
    reset = _reset_of(module)
    placeholders = dict(module._parameters)
    # by full name, so that a parameter with two local names is one object
    filled = {name: nn.Parameter(value) for name, value in values.items()}
    for local, name in owner.slots:
        held = placeholders[local]
        if held is not None and name not in filled:  # initialized by another owner
            filled[name] = nn.Parameter(torch.zeros(held.shape))
    try:
        module._parameters.update({local: filled[name] for local, name in owner.slots})
        with torch.enable_grad():
            if reset is not None:
                reset()
        with _OthersUntouched():
            _initialise(model, owner.path)
        for local, name in owner.slots:
            now = module._parameters[local]
            if now is not None and name in values:
                values[name].copy_(now)
    finally:
        module._parameters.update(placeholders)


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _refuse_left_out(module: nn.Module, owner: Owner, made: Mapping[str, Tensor]) -> None:
    if left_out := [name for name, value in made.items() if value.isnan().any()]:
        reset = "its reset_parameters() does not set it" if _reset_of(module) else "has no reset_parameters()"
        raise PlanError(
            f"{type(module).__name__} at {owner.path or '(root)'} holds {', '.join(left_out)} and {reset}. "
            "Give it a reset_parameters(), or pass weights= to zero.init."
        )


def _initialise(model: nn.Module, path: str) -> None:
    """Call `_init_weights` with each module from `path` up to the root.

    For each of them the method is its own or that of its nearest ancestor that has one.
    """
    calls: list[Callable[[], None]] = []
    nearest: Callable[[nn.Module], None] | None = None
    names = path.split(".") if path else []
    for count in range(len(names) + 1):
        module = model.get_submodule(".".join(names[:count]))
        nearest = getattr(module, "_init_weights", None) or nearest
        if nearest is not None:
            calls.append(partial(nearest, module))
    for call in reversed(calls):
        call()


class _OthersUntouched(TorchFunctionMode):
    """A mode in which writes into placeholders and their views have no effect and draw no random numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(iter((*args, *(kwargs or {}).values())), None)
        if not isinstance(first, ParameterPlaceholder) and not (isinstance(first, Tensor) and is_meta(first)):
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
        raise PlanError(f"weights have {known} in {value.dtype}. Give them in bf16 or fp32, with scales applied.")
    return value


def _refuse_missing(weights: Mapping[str, Tensor], wanted: Iterable[tuple[str, ...]]) -> None:
    missing = [names[0] for names in wanted if not any(name in weights for name in names)]
    if missing:
        hint = meant(missing[0], weights) if len(missing) == 1 else ""
        raise PlanError(f"weights have no {some(missing)}{hint}")


def _checked(name: str, value: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    if tuple(value.shape) != tuple(shape):
        raise PlanError(f"weights have {name} in shape {tuple(value.shape)}, but the model has {tuple(shape)}")
    return value


@torch.no_grad()
def _fill_buffers(copied: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy persistent buffers, such as running statistics, from `weights` into the model, if it has them."""
    for name, buffer in buffers_of(copied).items():
        if name in weights:
            buffer.copy_(_checked(name, weights[name], buffer.shape))
