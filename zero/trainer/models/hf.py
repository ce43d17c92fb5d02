"""Unmodified models of transformers, built and loaded by `zero.integrations.model_folder`, trained on rows of tokens.

    model = build(folder)                                    # parameters on meta
    plan = zero.Plan(model, ...)
    state = zero.init(plan, store, weights=weights(model, folder))

If names and tensors in the files are the model's, `zero.init(..., weights=folder)` works too.
"""

import inspect
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero.integrations.model_folder import (
    HFWeights as HFWeights,
    build as build,
    settings as settings,
    weights as weights,
)
from zero.losses import IGNORE_INDEX, linear_cross_entropy
from zero.sequence import SharedRows
from zero.trainer import hub
from zero.trainer.data.rows import positions_of, tokens_of, trains_of

LossReduction = Literal["mean", "sum"]


def not_causal(model: Any) -> str | None:
    """Return a description of a model that is not a causal language model; None if it is one.

    The name of the class is not enough: encoders such as BERT have a causal-language-model class, which attends to
    later tokens unless the settings say `is_decoder`. Other models have no such setting, or do not read it.
    """
    from transformers.models.auto import modeling_auto as known

    name = type(model).__name__
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
    fused = (other for other in experts.parameters() if other.dim() > 2)  # an adapter has matrices for all experts
    return len(experts) if isinstance(experts, nn.ModuleList) else next(fused, parameter).shape[0]


def _attention_numel(text: Any, seq: int) -> float:
    """Return the multiplications of attention for a token, in all layers: queries with keys, weights with values."""
    heads = getattr(text, "num_attention_heads", None) or 0
    width = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    head_numel = (getattr(text, "qk_head_dim", None) or width) + (getattr(text, "v_head_dim", None) or width)
    window = min(seq, getattr(text, "sliding_window", None) or seq)
    lengths = {"full_attention": seq, "sliding_attention": window}
    layers = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return float(heads * head_numel * sum(lengths.get(layer, 0) for layer in layers))


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
    places = _places(inputs, shared_rows)
    loss, outputs = _run(model, inputs, targets, places, chunked=chunked, reduction="mean")
    unbalanced = outputs.get("aux_loss")
    return loss if unbalanced is None else loss + router * unbalanced


def loss_by_tokens(
    model: Any,
    rows: Tensor,
    *,
    router: float = 0.0,
    chunked: bool = False,
    shared_rows: SharedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy over the tokens that train, and their number, a 0-dim int64 tensor.

    Args:
        rows: (b, t + 1) coded rows, see `zero.trainer.data.rows`. Attention sees the tokens of its document.
        router, chunked, shared_rows: as in `loss`. The auxiliary loss counts once for each token that trains.
    """
    inputs, trains = tokens_of(rows[:, :-1]), trains_of(rows[:, 1:])
    targets = torch.where(trains, tokens_of(rows[:, 1:]), IGNORE_INDEX)
    # with a cache transformers does not look where documents begin
    places: dict[str, Any] = {"position_ids": positions_of(rows[:, :-1]), "use_cache": False}
    if shared_rows is not None:
        places["shared_rows"] = shared_rows if rows.is_meta else shared_rows.packed(places["position_ids"])
    elif rows.is_meta:  # a trace, in which transformers cannot look where documents begin
        places["attention_mask"] = rows.new_ones(len(rows), 1, *2 * inputs.shape[1:], dtype=torch.bool)
    loss, outputs = _run(model, inputs, targets, places, chunked=chunked, reduction="sum")
    count, unbalanced = trains.sum(), outputs.get("aux_loss")
    return loss if unbalanced is None else loss + router * unbalanced * count, count


def _run(
    model: Any, inputs: Tensor, targets: Tensor, places: Mapping[str, Any], *, chunked: bool, reduction: LossReduction
) -> tuple[Tensor, Any]:
    """Return the cross entropy of targets (b, t), and the outputs of the model."""
    with _chunked(model, targets, reduction) if chunked else nullcontext():
        outputs = model(input_ids=inputs, **places)
    if chunked:
        return outputs.logits, outputs
    logits = outputs.logits.flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction), outputs


KNOWN_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers that see where documents begin, by the names in settings of transformers."""


def knows_documents(model: Any) -> bool:
    """Return whether attention sees the tokens of its document alone, if positions begin anew in a row.

    Models of transformers that make their mask from positions do; others, such as those with ALiBi or a recurrent
    state, would see earlier documents without a word.
    """
    body = inspect.getsource(type(model.base_model).forward)
    makes_mask = (
        re.search(r'(create_causal_mask|mask_function)\([^)]*position_ids|"position_ids": position_ids', body)
        is not None
    )
    makes_mask = makes_mask and "create_causal_mask" in body and "torch.ones" not in body  # ones: a mask of its own
    return makes_mask and {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} <= KNOWN_ATTENTION


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


_TARGETS: ContextVar[tuple[Tensor, LossReduction] | None] = ContextVar("targets", default=None)
"""The targets (b, t) and the reduction of the chunked loss that is computed; a recomputation in backward finds those of
its forward."""


@contextmanager
def _chunked(model: Any, targets: Tensor, reduction: LossReduction) -> Iterator[None]:
    """Have the model's head return the chunked loss of `targets` in place of logits."""
    head = model.get_output_embeddings()
    head.forward = partial(_loss_or_logits, head)  # stays: a recomputation calls it after this block
    token = _TARGETS.set((targets, reduction))
    try:
        yield
    finally:
        _TARGETS.reset(token)


def _loss_or_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    wanted = _TARGETS.get()
    if wanted is None:
        return F.linear(hidden, head.weight, head.bias)
    targets, reduction = wanted
    return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, reduction=reduction)


def write_settings(path: str | PathLike[str], out: Path) -> None:
    """Write the files that `from_pretrained` needs beside weights: the settings of `path`, and its tokenizer if any.

    Raises:
        ConfigError: see `build`.
    """
    folder = Path(path)
    if not folder.is_dir():
        settings(path).save_pretrained(out)
        return
    for pattern in hub.BESIDE:
        for file in folder.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
