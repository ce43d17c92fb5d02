"""Adapters of low rank for the linear layers of a frozen model, made by peft.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from zero.core.suggest import nearest
from zero.engine.empty import empty
from zero.errors import ConfigError
from zero.platform.installed import install
from zero.trainer.models.hf import build
from zero.trainer.models.hf_config import HFConfig


def add_lora(model: Any, chosen: HFConfig) -> None:
    """Add an adapter on meta to a model of transformers, in place, and freeze all other parameters.

    The model keeps its class, unlike with `peft.get_peft_model`.

    Raises:
        ConfigError: peft is not installed, or a pattern of `model.lora.targets` matches no linear layer.
    """
    peft, lora, folder = _peft(), chosen.lora, Path(chosen.path)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        target_modules=targets(model, lora.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder.absolute() if folder.is_dir() else folder),
    )
    with empty(), warnings.catch_warnings():
        # that it sets fan_in_fan_out itself, for the transposed weights of GPT-2
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        peft.inject_adapter_in_model(settings, model)


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
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in layers):
            ends = dict.fromkeys(name.rpartition(".")[2] for name in layers)
            raise ConfigError(f"model.lora.targets: no linear layer matches {pattern}. {nearest(pattern, ends)}")
    return [name for name in layers if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def adapter_settings(chosen: HFConfig) -> Any:
    """Return peft's settings of the adapter; their `save_pretrained(folder)` writes adapter_config.json.

    Raises:
        ConfigError: as `hf.build` and `add_lora`.
    """
    model: Any = build(chosen.path)
    add_lora(model, chosen)
    settings = model.peft_config["default"]
    settings.inference_mode = True
    return settings


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError(f"model.lora needs peft, which is not installed. Type {install('hf')}.") from error
    return peft
