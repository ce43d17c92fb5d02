"""The task of a run: the GPT or a model of transformers, with its loss, its logits and its initial weights."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from zero.core.sizes import size_text
from zero.core.suggest import some
from zero.distributed.world import World
from zero.engine.meta import empty
from zero.errors import ConfigError
from zero.integrations.sequence import sequence_parallel
from zero.sequence import SharedRows, open_group
from zero.settings.optimizers import AdamSection
from zero.trainer.config import Config
from zero.trainer.data.source import ChatConfig
from zero.trainer.models import hf
from zero.trainer.models.gpt import GPT, loss
from zero.trainer.models.gpt_config import GPTConfig
from zero.trainer.models.hf_config import HFConfig, tuned_lr
from zero.trainer.models.lora import add_lora

Loss = Tensor | tuple[Tensor, Tensor]
"""A mean, or a sum with its number of tokens."""


class Task(NamedTuple):
    """A model on meta, with its functions and its initial weights."""

    model: nn.Module
    loss: Callable[[Any, Tensor], Loss]
    """Function from (model, rows of seq + 1 tokens) to the mean cross entropy over next tokens, plus the router's
    loss; with data=chat to its sum over the tokens that train, and their number."""
    cross_entropy: Callable[[Any, Tensor], Loss]
    """Function like `loss`, without the router's loss, for validation."""
    logits: Callable[[Any, Tensor], Tensor]
    """Function from (model, tokens (b, t)) to logits (b, t, vocab)."""
    weights: Any
    """Initial weights for `zero.init`; None: the model initialises itself."""
    flops_per_token: float | None
    """Floating point operations of forward and backward per token; None: unknown."""
    notes: tuple[str, ...] = ()
    """Lines about the initial weights, printed if the run starts without a checkpoint."""


def build_task(config: Config, world: World | None = None) -> Task:
    """Build the model of a run and its functions.

    For an evaluation the model is frozen, so that its plan holds no master, moment or gradient.

    Args:
        world: the world of the run or of its plan; needed if `zero.sequence` is more than 1, and then collective.

    Raises:
        ConfigError: transformers cannot build the model, or it does not fit the data.
    """
    chosen, shared_rows = config.model, None
    if config.zero.sequence > 1:
        assert world is not None
        shared_rows = SharedRows(open_group(world, config.zero.sequence))
    if isinstance(chosen, HFConfig):
        task = _of_transformers(config, chosen, shared_rows)
    else:
        task = _gpt(config, chosen, shared_rows)
    if config.mode == "eval":
        task.model.requires_grad_(False)
    return task


def loss_of(config: Config, model: nn.Module, shared_rows: SharedRows | None) -> Callable[..., Loss]:
    """Return the loss function of a model, see `Task`, in chunks if the settings and the model allow it.

    Slices have equally many tokens, which all count, so the mean over ranks of the means is the mean over all tokens.
    """
    if not isinstance(config.model, HFConfig):
        return partial(loss, shared_rows=shared_rows)
    chunked = config.model.chunked_loss and hf.gives_logits(model)
    by_tokens = isinstance(config.data, ChatConfig)
    return partial(hf.loss_by_tokens if by_tokens else hf.loss, chunked=chunked, shared_rows=shared_rows)


def _gpt(config: Config, sizes: GPTConfig, shared_rows: SharedRows | None) -> Task:
    with empty():
        model = GPT(sizes)
    mean = loss_of(config, model, shared_rows)
    return Task(model, mean, mean, lambda model, tokens: model(tokens), None, sizes.flops_per_token)


def _of_transformers(config: Config, chosen: HFConfig, shared_rows: SharedRows | None) -> Task:
    model: Any = hf.build(chosen.files())
    settings = model.config
    if other := hf.not_causal(model):
        raise ConfigError(
            f"model.path={chosen.path} is {other}, but train.py trains only causal language models. Train others in "
            "your own loop with zero.trainer.models.hf.build and zero.make_step."
        )
    text = settings.get_text_config()
    if config.vocab > text.vocab_size:
        raise ConfigError(
            f"model.path={chosen.path} knows {text.vocab_size} tokens, fewer than the {config.vocab} of "
            f"data={config.data.name}. Choose other data."
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and chosen.seq > longest:
        raise ConfigError(
            f"model.seq={chosen.seq} is more than the {longest} tokens of model.path={chosen.path}. "
            f"Set model.seq={longest}."
        )
    packed = isinstance(config.data, ChatConfig) and config.data.pack
    if packed and shared_rows is None and not hf.knows_documents(model):  # attention of shared rows knows them
        raise ConfigError(
            f"data.pack: the chats of a row would see each other in a {type(model).__name__}. Set data.pack=false."
        )
    whole_rows = None
    if shared_rows is not None:
        sequence_parallel(model, shared_rows.group)
        whole_rows = SharedRows(World.solo(shared_rows.group.device))
    if chosen.lora.rank:
        add_lora(model, chosen)
    folder = chosen.files(weights=config.mode == "train")
    weights = hf.weights(model, folder) if any(folder.glob("*.safetensors")) else None
    if weights is None and any(folder.glob("*.bin")):
        raise ConfigError(f"model.path={folder}: the weights are pickle files. Save them as safetensors first.")
    if weights is None and chosen.lora.rank and config.mode == "train":
        raise ConfigError(
            f"model.lora: model.path={chosen.path} has no safetensors, so the frozen base would be random. "
            "Set model.path=FOLDER, a folder with weights."
        )
    router = float(getattr(text, "router_aux_loss_coef", None) or 0.0)
    notes = [*_notes_on(config, weights, folder)]
    if chosen.chunked_loss and not hf.gives_logits(model):
        notes.append(
            f"model.chunked_loss: {type(model).__name__} changes the result of its head, so all logits are held in "
            f"memory ({size_text(4 * chosen.seq * text.vocab_size)} for each row)"
        )
    mean = loss_of(config, model, shared_rows)
    logits = partial(hf.logits, shared_rows=whole_rows)
    flops = hf.flops_per_token(model, chosen.seq)
    return Task(model, partial(mean, router=router), mean, logits, weights, flops, tuple(notes))


def _notes_on(config: Config, weights: hf.HFWeights | None, folder: Path) -> Iterator[str]:
    """Yield lines about the initial weights: source, unused tensors, and a learning rate that is too high for them."""
    if weights is None:
        yield f"weights: random, because {folder} holds no safetensors" if folder.is_dir() else "weights: random"
        return
    yield str(weights)
    if weights.unused:
        yield f"warning: tensors that this model does not use: {some(weights.unused)}"
    adapts = bool(weights.fresh)
    if isinstance(config.optim, AdamSection) and config.optim.lr == tuned_lr(str(folder), adapts=adapts):
        yield f"optim.lr={config.optim.lr:g}, the default for {'an adapter' if adapts else 'trained weights'}"
    default = type(config.optim)().lr
    if config.optim.lr >= default and not weights.fresh:  # an adapter is new
        yield (
            f"warning: optim.lr={config.optim.lr:g} suits random weights and may destroy these trained ones. "
            f"A usual value is optim.lr={default / 50:g}."
        )
