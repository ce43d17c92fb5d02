"""Autograd functions that take a unit's gradients out of autograd and tell when all gradients of a call have arrived.

`Gather` is one node per call, whose outputs are the parameters of a unit that the call uses. An `Arrive` for each large
parameter delivers its gradient as soon as it is complete. `Gather` delivers the gradients of small parameters together,
because a node of Python for each would take longer than their sums. A `Reach` makes backward visit a unit whose
parameters did not affect its outputs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero.core.tree import replaced, tensors_in
from zero.engine.unit_state import UnitState
from zero.errors import StaleStateError

RUN_FIRST = 2**62
"""A sequence number above all that autograd assigns; autograd runs the ready node with the largest number first."""


LARGE_NUMEL = 65_536
"""The least number of elements of a parameter whose gradient is delivered alone."""


class Gather(torch.autograd.Function):
    """The node whose outputs are a unit's parameters; its backward runs when all gradients of the call have arrived."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, backward_pass: Any, unit: UnitState, slots: Sequence[int], flat: Tensor, counted: bool
    ) -> tuple[Tensor, ...]:
        """Return the trainable parameters `slots` as views of `flat`.

        Args:
            anchor: an empty tensor with `requires_grad`, because autograd records only calls with such an input.
            counted: passed on to `BackwardPass.returned`.
        """
        ctx.set_materialize_grads(False)
        ctx.backward_pass, ctx.unit, ctx.slots, ctx.counted, ctx.version = (
            backward_pass,
            unit,
            slots,
            counted,
            unit.version,
        )
        return tuple(unit.spec.trainable.slots[slot].of(flat) for slot in slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given = zip(ctx.slots, grads, strict=True)
        small = {slot: grad for slot, grad in given if grad is not None}  # `Arrive` passes no gradient on
        if small:
            check_same_parameters([(ctx.unit, ctx.version)])
            ctx.backward_pass.deliver(ctx.unit, small)
        ctx.backward_pass.returned(ctx.unit, counted=ctx.counted)
        return None, None, None, None, None, None


class Arrive(torch.autograd.Function):
    """The identity function on a large parameter; its backward delivers the parameter's complete gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, backward_pass: Any, unit: UnitState, slot: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.backward_pass, ctx.unit, ctx.slot, ctx.version = backward_pass, unit, slot, unit.version
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is not None:
            check_same_parameters([(ctx.unit, ctx.version)])
            ctx.backward_pass.deliver(ctx.unit, {ctx.slot: grads[0]})
        return None, None, None, None


class Reach(torch.autograd.Function):
    """The identity function on an output, with an edge to a unit's `Gather`, so that backward visits the unit."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(parameters)
        return output.clone()  # a copy, because the caller may write into it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return *grads, *[None] * ctx.count


def nodes_of(values: Any) -> set[Any]:
    return {t.grad_fn for t in tensors_in(values) if t.grad_fn is not None}


def check_same_parameters(made_with: Iterable[tuple[UnitState, int]], *_: Any) -> None:
    """Raise StaleStateError if parameters have changed since the graph's forward.

    Args:
        made_with: (unit, version of its parameters in the forward) for each unit.
    """
    for unit, version in made_with:
        if unit.version != version or unit.deferred is not None:
            raise StaleStateError(
                f"the parameters of {unit.spec.name} changed between this graph's forward and its backward. "
                "Call backward before the next step."
            )


def reaching(outputs: Any, parameters: Iterable[Tensor], known: set[Any]) -> Any:
    """Return `outputs` with an autograd edge to every `Gather` that made `parameters`.

    A rank may take a branch without parameters (`if drop: return x`) while other ranks use them. That rank's backward
    must visit the unit too: all ranks must start the same collectives.

    Args:
        known: the nodes that made the site's inputs, where the search of the graph stops. Visited nodes are added to
            `known`.
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
