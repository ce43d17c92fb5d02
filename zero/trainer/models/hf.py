"""Models of transformers, unmodified: built without memory, filled from their own files, trained on rows of tokens.

    model = build(folder)                                    # parameters on meta
    plan = zero.Plan(model, ...)
    state = zero.init(plan, store, weights=weights(model, folder))

A file may call tensors otherwise than the model does, and have in pieces what the model has in one: the experts of a
Mixtral are a file's tensors one by one and a model's as one. `weights` translates with transformers' own tables, one
tensor at a time. Where both say the same, `zero.init(..., weights=folder)` does as well.

Source: `transformers.core_model_loading`, which does this for a model that is whole.
"""

import copy
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero.engine.empty import empty
from zero.errors import ConfigError, in_short
from zero.losses import linear_cross_entropy
from zero.platform.installed import install
from zero.platform.safetensors_files import StoredWeights

BESIDE = ("*.json", "*.model", "*.txt", "*.jinja")
"""What of a model's folder goes along with an export: settings, tokenizer, templates."""


def build(path: str | PathLike[str]) -> nn.Module:
    """A model of random or no values on meta, of the class that its settings name, else the causal language model.

    The cache of keys and values is off: it is for generating, and recomputed activations would meet it filled.

    Args:
        path: a folder with config.json, or a model type such as "llama" with all its defaults, or what transformers
            finds in its cache.

    Raises:
        ConfigError: transformers is not installed, or knows no such model.
    """
    transformers = _transformers()
    config = settings(path)
    config.use_cache = False
    named = next(iter(getattr(config, "architectures", None) or ()), None)
    made_by = getattr(transformers, named, None) if named else transformers.AutoModelForCausalLM.from_config
    if made_by is None:
        raise ConfigError(f"{path}: transformers {transformers.__version__} has no {named}; upgrade it")
    try:
        with empty():
            model: nn.Module = made_by(config)
    except (ValueError, KeyError) as error:  # no causal language model, sizes that do not divide
        raise ConfigError(f"{path}: {in_short(error)}") from error
    return model


def not_causal(model: Any) -> str | None:
    """What a model of transformers is that does not predict each next token from those before it alone; None: it does.

    The class is not enough: what was an encoder first, as BERT, has a class for it that sees all tokens unless its
    settings say `is_decoder`. A model that was made for nothing else has no such setting, or does not read it.
    """
    known, name = _transformers().models.auto.modeling_auto, type(model).__name__
    if name not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return f"a {name}"
    encoder = model.config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    encoder |= any(getattr(one, "is_causal", None) is False for one in model.modules())
    if encoder and getattr(model.config, "is_decoder", None) is False:
        return f"a {name} that sees later tokens too, because its settings say is_decoder=false"
    return None


EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
"""Settings that say how many of a layer's experts a token goes to."""


def flops_per_token(model: Any, seq: int) -> float | None:
    """Floating point operations of forward and backward for one token of a row of `seq`; None where it is not known.

    Of experts those that a token goes to; of attention what its heads and its window see, and nothing for layers of
    another kind; a table that is only looked things up in costs nothing. What is recomputed is not counted.

    Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    looked_up = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)} - {id(head.weight)}
    active = 0.0
    chosen = next((count for name in EXPERTS_OF_A_TOKEN if (count := getattr(text, name, None))), None)
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up:
            continue
        of_layer, _, of_experts = name.partition(".experts.")
        if not of_experts:
            active += parameter.numel()
            continue
        held = model.get_submodule(f"{of_layer}.experts")
        count = len(held) if isinstance(held, nn.ModuleList) else parameter.shape[0]
        if chosen is None:
            return None
        active += parameter.numel() * chosen / count
    return 6.0 * active + 6.0 * _attention_numel(text, seq)


def _attention_numel(text: Any, seq: int) -> float:
    """Products that all layers make of a token with those before it: each query with keys, each weight with values."""
    heads = getattr(text, "num_attention_heads", None) or 0
    width = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    of_head = (getattr(text, "qk_head_dim", None) or width) + (getattr(text, "v_head_dim", None) or width)
    window = getattr(text, "sliding_window", None) or seq
    seen = {"full_attention": seq, "sliding_attention": min(window, seq)}
    usual = "sliding_attention" if window < seq else "full_attention"
    layers = getattr(text, "layer_types", None) or [usual] * text.num_hidden_layers
    return float(heads * of_head * sum(seen.get(kind, 0) for kind in layers))


def settings(path: str | PathLike[str]) -> Any:
    """The settings of a model as transformers has them.

    Raises:
        ConfigError: see `build`.
    """
    transformers = _transformers()
    folder = Path(path)
    if not folder.is_dir() and str(path) in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(str(path))
    if not folder.is_dir() and (str(path).startswith(("/", ".", "~")) or str(path).count("/") > 1):  # no name of a hub
        raise ConfigError(f"{path} does not exist; give a folder with config.json, or a model type")
    try:
        where = str(folder if folder.is_dir() else path)
        return transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)  # and does not ask for it
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: no model of transformers: {in_short(error)}") from error


def weights(model: nn.Module, path: str | PathLike[str]) -> "HFWeights":
    """The weights of a folder or file by the names that `model` has, for `zero.init(weights=...)`; it can be printed.

    Raises:
        PlanError, CheckpointError: as `StoredWeights`.
    """
    return HFWeights(model, StoredWeights(Path(path)))


def logits(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """tokens: (b, t) int64, to (b, t, vocab)."""
    _give_logits(model)
    return model(input_ids=tokens).logits


def loss(model: Any, rows: Tensor, *, router: float = 0.0, chunked: bool = False) -> Tensor:
    """Mean cross entropy of each next token, in nats, fp32; and `router` times what unbalanced experts cost.

    Args:
        rows: (b, t + 1) int64; each gives both inputs and targets.
        chunked: never hold all logits, see `linear_cross_entropy`; for models of which `gives_logits` is true.
    """
    if chunked:
        head = model.get_output_embeddings()
        # until the next call, because activations may be computed again in backward
        head.forward = lambda hidden: linear_cross_entropy(hidden, head.weight, rows[:, 1:], bias=head.bias)
    else:
        _give_logits(model)
    outputs = model(input_ids=rows[:, :-1])
    mean = outputs.logits if chunked else F.cross_entropy(outputs.logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    unbalanced = outputs.get("aux_loss")
    return mean if unbalanced is None else mean + router * unbalanced


def gives_logits(model: Any) -> bool:
    """Whether a causal model's logits are what a linear layer returns, and nothing is done to them after it.

    Tried with something in their place that operators refuse, and without what comes before the layer.
    """
    head, body = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or body is model:
        return False
    outputs = _Outputs(torch.zeros(1, 1, head.in_features, device="meta"))
    vars(body)["forward"] = lambda *args, **kwargs: outputs
    vars(head)["forward"] = lambda hidden: hidden.as_subclass(_Untouchable)
    try:
        with torch.no_grad():
            return isinstance(model(input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits, _Untouchable)
    except Exception:  # it does more than that with what its body returns, or with logits
        return False
    finally:
        del vars(body)["forward"], vars(head)["forward"]


class _Outputs(tuple[Tensor]):
    """What a model's body returns, with nothing in it but the last hidden states."""

    last_hidden_state: Tensor

    def __new__(cls, hidden: Tensor) -> "_Outputs":
        made = super().__new__(cls, (hidden,))
        made.last_hidden_state = hidden
        return made

    def __getattr__(self, name: str) -> None:
        return None


class _Untouchable(Tensor):
    """Refuses every operator but two that leave a mean in fp32 as it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.float):
            return args[0]
        raise TypeError(f"{func} of logits")


def _give_logits(model: Any) -> None:
    """Take back what a chunked loss put in the head's place; a model around another one has no head of its own."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        vars(head).pop("forward", None)


def write_settings(path: str | PathLike[str], out: Path) -> None:
    """What `from_pretrained` needs beside weights: the settings of `path`, and its tokenizer where it has one.

    Raises:
        ConfigError: see `build`.
    """
    folder = Path(path)
    if not folder.is_dir():
        settings(path).save_pretrained(out)
        return
    for pattern in BESIDE:
        for file in folder.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)


class HFWeights(Mapping[str, Tensor]):
    """Stored tensors under the model's names; what one translation makes beside is kept until another is asked for.

    Attributes:
        unused: names in the files that mean nothing to the model, but for those that its class says it can do without.
    """

    def __init__(self, model: nn.Module, stored: StoredWeights) -> None:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        known, prefix = dict.fromkeys(model.state_dict(), True), getattr(model, "base_model_prefix", None)
        table = get_model_conversion_mapping(model)
        renamings = [one for one in table if isinstance(one, loading.WeightRenaming)]
        converters = [one for one in table if isinstance(one, loading.WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        self._model, self._stored = model, stored
        self._sources: dict[str, list[tuple[str, str]]] = {}
        self._converters: dict[str, Any] = {}
        self._first: dict[str, str] = {}
        self._last: tuple[str, dict[str, Tensor]] | None = None
        ignored = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        unused = []
        for key in sorted(stored, key=loading.dot_natural_key):  # the experts in their order
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = key, None
            if name not in known:
                unused += [] if any(one.search(name) for one in ignored) else [key]
                continue
            self._sources.setdefault(name, []).append((pattern or key, key))
            for target in by_pattern[pattern].target_patterns if pattern else (name,):
                first = by_pattern[pattern].target_patterns[0] if pattern else name
                self._first.setdefault(name.replace(first, target), name)
            if pattern:
                self._converters[name] = by_pattern[pattern]
        self.unused = tuple(unused)

    def __getitem__(self, name: str) -> Tensor:
        first = self._first[name]
        if first not in self._converters:
            return self._stored[self._sources[first][0][1]]
        if self._last is None or self._last[0] != first:
            self._last = None  # freed before the next are made
            self._last = first, self._translated(first)
        return self._last[1][name]

    def __contains__(self, name: object) -> bool:
        return name in self._first  # by default it would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __str__(self) -> str:
        keys = [key for sources in self._sources.values() for _, key in sources]
        nbytes = sum(map(self._stored.nbytes, keys))
        return f"weights of {self._stored.path}: {len(keys)} tensors, {nbytes:,} bytes"

    def _translated(self, first: str) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converters[first])
        for pattern, key in self._sources[first]:
            converter.add_tensor(first, key, pattern, partial(self._stored.__getitem__, key))
        made = converter.convert(first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"models of Hugging Face need transformers, which is not installed; {install('hf')}"
        ) from error
    return transformers
