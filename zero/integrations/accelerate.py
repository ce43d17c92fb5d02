"""Accelerate scripts with ZeRO: `from zero.integrations.accelerate import Accelerator` in place of accelerate's own.

    accelerator = Accelerator(zero={"stage": 3, "offload": "cpu"}, gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The rest of a script stays. Each model that trains has an engine, made with its optimizer; others, such as a frozen
teacher, are prepared by Accelerate. Written for Accelerate 1.15.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from zero.distributed.world import World, open_world
from zero.errors import CheckpointError, ConfigError
from zero.integrations.foreign_loop import STATE_FOLDER, check_plan_settings, check_precision, new_engine
from zero.integrations.trainer_accelerator import EngineOptimizer
from zero.user_loop.engine import Engine


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` with a `zero.Engine` for each model that trains.

    Args:
        *args: arguments of Accelerator.
        **kwargs: keyword arguments of Accelerator.
        zero: arguments of `zero.Plan`, by name, such as `stage` (default 2), `offload` and `activations`; and
            `weights`, see `zero.init`.

    Attributes:
        engine: the engine of the first model that trains, from the `prepare` of its optimizer on; None before. That of
            another is `optimizer.engine` of its prepared optimizer.

    Raises:
        ConfigError: an unknown setting, or `accelerate launch` was told to use DeepSpeed, FSDP or a compiler.
    """

    engine: Engine | None = None
    _world: World | None = None

    def __init__(self, *args: Any, zero: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._plan_settings = {"stage": 2} | dict(zero or {})
        check_plan_settings(self._plan_settings, "Accelerator(...)")
        super().__init__(*args, **kwargs)
        if self.distributed_type not in (accelerate.DistributedType.NO, *_PLAIN):
            raise ConfigError(
                f"accelerate launch was told to use {self.distributed_type.value}, which zero replaces. Start with "
                "torchrun, or with accelerate launch --multi_gpu."
            )
        if self.mixed_precision == "fp8":
            raise ConfigError("mixed_precision=fp8 is not supported. Choose from bf16, fp16 and no.")
        precision = "fp32" if self.mixed_precision == "no" else self.mixed_precision
        check_precision(precision, self._plan_settings, ("mixed_precision", "zero={{'precision': {!r}}}"))
        self._precision, self._trained = precision, list[nn.Module]()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers in any order; return them in that order."""
        places = sorted(range(len(args)), key=lambda place: not isinstance(args[place], nn.Module))  # models first
        placed = None if device_placement is None else [device_placement[place] for place in places]
        prepared = super().prepare(*(args[place] for place in places), device_placement=placed)
        if len(args) == 1:
            return prepared
        return tuple(prepared[places.index(place)] for place in range(len(args)))

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Return a model that trains itself: its calls run its engine from the `prepare` of its optimizer on.

        A model that is only evaluated needs `evaluation_mode=True`, or no parameter that requires a gradient.
        """
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return super().prepare_model(model, device_placement, evaluation_mode=True)  # no DDP, which it refuses
        if all(model is not other for other in self._trained):
            self._trained.append(model)
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Make the engine of the optimizer's model, and return an optimizer whose `step` is the engine's.

        Raises:
            ConfigError: the optimizer's model was not prepared, the optimizer holds parameters of several models, or
                several models train in fp16.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        models = _with_any_of(held, self._trained)
        if len(models) > 1:
            raise ConfigError(f"an optimizer over the parameters of {len(models)} models: make an optimizer for each.")
        if not models:
            raise ConfigError(
                "accelerator.prepare(optimizer) before its model. Prepare the model first, or both together."
            )
        self._world = self._world or open_world(device="cpu" if str(self.device) == "cpu" else None)
        engine = new_engine(
            models[0],
            optimizer,
            self._world,
            self._plan_settings,
            precision=self._precision,
            accumulate=self.gradient_accumulation_steps,
            clip=None,
        )
        self._optimizers.append(EngineOptimizer(engine, engine.step))
        if len(self._optimizers) > 1 and engine.plan.precision.compute == torch.float16:
            raise ConfigError("several models that train in fp16: a loss has one scale. Use bf16.")
        self.engine = self._optimizers[0].engine
        return self._optimizers[-1]

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward into every engine whose model has run; several losses of a microbatch add up."""
        if not loss.requires_grad or self.engine is None:
            super().backward(loss, **kwargs)
            return
        running = [item for item in self._optimizers if item.engine.current.in_microbatch] or self._optimizers[:1]
        loss = loss / self.gradient_accumulation_steps  # the present number, which a script may change
        for optimizer in running:
            optimizer.backwards += 1
        for optimizer in running[1:]:
            loss = optimizer.engine.scale(loss)
        running[0].engine.backward(loss, scale_wrt_gas=False, **kwargs)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Context manager around a microbatch that does not end its step; `accumulate` uses it, too."""
        yield
        for optimizer in self._optimizers:
            engine = optimizer.engine
            if engine.module is model and engine.current.in_microbatch:
                engine.set_gradient_accumulation_boundary(False)
                engine.step()
                engine.set_gradient_accumulation_boundary(None)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing, because the step divides by the loss scale before it clips."""

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Have the step clip at `max_norm`. Return the norm as a 0-dim tensor, which is NaN until the step fills it.

        Raises:
            ConfigError: another norm than the 2-norm, or parameters of several models.
        """
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_(norm_type={norm_type:g}): the step clips by the 2-norm alone.")
        if self.engine is None or not self.sync_gradients:
            return None
        models = _with_any_of(parameters, self._trained)
        if len(models) != 1:
            raise ConfigError(f"clip_grad_norm_ over parameters of {len(models)} models that train: call it for each.")
        optimizer = next(item for item in self._optimizers if item.engine.module is models[0])
        optimizer.engine.clip(float(max_norm))
        optimizer.grad_norm = torch.full((), math.nan)
        return optimizer.grad_norm

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Raise ConfigError, because gradients are in shards."""
        raise ConfigError("clip_grad_value_ is not supported, because gradients are in shards. Use clip_grad_norm_.")

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the parameters of a model. If it trains, rank 0 returns all and other ranks {}. Collective."""
        for optimizer in self._optimizers:
            if optimizer.engine.module is model:
                return optimizer.engine.state_dict_on_rank_0() or {}
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Save the engine's state in shards and all else as Accelerate does; return the folder. Collective."""
        with _without_models(self):
            folder: str = super().save_state(output_dir, *args, **kwargs)
        for number, optimizer in enumerate(self._optimizers):
            optimizer.engine.save_checkpoint(folder, _state_folder(number), save_latest=False)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` has written. Collective.

        Raises:
            ConfigError: `input_dir` is not given.
            CheckpointError: there is no training state of an engine.
        """
        if input_dir is None:
            raise ConfigError("accelerator.load_state needs the folder that save_state has returned.")
        with _without_models(self):
            super().load_state(input_dir, *args, **kwargs)
        for number, optimizer in enumerate(self._optimizers):
            path, _ = optimizer.engine.load_checkpoint(input_dir, _state_folder(number))
            if path is None:
                raise CheckpointError(
                    f"{input_dir}/{_state_folder(number)} holds no training state. Another Accelerator saved it."
                )


_PLAIN = (accelerate.DistributedType.MULTI_CPU, accelerate.DistributedType.MULTI_GPU)
"""Accelerate's names for several processes that each have a model."""


def _state_folder(number: int) -> str:
    """Return the name of the folder with the state of a model, by the order in which optimizers were prepared."""
    return f"{STATE_FOLDER}-{number}" if number else STATE_FOLDER


def _with_any_of(parameters: Iterable[Tensor] | Tensor, models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the models that have one of the parameters."""
    wanted = {id(parameter) for parameter in ([parameters] if isinstance(parameters, Tensor) else parameters)}
    return [model for model in models if not wanted.isdisjoint(map(id, model.parameters()))]


@contextmanager
def _without_models(accelerator: Accelerator) -> Iterator[None]:
    """Context manager in which an accelerator saves and loads no model that the engine saves."""
    models = accelerator._models
    accelerator._models = [model for model in models if all(model is not other for other in accelerator._trained)]
    try:
        yield
    finally:
        accelerator._models = models
