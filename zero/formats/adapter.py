"""Write the adapter of a checkpoint as peft does: one file, with the trained tensors by names without the adapter's.

    model.layers.0.self_attn.q_proj.lora_A.default.weight                    in the checkpoint
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight           in adapter_model.safetensors

peft also needs adapter_config.json: `model.peft_config["default"].save_pretrained(folder)`.
"""

from collections.abc import Mapping
from pathlib import Path

from zero.errors import ConfigError
from zero.formats.safetensors_folder import write_file
from zero.formats.stream import Stream

FILE = "adapter_model.safetensors"

PREFIX, ADAPTER, COPIES = "base_model.model.", "default", "modules_to_save"
"""Parts of names that peft adds: for the model, for its adapter, and for modules that train as they are."""


def names_of_peft(trained: Mapping[str, Stream]) -> dict[str, Stream]:
    """Return the trained tensors by the names that peft gives them in a file.

    Raises:
        ConfigError: the checkpoint trains no adapter, or more than that.
    """
    for name in trained:
        if ADAPTER not in name.split("."):
            raise ConfigError(
                f"--to peft: {name} is trained, but is not part of an adapter of peft. Choose --to hf, torch or dcp."
            )
    added = {ADAPTER, COPIES}
    plain = {name: [part for part in name.removeprefix(PREFIX).split(".") if part not in added] for name in trained}
    return {PREFIX + ".".join(plain[name]): stream for name, stream in trained.items()}


def write(folder: Path, tensors: Mapping[str, Stream]) -> None:
    """Write the file of an adapter into an existing folder."""
    write_file(folder / FILE, tensors, list(tensors))
