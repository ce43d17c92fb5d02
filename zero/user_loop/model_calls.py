"""Pass the calls of a model to the engine that has taken it over."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero.core.tree import replaced, tensors_in
from zero.engine.model import ParameterPlaceholder, call_through
from zero.errors import ConfigError
from zero.platform.modes import unobserved


def take_over(model: nn.Module, engine: "weakref.ref[Any]") -> Callable[[], None]:
    """Pass calls of `model`, and methods that would fail in torch, to its engine; return a function that undoes it.

    Args:
        engine: the `Engine`. The type is Any, because its module imports this module.
    """

    def living() -> Any:
        current = engine()
        if current is None:
            raise ConfigError("the engine of this model was garbage-collected. Keep the result of zero.initialize.")
        return current

    def moved(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        plan = living().plan
        dtype, device = plan.precision.compute, plan.world.device
        there = fn(torch.empty(0, dtype=dtype, device=device))
        if (there.dtype, there.device) != (dtype, device):
            raise ConfigError(
                f"this model trains in {dtype} on {device} and cannot move to {there.dtype} on {there.device}. Leave "
                "out .to(), .cuda(), .half() after zero.initialize."
            )
        return model

    load_in_torch = model.load_state_dict

    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        """Load into the full tensors of `GatheredParameters`, on any rank; outside it into the engine, on all ranks."""
        is_open = any(cast(ParameterPlaceholder, parameter).full_value is not None for parameter in model.parameters())
        return (load_in_torch if is_open else living().load_module_state_dict)(*args, **kwargs)

    methods: dict[str, Any] = {
        "zero_grad": lambda set_to_none=True: living().zero_grad(set_to_none),
        "load_state_dict": load_state_dict,
        "_apply": moved,
    }

    def call(args: Any, kwargs: Any) -> Any:
        return living().forward(*args, **kwargs)

    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ParameterPlaceholder)
        parameter.gradient = partial(lambda name: living().gradient_of(name), name)
        parameter.source = living
    undo = call_through(model, call)
    vars(model).update(methods)

    def give_back() -> None:
        for name in methods:
            vars(model).pop(name, None)
        undo()

    return give_back


@unobserved()
def cast_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Return `inputs` with floating-point tensors of at least one dimension in `dtype`."""
    tensors = (tensor for tensor in tensors_in(inputs) if tensor.ndim and tensor.is_floating_point())
    floats = [tensor for tensor in tensors if tensor.dtype != dtype]
    return replaced(inputs, {id(tensor): tensor.to(dtype) for tensor in floats}) if floats else inputs
