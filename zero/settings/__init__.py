"""The settings of a training step, as one closed schema without model and data.

Reads a nested mapping, gives a frozen `Settings` or raises one `ConfigError` of one line: the key as the user typed it,
what was seen, what to write. Knows nothing of ranks or torch, so a mistake is answered before they are there. Whoever
has more to set extends it, as the trainer does. `build` makes the engine's objects of it.
"""

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from zero.core.placement import Offload
from zero.core.schema import Section
from zero.core.secret import refuse_secrets
from zero.core.setting_types import Natural, Whole, key
from zero.core.stage import Stage
from zero.errors import ConfigError
from zero.settings.optim import SGD, Adagrad, AdamW, Optim
from zero.settings.schedule import Decay, OneCycle, Schedule, Warmup, WarmupCosine
from zero.settings.sections import Batch, Precision, Zero
from zero.tracker.settings import Jsonl, TrackerSettings


class Settings(Section):
    """The settings of a training step, and of what a loop shows."""

    steps: Whole = key(1200, "optimizer steps", unit="steps", example="5000")
    seed: Natural = key(0, "seed of weights, data order, sample and random rounding", example="1")
    zero: Zero = Zero()
    batch: Batch = Batch()
    optim: Optim = AdamW()
    schedule: Schedule = WarmupCosine()
    precision: Precision = Precision()
    offload: Offload = Offload()
    tracker: TrackerSettings = Jsonl()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        self.offload.at(parameters_sharded=self.zero.stage == "auto" or Stage(self.zero.stage).parameters)
        self._schedule_agrees()
        return self

    def _schedule_agrees(self) -> None:
        chosen = self.schedule
        if isinstance(chosen, Decay) and self.warmup + chosen.hold >= self.decayed:
            held = f" and schedule.hold={chosen.hold}" if chosen.hold else ""
            total = "steps" if chosen.total is None else "schedule.total"
            verb = "leave" if held else "leaves"
            raise ConfigError(
                f"schedule.warmup={self.warmup}{held} {verb} no step of {total}={self.decayed} for the decay"
            )
        without = isinstance(self.optim, Adagrad) or (isinstance(self.optim, SGD) and not self.optim.momentum)
        if isinstance(chosen, OneCycle) and chosen.momentum and without:
            raise ConfigError(
                f"schedule.momentum=true moves a momentum that optim={self.optim.name} has not; "
                "set schedule.momentum=false"
            )

    @property
    def warmup(self) -> int:
        """Steps until the peak learning rate."""
        given = self.schedule.warmup if isinstance(self.schedule, Warmup) else 0
        return self.steps // 20 if given == "auto" else given

    @property
    def decayed(self) -> int:
        """The step at which a decay reaches its last learning rate."""
        given = self.schedule.total if isinstance(self.schedule, Decay) else None
        return self.steps if given is None else given

    def on(self, ranks: int) -> Self:
        """The same with the batch as numbers.

        Raises:
            ConfigError: the batch does not divide over `ranks`.
        """
        return self.model_copy(update={"batch": self.batch.solved(ranks)})

    def plain(self) -> dict[str, Any]:
        """Nested dict of plain values, keys as the user types them; `read` gives the same settings back."""
        values = self.model_dump(by_alias=True, mode="json")
        return {name: values[name] for name in self.in_reading_order()}

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """The settings in `raw`, defaults for what it leaves out.

        Raises:
            SettingError: one line about the first key or value that no run could have, unknown keys first.
            ConfigError: settings that do not go together, or one that looks like a secret.
        """
        refuse_secrets(raw, os.environ)
        return cls(**{str(name): value for name, value in raw.items()})
