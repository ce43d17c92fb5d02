"""Gather the full parameters or moments of a unit from the ranks' memory and pages."""

from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from zero.core.layout import Layout
from zero.engine.memory import load_page
from zero.engine.model import UnitSpec
from zero.engine.runtime import Runtime
from zero.engine.unit_state import UnitState
from zero.platform.modes import unobserved_items
from zero.store import Page, PageKind


def full_parameters(runtime: Runtime) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter's name and full value, an fp32 CPU tensor, one at a time. Collective."""
    names = set(runtime.plan.facts.splitting.names)
    return full_tensors(runtime, "param", names, partial(full_flat, runtime))


@unobserved_items
def full_tensors(
    runtime: Runtime, kind: str, names: Collection[str], flat_of: Callable[[UnitState, Layout, str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and a copy of the full value of each parameter in `names`, one unit at a time. Collective.

    Args:
        flat_of: (unit, layout, kind) to the full flat tensor, (P,).
    """
    for unit in runtime.units:
        for layout in layouts_of(unit.spec, kind):
            slots = [slot for slot in layout.slots if slot.name in names]
            if slots:
                flat = flat_of(unit, layout, kind)
                for slot in slots:
                    yield slot.name, slot.of(flat).clone()


def layouts_of(unit: UnitSpec, kind: str) -> tuple[Layout, ...]:
    """Return the layouts that have values of this kind: frozen parameters have neither gradients nor moments."""
    if kind in ("param", "compute"):
        return unit.layouts
    return (unit.trainable,) if kind in ("grad", *unit.moments) else ()


@torch.no_grad()
def full_flat(runtime: Runtime, unit: UnitState, layout: Layout, kind: str) -> Tensor:
    """Return a unit's full flat tensor of one kind: (P,) fp32 on the CPU, not shared with the state. Collective.

    Args:
        kind: "param", "compute" or a moment.
    """
    plan = runtime.plan
    runtime.updater.apply_deferred(unit)
    if kind in plan.optimizer.moments:
        form = plan.optimizer.form(kind)
        kept = updated_range(runtime, unit, kind, form.dtype)
        return gather_flat(runtime, unit, form.values_of(kept), kind).to("cpu", torch.float32)
    if kind == "param" and plan.precision.master.kind is not None and layout is unit.spec.trainable:
        return gather_flat(runtime, unit, master_of(runtime, unit), "master").cpu()
    full = runtime.residency.materialise(unit)
    flat = next(flat for flat in unit.spec.flats if flat.values is layout)
    return flat.of(full).to("cpu", torch.float32, copy=True)


def master_of(runtime: Runtime, unit: UnitState) -> Tensor:
    """Return the part of the fp32 master that this rank updates, for a precision with a separate master."""
    plan, master = runtime.plan, runtime.plan.precision.master
    params = unit.own_params(full_update=plan.facts.full_update)
    if params is None:
        params = updated_range(runtime, unit, "param", plan.precision.compute)
    return master.of(params, updated_range(runtime, unit, str(master.kind), master.dtype))


def updated_range(runtime: Runtime, unit: UnitState, kind: str, dtype: torch.dtype, count: int | None = None) -> Tensor:
    """Read from pages the range of one kind that this rank updates, in the pages' own format and `dtype`.

    Args:
        count: the number of elements of the range; None: of the range that this rank updates.
    """
    plan, numel = runtime.plan, partial(runtime.plan.passes.kept.numel, kind)
    count = plan.sizes.update_numel(unit.spec) if count is None else count
    values = torch.zeros(numel(count), dtype=dtype, device=plan.world.device)
    for number, (start, stop) in enumerate(plan.pages.cut(count)):
        page = Page(unit.index, kind, number)
        load_page(runtime.store, plan.world.compute, page, values[numel(start) : numel(stop)]).wait()
    return values


def summed_gradient(runtime: Runtime, unit: UnitState) -> Tensor:
    """Return the part of a unit's final gradient that this rank updates: a sum over ranks and microbatches."""
    plan = runtime.plan
    if unit.grad is None:
        runtime.gradients.left(unit).wait()
        return updated_range(runtime, unit, PageKind.GRAD, plan.facts.grad_dtype)
    return unit.grad if plan.facts.full_update else unit.own_grad_S(plan.rank)


def own_shard(runtime: Runtime, unit: UnitState) -> Tensor:
    """Return this rank's shard of the trainable parameters, (S,), compute dtype, on the device.

    It shares memory with the state unless parameters are offloaded. The unit must have no deferred update.
    """
    layout, shard_S = unit.spec.trainable, unit.shard_S
    if shard_S is None:
        return updated_range(runtime, unit, PageKind.PARAM, runtime.plan.precision.compute, layout.S)
    return layout.own_S(shard_S, runtime.plan.rank)


def own_stored(runtime: Runtime, unit: UnitState, number: int) -> Tensor:
    """Return a copy of this rank's shard of a flat as it is stored, (S,), on the CPU."""
    stored_S, flat = unit.shards[number], unit.spec.flats[number]
    if stored_S is None:
        dtype = flat.dtype(runtime.plan.precision.compute)
        stored_S = updated_range(runtime, unit, flat.kind, dtype, flat.stored.S)
    return stored_S.to("cpu", copy=True)


def gather_flat(runtime: Runtime, unit: UnitState, updated: Tensor, kind: str) -> Tensor:
    """All-gather the full flat tensor, (P,), from the ranges that the ranks update. Collective."""
    if updated.numel() == unit.spec.trainable.P:
        return updated
    full = updated.new_zeros(unit.spec.trainable.P)
    runtime.routes.gather(updated, full, what=f"{kind} of {unit.spec.name}").wait()
    return full
