"""TRL's trainers with ZeRO: `from zero.integrations.trl import SFTTrainer` in place of TRL's own.

    SFTTrainer("path/to/llama", train_dataset=chats, zero={"offload": "nvme"}).train()

A model named by its folder is built on meta and read into shards, so no rank holds all of it. Written for TRL 1.16.
"""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
import trl
from torch import nn
from transformers import TrainingArguments

from zero.engine.meta import lacks_values
from zero.engine.whole import Weights
from zero.integrations.model_folder import build, settings, weights
from zero.integrations.transformers import ZeroTrainerMixin

AnyModel = str | PathLike[str] | nn.Module


class FolderMixin(ZeroTrainerMixin):
    """A mixin for trainers that take a model, or the folder of one.

    A folder is left to TRL, which loads the whole model on every rank, if the arguments say how to load it
    (`model_init_kwargs`, `quantization_config`), and for `precompute_ref_log_probs`, which hashes all parameters.
    """

    _folder: Path | None = None

    def initial_values(self, model: nn.Module) -> Weights:
        """Return the values in the folder for a model on meta, and otherwise those of the settings."""
        values = super().initial_values(model)
        if values is None and self._folder is not None and any(map(lacks_values, model.parameters())):
            return weights(model, self._folder)
        return values

    def _on_meta(self, model: AnyModel, args: TrainingArguments | None, more: dict[str, Any]) -> AnyModel:
        """Return the model of a folder on meta; anything else as it is."""
        if isinstance(model, nn.Module):
            return model
        says_how = [getattr(args, name, None) for name in ("model_init_kwargs", "precompute_ref_log_probs")]
        if any(says_how) or more.get("quantization_config") is not None or not Path(model).is_dir():
            return str(model)
        self._folder = Path(model)
        return _built(self._folder)


def _built(folder: Path) -> nn.Module:
    """Return the model of a folder on meta, except its head, without memory for parameters.

    TRL passes the head's weight to an autograd function, and torch rejects the function's gradient of a tensor on meta.
    """
    model: Any = build(folder)
    model.config.use_cache = settings(folder).use_cache  # TRL turns the cache off in each forward
    old = model.get_output_embeddings().weight
    new = nn.Parameter(torch.full((), torch.nan, dtype=old.dtype).expand(old.shape))
    for module in model.modules():  # the input embedding may be tied to the head
        for name in [name for name, parameter in module._parameters.items() if parameter is old]:
            module._parameters[name] = new
    return model


class SFTTrainer(FolderMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` with ZeRO.

    Args:
        model: a model, or the folder of one, which is read into shards.
        args: TRL's `SFTConfig`.
        *more: further arguments of TRL's trainer.
        **keywords: its keyword arguments; and `zero`, see `ZeroTrainerMixin`.
    """

    def __init__(self, model: AnyModel, args: TrainingArguments | None = None, *more: Any, **keywords: Any) -> None:
        super().__init__(self._on_meta(model, args, keywords), args, *more, **keywords)


class DPOTrainer(FolderMixin, trl.DPOTrainer):
    """`trl.DPOTrainer` with ZeRO: the reference is sharded as the policy is, without gradients and moments.

    Args:
        model: a model, or the folder of one, which is read into shards.
        ref_model: the reference; None: the model before training, or with `peft_config` the model without its adapter.
        args: TRL's `DPOConfig`. With `precompute_ref_log_probs` no reference is kept.
        *more: further arguments of TRL's trainer.
        **keywords: its keyword arguments; and `zero`, see `ZeroTrainerMixin`.
    """

    def __init__(
        self,
        model: AnyModel,
        ref_model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *more: Any,
        **keywords: Any,
    ) -> None:
        policy = self._on_meta(model, args, keywords)
        if self._folder is not None and ref_model is None and keywords.get("peft_config") is None:
            ref_model = _built(self._folder).eval()
        super().__init__(policy, ref_model, args, *more, **keywords)

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """Return the reference's log probabilities; those of the policy before training need its engine."""
        if model is self.model:
            self.open_engine()
        return super().compute_ref_log_probs(model, inputs)
