"""First values, one parameter at a time, the same for every stage, world and choice of units.

A model that was built whole keeps the values it has. Values of parameters on meta are made on the CPU in fp32: each
owner (a module that holds parameters directly) gets real parameters for a moment, its `reset_parameters` runs with a
generator seeded from (seed, owner's path), and the values are taken out. A tied parameter is made by its first owner.

Values run through as a stream: every rank makes them all, each keeps its own range, page by page, and nothing larger
than one owner ever exists.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from zero.device import aligned_zeros, memory_of
from zero.errors import PlanError
from zero.layout import Layout
from zero.unit import Owner, Splitting
from zero.world import World

ZEROS = torch.zeros(64)
"""What gaps are filled with, as often as it takes."""

Weights = Mapping[str, Tensor] | str | PathLike[str] | Callable[[str, Tensor], None] | None

Values = Callable[[str], Tensor]
"""A parameter's full name to its first value, fp32 or as given, on any device, in the parameter's shape."""


def values_of(
    splitting: Splitting, model: nn.Module, copied: nn.Module, seed: int, weights: Weights, world: World
) -> Values:
    """First values, one parameter at a time: ask in the order of the layouts, and keep none.

    Args:
        model: the user's; parameters of it that are not on meta are taken as they are, unless `weights` says otherwise.
        copied: the copied model, whose parameters are absent; its owners lend their `reset_parameters`.

    Raises (the function that is returned):
        PlanError: an owner without `reset_parameters`; a weight that is missing or has another shape.
    """
    shapes = {
        slot.name: slot.shape for unit in splitting.units for one in (unit.trainable, unit.frozen) for slot in one.slots
    }
    if weights is None:
        given, reset = _given(splitting, model), _Reset(splitting, copied, seed, world)
        return lambda name: given[name] if name in given else reset(name)
    if isinstance(weights, Mapping):
        return lambda name: _checked(name, shapes[name], weights.get(name))
    if callable(weights):
        return lambda name: _filled(weights, name, shapes[name])
    path = Path(weights)
    if not path.is_file():
        raise PlanError(f"weights={path}: there is no such file")
    return lambda name: _stored(path, name, shapes[name])


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
    """Takes a flat from its beginning on and keeps a range of it, in pages.

    Args:
        start, stop: the range.
        cuts: the pages, as (start, stop) within the range.
        keep: called with the number and the fp32 values, (K,), of each page that is complete; they are valid only then.
    """

    def __init__(
        self, start: int, stop: int, cuts: Sequence[tuple[int, int]], keep: Callable[[int, Tensor], None]
    ) -> None:
        self._start, self._stop, self._cuts, self._keep = start, stop, cuts, keep
        self._page_K = torch.zeros(max((b - a for a, b in cuts), default=0))
        self._at, self._number = 0, 0

    def zeros(self, numel: int) -> None:
        """A gap."""
        for first in range(0, numel, ZEROS.numel()):
            self.take(ZEROS[: numel - first])

    def take(self, values: Tensor) -> None:
        """The next elements of the flat, (n,) fp32."""
        first, last = max(self._start - self._at, 0), min(self._stop - self._at, values.numel())
        while first < last:
            a, b = (self._start + edge for edge in self._cuts[self._number])
            count = min(last - first, b - self._at - first)
            begin = self._at + first - a
            self._page_K[begin : begin + count].copy_(values[first : first + count])
            first += count
            if self._at + first == b:
                self._keep(self._number, self._page_K[: b - a])
                self._number += 1
        self._at += values.numel()


def _given(splitting: Splitting, model: nn.Module) -> dict[str, Tensor]:
    """The parameters that have values already, by full name."""
    given: dict[str, Tensor] = {}
    for owner in splitting.owners:
        held = model.get_submodule(owner.path)._parameters
        for own, name in owner.slots:
            parameter = held[own]
            if parameter is not None and not parameter.is_meta:
                given.setdefault(name, parameter.detach())
    return given


class _Reset:
    """Values that owners make themselves; those of the last owner are kept until another is asked for."""

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
                told = hashlib.sha256(f"{self._seed}/{owner.path}".encode())
                torch.manual_seed(int.from_bytes(told.digest()[:7], "big"))
                self._last = owner.path, _made_by(owner, self._copied)
        return self._last[1][name]


def _made_by(owner: Owner, copied: nn.Module) -> dict[str, Tensor]:
    """Lend the owner real parameters, reset them, take them away again."""
    module = copied.get_submodule(owner.path)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        held = ", ".join(name for _, name in owner.slots)
        raise PlanError(
            f"{type(module).__name__} at {owner.path or '(root)'} holds {held} and has no reset_parameters(); "
            "give it one, or pass weights= to zero.init"
        )
    absent = dict(module._parameters)
    made: dict[int, nn.Parameter] = {}  # a parameter under two names is one
    try:
        for own, parameter in absent.items():
            if parameter is not None:
                zeros = aligned_zeros(parameter.numel(), torch.float32, torch.device("cpu")).view(parameter.shape)
                module._parameters[own] = made.setdefault(id(parameter), nn.Parameter(zeros))
        reset()
        return {name: _value(module._parameters[own]) for own, name in owner.slots}
    finally:
        module._parameters.update(absent)


def _value(parameter: Tensor | None) -> Tensor:
    assert parameter is not None
    return parameter.detach()


def _checked(name: str, shape: tuple[int, ...], found: Tensor | None) -> Tensor:
    if found is None:
        raise PlanError(f"weights hold nothing named {name}")
    if tuple(found.shape) != shape:
        raise PlanError(f"weights hold {name} as {tuple(found.shape)}, the model has {shape}")
    return found.detach()


def _filled(fill: Callable[[str, Tensor], None], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.zeros(shape, dtype=torch.float32)
    fill(name, tensor)
    return tensor


def _stored(path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return _checked(name, shape, file.get_tensor(name) if name in set(file.keys()) else None)
