"""The settings of a training step, without model and data, as a schema that rejects unknown keys.

`Settings.read` turns a nested mapping into a frozen `Settings` or raises a `ConfigError` of one line. Nothing here
needs ranks or torch, so a mistake is reported before ranks are started. The trainer's `Config` extends this schema, and
`zero.settings.build` makes the engine's objects from it.
"""

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from zero.core.offload import Offload
from zero.core.schema import Section
from zero.core.secret import refuse_secrets
from zero.core.setting_types import Natural, Whole, key
from zero.core.stage import Stage
from zero.errors import ConfigError
from zero.settings.optimizers import AdamWSection, Optim
from zero.settings.schedule import DecayFields, OneCycleSection, ScheduleSection, WarmupCosineSection, WarmupFields
from zero.settings.step_sections import Batch, PrecisionSection, Zero
from zero.tracker.settings import JsonlSettings, TrackerSettings


class Settings(Section):
    """Settings of a training step and of its tracker."""

    steps: Whole = key(800, "optimizer steps", unit="steps", example="5000")
    seed: Natural = key(0, "seed of weights, data order, sample and random rounding", example="1")
    zero: Zero = Zero()
    batch: Batch = Batch()
    optim: Optim = AdamWSection()
    schedule: ScheduleSection = WarmupCosineSection()
    precision: PrecisionSection = PrecisionSection()
    offload: Offload = Offload()
    tracker: TrackerSettings = JsonlSettings()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        self.offload.at(parameters_sharded=self.zero.stage == "auto" or Stage(self.zero.stage).parameters)
        if self.knows_steps:
            self.check_steps()
        schedule = self.schedule
        if isinstance(schedule, OneCycleSection) and schedule.momentum and not self.optim.has_momentum:
            raise ConfigError(
                f"schedule.momentum=true: optim={self.optim.name} has no momentum. Set schedule.momentum=false."
            )
        return self

    @property
    def knows_steps(self) -> bool:
        """Whether `steps` is the number of steps, and no other setting says it."""
        return True

    def check_steps(self) -> None:
        """Raise ConfigError if the schedule does not fit in `steps`."""
        schedule = self.schedule
        if isinstance(schedule, DecayFields) and self.warmup + schedule.hold >= self.decayed:
            total = "steps" if schedule.total is None else "schedule.total"
            raise ConfigError(
                f"schedule.warmup={self.warmup}, schedule.hold={schedule.hold}: no step of {total}={self.decayed} is "
                "left for the decay. Lower one of them."
            )

    @property
    def warmup(self) -> int:
        """Steps until the peak learning rate."""
        steps = self.schedule.warmup if isinstance(self.schedule, WarmupFields) else 0
        return self.steps // 20 if steps == "auto" else steps

    @property
    def decayed(self) -> int:
        """The step at which a decay reaches its last learning rate."""
        total = self.schedule.total if isinstance(self.schedule, DecayFields) else None
        return self.steps if total is None else total

    def on(self, ranks: int) -> Self:
        """Return the settings with every "auto" of the batch replaced by its number.

        Raises:
            ConfigError: the batch does not divide over `ranks`.
        """
        return self.model_copy(update={"batch": self.batch_on(ranks)})

    def batch_on(self, ranks: int) -> Batch:
        """Return the batch with every "auto" replaced by its number.

        Raises:
            ConfigError: the batch does not divide over `ranks`.
        """
        return self.batch.solved(ranks)

    def plain(self) -> dict[str, Any]:
        """Return a nested dict of plain values, keys as the user types them; the inverse of `read`."""
        values = self.model_dump(by_alias=True, mode="json")
        return {name: values[name] for name in self.in_reading_order()}

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Check `raw` and return its settings, with defaults for missing keys.

        Raises:
            SettingError: a key that does not exist, or a value that no run could have.
            ConfigError: settings that contradict each other, or a value that looks like a secret.
        """
        refuse_secrets(raw, os.environ)
        return cls(**{str(name): value for name, value in raw.items()})
