"""Every setting of a run, as one closed schema.

Reads a nested mapping, gives a frozen `Config` or raises one `ConfigError` of one line: the key as the user typed it,
what was seen, what to write. Knows nothing of ranks, Hydra or torch, so a mistake is answered before they are there.
`values` holds the kinds of values, `sections` the keys; here is what the sections make together.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ValidationError, model_validator

from zero.core import suggest
from zero.core.stage import Stage
from zero.errors import ConfigError, SettingError
from zero.trainer.config.sections import (
    GPT,
    HF,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Batch,
    Checkpoint,
    Constant,
    Data,
    Debug,
    Decay,
    Explain,
    HFText,
    Jsonl,
    Launch,
    LinearWarmup,
    Lion,
    LrRange,
    Machine,
    Model,
    Offload,
    OneCycle,
    Optim,
    Precision,
    Sample,
    Scale,
    Schedule,
    Synthetic,
    Text,
    Tokens,
    Tracker,
    Val,
    Wandb,
    Warmup,
    WarmupCosine,
    WarmupLinear,
    Zero,
)
from zero.trainer.config.values import UNIT_CLASSES, Natural, Place, Section, Whole, key
from zero.trainer.data.source import DataConfig
from zero.trainer.secret import refuse_secrets

__all__ = [
    "GPT",
    "HF",
    "SGD",
    "UNIT_CLASSES",
    "Adagrad",
    "Adam",
    "AdamW",
    "Batch",
    "Checkpoint",
    "Config",
    "Constant",
    "Debug",
    "Decay",
    "Explain",
    "HFText",
    "Jsonl",
    "Launch",
    "LinearWarmup",
    "Lion",
    "LrRange",
    "Machine",
    "Model",
    "Offload",
    "OneCycle",
    "Precision",
    "Sample",
    "Scale",
    "Section",
    "Synthetic",
    "Text",
    "Tokens",
    "Val",
    "Wandb",
    "Warmup",
    "WarmupCosine",
    "WarmupLinear",
    "Zero",
    "flat",
    "keys",
    "keys_of",
    "kinds",
    "read",
    "unknown_key",
]


class Config(Section):
    """A whole run. `Config()` is the default run."""

    mode: Literal["train", "eval", "plan", "doctor", "explain"] = key(
        "train",
        "what to do: train, eval (the validation loss of a checkpoint), plan (what fits where, nothing is run), "
        "doctor (is this machine ready), explain (what a key means)",
        example="plan",
    )
    resume: Place = key(
        "none",
        "where to go on: none (begin anew), latest (the newest valid checkpoint), or the path of a step, a run or a "
        "folder of checkpoints",
        example="latest",
    )
    steps: Whole = key(200, "optimizer steps", unit="steps", example="1000")
    seed: Natural = key(0, "seed of weights, data order and sample", example="1")
    deterministic: bool = key(
        False,
        "refuse kernels whose result varies from run to run (GPU)",
        trades="time against the same bits each time",
        example="true",
    )
    profile: bool = key(
        False,
        "record one step with torch.profiler, for Perfetto",
        trades="a slower step while it records",
        example="true",
    )
    zero: Zero = Zero()
    batch: Batch = Batch()
    model: Model = GPT()
    data: Data = Text()
    optim: Optim = AdamW()
    schedule: Schedule = WarmupCosine()
    precision: Precision = Precision()
    offload: Offload = Offload()
    tracker: Tracker = Jsonl()
    val: Val = Val()
    sample: Sample = Sample()
    launch: Launch = Launch()
    checkpoint: Checkpoint = Checkpoint()
    plan: Machine = Machine()
    explain: Explain = Explain()
    debug: Debug = Debug()

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.explain.key is not None and self.mode != "explain":
            raise ConfigError(f"explain.key={self.explain.key} does nothing in mode={self.mode}; add mode=explain")
        if self.mode == "eval" and self.resume == "none":
            raise ConfigError("mode=eval needs a checkpoint: set resume=latest, or resume=PATH of a step or a run")
        if self.val.weights == "ema" and self.mode not in ("eval", "explain"):
            raise ConfigError(f"val.weights=ema does nothing in mode={self.mode}; add mode=eval resume=PATH")
        self.offload.asked().at(parameters_sharded=self.zero.stage == "auto" or Stage(self.zero.stage).parameters)
        eager = self.zero.update == "eager"
        if eager and self.optim.clip is not None:
            raise ConfigError(
                f"zero.update=eager cannot wait for the norm that optim.clip={self.optim.clip:g} needs; "
                "set optim.clip=null or zero.update=lazy"
            )
        if eager and self.precision.compute == "fp16":
            raise ConfigError("zero.update=eager cannot undo an overflow of fp16; set zero.update=lazy")
        self._schedule_agrees()
        if isinstance(self.data, HFText) and self.data.tokenizer is None and not isinstance(self.model, HF):
            raise ConfigError("data=hf needs data.tokenizer=PATH, a tokenizer.json or a folder with one, or model=hf")
        stop_at = self.debug.stop_at
        if stop_at is not None and stop_at > self.steps:
            raise ConfigError(f"debug.stop_at={stop_at} lies beyond steps={self.steps}, and would never stop anything")
        if isinstance(self.model, GPT):
            self._model_agrees(self.model)
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
        if isinstance(chosen, OneCycle) and chosen.momentum:
            without = isinstance(self.optim, Adagrad) or (isinstance(self.optim, SGD) and not self.optim.momentum)
            if without:
                raise ConfigError(
                    f"schedule.momentum=true moves a momentum that optim={self.optim.name} has not; "
                    "set schedule.momentum=false"
                )

    def _model_agrees(self, model: GPT) -> None:
        """With what of transformers' models is known only when they are built."""
        for name in () if self.zero.units == "auto" else self.zero.units:
            if name not in (*UNIT_CLASSES, "auto"):
                units, nearest = list(self.zero.units), suggest.nearest(name, UNIT_CLASSES)
                raise ConfigError(f"zero.units={units}: {name} is not a class of this model; {nearest}")
        norm, absent = ("RMSNorm", "LayerNorm") if model.norm == "rms" else ("LayerNorm", "RMSNorm")
        if absent in self.zero.units:
            raise ConfigError(f"zero.units: a model with model.norm={model.norm} has no {absent}; write {norm}")
        if not isinstance(self.data, HFText):
            self.check_tokens()

    def check_tokens(self) -> None:
        """Refuse more tokens than the model knows, and bytes as tokens where it has a tokenizer.

        The numbers of a tokenizer are read from its file, those of model=hf are not.

        Raises:
            ConfigError: in one line.
        """
        if isinstance(self.model, HF) and isinstance(self.data, Text) and self.model.hf().has_tokenizer:
            raise ConfigError(
                f"data=text feeds bytes to model.path={self.model.path}, which has a tokenizer of its own; set data=hf "
                f"data.path={self.data.folder or 'TEXTS'}"
            )
        if isinstance(self.model, GPT) and self.vocab > self.model.vocab:
            raise ConfigError(
                f"model.vocab={self.model.vocab} is smaller than the {self.vocab} tokens of data={self.data.name}; "
                f"set model.vocab={self.vocab}"
            )

    def source(self) -> DataConfig:
        """The data as `zero.trainer.data` reads it, with the model's own tokenizer where no other is named.

        Raises:
            ConfigError: the model has none.
        """
        data = self.data
        if isinstance(data, HFText) and data.tokenizer is None and isinstance(self.model, HF):
            if not self.model.hf().has_tokenizer:
                raise ConfigError(
                    f"model.path={self.model.path} has no tokenizer; set data.tokenizer=PATH, a tokenizer.json or a "
                    "folder with one"
                )
            data = data.model_copy(update={"tokenizer": self.model.path})
        return data.source()

    @property
    def vocab(self) -> int:
        """Different tokens of the data."""
        return self.source().vocab

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

    def on(self, ranks: int) -> "Config":
        """The same run with `launch.ranks` and the batch as numbers.

        Raises:
            ConfigError: the batch does not divide over `ranks`.
        """
        launch = self.launch.model_copy(update={"ranks": ranks})
        return self.model_copy(update={"launch": launch, "batch": self.batch.solved(ranks)})

    def plain(self) -> dict[str, Any]:
        """Nested dict of plain values, keys as the user types them; `read` gives the same Config back."""
        return self.model_dump(by_alias=True, mode="json")


def read(raw: Mapping[str, Any]) -> Config:
    """The settings in `raw`, defaults for what it leaves out.

    Raises:
        SettingError: one line about the first key or value that no run could have, unknown keys first.
        ConfigError: settings that do not go together.
    """
    refuse_secrets(raw, os.environ)
    try:
        return Config.model_validate(dict(raw))
    except ValidationError as refused:
        raise SettingError(suggest.sentence(Config, refused, raw)) from None


def keys() -> tuple[str, ...]:
    """Every dotted key that some choice of options has, in reading order."""
    return suggest.keys(Config)


def kinds(section: str) -> dict[str, type[BaseModel]]:
    """What may be chosen for a section, by name; empty where there is one kind only, which has no name."""
    models = list(suggest.models_in(Config.model_fields[section].annotation)) if section in Config.model_fields else []
    return {str(model.model_fields["name"].default): model for model in models if "name" in model.model_fields}


def keys_of(section: str, chosen: Mapping[str, Any]) -> set[str]:
    """The keys of the kind that is `chosen` for a section; empty where there is no such kind."""
    kind = kinds(section).get(str(chosen.get("name")))
    return set() if kind is None else {field.alias or name for name, field in kind.model_fields.items()}


def flat(config: Config) -> dict[str, str]:
    """Dotted key to value as text, for comparing the settings of ranks."""

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for name, value in node.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield prefix + name, str(value)

    return dict(walk(config.plain(), ""))


def unknown_key(key: str) -> str:
    """The sentence for a key that does not exist."""
    return suggest.unknown_key(Config, key)
