"""Sequence parallelism for models of transformers: an attention function that exchanges slices of tokens for heads.

The function is registered with transformers, and the model gets the rows with each call, as an argument that models
pass on to their attention. Layers that would get other results raise ConfigError with their names, by their settings or
in the first forward.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from zero.distributed.world import World
from zero.errors import ConfigError
from zero.platform.installed import require_hf
from zero.sequence import SequenceParallel, SharedRows, attention, check_heads

NAME = "zero_sequence"
"""The name of the attention function."""

HARMLESS = {
    *("cache", "cache_position", "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states"),
    *("output_router_logits", "position_ids", "return_dict", "use_cache"),
}
"""Arguments that models pass to attention and that do not change its result."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense"}
"""Kinds of layers that mix tokens in attention only."""


def sequence_parallel(model: nn.Module, group: World) -> SequenceParallel:
    """Let a model of transformers attend over rows that the ranks of a group share; return their slices and loss.

    Call the model with the arguments that `SequenceParallel.slice` returns. A module of one's own needs no such call:
    it calls `zero.sequence.attention`, and `SequenceParallel(group)` makes its slices.

    Args:
        model: a causal language model, before `zero.init`; its `set_attn_implementation` is called.
        group: the ranks that share rows, see `zero.sequence.open_group`.

    Raises:
        ConfigError: `model` is not a model of transformers, its heads do not divide over the group, or it mixes tokens
            in another way. By the model: an argument of attention that this attention does not honour.
    """
    require_hf("transformers", "sequence parallelism of a model needs")
    from transformers import AttentionInterface, PreTrainedModel

    base: Any = getattr(model, "get_base_model", lambda: model)()  # the base of a PeftModel
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(
            f"sequence_parallel: {type(base).__name__} is not a model of transformers. Call zero.sequence.attention in "
            "its forward, and use zero.sequence.SequenceParallel(group)."
        )
    for problem in _problems(base, base.config.get_text_config()):
        name = type(base).__name__
        raise ConfigError(f"sequence parallelism cannot train a {name}: {problem}. Use a group of 1 rank.")
    _check_heads(base, base.config.get_text_config(), group.size)
    for name, module in base.named_modules():
        module._name_in_model = name  # for messages, also of a copy of the model
    AttentionInterface.register(NAME, _attend)
    base.set_attn_implementation(NAME)
    return SequenceParallel(group)


def _check_heads(model: nn.Module, config: Any, size: int) -> None:
    heads, name = config.num_attention_heads, f"sequence parallelism of {_mixer(model, 0)}"
    check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, size, name)


def _problems(model: Any, config: Any) -> Iterator[str]:
    """Yield the reasons why a model's slices would not have the results of its rows, each with the name of a layer."""
    kinds = [*(getattr(config, "layer_types", None) or ())]
    for index, kind in enumerate(kinds):
        if kind not in ATTENTION_LAYERS:
            yield f"{_mixer(model, index)} is a layer of {kind}, which mixes tokens"
    calls = model._supports_attention_backend or (kinds and model._can_set_attn_implementation())
    if not calls or getattr(config, "num_attention_heads", None) is None:
        yield f"{_mixer(model, 0)} does not call the attention function that it is set to"
    for name, module in model.named_modules():
        if "position" in name and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            yield f"{name} counts positions from its padding token on"
    for rope in _rope_types(getattr(config, "rope_parameters", None)):
        if "dynamic" in rope or rope == "longrope":
            rotary = next((name for name, _ in model.named_modules() if "rotary" in name), "rope_parameters")
            yield f"{rotary} rotates positions by the length of a row ({rope})"


def _mixer(model: nn.Module, index: int) -> str:
    """Return the name of the module that mixes the tokens of layer `index`, else of the layer, else of the model."""
    layers = [name for name, _ in model.named_modules() if name.endswith(f".{index}")]
    inside = [name for name, module in model.named_modules() if getattr(module, "layer_idx", None) == index]
    return next((name for name in inside if name not in layers), next(iter(layers), type(model).__name__))


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the kinds of rotary embeddings in settings, which may be nested by kind of layer."""
    if isinstance(parameters, Mapping):
        yield str(parameters.get("rope_type", "default"))
        for value in parameters.values():
            yield from _rope_types(value)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as `eager_attention_forward` of the model does, over whole rows: (b, s, h, d)."""
    name = getattr(module, "_name_in_model", type(module).__name__)
    if "shared_rows" not in others:
        raise ConfigError(
            f"{name} got no shared_rows. Call the model with what SequenceParallel.slice returns; a model that does "
            "not pass it on to its attention cannot be trained so."
        )
    rows: SharedRows = others.pop("shared_rows")
    if attention_mask is not None:
        raise ConfigError(f"{name} got a mask. Pass attention_mask to SequenceParallel.slice, not to the model.")
    hidden = None if "sliding_window" in others else _window_in_masks(module)
    if hidden is not None and hidden < query.shape[2] * rows.group.size:
        raise ConfigError(
            f"{name} has sliding_window={hidden} in its masks alone. Use rows of at most {hidden} tokens."
        )
    is_causal = others.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal) or key.shape[2] != query.shape[2]:
        raise ConfigError(f"{name}: sequence parallelism is for causal self-attention. Use a group of 1 rank.")
    names = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}
    scoring = {ours: others.pop(theirs, None) for theirs, ours in names.items()}
    for argument, given in others.items():
        if argument not in HARMLESS and given is not None and given is not False:
            raise ConfigError(f"{name}: sequence parallelism does not honour {argument}. Use a group of 1 rank.")
    try:
        result = attention(query, key, value, rows, scale=scaling, dropout=dropout, **scoring)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return result.transpose(1, 2).contiguous(), None


def _window_in_masks(module: Any) -> int | None:
    """Return the window of a model that puts it into masks and does not pass it to attention, as Phimoe does."""
    config = getattr(module, "config", None)
    return None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
