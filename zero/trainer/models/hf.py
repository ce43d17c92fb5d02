"""Unmodified models of transformers: built on meta, loaded from their own files, trained on rows of tokens.

    model = build(folder)                                    # parameters on meta
    plan = zero.Plan(model, ...)
    state = zero.init(plan, store, weights=weights(model, folder))

Names in a file may differ from the model's names, and a file may store one tensor of the model as several, as with the
experts of a Mixtral. `weights` converts with transformers' own tables, one tensor at a time. If names and tensors are
the same, `zero.init(..., weights=folder)` works too.

Source: `transformers.core_model_loading`, which does this for a model in memory.
"""

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero.core.peft_names import COPIES, plain_name
from zero.engine.model import empty
from zero.errors import ConfigError, in_short
from zero.losses import linear_cross_entropy
from zero.platform.installed import require_hf
from zero.platform.safetensors_files import RangedWeights, StoredWeights
from zero.sequence import SharedRows

BESIDE = ("*.json", "*.model", "*.txt", "*.jinja")
"""Files of a model's folder that an export copies: settings, tokenizer, templates."""


def build(path: str | PathLike[str]) -> nn.Module:
    """Build a model on meta, of the class that its settings name, else of a causal language model.

    The key-value cache is off, because a recomputed forward would find it filled already.

    Args:
        path: a folder with config.json, or a model type such as "llama" with all its defaults, or a name in
            transformers' cache.

    Raises:
        ConfigError: transformers is not installed, or knows no such model.
    """
    transformers = _transformers()
    config = settings(path)
    config.use_cache = False
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    build_class = getattr(transformers, name, None) if name else transformers.AutoModelForCausalLM.from_config
    if build_class is None:
        raise ConfigError(f"{path}: transformers {transformers.__version__} has no {name}. Upgrade transformers.")
    try:
        with empty():
            model: nn.Module = build_class(config)
    except (ValueError, KeyError) as error:  # no causal language model, sizes that do not divide
        raise ConfigError(f"{path}: {in_short(error)}") from error
    return model


def not_causal(model: Any) -> str | None:
    """Return a description of a model that is not a causal language model; None if it is one.

    The name of the class is not enough: encoders such as BERT have a causal-language-model class, which attends to
    later tokens unless the settings say `is_decoder`. Other models have no such setting, or do not read it.
    """
    known, name = _transformers().models.auto.modeling_auto, type(model).__name__
    if name not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return f"a {name}"
    encoder = model.config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    encoder |= any(getattr(module, "is_causal", None) is False for module in model.modules())
    if encoder and getattr(model.config, "is_decoder", None) is False:
        return f"a {name} that sees later tokens too, because its settings say is_decoder=false"
    return None


EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
"""Names of the setting with the number of experts that a token is routed to in a layer."""


def flops_per_token(model: Any, seq: int) -> float | None:
    """Return the floating point operations of forward and backward for a token of a row of `seq`; None if unknown.

    Counted are only the experts that a token is routed to and only tokens inside of an attention's window. Embeddings
    used for look-ups and recomputation are not counted. A frozen matrix has no gradient, which saves a third.
    Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - {id(head.weight)}
    chosen = next((count for name in EXPERTS_OF_A_TOKEN if (count := getattr(text, name, None))), None)
    active = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in tables:
            continue
        layer, _, is_expert = name.partition(".experts.")
        numel = parameter.numel() * (1.0 if parameter.requires_grad else 2 / 3)
        if not is_expert:
            active += numel
        elif chosen is None:
            return None
        else:
            active += numel * chosen / _expert_count(model, layer, parameter)
    return 6.0 * active + 6.0 * _attention_numel(text, seq)


def _expert_count(model: Any, layer: str, parameter: Tensor) -> int:
    experts = model.get_submodule(f"{layer}.experts")
    return len(experts) if isinstance(experts, nn.ModuleList) else parameter.shape[0]


def _attention_numel(text: Any, seq: int) -> float:
    """Return the multiplications of attention for a token, in all layers: queries with keys, weights with values."""
    heads = getattr(text, "num_attention_heads", None) or 0
    width = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    head_numel = (getattr(text, "qk_head_dim", None) or width) + (getattr(text, "v_head_dim", None) or width)
    window = min(seq, getattr(text, "sliding_window", None) or seq)
    lengths = {"full_attention": seq, "sliding_attention": window}
    layers = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return float(heads * head_numel * sum(lengths.get(layer, 0) for layer in layers))


def settings(path: str | PathLike[str]) -> Any:
    """Return the configuration object of transformers for a model.

    Raises:
        ConfigError: see `build`.
    """
    transformers = _transformers()
    folder = Path(path).expanduser()
    if not folder.is_dir() and str(path) in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(str(path))
    if not folder.is_dir() and (str(path).startswith(("/", ".", "~")) or str(path).count("/") > 1):
        raise ConfigError(f"{path} does not exist. Give a folder with config.json, or a model type.")
    try:
        where = str(folder if folder.is_dir() else path)
        return transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: transformers cannot read this model: {in_short(error)}") from error


def weights(model: nn.Module, path: str | PathLike[str]) -> "HFWeights":
    """Return the weights of a folder or file by the names in `model`, for `zero.init(weights=...)`.

    `str` of the result is a line with the number of tensors and their bytes.

    Raises:
        PlanError, CheckpointError: as `StoredWeights`.
    """
    return HFWeights(model, StoredWeights(Path(path).expanduser()))


def logits(model: Callable[..., Any], tokens: Tensor, *, shared_rows: SharedRows | None = None) -> Tensor:
    """Return logits (b, t, vocab) for tokens (b, t) int64."""
    return model(input_ids=tokens, **_places(tokens, shared_rows)).logits


def _places(tokens: Tensor, shared_rows: SharedRows | None) -> dict[str, Any]:
    """Return the arguments for tokens (b, s) that are a slice of shared rows; none for tokens of whole rows."""
    if shared_rows is None:
        return {}
    first, count = shared_rows.group.rank * tokens.shape[1], tokens.shape[1]
    positions = torch.arange(first, first + count, device=tokens.device).expand_as(tokens)
    return {"position_ids": positions, "shared_rows": shared_rows}


def loss(
    model: Any,
    rows: Tensor,
    *,
    router: float = 0.0,
    chunked: bool = False,
    shared_rows: SharedRows | None = None,
) -> Tensor:
    """Return the mean cross entropy over next tokens, in nats, fp32, plus `router` times the model's auxiliary loss.

    Args:
        rows: (b, t + 1) int64; each row contains both inputs and targets.
        router: weight of the auxiliary loss, which balances the load of experts; models without experts have none.
        chunked: never hold all logits, see `linear_cross_entropy`; allowed only if `gives_logits(model)`.
        shared_rows: the rows of which `rows` is a slice; None: `rows` are whole. For a model that
            `zero.sequence_parallel` has changed.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:]
    with _chunked(model, targets) if chunked else nullcontext():
        outputs = model(input_ids=inputs, **_places(inputs, shared_rows))
    mean = outputs.logits if chunked else F.cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())
    unbalanced = outputs.get("aux_loss")
    return mean if unbalanced is None else mean + router * unbalanced


def gives_logits(model: Any) -> bool:
    """Return whether a causal model returns the outputs of its linear head unchanged.

    The model is run with a stub for its body and with logits that raise an error for every operator.
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
    except Exception:  # an operator on logits, or another use of the body's outputs
        return False
    finally:
        del vars(body)["forward"], vars(head)["forward"]


class _Outputs(tuple[Tensor]):
    """A stub for the outputs of a model's body: the last hidden states; all other attributes are None."""

    last_hidden_state: Tensor

    def __new__(cls, hidden: Tensor) -> "_Outputs":
        outputs = super().__new__(cls, (hidden,))
        outputs.last_hidden_state = hidden
        return outputs

    def __getattr__(self, name: str) -> None:
        return None


class _Untouchable(Tensor):
    """A tensor that raises TypeError for every operator except `contiguous` and `float`.

    Those two do not change a loss that is computed in fp32.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.float):
            return args[0]
        raise TypeError(f"{func} of logits")


_TARGETS: ContextVar[Tensor | None] = ContextVar("targets", default=None)
"""The targets (b, t) of the chunked loss that is computed; a recomputation in backward finds those of its forward."""


@contextmanager
def _chunked(model: Any, targets: Tensor) -> Iterator[None]:
    """Have the model's head return the chunked loss of `targets` in place of logits."""
    head = model.get_output_embeddings()
    head.forward = partial(_loss_or_logits, head)  # stays: a recomputation calls it after this block
    token = _TARGETS.set(targets)
    try:
        yield
    finally:
        _TARGETS.reset(token)


def _loss_or_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    targets = _TARGETS.get()
    if targets is None:
        return F.linear(hidden, head.weight, head.bias)
    return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias)


def write_settings(path: str | PathLike[str], out: Path) -> None:
    """Write the files that `from_pretrained` needs beside weights: the settings of `path`, and its tokenizer if any.

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


class HFWeights(RangedWeights):
    """Stored tensors by the model's names. A tensor is read, and converted if necessary, when it is accessed.

    Attributes:
        unused: names in the files for which the model has no tensor, except names that its class ignores.
        fresh: names of the parameters that peft has added to the model, except copies of modules.
    """

    def __init__(self, model: nn.Module, stored: StoredWeights) -> None:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        adapters = frozenset(getattr(model, "peft_config", ()))
        tensors = model.state_dict(keep_vars=True)
        plain = {name: plain_name(name, adapters) for name in tensors}
        model = getattr(model, "get_base_model", lambda: model)()  # of a PeftModel
        known, prefix = dict.fromkeys(plain.values(), True), getattr(model, "base_model_prefix", None)
        table = get_model_conversion_mapping(model)
        renamings = [entry for entry in table if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in table if isinstance(entry, loading.WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._model, self._stored = model, stored
        self._sources: dict[str, list[tuple[str, str]]] = {}
        self._converters: dict[str, Any] = {}
        self._first: dict[str, str] = {}
        self._last: tuple[str, dict[str, Tensor]] | None = None
        ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        unused = []
        for key in sorted(stored, key=loading.dot_natural_key):  # sorts experts by number
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = key, None
            if name not in known:
                unused += [] if any(pattern.search(name) for pattern in ignored) else [key]
                continue
            self._sources.setdefault(name, []).append((pattern or key, key))
            for target in by_pattern[pattern].target_patterns if pattern else (name,):
                first = by_pattern[pattern].target_patterns[0] if pattern else name
                self._first.setdefault(name.replace(first, target), name)
            if pattern:
                self._converters[name] = by_pattern[pattern]
        self.unused = tuple(unused)
        in_files = {id(tensors[name]): base_name for name, base_name in plain.items() if base_name in self._first}
        tied = {plain[name]: in_files[id(tensor)] for name, tensor in tensors.items() if id(tensor) in in_files}
        stored_as = tied | {name: name for name in self._first}
        self._plain = {name: stored_as[base_name] for name, base_name in plain.items() if base_name in stored_as}
        new = {name for name in tensors if not adapters.isdisjoint(parts := name.split(".")) and COPIES not in parts}
        self.fresh = frozenset(new - self._plain.keys())

    def __getitem__(self, name: str) -> Tensor:
        name = self._plain[name]
        first = self._first[name]
        if first not in self._converters:
            return self._stored[self._key(first)]
        if self._last is None or self._last[0] != first:
            self._last = None  # freed before the next tensors are made
            self._last = first, self._translated(first)
        return self._last[1][name]

    def shape(self, name: str) -> tuple[int, ...]:
        first = self._first[self._plain[name]]
        return tuple(self[name].shape) if first in self._converters else self._stored.shape(self._key(first))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        first = self._first[self._plain[name]]
        if first in self._converters:
            return self[name].reshape(-1)[start:stop]
        return self._stored.read(self._key(first), start, stop)

    def _key(self, first: str) -> str:
        """Return the name in the files of a tensor that needs no conversion."""
        return self._sources[first][0][1]

    def __contains__(self, name: object) -> bool:
        return name in self._plain  # the method of Mapping would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def __str__(self) -> str:
        keys = [key for sources in self._sources.values() for _, key in sources]
        nbytes = sum(map(self._stored.nbytes, keys))
        return f"weights of {self._stored.path}: {len(keys)} tensors, {nbytes:,} bytes"

    def _translated(self, first: str) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converters[first])
        for pattern, key in self._sources[first]:
            converter.add_tensor(first, key, pattern, partial(self._stored.__getitem__, key))
        tensors = converter.convert(first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


def _transformers() -> Any:
    require_hf("transformers", "models of Hugging Face need")
    import transformers

    return transformers
