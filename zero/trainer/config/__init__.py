"""The settings of a run of train.py, in one schema that rejects unknown keys. Imports neither Hydra nor torch."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from zero.core import schema, suggest
from zero.core.schema import Section
from zero.core.setting_types import PathText, Rows, key
from zero.errors import ConfigError
from zero.settings import Settings
from zero.settings.step_sections import Batch
from zero.trainer.config.sections import (
    CheckpointSection,
    Debug,
    Explain,
    Launch,
    MachineSection,
    Sample,
    Val,
    ZeroOfRun,
)
from zero.trainer.data.source import ChatConfig, DataConfig, TextConfig, TokenisedConfig, TokensConfig
from zero.trainer.models.gpt_config import UNIT_CLASSES, GPTConfig
from zero.trainer.models.hf_config import HFConfig, tuned_lr


def _gpt_unless_named(value: Any) -> Any:
    return {"name": "gpt", **value} if isinstance(value, dict) else value


Model = Annotated[GPTConfig | HFConfig, Field(discriminator="name"), BeforeValidator(_gpt_unless_named)]


class Config(Settings):
    """Settings of a whole run. `Config()` is the default run."""

    first = ("mode", "resume", "steps", "epochs", "seed", "deterministic", "profile", "zero", "batch", "model", "data")

    mode: Literal["train", "eval", "plan", "doctor", "explain"] = key(
        "train",
        "task: train, eval (the validation loss of a checkpoint), plan (what fits where, nothing is run), "
        "doctor (is this machine ready), explain (what a key means)",
        example="plan",
    )
    resume: PathText = key(
        "none",
        "checkpoint to continue from: none (begin anew), latest (the newest valid checkpoint), best (see "
        "checkpoint.best), or the path of a step, a run or a folder of checkpoints",
        example="latest",
    )
    epochs: Rows | None = key(
        None,
        "passes over the training data, from which `steps` follows; null: as many steps as `steps` says",
        unit="passes",
        example="3",
    )
    deterministic: bool = key(
        False,
        "reject kernels whose result varies from run to run (GPU)",
        trades="time against the same bits each time",
        example="true",
    )
    profile: bool = key(
        False,
        "record one step with torch.profiler, for Perfetto",
        trades="a slower step while it records",
        example="true",
    )
    zero: ZeroOfRun = ZeroOfRun()
    model: Model = GPTConfig()
    data: DataConfig = TextConfig()
    val: Val = Val()
    sample: Sample = Sample()
    launch: Launch = Launch()
    checkpoint: CheckpointSection = CheckpointSection()
    plan: MachineSection = MachineSection()
    explain: Explain = Explain()
    debug: Debug = Debug()

    @model_validator(mode="after")
    def _run_agrees(self) -> Self:
        if self.explain.key is not None and self.mode != "explain":
            raise ConfigError(f"explain.key={self.explain.key} does nothing in mode={self.mode}. Add mode=explain.")
        if self.mode == "eval" and self.resume == "none":
            raise ConfigError("mode=eval needs a checkpoint: set resume=latest, or resume=PATH of a step or a run")
        if self.val.patience is not None and not self.val.every:
            raise ConfigError("val.patience counts validations, but val.every=0 makes one. Set val.every=100.")
        if self.val.weights == "ema" and self.mode not in ("eval", "explain"):
            raise ConfigError(f"val.weights=ema does nothing in mode={self.mode}. Add mode=eval resume=PATH.")
        of_transformers = isinstance(self.model, HFConfig)
        if isinstance(self.data, TokenisedConfig) and self.data.tokenizer is None and not of_transformers:
            raise ConfigError(
                f"data={self.data.name} needs data.tokenizer=PATH, a tokenizer.json or a folder with one, or model=hf"
            )
        if isinstance(self.data, ChatConfig) and not of_transformers:
            raise ConfigError("data=chat needs model=hf model.path=FOLDER, a model of transformers")
        if isinstance(self.data, TokenisedConfig) and self.data.mix is not None and self.epochs is not None:
            raise ConfigError(f"epochs={self.epochs}: the sources of data.mix end at different steps. Set steps.")
        if self.zero.sequence > 1 and self.zero.compile:
            raise ConfigError("zero.compile cannot compile the exchanges of zero.sequence. Remove one of them.")
        if self.model.seq % self.zero.sequence:
            raise ConfigError(
                f"zero.sequence={self.zero.sequence} does not divide model.seq={self.model.seq}. Choose a divisor."
            )
        if isinstance(self.model, GPTConfig):
            self._model_agrees(self.model)
        return self

    @property
    def knows_steps(self) -> bool:
        """Whether `steps` is the number of steps, and not `epochs` of data that is still to be read."""
        return self.epochs is None

    def check_steps(self) -> None:
        """Raise ConfigError if the schedule or debug.stop_at does not fit in `steps`."""
        super().check_steps()
        stop_at = self.debug.stop_at
        if stop_at is not None and stop_at > self.steps:
            raise ConfigError(f"debug.stop_at={stop_at} is above steps={self.steps}. Lower it.")

    def _model_agrees(self, model: GPTConfig) -> None:
        """Check settings against the classes and the vocabulary of a GPT.

        For a model of transformers both are known only when it is built.
        """
        for name in () if self.zero.units == "auto" else self.zero.units:
            if name not in (*UNIT_CLASSES, "auto"):
                units, nearest = list(self.zero.units), suggest.nearest(name, UNIT_CLASSES)
                raise ConfigError(f"zero.units={suggest.shown(units)}: {name} is not a class of this model. {nearest}")
        if model.heads % self.zero.sequence:
            raise ConfigError(
                f"zero.sequence={self.zero.sequence} does not divide model.heads={model.heads}. Choose a divisor."
            )
        norm, absent = ("RMSNorm", "LayerNorm") if model.norm == "rms" else ("LayerNorm", "RMSNorm")
        if absent in self.zero.units:
            raise ConfigError(f"zero.units: a model with model.norm={model.norm} has no {absent}. Write {norm}.")
        if not isinstance(self.data, TokenisedConfig | TokensConfig):  # parse_config checks their files first
            self.check_tokens()

    def check_tokens(self) -> None:
        """Raise ConfigError if the data does not fit the model's vocabulary. May read the file of a tokenizer.

        Raises:
            ConfigError: the data has more tokens than `model.vocab`, or consists of bytes although the model has a
                tokenizer.
        """
        if isinstance(self.model, HFConfig) and isinstance(self.data, TextConfig) and self.model.has_tokenizer:
            raise ConfigError(
                f"data=text feeds bytes to model.path={self.model.path}, which has its own tokenizer. Set data=hf "
                f"data.path={self.data.folder or 'TEXTS'}."
            )
        if isinstance(self.model, GPTConfig) and self.vocab > self.model.vocab:
            fewer = f", or data.vocab={self.model.vocab} if the file has no larger numbers"
            raise ConfigError(
                f"model.vocab={self.model.vocab} is smaller than the {self.vocab} tokens of data={self.data.name}. "
                f"Set model.vocab={self.vocab}{fewer if isinstance(self.data, TokensConfig) else ''}."
            )

    def source(self) -> DataConfig:
        """Return the settings of the data, with the model's tokenizer if no other is set.

        Raises:
            ConfigError: the data has no tokenizer, and neither has the model.
        """
        data = self.data
        if isinstance(data, TokenisedConfig) and data.tokenizer is None and isinstance(self.model, HFConfig):
            if not self.model.has_tokenizer and not Path(self.model.path).exists() and "/" not in self.model.path:
                raise ConfigError(
                    f"model.path={self.model.path} is no folder, so it has no tokenizer. Give a folder with a model, "
                    "or data.tokenizer=PATH."
                )
            if not self.model.has_tokenizer:
                raise ConfigError(
                    f"model.path={self.model.path} has no tokenizer. Set data.tokenizer=PATH, a tokenizer.json or a "
                    "folder with one."
                )
            data = data.model_copy(update={"tokenizer": str(self.model.files())})
        return data

    @property
    def vocab(self) -> int:
        """The number of different tokens in the data."""
        return self.source().vocab

    def changed(self, section: str, **values: Any) -> Self:
        """Return these settings with other values in a section. They are not validated."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def on(self, ranks: int) -> Self:
        """Return these settings with `launch.ranks` set to `ranks`, and the batch as numbers.

        Raises:
            ConfigError: the batch does not divide over `ranks`.
        """
        return super().on(ranks).changed("launch", ranks=ranks)

    def batch_on(self, ranks: int) -> Batch:
        """Return the batch with every "auto" replaced by its number; ranks of a group share rows.

        Raises:
            ConfigError: as `groups`, or the batch does not divide over the groups.
        """
        return self.batch.solved(self.groups(ranks), "rank" if self.zero.sequence == 1 else "group")

    def groups(self, ranks: int) -> int:
        """Return the number of groups of ranks that share rows.

        Raises:
            ConfigError: `zero.sequence` does not divide `ranks`.
        """
        if ranks % self.zero.sequence:
            raise ConfigError(
                f"launch.ranks={ranks} does not divide into groups of zero.sequence={self.zero.sequence}. Choose a "
                "multiple."
            )
        return ranks // self.zero.sequence


read = Config.read


@cache  # walking the schema takes 4 ms
def keys() -> tuple[str, ...]:
    """Return the dotted keys of all options, in the order of the schema."""
    return schema.schema_keys(Config)


def is_section(key: str) -> bool:
    """Return whether `key` is a section, which means that other keys begin with it and a dot."""
    return any(known.startswith(f"{key}.") for known in keys())


def kinds(section: str) -> dict[str, type[Section]]:
    """Return the classes that `section` can have, by name (gpt and hf for model); {} if there is nothing to choose."""
    models = list(schema.models_in(Config.model_fields[section].annotation)) if section in Config.model_fields else []
    return {str(model.model_fields["name"].default): model for model in models if "name" in model.model_fields}


def keys_of(section: str, chosen: Mapping[str, Any]) -> set[str]:
    """Return the keys of the class whose `name` is in `chosen`, the settings of a section; empty for unknown names."""
    model = kinds(section).get(str(chosen.get("name")))
    return set() if model is None else {field.alias or name for name, field in model.model_fields.items()}


def defaults_for(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain default settings of the options whose names are in `chosen`, plain settings of a run.

    The names are those of the default run.
    """
    defaults = Config().plain()
    for section, values in chosen.items():
        model = kinds(section).get(str(values.get("name"))) if isinstance(values, Mapping) else None
        if model is not None:
            own = model.model_construct().model_dump(by_alias=True, mode="json")
            defaults[section] = own | {"name": defaults[section]["name"]}
    return defaults


def default_lr(settings: Mapping[str, Any]) -> float | None:
    """Return the default of optim.lr for composed settings, which may be wrong; None for an unknown optimizer."""
    match settings:
        case {"optim": {"name": "adam" | "adamw"}, "model": {"name": "hf", "path": str(path), "lora": {"rank": rank}}}:
            if (lr := tuned_lr(path, adapts=bool(rank))) is not None:
                return lr
    optimizer = kinds("optim").get(settings["optim"].get("name"))
    return None if optimizer is None else optimizer.model_fields["lr"].default


def flat(config: Config) -> dict[str, str]:
    """Return all values as text by dotted key, so that ranks can compare their settings."""
    return {key: str(value) for key, value in schema.flat_fields(config.plain()).items()}
