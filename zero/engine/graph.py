"""Nodes of autograd's graph that tell when backward has all gradients of a unit's call, and take them.

`Gather` is one node from a unit to all its parameters. An `Arrive` for each of them takes the gradient out of autograd
as soon as it is complete. A `Reach` has backward pass through a unit whose parameters took no part in its outputs.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zero.core.layout import Layout
from zero.core.tree import replaced, tensors_in
from zero.engine.unit_state import UnitState
from zero.errors import StaleStateError

RUN_FIRST = 2**62
"""Above every counted sequence number: of the nodes that can run, autograd runs the one with the largest first."""


class Gather(torch.autograd.Function):
    """A node from a unit to its parameters, whose backward runs when all gradients of the call have arrived."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, gatherer: Any, unit: UnitState, flat: Tensor, counted: bool
    ) -> tuple[Tensor, ...]:
        """Return the parameters as views of `flat`; `anchor` has autograd record the call."""
        ctx.set_materialize_grads(False)
        ctx.gatherer, ctx.unit, ctx.counted = gatherer, unit, counted
        return views(unit.spec.trainable, flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.gatherer.returned(ctx.unit, counted=ctx.counted)
        return None, None, None, None, None


class Arrive(torch.autograd.Function):
    """The identity of one parameter, whose backward delivers the gradient as soon as it is complete."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gatherer: Any, unit: UnitState, slot: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gatherer, ctx.unit, ctx.slot, ctx.version = gatherer, unit, slot, unit.version
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is not None:
            check_same_parameters([(ctx.unit, ctx.version)])
            ctx.gatherer.deliver(ctx.unit, ctx.slot, grads[0])
        return None, None, None, None


class Reach(torch.autograd.Function):
    """The identity with an edge to a unit's `Gather`, so that backward passes through the unit."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(parameters)
        return output.clone()  # not a view: the caller may write into it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return *grads, *[None] * ctx.count


def views(layout: Layout, flat: Tensor, start: int = 0) -> tuple[Tensor, ...]:
    """Return the layout's parameters as views of `flat`, whose element `start` is the layout's first."""
    return tuple(layout.views(flat[start : start + layout.P]).values())


def nodes_of(values: Any) -> set[Any]:
    return {t.grad_fn for t in tensors_in(values) if t.grad_fn is not None}


def check_same_parameters(made_with: Iterable[tuple[UnitState, int]], *_: Any) -> None:
    """Raise StaleStateError if a graph was made with other parameters: (unit, version) of each."""
    for unit, version in made_with:
        if unit.version != version or unit.deferred is not None:
            raise StaleStateError(
                f"the parameters of {unit.spec.name} changed between this graph's forward and its backward. "
                "Call backward before the next step."
            )


def reaching(outputs: Any, parameters: Iterable[Tensor], known: set[Any]) -> Any:
    """Return `outputs`, made to depend on every `Gather` that made `parameters`.

    A rank may take a branch without parameters (`if drop: return x`) while the others do not. Its backward must pass
    here too, or its collectives would differ from theirs.

    Args:
        known: the nodes that made the inputs; the search stops at them.
    """
    wanted = {p.grad_fn: p for p in parameters if p.grad_fn is not None}
    tensors = [t for t in tensors_in(outputs) if t.is_floating_point()]
    if not wanted or not tensors:
        return outputs
    stack = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while stack and wanted:
        node = stack.pop()
        if node in known:
            continue
        known.add(node)
        wanted.pop(node, None)
        stack.extend(following for following, _ in node.next_functions if following is not None)
    if not wanted:
        return outputs
    return replaced(outputs, {id(tensors[0]): Reach.apply(tensors[0], *wanted.values())})
