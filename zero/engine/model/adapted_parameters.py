"""Adapters of peft for single parameters (`target_parameters`), such as the fused experts of a layer.

Their forward adds the adapter to the parameter by torch's `parametrize`, which registers it anew as a parameter of the
module. A view of a gathered buffer cannot be registered, and `parametrize` counts its users in a global variable, which
threads of several ranks would corrupt. The value of the adapted parameter takes the parameter's place instead, as
gathered values do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_adapted_parameter(module: nn.Module) -> bool:
    """Return whether `module` is peft's adapter of a single parameter."""
    return type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft.")


def put_in_place(model: nn.Module) -> Callable[[], None]:
    """Have adapters of parameters put the adapted value in the parameter's place; return a function that undoes this.

    Its bits and its gradient are those of peft.
    """
    undo = ExitStack()
    for module in model.modules():
        if is_adapted_parameter(module):
            vars(module)["_activate_lora"] = partial(_adapted, module)
            undo.callback(vars(module).pop, "_activate_lora")
    return undo.close


@contextmanager
def _adapted(wrapper: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Put the adapted value in the place of the wrapper's parameter in the block, as `ParamWrapper._activate_lora`."""
    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    if not adapters:
        yield
        return
    parameters, name = wrapper.get_base_layer()._parameters, wrapper.parameter_name
    parameter = parameters[name]
    parameters[name] = _value(wrapper, adapters)
    try:
        yield
    finally:
        parameters[name] = parameter


def _value(wrapper: Any, adapters: Sequence[str]) -> Tensor:
    """Return the parameter with the sum of its adapters, computed with peft's operators in peft's order."""
    parameter = wrapper.get_param()
    if len(adapters) == 1 and wrapper.num_experts > 1:
        left, right, scaling = wrapper.get_delta_factors(adapters[0])
        # torch 2.13 cannot compile `_DisableAutocast`
        with nullcontext() if torch.compiler.is_compiling() else torch._C._DisableAutocast():
            return torch.baddbmm(parameter, left, right, alpha=scaling)
    first, *others = map(wrapper.get_delta_weight, adapters)
    return cast(Tensor, parameter + sum(others, first))
