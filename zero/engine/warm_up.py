"""Compile the kernels of a plan before its first step, by one launch of each on a vector of zeros."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from zero.core.fused import GROUP_NUMBERS, expansion, tables
from zero.core.layout import VECTOR, Layout
from zero.core.optim import Hyper
from zero.distributed.ordered_sum import ordered_sum
from zero.engine.gather import expansion_numel
from zero.engine.plan import Plan
from zero.engine.update import Piece, run_kernel
from zero.errors import MachineError, in_short


def warm_up(plan: Plan, *, updates: bool) -> None:
    """Launch each kernel that the steps of `plan` launch, with the same dtypes and constants.

    Args:
        updates: whether kernels update any state.

    Raises:
        MachineError: Triton does not compile or launch one of them.
    """
    if not plan.world.compute.tile_numel:
        return
    for name, launch in _launches(plan, updates):
        try:
            launch()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, the driver, or the optimizer's own function
            raise MachineError(
                f"Triton: the kernel for {name} does not compile or start ({in_short(error)}). Uninstall triton to "
                "train without kernels."
            ) from error


def _launches(plan: Plan, updates: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    facts, precision, form = plan.facts, plan.precision, plan.precision.frozen
    if updates:
        yield f"updates by {plan.optimizer.name}", partial(_update, plan)
    if plan.world.size > 1:
        dtypes = facts.flat_dtype, precision.reduce
        for count, dtype in zip(facts.sum_route.chunks(plan.world), dtypes, strict=False):
            yield f"sums of {count} chunks in {dtype}", partial(_sums, plan, count, dtype)
    if form is not None and form.rule and any(unit.packed for unit in plan.units):
        yield f"precision.frozen={form.name}", partial(_expand, plan)


def _update(plan: Plan) -> None:
    device, kept, rule = plan.world.compute, plan.passes.kept, plan.optimizer.fused
    assert rule is not None
    param, grad = (device.zeros(VECTOR, dtype) for dtype in (plan.precision.compute, plan.facts.grad_dtype))
    pages = [device.zeros(kept.numel(kind, VECTOR), dtype) for kind, dtype in kept.dtypes.items()]
    numbers = device.upload(torch.ones(1, GROUP_NUMBERS, dtype=torch.float32, device="cpu"))  # no division by zero
    rows = tables(Layout.of({"x": (VECTOR,)}, world_size=1), 0, VECTOR, device.tile_numel)
    piece = Piece(0, param, pages, grad, tuple(map(device.upload, rows)))
    run_kernel(rule, kept, Hyper(1, 1.0, (), table=numbers), device, piece)


def _sums(plan: Plan, count: int, dtype: torch.dtype) -> None:
    device = plan.world.compute
    total, chunks_WS = device.zeros(VECTOR, torch.float32), device.zeros(count * VECTOR, dtype).view(count, -1)
    for accumulate in (False, True):
        ordered_sum(chunks_WS, total, device.zeros(VECTOR, dtype), accumulate=accumulate, device=device)


def _expand(plan: Plan) -> None:
    device, form, tile_numel = plan.world.compute, plan.precision.frozen, expansion_numel(plan.world.compute.tile_numel)
    assert form is not None
    codes = device.zeros(form.nbytes(VECTOR), torch.uint8)
    stored, values = (Layout.of({"x": (count,)}, world_size=1) for count in (codes.numel(), VECTOR))
    rows = [*map(device.upload, expansion(stored, values, tile_numel)), *form.tables(device.device)]
    torch.ops.zero.expand(device.zeros(VECTOR, plan.precision.compute), codes, rows, form.rule, tile_numel)
