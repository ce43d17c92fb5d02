"""What a unit adds to autograd's graph, to hear when backward wants its parameters and to take their gradients.

`Gather` is one node from a unit to all its parameters. An `Arrive` for each of them takes the gradient out of autograd
as soon as it is complete. A `Reach` has backward pass through a unit whose parameters took no part in its outputs.

Under a `torch.func` transform these nodes are made outside of it: `beneath_transforms` steps there.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zero.core.layout import Layout
from zero.core.tree import replaced, tensors_in
from zero.engine.unit_state import UnitState
from zero.errors import StaleStateError

RUN_FIRST = 2**62
"""Autograd runs what it can in the order of sequence numbers, largest first. Counted numbers do not come this far."""


class Listener(Protocol):
    """Who hears of what passes through a unit in backward."""

    def deliver(self, unit: UnitState, slot: int, grad: Tensor) -> None:
        """The gradient of one parameter is complete."""

    def returned(self, unit: UnitState, *, counted: bool) -> None:
        """All gradients of one call have been delivered."""


class Gather(torch.autograd.Function):
    """From a unit to its parameters: its backward runs when all gradients of the call have arrived."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, gatherer: Listener, unit: UnitState, flat: Tensor, counted: bool
    ) -> tuple[Tensor, ...]:
        """`anchor` only makes autograd record the call; the parameters are views of `flat`."""
        ctx.set_materialize_grads(False)
        ctx.gatherer, ctx.unit, ctx.counted = gatherer, unit, counted
        return views(unit.spec.trainable, flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.gatherer.returned(ctx.unit, counted=ctx.counted)
        return None, None, None, None, None


class Arrive(torch.autograd.Function):
    """The identity of one parameter: in its backward the gradient leaves autograd, as soon as it is complete."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gatherer: Listener, unit: UnitState, slot: int) -> Tensor:
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
    """The identity, with an edge to a unit's `Gather`: backward passes through the unit whatever it computed."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(parameters)
        return output.clone()  # not a view: the caller may write into it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return *grads, *[None] * ctx.count


def views(layout: Layout, flat: Tensor, start: int = 0) -> tuple[Tensor, ...]:
    """The layout's parameters as views of `flat`, whose element `start` is the layout's first."""
    return tuple(layout.views(flat[start : start + layout.P]).values())


def nodes_of(values: Any) -> set[Any]:
    return {t.grad_fn for t in tensors_in(values) if t.grad_fn is not None}


def check_same_parameters(made_with: Iterable[tuple[UnitState, int]], *_: Any) -> None:
    """Refuse a graph that was made with other parameters than there are now: (unit, version) of each."""
    for unit, version in made_with:
        if unit.version != version or unit.deferred is not None:
            raise StaleStateError(
                f"the parameters of {unit.spec.name} changed between this graph's forward and its backward; "
                "call backward before the next step"
            )


def reaching(outputs: Any, parameters: Iterable[Tensor], known: set[Any]) -> Any:
    """`outputs`, made to depend on every `Gather` that made `parameters`.

    A rank may take a branch without parameters (`if drop: return x`) while the others do not. Its backward must pass
    here all the same, or its collectives would differ from theirs. `known` are the nodes that made the inputs.
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


@contextmanager
def beneath_transforms() -> Iterator[bool]:
    """Step outside of the `torch.func` transforms under way; yields whether there are any."""
    functorch = torch._C._functorch
    around = functorch.get_interpreter_stack() or ()
    if not around:
        yield False
        return
    grads = [one for one in around if one.key() == functorch.TransformType.Grad]  # each switches gradients on inside
    enabled = torch.is_grad_enabled() and all(functorch.CGradInterpreterPtr(one).prevGradMode() for one in grads)
    with temporarily_clear_interpreter_stack(), torch.set_grad_enabled(enabled):
        yield True


def untransformed(tensor: Tensor) -> Tensor:
    """The tensor that `torch.func` transforms have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
