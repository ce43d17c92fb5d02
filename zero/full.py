"""Whole tensors out of shards, by name: for looking, comparing and exporting.

Everything here is collective, and reads through the waiting updates.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from zero.copied import buffers_of
from zero.device import Device, memory_of
from zero.errors import ConfigError
from zero.layout import pages
from zero.state import State
from zero.store import Page
from zero.transfer import load
from zero.unit_state import UnitState


def full_state_dict(state: State, kind: str = "param") -> dict[str, Tensor]:
    """Every parameter's whole value, on every rank.

    Args:
        kind: "param" (the master where there is one), "compute" (what the model computes with), or a moment such as
            "mu", which only trainable parameters have.

    Returns:
        Full name to an fp32 tensor of the parameter's shape on the CPU.
    """
    return dict(full_values(state, kind))


def full_values(state: State, kind: str) -> Iterator[tuple[str, Tensor]]:
    """The same, one after the other: no more than a unit is whole at a time."""
    for unit in state.machinery.units:
        yield from _unit(state, unit, kind)


def digest(state: State) -> str:
    """SHA-256 of parameters, moments, buffers, step and loss scale: equal for equal states, whatever the stage."""
    plan = state.plan
    told = hashlib.sha256(repr((state.step, state.scale)).encode())
    for kind in ("param", "compute", *plan.optimizer.moments):
        for name, tensor in full_state_dict(state, kind).items():
            told.update(f"{kind} {name}".encode())
            told.update(memory_of(tensor.contiguous()))
    for name, buffer in buffers_of(state.model).items():
        told.update(name.encode())
        told.update(memory_of(buffer.detach().cpu().contiguous()))
    return told.hexdigest()


def _unit(state: State, unit: UnitState, kind: str) -> Iterator[tuple[str, Tensor]]:
    plan, spec = state.plan, unit.spec
    if unit.waiting is not None:
        state.machinery.updater.force(unit)
    if kind == "compute" or (kind == "param" and not plan.precision.has_master):
        full = state.machinery.gatherer.residency.materialise(unit).float().cpu()
        flats = [(spec.trainable, full[: spec.trainable.P]), (spec.frozen, full[spec.trainable.P :])]
    elif kind == "param":
        full = state.machinery.gatherer.residency.materialise(unit).float().cpu()
        flats = [(spec.trainable, _pages(state, unit, "master")), (spec.frozen, full[spec.trainable.P :])]
    elif kind in plan.optimizer.moments:
        flats = [(spec.trainable, _pages(state, unit, kind))]
    else:
        raise ConfigError(f"{kind!r} is not held: param, compute, {', '.join(plan.optimizer.moments)}")
    for layout, flat in flats:
        for name, view in layout.views(flat).items():
            yield name, view.clone()


def _pages(state: State, unit: UnitState, kind: str) -> Tensor:
    """The whole flat of one kind, out of every rank's pages."""
    plan, layout = state.plan, unit.spec.trainable
    own = torch.zeros(plan.update_numel(unit.spec), dtype=torch.float32, device=plan.world.device)
    for number, (start, stop) in enumerate(pages(own.numel(), plan.page_numel)):
        page = Page(unit.index, kind, number)
        load(state.machinery.store, Device(plan.world.device), page, own[start:stop]).wait()
    if own.numel() == layout.P:
        return own.cpu()
    full = torch.zeros(layout.P, dtype=torch.float32, device=plan.world.device)
    plan.world.gather(own, full, what=f"{kind} of {unit.spec.name}").wait()
    return full.cpu()
