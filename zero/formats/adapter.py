"""Write the adapter of a checkpoint as peft does: its tensors, by names without the adapter's name, and its settings.

    model.layers.0.self_attn.q_proj.lora_A.default.weight                    in the checkpoint
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight           in adapter_model.safetensors

Adapters of several parameters of a module are nested, so their names have `base_layer` once for each that is inside.

Source: `peft.utils.save_and_load`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zero.core.peft_names import COPIES, PREFIX, plain_name
from zero.errors import ConfigError
from zero.formats.safetensors_folder import write_file
from zero.formats.stream import Stream, new_file

ADAPTER, LAYER = "default", ".lora_"
"""The name that peft gives an adapter, and the end of an adapted layer's name."""

PARAMETERS = "target_parameters"
"""Peft's setting with the names of parameters that have adapters of their own, such as fused experts."""

MAGNITUDE = ".lora_magnitude_vector.weight"
"""The end of the name of a layer's magnitudes, with DoRA; in a file it is without `.weight`."""


def names_of_peft(tensors: Mapping[str, Stream], trained: Iterable[str]) -> dict[str, Stream]:
    """Return the tensors of the adapter, frozen ones too, by the names that peft gives them in a file.

    Raises:
        ConfigError: there is no adapter, or other tensors are trained.
    """
    names = {name: PREFIX + _name_in_file(name) for name in tensors if ADAPTER in name.split(".")}
    other = next((name for name in trained if name not in names), None)
    if other or not names:
        reason = f"{other} is trained, but is not part of" if other else "the checkpoint does not have"
        raise ConfigError(f"--to peft: {reason} peft's adapter '{ADAPTER}'. Choose --to hf, torch or dcp.")
    return {names[name]: tensors[name] for name in names}


def _name_in_file(name: str) -> str:
    name = ".".join(part for part in name.removeprefix(PREFIX).split(".") if part not in (ADAPTER, COPIES))
    return name.removesuffix(".weight") if name.endswith(MAGNITUDE) else name


def refuse_adapters(trained: Iterable[str]) -> None:
    """Raise ConfigError if an adapter is trained, because from_pretrained cannot read a model with one."""
    if any(LAYER in name for name in trained):
        raise ConfigError(
            "--to hf: this run trained an adapter. Write --to peft, and to merge it into the model: "
            "peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(MERGED)"
        )


def write(folder: Path, tensors: Mapping[str, Stream], settings: Mapping[str, Any]) -> None:
    """Write the two files of an adapter into an existing folder; without settings only that of the tensors.

    Args:
        settings: peft's settings, of which `target_modules` are found by the names of the tensors.
    """
    write_file(folder / "adapter_model.safetensors", tensors)
    if settings:
        adapted = {plain_name(name.partition(LAYER)[0], {ADAPTER}) for name in tensors}
        layers = adapted - {name.rpartition(".")[0] for name in settings.get(PARAMETERS, ())}
        known = {"peft_type": "LORA", "inference_mode": True, "target_modules": sorted(layers), **settings}
        with new_file(folder / "adapter_config.json") as file:
            file.write(json.dumps(known, indent=2, sort_keys=True).encode())
