"""A Lightning Strategy that trains with ZeRO: `Trainer(strategy=ZeroStrategy(stage=3, offload="nvme"))`.

Lightning's automatic optimization calls its strategy for a training step, and its precision plugin for backward,
clipping and the optimizer's step. These calls are passed to an `Engine`, which takes over the LightningModule as
`zero.initialize` does. Ranks, launchers, samplers and logged values are handled as in Lightning's DDP strategy. Written
for Lightning 2.6.

Lightning divides a loss by `accumulate_grad_batches` before backward, so the engine adds the gradients of microbatches
and averages over ranks.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from fsspec.utils import get_protocol
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torchmetrics import Metric

from zero.core.offload import Offload
from zero.core.precision import Precision as ComputePrecision
from zero.core.stage import Stage
from zero.distributed.world import World, open_world
from zero.engine.meta import empty
from zero.engine.model import Backend
from zero.engine.whole import Weights
from zero.errors import CheckpointError, ConfigError
from zero.integrations.foreign_loop import check_precision, new_engine
from zero.integrations.lightning_features import check_features
from zero.integrations.lightning_folder import load_folder, save_folder
from zero.integrations.lightning_precision import PRECISIONS, EnginePrecision
from zero.user_loop.engine import Engine
from zero.user_loop.made_again import StepMadeAgain


class ZeroStrategy(DDPStrategy):
    """A Lightning Strategy that trains and evaluates a LightningModule with a `zero.Engine`.

    All arguments except `weights` and `timeout` are those of `zero.Plan`. LightningCLI accepts all of them, such as
    `--trainer.strategy.stage 3`.

    Args:
        precision: the precision of compute; None: that of the Trainer.
        weights: initial values of a model whose parameters are on meta, see `zero.init`.
        timeout: the timeout of every wait for other ranks.

    Attributes:
        engine: the `zero.Engine` of the module from the first `fit`, `validate`, `test` or `predict` on; None before.
            `engine.plan` shows the bytes, `zero.get_full(engine, name)` reads a parameter, `engine.destroy()` frees
            memory and disk.
        step: makes a step again that runs out of memory.

    Raises:
        ConfigError: raised by `fit`, if a feature of Lightning is used that is not supported.
    """

    engine: Engine | None = None
    step: StepMadeAgain
    _world: World | None = None
    _in_microbatch = False
    """Whether backward has run since the engine's last step."""
    _has_updated = False
    """Whether parameters were updated and gradients have not been zeroed since."""

    def __init__(
        self,
        *,
        stage: Stage | int = 3,
        precision: ComputePrecision | str | None = None,
        offload: Offload | str | None = None,
        units: Sequence[str | type[nn.Module]] | None = None,
        bucket: int | Literal["auto"] = "auto",
        prefetch: int = 1,
        keep: Sequence[str] = (),
        activations: str | Mapping[str, str] = "keep",
        rows: int = 0,
        compile: Backend = False,
        update: str = "lazy",
        gather: str = "auto",
        reduce: str = "auto",
        shard: str = "world",
        weights: Weights = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(timeout=timeout)
        self._settings: dict[str, Any] = {
            "stage": stage, "offload": offload, "units": units, "bucket": bucket, "prefetch": prefetch,
            "keep": keep, "activations": activations, "rows": rows, "compile": compile, "update": update,
            "gather": gather, "reduce": reduce, "shard": shard, "weights": weights,
        }  # fmt: skip
        if precision is not None:
            self._settings["precision"] = precision

    @property
    def opened(self) -> Engine:
        """The engine, which exists after `setup`."""
        assert self.engine is not None
        return self.engine

    def setup_distributed(self) -> None:
        """Open Lightning's process group, which logged values and metrics use. A single rank needs none."""
        if self.world_size == 1:
            return
        super().setup_distributed()
        local = {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.num_processes}
        variables = {"RANK": self.global_rank, "WORLD_SIZE": self.world_size, **local}
        os.environ.update({name: str(value) for name, value in variables.items()})  # for `zero.open_world`

    def setup(self, trainer: Trainer) -> None:
        """Make the engine on the first call, with the optimizer that `configure_optimizers` returns. Collective."""
        module = self.lightning_module
        self.accelerator.setup(trainer)
        if self.world_size == 1:  # samples in the loader's order, as without a strategy
            trainer._accelerator_connector.use_distributed_sampler = False
        if self.engine is None or self.engine.module is not module:
            self._open_engine(trainer, module)
        elif trainer.state.fn == TrainerFn.FITTING:
            raise ConfigError(
                "a Trainer can fit a model once, before test and predict, but this Trainer ran it already. To train "
                "further, call save_checkpoint, make a new model and Trainer, and call fit(ckpt_path=...)."
            )
        self.setup_precision_plugin()
        for optimizer in (*self.optimizers, *self._lightning_optimizers):
            optimizer.zero_grad = self._zero_grad

    def _open_engine(self, trainer: Trainer, module: LightningModule) -> None:
        fits, passed = trainer.state.fn == TrainerFn.FITTING, None
        precision = PRECISIONS[self.precision_plugin.precision]
        check_features(module, trainer, fits)
        check_precision(precision, self._settings, ("Trainer(precision=...)", "ZeroStrategy(precision={!r})"))
        if self.engine is not None:
            self.engine.destroy()
        device = self.root_device
        name = "cpu" if device == torch.device("cpu") else None
        self._world = self._world or open_world(device=name, timeout_s=self._timeout.total_seconds())
        if self._world.device != device:
            raise ConfigError(
                f"Trainer chose {device} for this rank, not {self._world.device}. Choose GPUs with "
                "CUDA_VISIBLE_DEVICES."
            )
        if fits:
            self.setup_optimizers(trainer)
            (passed,) = self.optimizers
        self.engine = new_engine(
            module,
            passed,
            self._world,
            self._settings,
            precision=precision,
            accumulate=trainer.accumulate_grad_batches,
            clip=trainer.gradient_clip_val or None,
        )
        self.step = StepMadeAgain(self.engine, partial(setattr, self, "_in_microbatch", False))
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.to(device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`. First end the previous microbatch, if no optimizer step has ended it."""
        self.end_microbatch(updates=False)
        return super().training_step(*args, **kwargs)

    def end_microbatch(self, *, updates: bool) -> None:
        """End the current microbatch, if any. If `updates` and there are gradients, update parameters. Collective."""
        updates = updates and self.opened.current.has_loss
        if self._in_microbatch:
            self._in_microbatch = False
            self.opened.set_gradient_accumulation_boundary(updates)
            self.opened.step()
        elif updates:  # the last microbatches had no loss, earlier microbatches have gradients
            self.opened.optimizer.step()
        self._has_updated = self._has_updated or updates

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the engine's backward, between Lightning's hooks.

        Raises:
            ConfigError: `optimizer_zero_grad` is overridden and did not drop the gradients of the last update.
        """
        if self._has_updated:
            raise ConfigError(
                "optimizer_zero_grad is overridden and did not call optimizer.zero_grad(): an update uses up its "
                "gradients. Call it, or add up microbatches with Trainer(accumulate_grad_batches=...)."
            )
        self._in_microbatch = True
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        # replaces the optimizer's `zero_grad`
        self._has_updated = False
        if self.opened.current.has_loss:
            self.opened.zero_grad()

    def teardown(self) -> None:
        """Tear down Lightning's plugins, but keep the engine, because `test` continues with it."""
        for plugin in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            plugin.teardown()

    # -- devices and dtypes --------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The Trainer's precision plugin, wrapped so that backward, clipping and update are the engine's."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else EnginePrecision(plugin, self)

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return the context in which `configure_model` and `trainer.init_module()` create modules.

        Parameters are in host memory, or on meta, without memory, if `empty_init`.
        """
        return empty() if empty_init else nullcontext()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because the engine must exist to read a checkpoint into its shards."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return {}, because `save_checkpoint` writes the parameters."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {}, because the engine saves moments and settings of the groups."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint's folder with the sharded training state. Collective.

        With `weights_only=True`, write a single file in Lightning's format instead. An earlier checkpoint of this name
        is replaced when the new one is complete, see `lightning_folder`.

        Raises:
            CheckpointError: the folder is not on a disk, but for example in an object store; or it exists and is no
                checkpoint.
        """
        place = self.broadcast(filepath)
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = self.opened.state_dict_on_rank_0()
            super().save_checkpoint(checkpoint, place, storage_options)
            return
        if get_protocol(str(place)) != "file":
            raise CheckpointError(
                f"{place}: the training state needs a folder on a disk. Name one, or write save_weights_only=True."
            )
        io = TorchCheckpointIO()
        save_folder(self.opened, Path(place), lambda file: io.save_checkpoint(checkpoint, file, storage_options))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint's folder into the engine, and return Lightning's part. Collective.

        A single file is read and returned as Lightning does.

        Raises:
            CheckpointError: the folder has no training state, or the training state is damaged.
        """
        place = self.broadcast(checkpoint_path)
        path = Path(place)
        if not path.is_dir():
            return super().load_checkpoint(place, weights_only)
        loop_file = load_folder(self.opened, path, strict=self.lightning_module.strict_loading)
        return super().load_checkpoint(loop_file, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load parameters from a file in Lightning's format; `load_checkpoint` has loaded a folder's parameters."""
        if checkpoint["state_dict"]:
            self.opened.load_module_state_dict(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing, because the engine has loaded the moments.

        Raises:
            CheckpointError: the checkpoint was written by another strategy.
        """
        if any(state.get("state") for state in checkpoint["optimizer_states"]):
            raise CheckpointError(
                "another strategy wrote this checkpoint, and its moments cannot be read. Start from its weights with "
                "load_from_checkpoint."
            )
