"""Adapters of low rank for the linear layers of a frozen model, made by peft.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from torch import nn

from zero.core.suggest import nearest
from zero.engine.meta import empty
from zero.errors import ConfigError, in_short
from zero.platform.installed import require_hf
from zero.trainer.models.hf_config import HFConfig


def add_lora(model: Any, chosen: HFConfig) -> None:
    """Add an adapter on meta to a model of transformers, in place, and freeze all other parameters.

    The model keeps its class, unlike with `peft.get_peft_model`.

    Raises:
        ConfigError: peft is not installed, a pattern of `model.lora.targets` matches no linear layer or a layer whose
            weight another module shares, or peft cannot adapt the layers or would adapt fused experts.
    """
    require_hf("peft", "model.lora needs")
    import peft
    from transformers.pytorch_utils import Conv1D

    layers = targets(model, chosen.lora.targets)
    _refuse_tied(model, layers)
    transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in layers)
    settings = peft.LoraConfig(**chosen.lora.of_peft(chosen.path), target_modules=layers, fan_in_fan_out=transposed)
    try:
        with empty():
            peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets: {in_short(error)}") from error
    if settings.target_parameters:
        raise ConfigError(
            f"model.lora.targets: peft would adapt the experts of {type(model).__name__}, which zero cannot train. "
            "Choose attention layers: 'model.lora.targets=[*attn.*]'."
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


def targets(model: Any, patterns: tuple[str, ...]) -> list[str]:
    """Return the full names of the linear layers that match a pattern; without patterns of all but the head.

    A pattern matches a full name or the end of one, as in peft: q_proj matches model.layers.0.self_attn.q_proj.

    Raises:
        ConfigError: a pattern matches no linear layer.
    """
    from transformers.pytorch_utils import Conv1D

    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if not patterns:
        return [name for name, layer in layers.items() if layer is not model.get_output_embeddings()]
    matches = {pattern: [name for name in layers if fnmatchcase(f".{name}", f"*.{pattern}")] for pattern in patterns}
    for pattern, names in matches.items():
        if not names:
            ends = dict.fromkeys(name.rpartition(".")[2] for name in layers)
            raise ConfigError(f"model.lora.targets: no linear layer matches {pattern}. {nearest(pattern, ends)}")
    return list(dict.fromkeys(chain.from_iterable(matches.values())))
