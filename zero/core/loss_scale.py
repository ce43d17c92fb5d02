"""Loss scaling: multiplies the loss by a factor so that small fp16 gradients do not become zero.

`LossScaling` has the settings, `LossScale` the state. `LossScaling.advance` computes the next state from the last one
and from whether the step's gradients were finite. This file does not import torch, so a wrong setting is reported
before torch is imported.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; hysteresis as in DeepSpeed's and
Megatron-LM's dynamic scalers.
"""

from typing import Annotated, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from zero.core.schema import Section
from zero.core.setting_types import Whole, key, words_in_fp32
from zero.errors import ConfigError


class LossScale(NamedTuple):
    """The state of loss scaling, which checkpoints contain."""

    scale: float
    good_steps: int
    """Steps with finite gradients since the last overflow or the last doubling of the scale."""
    hysteresis_left: int
    """Number of overflows until the scale is halved, including the one that halves it."""
    skipped: int
    """Steps skipped since the start of the run because of an overflow."""


_Scale = Annotated[float, Field(gt=0, le=2**40), AfterValidator(words_in_fp32)]


class LossScaling(Section):
    """The settings of loss scaling, for precision=fp16 only.

    The scale is halved by the overflow that uses up the hysteresis, and by every further overflow until the next
    doubling. After `window` steps in a row without overflow the scale is doubled and the hysteresis restored. A static
    scale never changes.
    """

    section_key = "precision.scale"

    initial: _Scale = key(65536.0, "first scale", example="1024")
    window: Whole = key(
        1000,
        "finite steps before the scale doubles",
        unit="steps",
        trades="a short window follows growing gradients closely and skips more steps",
        example="500",
    )
    hysteresis: Whole = key(2, "overflows before the scale halves", unit="steps", example="1")
    minimum: _Scale = key(1.0, "the scale never falls below this", example="16")
    maximum: _Scale = key(16777216.0, "the scale never rises above this", example="65536")
    static: _Scale | None = key(None, "a fixed scale; null: dynamic", example="1024")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.minimum <= self.initial <= self.maximum:
            raise ConfigError(
                f"precision.scale.initial={self.initial:g} is not between minimum={self.minimum:g} "
                f"and maximum={self.maximum:g}"
            )
        return self

    def start(self) -> LossScale:
        scale = self.initial if self.static is None else self.static
        return LossScale(scale, good_steps=0, hysteresis_left=self.hysteresis, skipped=0)

    def advance(self, last: LossScale, finite: bool) -> LossScale:
        """Return the state after a step. If its gradients were not `finite` on every rank, the step was skipped."""
        if self.static is not None:
            return last if finite else last._replace(skipped=last.skipped + 1)
        if not finite:
            return self._overflow(last)
        if last.good_steps + 1 < self.window:
            return last._replace(good_steps=last.good_steps + 1)
        return LossScale(min(last.scale * 2, self.maximum), 0, self.hysteresis, last.skipped)

    def resumed(self, saved: LossScale, *, dynamic: bool) -> LossScale:
        """Return the state in which a resumed run continues.

        A dynamic scale continues within the current bounds. If the saved or the current scale is static, the scale
        starts anew, and only the count of skipped steps is kept.

        Args:
            saved: the state in the checkpoint.
            dynamic: whether the saved scale was dynamic.
        """
        if self.static is not None or not dynamic:
            return self.start()._replace(skipped=saved.skipped)
        return saved._replace(scale=min(max(saved.scale, self.minimum), self.maximum))

    def _overflow(self, last: LossScale) -> LossScale:
        if last.hysteresis_left > 1:
            return LossScale(last.scale, 0, last.hysteresis_left - 1, last.skipped + 1)
        return LossScale(max(last.scale / 2, self.minimum), 0, 1, last.skipped + 1)
