"""A Lightning precision plugin whose backward, clipping and update are an engine's."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor

from zero.engine.retry import advised
from zero.errors import ConfigError
from zero.user_loop.engine import Engine
from zero.user_loop.made_again import StepMadeAgain

PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}
"""Lightning's precisions -> the engine's."""


class StrategyWithEngine(Protocol):
    """The strategy, which has the engine: see `ZeroStrategy`."""

    step: StepMadeAgain

    @property
    def opened(self) -> Engine: ...

    def end_microbatch(self, *, updates: bool) -> None: ...


class EnginePrecision(Precision):
    """A Lightning precision plugin that uses the engine's backward, clipping and update.

    Args:
        plugin: Lightning's plugin, which is still used for the context of forward (autocast, default dtype) and for the
            dtypes of batches.
        strategy: the strategy that has the engine.
    """

    def __init__(self, plugin: Precision, strategy: StrategyWithEngine) -> None:
        if type(plugin) not in (Precision, HalfPrecision, MixedPrecision) or plugin.precision not in PRECISIONS:
            raise ConfigError(
                f"Trainer(precision={plugin.precision!r}), {type(plugin).__name__}, is not supported. Choose from "
                f"{', '.join(PRECISIONS)}."
            )
        self.precision, self._strategy, self._has_clipped = plugin.precision, strategy, False
        self.forward_context, self.convert_input = plugin.forward_context, plugin.convert_input

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._strategy.opened.backward(tensor, scale_wrt_gas=False)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Call `closure`, which runs forward and backward, and update parameters if there are gradients. Collective.

        If memory runs out, `closure` is called again on lower tiers, see `zero.move`, unless steps have several
        microbatches.

        Raises:
            ConfigError: an overridden `configure_gradient_clipping` did not clip.
        """
        if model.trainer.accumulate_grad_batches == 1:
            return self._strategy.step.end(partial(self._step, optimizer, model, closure))
        with advised(self._strategy.opened.plan):  # earlier microbatches ran outside of `closure`
            return self._step(optimizer, model, closure)

    def _step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any]) -> Any:
        result = closure()
        self._has_clipped = False
        self._after_closure(model, optimizer)
        clip = self._strategy.opened.plan.optimizer.clip
        if clip and not self._has_clipped:
            raise ConfigError(
                f"configure_gradient_clipping did not call clip_gradients: each step clips by the norm {clip:g}. "
                "Call it each time, or leave out Trainer(gradient_clip_val=...)."
            )
        self._strategy.end_microbatch(updates=True)
        return result

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Only check the arguments, because the engine's step clips.

        Raises:
            ConfigError: norm or algorithm are not those of the Trainer.
        """
        clip = self._strategy.opened.plan.optimizer.clip
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM or clip_val != (clip or 0):
            raise ConfigError(
                f"clip_gradients({clip_val:g}, '{gradient_clip_algorithm.value}'): the step clips by the norm "
                f"{clip or 0:g}. Write Trainer(gradient_clip_val={clip_val:g})."
            )
        self._has_clipped = True
