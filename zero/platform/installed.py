"""Paths and commands of the installed program, which differ between a checkout of the repository and a wheel.

Messages are written for a checkout: `python train.py`, `scripts/export`, `docs/scale.md`. A wheel contains these files
of the repository in `zero/application`, and its commands are `zero-train` and `python -m zero`. `as_called` converts
messages.
"""

import re
import shlex
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from zero.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_APPLICATION = _PACKAGE / "application"
_IN_WHEEL = _APPLICATION.is_dir()

TOP = _APPLICATION if _IN_WHEEL else _PACKAGE.parent
"""The folder that contains conf/ and docs/."""

TRAIN = "python train.py"
"""The command that starts training, as written in messages."""


def require(*packages: str) -> None:
    """Check that packages are installed, without importing them.

    Raises:
        ModuleNotFoundError: a package is missing; the message has the command that installs it.
    """
    for package in packages:
        if find_spec(package) is None:
            checkout = f"type `source .venv/bin/activate` (scripts/train makes .venv), or `{install()}`"
            wheel = f"type `{sys.executable} -m {install()}`"
            raise ModuleNotFoundError(
                f"{sys.executable} has no {package}: {wheel if _IN_WHEEL else checkout}", name=package
            )


def require_hf(package: str, needs: str) -> None:
    """Raise ConfigError, which begins with `needs`, unless a package of the extra `hf` is installed."""
    if find_spec(package) is None:
        raise ConfigError(f"{needs} {package}, which is not installed. Type {install('hf')}.")


def install(extra: str = "") -> str:
    """Return the pip command that installs the required packages of zero, or the packages of an `extra`.

    In a checkout, the command installs the checkout. For a wheel, it lists the missing packages, because the wheel
    itself is on no package index.
    """
    if not _IN_WHEEL:
        return f"pip install -e '.[{extra}]'" if extra else "pip install -e ."
    wanted = [
        package.strip()
        for package, _, marker in (line.partition(";") for line in metadata.requires("functional-zero") or ())
        if (re.search(rf"""extra == ["']{extra}["']""", marker) if extra else "extra ==" not in marker)
    ]
    missing = [package for package in wanted if not _is_installed(re.split(r"[^\w.-]", package)[0])]
    return f"pip install {shlex.join(missing or wanted)}"


def _is_installed(distribution: str) -> bool:
    return any(True for _ in metadata.distributions(name=distribution))


def from_here(path: Path) -> Path:
    """Return the path as a person would type it: relative to the current folder if it is inside of that folder."""
    with suppress(ValueError, FileNotFoundError):  # it is elsewhere, or the current folder was removed
        return path.relative_to(Path.cwd())
    return path


def docs_page(name: str) -> Path:
    """Return the path of a page of docs/, relative to the current folder if the page is inside of that folder."""
    return from_here(TOP / "docs" / name)


def program() -> str:
    """Return the command that started the program: `zero-train`, `python -m zero` or `python train.py`."""
    path = Path(sys.argv[0])
    if path.name == "zero-train":
        return "zero-train"
    return "python -m zero" if path.parts[-2:] == ("zero", "__main__.py") else TRAIN


def as_called(text: str) -> str:
    """Replace the commands and the paths of pages in a text by those that exist in this installation."""
    text = re.sub(r"\bdocs/([\w-]+\.md)", lambda match: str(docs_page(match[1])), text)
    called = program()
    if called == TRAIN:
        return text
    text = re.sub(r"scripts/(report|sample|export|import)\b", rf"{called} \1", text)
    shorter = " " * (len(TRAIN) - len(called))  # keeps columns beside commands aligned
    text = re.sub(rf"{re.escape(TRAIN)}(.*?  )", rf"{called}\1{shorter}", text)
    text = text.replace(TRAIN, called)
    text = re.sub(r"\b(torchrun (?:-\S+ \S+ )+)train\.py\b", r"\1-m zero", text)
    return re.sub(r"\btrain\.py\b", called, text)
