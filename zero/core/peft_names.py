"""The names of a parameter in a model with adapters of peft and without them.

base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight       with an adapter
model.layers.0.self_attn.q_proj.weight                                   in the base
"""

from collections.abc import Collection

PREFIX, BASE, COPIES = "base_model.model.", "base_layer", "modules_to_save"
"""Parts of names that peft adds: for the model, for the module inside an adapter, and for modules that train as they
are."""


def plain_name(name: str, adapters: Collection[str]) -> str:
    """Return `name` without the parts that peft adds for the model, for wrapped modules and for these adapters."""
    if not adapters:
        return name
    added = {BASE, "original_module", COPIES, *adapters}
    return ".".join(part for part in name.removeprefix(PREFIX).split(".") if part not in added)
