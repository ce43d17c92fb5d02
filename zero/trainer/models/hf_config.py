"""Settings of a model of transformers. Does not import torch, so that a missing folder is reported at once."""

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from zero.core.schema import Section
from zero.core.setting_types import Names, Natural, Needed, Positive, Rows, key
from zero.errors import ConfigError
from zero.trainer import hub
from zero.trainer.data.tokenizer import FILE, SETTINGS


class LoRAConfig(Section):
    """An adapter of low rank, which trains while the model is frozen."""

    section_key = "model.lora"

    rank: Natural = key(
        0,
        "rank of the adapter of each layer; 0: no adapter, the whole model trains",
        trades="memory for gradients, master and moments of the whole model, against what a low rank can learn",
        example="16 model.path=FOLDER",
    )
    alpha: Positive | None = key(
        None, "the adapter is scaled by alpha / rank; null: 2 x rank", example="16 model.lora.rank=16 model.path=FOLDER"
    )
    targets: Names = key(
        (),
        "linear layers and fused experts that get an adapter, by name or pattern, such as [q_proj, experts.*]; []: "
        "all linear layers but the head",
        example="[q_proj,v_proj] model.lora.rank=16 model.path=FOLDER",
    )

    rslora: bool = key(
        False,
        "scale the adapter by alpha / sqrt(rank), as rsLoRA does",
        example="true model.lora.rank=64 model.path=FOLDER",
    )

    @model_validator(mode="after")
    def _has_a_rank(self) -> Self:
        if not self.rank and (self.alpha is not None or self.targets or self.rslora):
            name = "targets" if self.targets else "rslora" if self.rslora else "alpha"
            raise ConfigError(f"model.lora.{name} does nothing without model.lora.rank. Set model.lora.rank=16.")
        return self

    def of_peft(self, path: str, parameters: Iterable[str]) -> dict[str, object]:
        """Return the fields of a `peft.LoraConfig` for the model at `path`, without its target_modules.

        Args:
            parameters: the full names of the fused experts that get an adapter.
        """
        fields = {"r": self.rank, "lora_alpha": self.alpha or 2 * self.rank, "task_type": "CAUSAL_LM"}
        further = {"use_rslora": self.rslora, "target_parameters": sorted(parameters)}
        return fields | {"base_model_name_or_path": path} | {name: value for name, value in further.items() if value}

    def matches(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the full names that each of `targets` matches: the whole name or the end of it, as in peft."""
        names = list(names)
        return {
            pattern: [name for name in names if fnmatchcase(f".{name}", f"*.{pattern}")] for pattern in self.targets
        }


class HFConfig(Section):
    """Settings of model=hf: a causal language model of transformers."""

    section_key = "model"

    name: Literal["hf"] = key("hf", "kind of model")
    path: Needed = key(
        None,
        "folder with config.json and safetensors; or ORG/NAME of Hugging Face's hub; or a model type such as llama, "
        "with fresh weights; required",
        example="gpt2",
    )
    seq: Rows = key(256, "length of a training row, in tokens", unit="tokens", example="512 model.path=gpt2")

    chunked_loss: bool = key(
        True,
        "hold 32 MiB of logits at a time, in chunks of 64 or more entries of the vocabulary, where the head is a "
        "linear layer",
        trades="a large vocabulary's logits in memory against computing them a second time in backward",
        example="false model.path=gpt2",
    )
    lora: LoRAConfig = LoRAConfig()

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.path is None:
            raise ConfigError("model=hf needs model.path=FOLDER, a folder with config.json and safetensors")
        return self

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a tokenizer."""
        return any((self.files() / name).is_file() for name in (FILE, SETTINGS))

    def files(self, *, weights: bool = False) -> Path:
        """Return the folder of the model, which for a name of the hub is in its cache; a model type as it is.

        Raises:
            ConfigError: see `hub.model_folder`.
        """
        return hub.model_folder(self.path, weights=weights) if hub.is_name(self.path) else Path(self.path)

    def check(self) -> None:
        """Raise ConfigError for a folder without a readable config.json."""
        folder = self.files()
        if "/" in self.path and not folder.is_dir():
            raise ConfigError(
                f"model.path={self.path} does not exist. Give a folder with config.json, or a model type."
            )
        if not folder.is_dir():
            return
        try:
            settings = json.loads((folder / "config.json").read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(f"model.path={self.path}: there is no config.json in it") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={self.path}: no readable config.json in it ({error})") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"model.path={self.path}: its config.json is not a JSON object")


def tuned_lr(path: str, *, adapts: bool) -> float | None:
    """Return the default learning rate of Adam for the weights at `path`, or for an adapter on them; None without any.

    Args:
        path: as `HFConfig.path`.
        adapts: whether an adapter trains.
    """
    if not hub.is_name(path) and not any(Path(path).glob(hub.WEIGHTS)):
        return None
    return 2e-4 if adapts else 2e-5
