"""Adapters of low rank for the linear layers and the fused experts of a frozen model, made by peft.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from zero.core.suggest import nearest, some
from zero.engine.meta import empty
from zero.errors import ConfigError, in_short
from zero.platform.installed import require_hf
from zero.trainer.models.hf_config import HFConfig, LoRAConfig


def add_lora(model: Any, chosen: HFConfig) -> None:
    """Add an adapter on meta to a model of transformers, in place, and freeze all other parameters.

    The model keeps its class, unlike with `peft.get_peft_model`.

    Raises:
        ConfigError: peft is not installed, a pattern of `model.lora.targets` matches nothing or a layer whose weight
            another module shares, or peft cannot adapt the layers or would adapt fused experts in their place.
    """
    require_hf("peft", "model.lora needs")
    import peft
    from transformers.pytorch_utils import Conv1D

    layers, parameters = targets(model, chosen.lora)
    _refuse_tied(model, layers)
    transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in layers)
    fields = chosen.lora.of_peft(chosen.path, parameters)
    settings = peft.LoraConfig(**fields, target_modules=layers, fan_in_fan_out=transposed)
    try:
        with empty():
            peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets: {in_short(error)}") from error
    if {*(settings.target_parameters or ())} != {*parameters}:
        left = [name for name in layers if name not in settings.target_modules]
        raise ConfigError(
            f"model.lora.targets: peft would adapt the experts of {type(model).__name__} in place of {some(left)}. "
            "Choose other layers: 'model.lora.targets=[*attn.*,mlp.experts.*]'."
        )


def _refuse_tied(model: nn.Module, layers: list[str]) -> None:
    """Raise ConfigError for a layer that shares its weight, because merging would change the other module too."""
    named = model.named_parameters(remove_duplicate=False)
    names = {id(parameter): name for name, parameter in named if name.rpartition(".")[0] not in layers}
    for layer in layers:
        if other := names.get(id(model.get_submodule(layer).weight)):
            raise ConfigError(
                f"model.lora.targets: {layer} is tied to {other}, so an adapter cannot be merged into it. Choose other "
                "layers, or a base without tied weights."
            )


class Targets(NamedTuple):
    """The full names of the linear layers and of the fused experts, which are parameters, that get an adapter."""

    layers: list[str]
    parameters: list[str]


def targets(model: Any, chosen: LoRAConfig) -> Targets:
    """Return the linear layers and the fused experts that match a target; without targets all layers but the head.

    A target matches a full name or the end of one, as in peft: q_proj matches model.layers.0.self_attn.q_proj.

    Raises:
        ConfigError: a target matches nothing.
    """
    from transformers.pytorch_utils import Conv1D

    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if not chosen.targets:
        return Targets([name for name, layer in layers.items() if layer is not model.get_output_embeddings()], [])
    experts = _fused_experts(model)
    matches = chosen.matches([*layers, *experts])
    for pattern, names in matches.items():
        if not names:
            ends = dict.fromkeys(name.rpartition(".")[2] for name in (*layers, *experts))
            raise ConfigError(f"model.lora.targets: no layer or expert matches {pattern}. {nearest(pattern, ends)}")
    chosen_names = dict.fromkeys(chain.from_iterable(matches.values()))
    return Targets(
        [name for name in chosen_names if name in layers], [name for name in chosen_names if name in experts]
    )


def _fused_experts(model: nn.Module) -> list[str]:
    """Return the full names of the parameters of 3 dimensions, which hold the matrices of several experts."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and not isinstance(module, nn.modules.conv._ConvNd)
    ]
