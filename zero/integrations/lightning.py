"""A Strategy of Lightning on an engine: `Trainer(strategy=ZeroStrategy(stage=3, offload="nvme"))`.

Lightning's automatic optimization calls its strategy for a training step, and its precision plugin for backward,
clipping and the optimizer's step. So that is where the engine goes. The LightningModule is taken over, as by
`zero.initialize`, and remains the object that it was. Ranks, launchers, samplers and logged values are those of
Lightning's DDP. Read for Lightning 2.6.

Lightning's own words for gradients hold: a loss is divided by `accumulate_grad_batches` before its backward, and
gradients of microbatches are added. Only ranks are averaged.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from fsspec.utils import get_protocol
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric

from zero.core.offload import Offload
from zero.core.precision import Precision as ComputePrecision
from zero.core.stage import Stage
from zero.deepspeed.engine import Engine
from zero.distributed.world import World
from zero.engine.compile import Backend
from zero.engine.empty import empty
from zero.engine.first_values import Weights
from zero.engine.placeholder import ParameterPlaceholder
from zero.errors import CheckpointError, ConfigError
from zero.integrations.foreign_loop import STATE_FOLDER, check_precision, check_settings, new_engine

LOOP_FILE = "lightning.ckpt"
"""In each checkpoint: what Lightning keeps beside the training state."""

PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}
"""Lightning's precisions and the engine's."""


class ZeroStrategy(DDPStrategy):
    """Trains and evaluates a LightningModule on an engine.

    Every argument but two is one of `zero.Plan`. LightningCLI has them all: `--trainer.strategy.stage 3`.

    Args:
        precision: None: the Trainer's.
        weights: the first values of a model without memory, see `zero.init`.
        timeout: of every wait for other ranks.

    Attributes:
        engine: has the module's calls from the first `fit`, `validate`, `test` or `predict` on; None before. It is a
            `zero.Engine`: `trainer.strategy.engine.plan` shows the bytes, `zero.get_full(engine, name)` reads a
            parameter, `engine.destroy()` frees memory and disk.

    Raises:
        ConfigError: a setting that does not exist; by `fit`, what cannot be kept.
    """

    engine: Engine | None = None
    _world: World | None = None
    _in_microbatch = False  # a backward was made since the engine's last step
    _has_updated = False  # ... and no gradient was zeroed since

    def __init__(
        self,
        *,
        stage: Stage | int = 3,
        precision: ComputePrecision | str | None = None,
        offload: Offload | str | None = None,
        units: Sequence[str | type[nn.Module]] | None = None,
        prefetch: int = 1,
        activations: str | Mapping[str, str] = "keep",
        compile: Backend = False,
        update: str = "lazy",
        gather: str = "auto",
        reduce: str = "world",
        shard: str = "world",
        weights: Weights = None,
        timeout: timedelta = timedelta(minutes=30),
        **unknown: Any,
    ) -> None:
        check_settings(unknown, "ZeroStrategy({}=...)", "Trainer says")
        super().__init__(timeout=timeout)
        self._settings: dict[str, Any] = {
            "stage": stage, "offload": offload, "units": units, "prefetch": prefetch, "activations": activations,
            "compile": compile, "update": update, "gather": gather, "reduce": reduce, "shard": shard,
            "weights": weights,
        }  # fmt: skip
        if precision is not None:
            self._settings["precision"] = precision

    @property
    def opened(self) -> Engine:
        """The engine, which is there from `setup` on."""
        assert self.engine is not None
        return self.engine

    # -- a run ---------------------------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        """Lightning's process group, which logged values and metrics use; none for a rank alone."""
        if self.world_size == 1:
            return
        super().setup_distributed()
        local = {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.num_processes}
        all_of_them = {"RANK": self.global_rank, "WORLD_SIZE": self.world_size, **local}
        os.environ.update({name: str(value) for name, value in all_of_them.items()})  # for `World.from_env`

    def setup(self, trainer: Trainer) -> None:
        """Make the engine, the first time, with the optimizer of `configure_optimizers`. Collective.

        Raises:
            ConfigError, PlanError: one line.
        """
        module = self.lightning_module
        self.accelerator.setup(trainer)
        if self.world_size == 1:  # as on a device alone: rows in the order of the loader
            trainer._accelerator_connector.use_distributed_sampler = False
        if self.engine is None or self.engine.module is not module:
            self._open_engine(trainer, module)
        elif trainer.state.fn == TrainerFn.FITTING:
            raise ConfigError(
                "this Trainer's engine has this model already: fit once, before test and predict; to train on, "
                "save_checkpoint, make model and Trainer anew, and fit(ckpt_path=...)"
            )
        self.setup_precision_plugin()
        for one in (*self.optimizers, *self._lightning_optimizers):
            one.zero_grad = self._zero_grad

    def _open_engine(self, trainer: Trainer, module: LightningModule) -> None:
        fits, given = trainer.state.fn == TrainerFn.FITTING, None
        precision = PRECISIONS[self.precision_plugin.precision]
        _check(module, trainer, fits)
        check_precision(precision, self._settings, ("Trainer(precision=...)", "ZeroStrategy(precision={!r})"))
        if self.engine is not None:
            self.engine.destroy()
        device = self.root_device
        where = {"device": "cpu" if device == torch.device("cpu") else None, "timeout_s": self._timeout.total_seconds()}
        self._world = self._world or World.from_env(**where)
        if self._world.device != device:
            raise ConfigError(
                f"Trainer chose {device} here, not {self._world.device}: set CUDA_VISIBLE_DEVICES instead"
            )
        if fits:
            self.setup_optimizers(trainer)
            (given,) = self.optimizers
        count, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val or None
        how = {"precision": precision, "accumulate": count, "clip": clip}
        self.engine = new_engine(module, given, self._world, self._settings, **how)
        for metric in (one for one in module.modules() if isinstance(one, Metric)):
            metric.to(device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. Where the last one made no optimizer step, its microbatch ends here."""
        self.end_microbatch(updates=False)
        return super().training_step(*args, **kwargs)

    def end_microbatch(self, *, updates: bool) -> None:
        """End a microbatch, if one has begun, and update if that is wanted and there are gradients. Collective."""
        updates = updates and self.opened.has_loss
        if self._in_microbatch:
            self._in_microbatch = False
            self.opened.set_gradient_accumulation_boundary(updates)
            self.opened.step()
        elif updates:  # the last microbatches had no loss, those before them have gradients
            self.opened.optimizer.step()
        self._has_updated = self._has_updated or updates

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The engine's, between Lightning's hooks.

        Raises:
            ConfigError: the gradients of the last update shall remain.
        """
        if self._has_updated:
            raise ConfigError(
                "optimizer_zero_grad is overridden and did not call optimizer.zero_grad(): an update uses its "
                "gradients up here; call it, or add up microbatches with Trainer(accumulate_grad_batches=...)"
            )
        self._in_microbatch = True
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's `zero_grad`: what arrived since the last update is dropped."""
        self._has_updated = False
        if self.opened.has_loss:
            self.opened.zero_grad()

    def teardown(self) -> None:
        """The engine stays: `test` goes on with it."""
        for one in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            one.teardown()

    # -- what is on which device, and in which dtype -------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """Trainer's, where backward, clipping and update are the engine's."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, given: Precision | None) -> None:
        self._precision_plugin = None if given is None else EnginePrecision(given, self)

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """In `configure_model` and `trainer.init_module()`: fp32, in host memory; without memory if `empty_init`."""
        return empty() if empty_init else nullcontext()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Yes: the engine reads it into shards."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` knows what is needed."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {}, because the engine saves moments and settings of the groups."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A folder with the training state in shards; of `weights_only=True` a file as Lightning's. Collective.

        Raises:
            CheckpointError: a folder that is on no disk.
        """
        place = self.broadcast(filepath)
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = self.opened.state_dict_on_rank_0()
            super().save_checkpoint(checkpoint, place, storage_options)
            return
        if get_protocol(str(place)) != "file":
            raise CheckpointError(
                f"{place}: the training state is written to a disk; name a folder there, or save_weights_only=True"
            )
        path = Path(place)
        part, files = path.with_name(f"{path.name}.part"), TorchCheckpointIO()
        if self.is_global_zero:
            files.remove_checkpoint(part)  # of a run that ended while it wrote
        self.opened.save_checkpoint(part, STATE_FOLDER, save_latest=False)
        if self.is_global_zero:
            files.save_checkpoint(checkpoint, part / LOOP_FILE, storage_options)
            files.remove_checkpoint(path)
            part.rename(path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder into the engine, or Lightning's file. Collective.

        Raises:
            CheckpointError: the folder has no training state, or a damaged one.
        """
        place = self.broadcast(checkpoint_path)
        path = Path(place)
        if not path.is_dir():
            return super().load_checkpoint(place, weights_only)
        strict, weights_alone = self.lightning_module.strict_loading, not self.opened.plan.trains
        how = {"load_module_strict": strict, "load_module_only": weights_alone}
        found, _ = self.opened.load_checkpoint(path, STATE_FOLDER, **how)
        if found is None:
            raise CheckpointError(f"{path}/{STATE_FOLDER} holds no training state: it is no checkpoint of ZeroStrategy")
        return super().load_checkpoint(path / LOOP_FILE, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Of Lightning's file; of a folder the engine has read them."""
        if checkpoint["state_dict"]:
            self.opened.load_module_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: the engine has read it.

        Raises:
            CheckpointError: it is of another strategy.
        """
        if any(one.get("state") for one in checkpoint["optimizer_states"]):
            raise CheckpointError(
                "this checkpoint is of another strategy, whose moments cannot be read: start anew from its weights, "
                "with load_from_checkpoint"
            )


class EnginePrecision(Precision):
    """Lightning's plugin `given`, where backward, clipping and update are the engine's.

    Of `given` remain what surrounds a forward (autocast, a default dtype) and the dtype of a batch.
    """

    def __init__(self, given: Precision, strategy: ZeroStrategy) -> None:
        if type(given) not in (Precision, HalfPrecision, MixedPrecision) or given.precision not in PRECISIONS:
            raise ConfigError(
                f"Trainer(precision={given.precision!r}), {type(given).__name__}, has no counterpart here; known are "
                f"{', '.join(PRECISIONS)}"
            )
        self.precision, self._given, self._strategy = given.precision, given, strategy
        self._has_clipped = False

    def forward_context(self) -> Any:
        return self._given.forward_context()

    def convert_input(self, data: Any) -> Any:
        return self._given.convert_input(data)

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._strategy.opened.backward(tensor, scale_wrt_gas=False)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Forward and backward are in `closure`; without gradients nothing is updated. Collective.

        Raises:
            ConfigError: a `configure_gradient_clipping` that does not clip now.
        """
        result = closure()
        self._has_clipped = False
        self._after_closure(model, optimizer)
        clip = self._strategy.opened.plan.optimizer.clip
        if clip and not self._has_clipped:
            raise ConfigError(
                f"configure_gradient_clipping did not call clip_gradients: each step clips by the norm {clip:g}, with "
                "which it was made; call it with that value each time, or leave out Trainer(gradient_clip_val=...)"
            )
        self._strategy.end_microbatch(updates=True)
        return result

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Nothing: the step clips.

        Raises:
            ConfigError: in another way than the Trainer was told.
        """
        clip = self._strategy.opened.plan.optimizer.clip
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM or clip_val != (clip or 0):
            raise ConfigError(
                f"clip_gradients({clip_val:g}, '{gradient_clip_algorithm.value}'): the step clips by the norm "
                f"{clip or 0:g}, with which it was made; write Trainer(gradient_clip_val={clip_val:g})"
            )
        self._has_clipped = True


def _check(module: LightningModule, trainer: Trainer, fits: bool) -> None:
    """Refuse what cannot be kept."""
    has_engine = any(isinstance(one, ParameterPlaceholder) for one in module.parameters())
    averages = any(isinstance(one, StochasticWeightAveraging | WeightAveraging) for one in trainer.callbacks)
    goes_backward = is_overridden("backward", module)
    files = type(trainer.strategy.checkpoint_io)
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    refused = [
        (module._compiler_ctx, "a model of torch.compile: pass it as it is, and write ZeroStrategy(compile=True)"),
        (has_engine, "this model has the engine of another Trainer: use that, or load a checkpoint into a new model"),
        (trainer.strategy._layer_sync, "Trainer(sync_batchnorm=True): each rank keeps its statistics; leave it out"),
        (fits and by_value, "Trainer(gradient_clip_algorithm='value'): the norm is clipped here; leave it out"),
        (fits and averages, "StochasticWeightAveraging and WeightAveraging write whole parameters; leave it out"),
        (
            fits and files is not TorchCheckpointIO,
            f"{files.__name__} would write nothing but weights: ZeroStrategy writes the training state itself; leave "
            "it out",
        ),
        (fits and goes_backward, "LightningModule.backward is overridden: leave it out; the engine goes backward"),
        (
            fits and not module.automatic_optimization,
            "automatic_optimization=False: return the loss from training_step; several optimizers need a loop of "
            "zero.initialize",
        ),
    ]
    for applies, line in refused:
        if applies:
            raise ConfigError(line)
