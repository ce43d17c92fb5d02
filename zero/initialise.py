"""First values, one unit at a time, the same for every stage, world and choice of units.

A model that was built whole keeps the values it has. Values of parameters on meta are made on the CPU in fp32: each
owner (a module that holds parameters directly) gets real parameters for a moment, its `reset_parameters` runs with a
generator seeded from (seed, owner's path), and the values are taken out. A tied parameter is made by its first owner.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from zero.errors import PlanError
from zero.unit import Owner, Splitting, UnitSpec
from zero.world import World

Weights = Mapping[str, Tensor] | str | PathLike[str] | Callable[[str, Tensor], None] | None


def values_of(
    splitting: Splitting, model: nn.Module, copied: nn.Module, seed: int, weights: Weights, world: World
) -> Iterator[tuple[UnitSpec, dict[str, Tensor]]]:
    """Each unit with its parameters by full name, fp32 on the CPU; take one before asking for the next.

    Args:
        model: the user's; parameters of it that are not on meta are taken as they are, unless `weights` says otherwise.
        copied: the copied model, whose parameters are absent; its owners lend their `reset_parameters`.

    Raises:
        PlanError: an owner without `reset_parameters`; a weight that is missing or has another shape.
    """
    source = _source(splitting, model, copied, seed, weights, world)
    for spec in splitting.units:
        wanted = {slot.name: slot.shape for layout in (spec.trainable, spec.frozen) for slot in layout.slots}
        yield spec, source(wanted)


def _source(
    splitting: Splitting, model: nn.Module, copied: nn.Module, seed: int, weights: Weights, world: World
) -> Callable[[Mapping[str, tuple[int, ...]]], dict[str, Tensor]]:
    if weights is None:
        given = _given(splitting, model)
        return lambda wanted: {
            **{name: given[name] for name in wanted if name in given},
            **_reset(splitting, copied, seed, {n: shape for n, shape in wanted.items() if n not in given}, world),
        }
    if isinstance(weights, Mapping):
        return lambda wanted: {name: _checked(name, shape, weights.get(name)) for name, shape in wanted.items()}
    if callable(weights):
        return lambda wanted: {name: _filled(weights, name, shape) for name, shape in wanted.items()}
    path = Path(weights)
    if not path.is_file():
        raise PlanError(f"weights={path}: there is no such file")
    return lambda wanted: _stored(path, wanted)


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


def _reset(
    splitting: Splitting, copied: nn.Module, seed: int, wanted: Mapping[str, tuple[int, ...]], world: World
) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for owner in splitting.owners:
        if any(name in wanted and name not in values for _, name in owner.slots):
            with world.exclusive(), torch.random.fork_rng(devices=[]):
                name = hashlib.sha256(f"{seed}/{owner.path}".encode())
                torch.manual_seed(int.from_bytes(name.digest()[:7], "big"))
                made = _made_by(owner, copied)
            values |= {name: tensor for name, tensor in made.items() if name in wanted and name not in values}
    return values


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
                zeros = nn.Parameter(torch.zeros(parameter.shape, dtype=torch.float32))
                module._parameters[own] = made.setdefault(id(parameter), zeros)
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


def _stored(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
        return {
            name: _checked(name, shape, file.get_tensor(name) if name in stored else None)
            for name, shape in wanted.items()
        }
