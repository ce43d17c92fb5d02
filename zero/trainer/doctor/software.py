"""Checks of installed packages and of the account of W&B."""

import importlib.metadata
import platform
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from zero.platform.installed import install
from zero.tracker.settings import WandbSettings
from zero.tracker.views.wandb import has_key, mode_of
from zero.trainer.config import Config
from zero.trainer.doctor.host import Diagnosis, Host, judge


def pins() -> dict[str, str]:
    """Return the versions that zero works with, such as ">=5.5.4,<6", by package."""
    project = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text())["project"]
        python, packages = table["requires-python"], table["dependencies"]
    else:
        metadata = importlib.metadata.metadata("functional-zero")
        python, packages = metadata["Requires-Python"], metadata.get_all("Requires-Dist") or []
    needed = [Requirement(f"python{python}"), *map(Requirement, packages)]
    return {
        requirement.name: ",".join(sorted(map(str, requirement.specifier), reverse=True))
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def versions_of_software(config: Config, host: Host) -> Iterator[Diagnosis]:
    wrong, shown = [], []
    for package, pin in pins().items():
        version = platform.python_version() if package == "python" else host.version(package)
        if not version or not within(version, pin):
            wrong.append(f"{package} {version or 'is missing'} ({pin})")
        if package in ("python", "torch", "hydra-core", "wandb"):
            shown.append(f"{package} {version or '-'}")
    advice = f"install what it needs: {install()}"
    yield judge("versions", ", ".join(wrong or shown), (wrong, "bad", advice))


def within(version: str, pin: str) -> bool:
    """Return whether a version satisfies a pin such as ">=2.11". A vendor's build 2.11.0a0+git counts as 2.11.0."""
    # the version of a Python that was built from git ends in +
    return SpecifierSet(pin).contains(Version(version.rstrip("+")).base_version)


def wandb(config: Config, host: Host) -> Iterator[Diagnosis]:
    settings = config.tracker if isinstance(config.tracker, WandbSettings) else WandbSettings()
    unused = "" if settings is config.tracker else " (tracker=wandb is not set)"
    mode, key = mode_of(settings), "a key is set" if has_key() else "no key"
    unmet = settings.mode == "online" and mode != "online"
    finding = f"{key}, so runs are {mode}{unused}" if unmet else f"{key}, runs are {mode}{unused}"
    yield judge("W&B", finding, (unmet, "warn", "run `wandb login`, or export WANDB_API_KEY"))
