"""The model that the user passed: it is taken over, with rank 0's values, and stays the one that the user holds.

Calls of it are the engine's, and what a module does to all its parameters goes to the engine too.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero.distributed.world import World
from zero.engine.first_values import Weights
from zero.engine.module_copy import buffers_of, call_through
from zero.engine.placeholder import ParameterPlaceholder
from zero.engine.plan import Plan
from zero.errors import ConfigError


@contextmanager
def training_only(model: nn.Module, chosen: set[int]) -> Iterator[None]:
    """Inside, parameters that no optimizer was given do not require a gradient."""
    others = [one for one in model.parameters() if one.requires_grad and id(one) not in chosen]
    for one in others:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in others:
            one.requires_grad_(True)


def rank_0(model: nn.Module, world: World) -> Weights:
    """Rank 0's values, one parameter at a time; None where the model has none yet."""
    held = dict(model.named_parameters())
    if any(parameter.is_meta for parameter in held.values()):
        return None
    values = {name: parameter.detach() for name, parameter in held.items()}  # before it is taken over

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(values[name])
        world.broadcast(tensor, what=f"first values of {name}").wait()

    return fill


def share_buffers(copied: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers."""
    for name, buffer in buffers_of(copied).items():
        whole = buffer.contiguous()
        world.broadcast(whole, what=f"buffer {name}").wait()
        if not torch.equal(whole, buffer):
            buffer.copy_(whole)


class Training(Protocol):
    """What an engine does for the model that it has taken over."""

    @property
    def plan(self) -> Plan: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...

    def gradient_of(self, name: str) -> Tensor | None: ...


def hand_over(model: nn.Module, engine: Training) -> Callable[[Any, Any], Any]:
    """Have calls of `model` go through `engine`, which is not kept alive by it; returns what they went to before."""
    held = weakref.ref(engine)

    def living() -> Training:
        found = held()
        if found is None:
            raise ConfigError("the engine that had this model is gone; keep what zero.initialize returns")
        return found

    def moved(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        plan = living().plan
        dtype, device = plan.precision.compute, plan.world.device
        there = fn(torch.empty(0, dtype=dtype, device=device))
        if (there.dtype, there.device) != (dtype, device):
            raise ConfigError(
                f"this model trains in {dtype} on {device}, as the config says, and cannot go to {there.dtype} on "
                f"{there.device}; leave out .to(), .cuda(), .half() and their like after zero.initialize"
            )
        return self

    methods: dict[str, Callable[..., Any]] = {
        "zero_grad": lambda self, set_to_none=True: living().zero_grad(set_to_none),
        "load_state_dict": lambda self, *args, **how: living().load_module_state_dict(*args, **how),
        "_apply": moved,
    }
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ParameterPlaceholder)
        parameter.gradient = partial(lambda name: living().gradient_of(name), name)
        parameter.source = living
    return call_through(model, lambda args, kwargs: living().forward(*args, **kwargs), methods=methods)
