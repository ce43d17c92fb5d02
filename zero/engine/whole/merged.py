"""The weights of a base with the adapters of peft merged into them, by the names of the base.

peft merges a copy of one adapted layer at a time, so the bits are those of its `merge_and_unload`.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero.core.peft_names import plain_name
from zero.engine.model import ParameterPlaceholder
from zero.errors import ConfigError


def check_adapters(model: Any, aliases: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError unless `model` has adapters of peft that can be merged.

    Args:
        aliases: all names of each parameter, by its full name.
    """
    if not getattr(model, "peft_config", None):
        raise ConfigError("merged=True: the model has no adapters of peft. Call zero.stream_weights without it.")
    for path, layer in _layers(model).items():
        base: nn.Module = getattr(layer, "get_base_layer", nn.Module)()
        for parameter in base.parameters():
            assert isinstance(parameter, ParameterPlaceholder)
            names = aliases[parameter.full_name]
            if tied := [name for name in names if not name.startswith(f"{path}.")]:
                raise ConfigError(
                    f"merged=True: {path} is tied to {tied[0]}, so an adapter cannot be merged into it. "
                    "Stream without merged, and merge in the receiver."
                )


def merged_weights(model: Any, names: Iterable[str], value: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name in the base and the merged value of each weight.

    Args:
        model: a model for which `check_adapters` does not raise.
        names: the full names of its parameters.
        value: returns the value of a parameter, which the next call may overwrite.
    """
    adapters, waiting = frozenset(model.peft_config), _layers(model)
    layer_of = {f"{path}.{local}": path for path in waiting for local, _ in waiting[path].named_parameters()}
    for name in names:
        if name not in layer_of:
            yield plain_name(name, adapters), value(name)
        elif (layer := waiting.pop(path := layer_of[name], None)) is not None:
            for local, tensor in _merged(layer, value).items():
                yield f"{plain_name(path, adapters)}.{local}", tensor


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that peft has put around others, except those inside of another one, by path."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    layers: dict[str, nn.Module] = {}
    inside = ""
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not (inside and path.startswith(inside)):
            layers[path], inside = module, f"{path}."
    return layers


@torch.no_grad()
def _merged(layer: nn.Module, value: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the parameters of the base of one layer, merged, by their names in it."""
    copied: dict[int, Any] = {}
    for parameter in layer.parameters():
        assert isinstance(parameter, ParameterPlaceholder)
        copied[id(parameter)] = nn.Parameter(value(parameter.full_name).clone(), requires_grad=False)
    for module in layer.modules():
        if (no_copy := vars(module).get("_no_copy")) is not None:
            copied[id(no_copy)] = None
    made: Any = copy.deepcopy(layer, copied)
    # as `merge_and_unload` does
    if (unload := getattr(made, "unload_and_optionally_merge_module", None)) is not None:
        base = unload(merge=True, safe_merge=False, adapter_names=None)
    else:
        made.merge(safe_merge=False, adapter_names=None)
        base = made.get_base_layer()
    return {name: parameter.detach() for name, parameter in base.named_parameters()}
