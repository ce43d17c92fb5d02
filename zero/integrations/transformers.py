"""Hugging Face's `Trainer` with ZeRO: its loop, arguments, callbacks and folders are unchanged.

Trainer trains through Accelerate: it passes model and optimizer to `prepare` and each loss to `backward`, and calls
`clip_grad_norm_` before `optimizer.step`. These calls are passed to an `Engine`, which takes over the model as
`zero.initialize` does. Written for transformers 5.5.4 to 5.23 and Accelerate 1.15.

Trainer divides a loss by the number of microbatches or of tokens in the step before backward, so the engine adds the
gradients of microbatches and averages over ranks.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import DynamoBackend
from torch import Tensor, nn

from zero.distributed.world import World, open_world
from zero.engine.whole import Weights
from zero.errors import CheckpointError, ConfigError
from zero.integrations.foreign_loop import STATE_FOLDER, check_plan_settings, check_precision, new_engine
from zero.integrations.trainer_accelerator import TrainerAccelerator
from zero.user_loop.engine import Engine
from zero.user_loop.full_models import full_on_this_rank
from zero.user_loop.made_again import StepMadeAgain

UNSUPPORTED = {
    "deepspeed": "zero replaces DeepSpeed. Leave it out, and write zero={'stage': 3, 'offload': 'cpu'}.",
    "fsdp": "zero replaces FSDP. Leave it out, and write zero={'stage': 3}.",
    "parallelism_config": "zero has no tensor, context or pipeline parallelism. Leave it out.",
    "torch_compile": "not supported. Write zero={'compile': True} to compile each unit.",
    "auto_find_batch_size": "the engine keeps its first batch size. Set per_device_train_batch_size.",
    "bf16_full_eval": "evaluation has the precision of training. Write zero={'precision': 'bf16'}.",
    "fp16_full_eval": "evaluation has the precision of training. Write zero={'precision': 'fp16'}.",
    "enable_jit_checkpoint": "all ranks save together, but get the signal in different steps. Set save_steps.",
    "save_on_each_node": "a checkpoint is written once, to a disk that all ranks share. Leave it out.",
    "sync_ref_model": "policy and reference are in shards, which TRL's callback cannot edit. Leave it out.",
    "debug": "its hooks read every parameter. Leave it out: trainer.engine.metrics.nonfinite_unit names the unit.",
}
"""Unsupported arguments of `TrainingArguments` -> advice. Arguments for DDP are accepted and have no effect."""

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object  # a user's class inherits from Trainer, or from a subclass, after the mixin


class ZeroTrainerMixin(_Base):
    """A mixin that makes a subclass of Trainer train with ZeRO: `class Mine(ZeroTrainerMixin, SFTTrainer): pass`.

    Args:
        *args: arguments of Trainer.
        **kwargs: keyword arguments of Trainer.
        zero: arguments of `zero.Plan`, by name: `stage` (default 3), `precision` (default by bf16=True, fp16=True or
            `accelerate launch`, else "fp32"), `offload`, `units`, `bucket`, `prefetch`, `keep`, `activations`,
            `rows`, `compile`, `update`, `gather`, `reduce`, `shard`; and `weights`, initial values of a model whose
            parameters are on meta, see `zero.init`. None: Plan's defaults.

    Attributes:
        engine: the `zero.Engine` of `model` from the first `train`, `evaluate` or `predict` on; None before.
            `trainer.engine.plan` shows the bytes, `zero.get_full(trainer.engine, name)` reads a parameter,
            `trainer.engine.destroy()` frees memory and disk.
        frozen_engines: the engines of other models that are only evaluated, such as a reference.

    Raises:
        ConfigError: an unknown setting, or an unsupported argument of `TrainingArguments`.
    """

    engine: Engine | None = None
    _world: World | None = None
    _again: StepMadeAgain

    _dtypes: Mapping[str, torch.dtype]  # dtypes of the model before training

    def __init__(self, *args: Any, zero: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._plan_settings, self.frozen_engines = dict(zero or {}), list[Engine]()
        check_plan_settings(self._plan_settings, "TrainingArguments")
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make Trainer's accelerator, and change its class to `TrainerAccelerator`, which uses the engine."""
        _check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        compiles = self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or compiles:  # set by accelerate launch
            raise ConfigError(
                "accelerate launch was told to use DeepSpeed, FSDP or a compiler, which zero replaces. Start with "
                "torchrun, and write zero={'compile': True} to compile."
            )
        _check_precision(self.accelerator.mixed_precision, self._plan_settings)
        self.accelerator.__class__ = TrainerAccelerator  # keeps the arguments that Trainer passed
        self.accelerator.trainer = self

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing, because the whole model may not fit on the device. A private method of Trainer since 4.3."""

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        # a private method of Trainer since 5, which would read `grad` of every parameter
        return False

    # -- the engine ----------------------------------------------------------------------------------------------------

    def open_engine(self) -> Engine:
        """Return the engine of `model`. The first call makes it, with Trainer's optimizer and its groups. Collective.

        Without a `train_dataset` the engine has no optimizer, because nothing will be trained.
        """
        if self.engine is not None:
            if self.engine.module is self.model:
                return self.engine
            self.engine.destroy()  # `model_init` made another model
        if self.optimizer is None and self.train_dataset is not None:
            self.create_optimizer()
        parameters = self.model.named_parameters(remove_duplicate=False)
        self._dtypes = {name: parameter.dtype for name, parameter in parameters}
        self.engine = self._sharded(self.model, self.optimizer)
        self._again = StepMadeAgain(self.engine)
        generate = getattr(self.model, "generate", None)
        if generate is not None and self.engine.world_size > 1 and self.engine.plan.facts.stage.parameters:
            self.model.generate = _in_step(generate)
        return self.engine

    def shard_frozen(self, model: nn.Module) -> None:
        """Shard another model, which is only evaluated, by the same settings. Its calls are collective from now on."""
        self.frozen_engines.append(self._sharded(model, None))

    def initial_values(self, model: nn.Module) -> Weights:
        """Return the first values of a model's parameters; None: those that it has."""
        return self._plan_settings.get("weights") if model is self.model else None

    def _sharded(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Engine:
        device = "cpu" if self.args.use_cpu else None
        self._world = self._world or open_world(timeout_s=self.args.ddp_timeout, device=device)
        if self.args.world_size != self._world.size:
            raise ConfigError(
                f"{self._world.size} ranks were started, but Trainer sees {self.args.world_size}. Without GPUs write "
                "TrainingArguments(use_cpu=True)."
            )
        return new_engine(
            model,
            optimizer,
            self._world,
            self._plan_settings | {"weights": self.initial_values(model)},
            precision=_precision(self.accelerator.mixed_precision),
            accumulate=self.args.gradient_accumulation_steps,
            clip=self.args.max_grad_norm or None,
            rows=self.args.per_device_train_batch_size,
        )

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run a microbatch. If memory runs out, the step's microbatches run again on lower tiers, see `zero.move`."""
        state, is_last = self.accelerator.gradient_state, self.accelerator.sync_gradients
        run = super().training_step

        def microbatch() -> Tensor:
            state._set_sync_gradients(is_last)
            return run(model, copy(inputs), *args, **kwargs)  # `compute_loss` may take out labels

        return self._again.run(microbatch)

    def end_step(self) -> None:
        """End the step; Accelerate's `optimizer.step` calls it."""
        self._again.end(self.open_engine().step)

    # -- folders: private methods of Trainer since 4.20, because no public one is called on every rank -----------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save full parameters in the dtypes of the model before training, or only adapters. Called on every rank."""
        if state_dict is not None or self.engine is None:
            super()._save(output_dir, state_dict)
            return
        has_adapters = getattr(self.model, "peft_config", None) is not None
        whole = self.engine.state_dict_on_rank_0(without=_never_saved(self.model) if has_adapters else ())
        if whole is not None:
            whole = {name: value.to(self._dtypes.get(name, value.dtype)) for name, value in whole.items()}
        with full_on_this_rank(self.model, whole or {}):
            super()._save(output_dir, whole)
        if self.args.should_save and isinstance(self.model, transformers.PreTrainedModel) and not has_adapters:
            self.model.config.dtype = next(dtype for dtype in self._dtypes.values() if dtype.is_floating_point)
            self.model.config.save_pretrained(output_dir or self.args.output_dir)  # `super` wrote the dtype of compute

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # saves the scheduler
        self.open_engine().save_checkpoint(output_dir, STATE_FOLDER, save_latest=False)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # only a check, because `_load_optimizer_and_scheduler` loads the weights later
        if not (Path(resume_from_checkpoint) / STATE_FOLDER).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no folder {STATE_FOLDER!r} with the training state, because another "
                "Trainer or save_only_model=True wrote it. Start from its weights with from_pretrained."
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_state(checkpoint)

    def _load_best_model(self) -> None:
        if (Path(self.state.best_model_checkpoint) / STATE_FOLDER).is_dir():
            self._load_state(self.state.best_model_checkpoint)
        else:  # save_only_model=True
            super()._load_best_model()

    def _load_state(self, folder: str) -> None:
        path, _ = self.open_engine().load_checkpoint(folder, STATE_FOLDER)
        if path is None:
            raise CheckpointError(f"{folder}/{STATE_FOLDER} holds no training state. Resume from another checkpoint.")


class Trainer(ZeroTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with ZeRO: `Trainer(model=..., args=..., train_dataset=..., zero={"stage": 3})`.

    See `ZeroTrainerMixin` for `zero` and `engine`, and transformers for everything else.
    """


# Inside


def _check_arguments(args: transformers.TrainingArguments) -> None:
    for key, instead in UNSUPPORTED.items():
        if getattr(args, key, None) not in (None, False, [], "", {}):
            raise ConfigError(f"TrainingArguments({key}=...): {instead}")
    if args.n_gpu > 1:
        start = f"torchrun --nproc-per-node {args.n_gpu}"
        raise ConfigError(f"one process sees {args.n_gpu} GPUs. Start a process for each with {start}.")


def _check_precision(mixed: str, settings: Mapping[str, Any]) -> None:
    if mixed == "fp8":
        raise ConfigError("accelerate launch --mixed_precision=fp8 is not supported. Choose from bf16, fp16 and no.")
    names = f"TrainingArguments({mixed}=True), or --mixed_precision of accelerate launch,"
    check_precision(_precision(mixed), settings, (names, "zero={{'precision': {!r}}}"))


def _precision(mixed: str) -> str:
    return "fp32" if mixed == "no" else mixed


def _never_saved(model: nn.Module) -> set[str]:
    """Return the names of frozen parameters that PEFT never saves, so that rank 0 need not hold them.

    They are most of the base model. PEFT saves inactive adapters, frozen parts of an active adapter, and resized
    embeddings.
    """
    adapters, embeddings = set(getattr(model, "peft_config", ())), set[int]()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(AttributeError, NotImplementedError):  # a model without them
            embeddings |= {id(parameter) for parameter in getattr(model, get)().parameters()}
    frozen = [item for item in model.named_parameters(remove_duplicate=False) if not item[1].requires_grad]
    return {
        name for name, parameter in frozen if id(parameter) not in embeddings and adapters.isdisjoint(name.split("."))
    }


def _in_step(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `generate` that continues until every rank has finished, because all ranks must run sharded layers."""

    @wraps(generate)
    def generated(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{**kwargs, "synced_gpus": True})

    return generated
