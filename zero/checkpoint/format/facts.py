"""The facts of a manifest that `load` reads: numbers of the training state, the lineage, versions.

The user's own facts are under "given".
"""

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from zero.checkpoint.format.manifest import Manifest
from zero.checkpoint.format.texts import Schema, checked_json
from zero.core.loss_scale import LossScale

NonNegativeInt = Annotated[int, Field(ge=0)]


class StateFacts(Schema):
    """The part of a saved state that is not tensors: the facts of a manifest under "state".

    Attributes:
        step: number of updates made.
        scale, dynamic: the loss scale, and whether it is dynamic.
        rested: name of a parameter -> number of steps in which it was not updated; negative if it kept moments of more
            updates than `step` when an earlier checkpoint was loaded.
    """

    step: NonNegativeInt
    scale: LossScale
    dynamic: bool
    rested: dict[str, int] = Field({})


class LineageText(Schema):
    """The lineage of a checkpoint: the facts of a manifest under "lineage", see `Lineage`."""

    name: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    saved_ns: NonNegativeInt


def lineage_of(folder: Path, manifest: Manifest) -> LineageText | None:
    """Validate and return the lineage of a manifest; None if an older version of the library wrote it, or an import."""
    lineage = manifest.facts.get("lineage")
    return None if lineage is None else checked_json(LineageText, lineage, f"the facts of {folder}")


def numbers_of(folder: Path, manifest: Manifest) -> StateFacts:
    """Validate and return the numbers of a manifest."""
    return checked_json(StateFacts, manifest.facts.get("state"), f"the facts of {folder}")


def saved_facts(
    step: int, scale: LossScale, *, dynamic: bool, ties: Mapping[str, str], rested: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the facts of a manifest that `load` reads. The caller adds the user's facts under "given".

    Args:
        step: number of updates made.
        scale, dynamic: the loss scale, and whether it is dynamic.
        ties: alias of a tied tensor -> name under which the tensor is saved.
        rested: name of a parameter -> number of steps in which it was not updated.
    """
    numbers = {"step": step, "scale": list(scale), "dynamic": dynamic} | ({"rested": dict(rested)} if rested else {})
    return {"state": numbers, "ties": dict(ties), "versions": versions()}


def versions() -> dict[str, str | None]:
    """Return the versions of this library (None if it is not installed), torch and Python."""
    return {"zero": version(), "torch": str(torch.__version__), "python": platform.python_version()}


def version() -> str | None:
    """Return the version of this library; None if it runs from its sources without being installed."""
    return next((package.version for package in metadata.distributions(name="functional-zero")), None)
