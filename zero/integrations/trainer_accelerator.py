"""Accelerate's objects as transformers' Trainer uses them, which pass its calls to an engine."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from zero.errors import ConfigError
from zero.user_loop.engine import Engine


class TrainerWithEngine(Protocol):
    """The trainer, which has the engine: see `ZeroTrainerMixin`."""

    model: nn.Module

    def open_engine(self) -> Engine: ...

    def shard_frozen(self, model: nn.Module) -> None: ...

    def end_step(self) -> None: ...


class TrainerAccelerator(Accelerator):
    """An `Accelerator` that uses the engine for the trainer's model, its losses and gradients.

    Attributes:
        trainer: the trainer. Other models than its `model` are sharded too if they are only evaluated, such as a
            reference, and else prepared by Accelerate.
    """

    trainer: TrainerWithEngine

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Make the engine and return the model itself, whose calls now run the engine."""
        if model is self.trainer.model:
            self.trainer.open_engine()
            self._models.append(model)
        elif evaluation_mode:
            self.trainer.shard_frozen(model)
        else:
            return super().prepare_model(model, device_placement, evaluation_mode)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return an optimizer whose `step` is the engine's."""
        if isinstance(optimizer, AcceleratedOptimizer):  # prepared by an earlier `train`
            return super().prepare_optimizer(optimizer, device_placement)
        engine = self.trainer.open_engine()
        if not engine.plan.facts.trains:
            raise ConfigError("this Trainer has no train_dataset, so it can only evaluate. Make a Trainer with one.")
        self._optimizers.append(EngineOptimizer(engine, self.trainer.end_step))
        return self._optimizers[-1]

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the engine's backward. Also end the microbatch, unless it is the last of a step and Trainer ends it."""
        engine = self.trainer.open_engine()
        self._optimizers[-1].backwards += 1
        engine.set_gradient_accumulation_boundary(self.sync_gradients)
        engine.backward(loss, scale_wrt_gas=False, **kwargs)
        if not self.sync_gradients:
            engine.step()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Return the gradient norm as a 0-dim tensor, which is NaN until the optimizer's step clips and fills it."""
        clip = self.trainer.open_engine().plan.optimizer.clip
        if norm_type != 2 or max_norm != (math.inf if clip is None else clip):
            raise ConfigError(
                f"clip_grad_norm_(max_norm={max_norm:g}, norm_type={norm_type:g}): this engine was made with "
                f"max_grad_norm={clip or 0:g} and the 2-norm. Set max_grad_norm before the first train or evaluate."
            )
        optimizer = self._optimizers[-1]
        optimizer.grad_norm = torch.full((), math.nan)
        return optimizer.grad_norm

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Raise ConfigError, because the optimizer file that Accelerate writes would have no moments."""
        raise ConfigError(
            "accelerator.save_state and load_state leave out moments, which are in shards. Set save_steps and call "
            "trainer.train(resume_from_checkpoint=...), or call trainer.engine.save_checkpoint(folder)."
        )

    load_state = save_state


class EngineOptimizer(AcceleratedOptimizer):
    """The engine's optimizer with Accelerate's interface. Schedulers write into its parameter groups.

    Args:
        update: ends a step of the engine.

    Attributes:
        grad_norm: () fp32 the norm of the step's gradient, filled by `step`.
        backwards: number of calls of Accelerate's `backward` in this step.
    """

    def __init__(self, engine: Engine, update: Callable[[], None]) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine, self.grad_norm, self.backwards, self._update = engine, torch.full((), math.nan), 0, update

    def step(self, closure: None = None) -> None:
        """Update all parameters at the last microbatch of a step; do nothing at earlier microbatches. Collective.

        Raises:
            ConfigError: backward was not called through Accelerate, or there is a closure.
        """
        if closure is not None:
            raise ConfigError("optimizer.step(closure): a closure is not supported. Call backward, then step().")
        if not self.gradient_state.sync_gradients:
            return
        if not self.backwards:  # `loss.backward()` would divide by the microbatches twice
            raise ConfigError(
                "optimizer.step() without self.accelerator.backward(loss). Call it in place of loss.backward()."
            )
        self._update()
        self.backwards = 0
        assert self.engine.metrics is not None
        self.grad_norm.fill_(self.engine.metrics.grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return {}, because the engine saves moments and settings of the groups."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing, because the engine loads moments and settings of the groups."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, because a gradient was not finite."""
        return self.engine.overflow
