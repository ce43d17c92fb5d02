"""Accelerate scripts with ZeRO: `from zero.integrations.accelerate import Accelerator` in place of accelerate's own.

    accelerator = Accelerator(zero={"stage": 3, "offload": "cpu"}, gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The rest of a script stays. One model trains; others, such as a frozen teacher, are prepared by Accelerate. Written for
Accelerate 1.15.
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
    """`accelerate.Accelerator` with a `zero.Engine` for the model that trains.

    Args:
        *args: arguments of Accelerator.
        **kwargs: keyword arguments of Accelerator.
        zero: arguments of `zero.Plan`, by name, such as `stage` (default 2), `offload` and `activations`; and
            `weights`, see `zero.init`.

    Attributes:
        engine: the engine, from the `prepare` of the model's optimizer on; None before.

    Raises:
        ConfigError: an unknown setting, or `accelerate launch` was told to use DeepSpeed, FSDP or a compiler.
    """

    engine: Engine | None = None
    _world: World | None = None
    _trained: nn.Module | None = None

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
        self._precision = precision

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers in any order; return them in that order."""
        places = sorted(range(len(args)), key=lambda place: not isinstance(args[place], nn.Module))  # models first
        placed = None if device_placement is None else [device_placement[place] for place in places]
        prepared = super().prepare(*(args[place] for place in places), device_placement=placed)
        if len(args) == 1:
            return prepared
        return tuple(prepared[places.index(place)] for place in range(len(args)))

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Return the model that trains itself: its calls run the engine from the `prepare` of its optimizer on.

        A model that is only evaluated needs `evaluation_mode=True`, or no parameter that requires a gradient.

        Raises:
            ConfigError: another model trains already.
        """
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return super().prepare_model(model, device_placement, evaluation_mode=True)  # no DDP, which it refuses
        if self._trained is not None and model is not self._trained:
            raise ConfigError(
                f"a second model that trains, a {type(model).__name__}: freeze it with requires_grad_(False), or write "
                "a loop of your own with two engines of zero.initialize."
            )
        if self._trained is None:
            self._trained = model
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Make the engine, with the optimizer's groups, and return an optimizer whose `step` is the engine's.

        Raises:
            ConfigError: the optimizer's model was not prepared.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if self._trained is None:
            raise ConfigError(
                "accelerator.prepare(optimizer) before its model. Prepare the model first, or both together."
            )
        self._world = self._world or open_world(device="cpu" if str(self.device) == "cpu" else None)
        self.engine = engine = new_engine(
            self._trained,
            optimizer,
            self._world,
            self._plan_settings,
            precision=self._precision,
            accumulate=self.gradient_accumulation_steps,
            clip=None,
        )
        self._optimizers.append(EngineOptimizer(engine, engine.step))
        return self._optimizers[-1]

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the engine's backward; several losses of a microbatch add up."""
        if not loss.requires_grad or self.engine is None:
            super().backward(loss, **kwargs)
            return
        self._optimizers[-1].backwards += 1
        # by the present number, which a script may change
        self.engine.backward(loss / self.gradient_accumulation_steps, scale_wrt_gas=False, **kwargs)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Context manager around a microbatch that does not end its step; `accumulate` uses it, too."""
        if model is not self._trained or self.engine is None:
            yield
            return
        optimizer = self._optimizers[-1]
        before = optimizer.backwards
        yield
        if optimizer.backwards > before:
            self.engine.set_gradient_accumulation_boundary(False)
            self.engine.step()
            self.engine.set_gradient_accumulation_boundary(None)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing, because the step divides by the loss scale before it clips."""

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Have the step clip at `max_norm`. Return the norm as a 0-dim tensor, which is NaN until the step fills it.

        Raises:
            ConfigError: another norm than the 2-norm.
        """
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_(norm_type={norm_type:g}): the step clips by the 2-norm alone.")
        if self.engine is None or not self.sync_gradients:
            return None
        self.engine.clip(float(max_norm))
        optimizer = self._optimizers[-1]
        optimizer.grad_norm = torch.full((), math.nan)
        return optimizer.grad_norm

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Raise ConfigError, because gradients are in shards."""
        raise ConfigError("clip_grad_value_ is not supported, because gradients are in shards. Use clip_grad_norm_.")

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the parameters of a model; of the trained one all of them on rank 0, and {} elsewhere. Collective."""
        if model is not self._trained or self.engine is None:
            return super().get_state_dict(model, unwrap)
        return self.engine.state_dict_on_rank_0() or {}

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Save the engine's state in shards and all else as Accelerate does; return the folder. Collective."""
        with _without_models(self):
            folder: str = super().save_state(output_dir, *args, **kwargs)
        if self.engine is not None:
            self.engine.save_checkpoint(folder, STATE_FOLDER, save_latest=False)
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
        if self.engine is not None:
            path, _ = self.engine.load_checkpoint(input_dir, STATE_FOLDER)
            if path is None:
                raise CheckpointError(
                    f"{input_dir}/{STATE_FOLDER} holds no training state. Another Accelerator saved it."
                )


_PLAIN = (accelerate.DistributedType.MULTI_CPU, accelerate.DistributedType.MULTI_GPU)
"""Accelerate's names for several processes that each have a model."""


@contextmanager
def _without_models(accelerator: Accelerator) -> Iterator[None]:
    """Context manager in which an accelerator saves and loads no model that the engine saves."""
    models = accelerator._models
    accelerator._models = [model for model in models if model is not accelerator._trained]
    try:
        yield
    finally:
        accelerator._models = models
