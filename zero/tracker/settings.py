"""Settings of the tracker."""

from typing import Annotated, Literal

from pydantic import Field

from zero.core.schema import Section
from zero.core.setting_types import PlainText, Reads, Whole, key, validate_names, validate_text


def _name(value: object) -> str:
    text = validate_text(value)
    if len(text) > 128:
        raise ValueError("must have at most 128 characters, the limit of W&B")
    return text


def _tags(value: object) -> tuple[str, ...]:
    tags = validate_names(value)
    if long := next((tag for tag in tags if len(tag) > 64), None):
        raise ValueError(f"has {long}, but a tag of W&B has at most 64 characters")
    return tags


def _project(value: object) -> str:
    text = _name(value)
    if refused := set(text) & set("/\\#?%:"):
        raise ValueError(f"must be without {min(refused)}, which W&B rejects in the name of a project")
    return text


Name = Annotated[str, Reads("text", _name)]
Tags = Annotated[tuple[str, ...], Reads("a list such as [a, b]", _tags)]
Project = Annotated[str, Reads("text", _project)]


class JsonlSettings(Section):
    """Settings of metrics.jsonl and the console, which every run has."""

    name: Literal["jsonl"] = key("jsonl", "kind of tracker")
    every: Whole = key(10, "steps between two rows", unit="steps", example="1")
    console: Literal["auto", "bar", "lines", "none"] = key(
        "auto", "auto: a progress bar on a terminal, plain lines in a pipe", example="lines"
    )
    tensorboard: bool = key(
        False, "also write the rows for TensorBoard, to `tensorboard/` in the run's folder", example="true"
    )


class WandbSettings(JsonlSettings):
    """Settings of a Weights & Biases run, beside those of `JsonlSettings`."""

    name: Literal["wandb"] = key("wandb", "kind of tracker")  # type: ignore[assignment]
    project: Project | None = key(None, "W&B project; null: WANDB_PROJECT, else functional-zero", example="my-project")
    entity: Name | None = key(None, "W&B user or team; null: WANDB_ENTITY, or whose key it is", example="my-team")
    run: Name | None = key(
        None, "name of the run; null: WANDB_NAME, else its overrides in a sweep, or its folder", example="first"
    )
    group: Name | None = key(
        None, "group of the run; null: the folder of its sweep if it has one, else WANDB_RUN_GROUP", example="stages"
    )
    tags: Tags = key((), "labels to find the run by; empty: WANDB_TAGS", example="[baseline,night]")
    notes: PlainText | None = key(None, "a sentence about the run; null: WANDB_NOTES", example="larger-batch")
    versions: bool = key(
        True, "record the commit of the code's git repository, and which packages are installed", example="false"
    )
    mode: Literal["auto", "online", "offline", "disabled"] = key(
        "auto", "auto: online where a key is found, else offline", example="offline"
    )
    artifacts: bool = key(False, "record each checkpoint's place as a reference artifact; no upload", example="true")


TrackerSettings = Annotated[JsonlSettings | WandbSettings, Field(discriminator="name")]
