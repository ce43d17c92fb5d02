"""Read full parameters, gradients and moments by name, whatever their sharding and tier.

Reads apply all deferred updates first and return fp32 copies on the CPU. All functions are collective: every rank makes
the same call. At most one unit is gathered at a time.

A gradient is the mean over the global batch before clipping. It can be read between backward and the end of its step.
Afterwards the deferred update owns it.
"""

import hashlib
from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from zero.core.layout import Layout
from zero.engine.full_flat import full_flat, full_tensors, gather_flat, summed_gradient
from zero.engine.model import buffers_of
from zero.engine.state import State
from zero.engine.step_losses import SUM_LOSSES
from zero.engine.unit_state import UnitState
from zero.engine.whole.names import Source, name_of, names_of, state_of
from zero.errors import ConfigError, StaleStateError
from zero.platform.files import memory_of
from zero.platform.modes import unobserved


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
        StaleStateError: the state is spent; or `kind` is "grad" before a backward or after the step's end.
    """
    return dict(full_values(state_of(source, "zero.full_state_dict", "zero.full_state_dict(state)"), kind))


def full_values(state: State, kind: str, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of `full_state_dict` one by one, except names in `without`. Collective.

    At most one unit is gathered at a time.
    """
    state.runtime.tree.check()
    state.runtime.settle()
    names = set(names_of(state, None, kind)) - set(without)
    yield from values_of_kind(state, kind, names)


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
        StaleStateError: the state is spent; or `kind` is "grad" before a backward or after the step's end.
    """
    state = state_of(source, "zero.get_full", "zero.get_full(state, name)")
    state.runtime.settle()
    name = name_of(state, name, kind)
    return dict(values_of_kind(state, kind, {name}))[name]


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


def values_of_kind(state: State, kind: str, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    return full_tensors(state.runtime, kind, names, partial(flat_of, state))


@torch.no_grad()
def flat_of(state: State, unit: UnitState, layout: Layout, kind: str) -> Tensor:
    """Return a unit's full flat tensor: a (P,) fp32 copy on the CPU. Collective."""
    if kind != "grad":
        return full_flat(state.runtime, unit, layout, kind)
    full = gather_flat(state.runtime, unit, _gradient(state, unit), kind)
    return full.to("cpu", torch.float32, copy=True).div_(divisor_of(state))


def _gradient(state: State, unit: UnitState) -> Tensor:
    """Return the part of a unit's gradient that this rank updates: a sum over ranks and microbatches."""
    plan = state.plan
    if not has_gradient(state, unit):  # like a parameter that was not used
        return torch.zeros(plan.sizes.update_numel(unit.spec), dtype=plan.facts.grad_dtype, device=plan.world.device)
    return summed_gradient(state.runtime, unit)


@unobserved()
def has_gradient(state: State, unit: UnitState) -> bool:
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


def divisor_of(state: State) -> float:
    """Return the divisor that turns the scaled sum of gradients into their mean.

    Raises:
        ConfigError: the losses are sums over tokens, which the ranks count at the end of the step only.
    """
    if state.runtime.losses.kinds & SUM_LOSSES:
        raise ConfigError(
            "a gradient cannot be read or edited in a step whose losses come with a count of tokens, because it is "
            "divided at the step's end. Return means, or use a hook of the parameter."
        )
    return state.plan.world.size * state.plan.accumulate * state.scale.scale
