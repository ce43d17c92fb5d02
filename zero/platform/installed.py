"""The installation of the program: its packages, its pages, and the commands that can be typed.

Texts are written for a checkout: `python train.py`, `scripts/export`, `docs/scale.md`. A wheel has the top of the
repository in `zero/application`, and is started by `zero-train` or `python -m zero`.
"""

import re
import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_APPLICATION = _PACKAGE / "application"
_IN_WHEEL = _APPLICATION.is_dir()

TOP = _APPLICATION if _IN_WHEEL else _PACKAGE.parent
"""The folder with conf/ and docs/."""

TRAIN = "python train.py"
"""The beginning of a command in texts."""


def require(*packages: str) -> None:
    """Check that packages can be imported.

    Raises:
        ModuleNotFoundError: one is missing; with the command that installs it.
    """
    for package in packages:
        if find_spec(package) is None:
            checkout = f"type `source .venv/bin/activate` (scripts/train makes .venv), or `{install()}`"
            wheel = f"type `{sys.executable} -m {install()}`"
            raise ModuleNotFoundError(
                f"{sys.executable} has no {package}: {wheel if _IN_WHEEL else checkout}", name=package
            )


def install(extra: str = "") -> str:
    """Return the command that installs the packages that zero needs, or those of an `extra`.

    A checkout is installed itself. A wheel names the missing packages, because no index has this zero.
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


def page(name: str) -> Path:
    """Return the path of a page of docs/, relative to the current folder if it is inside."""
    path, here = TOP / "docs" / name, Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def program() -> str:
    """Return the command that started the program: train.py in a checkout, else a command or a module."""
    path = Path(sys.argv[0])
    if path.name == "zero-train":
        return "zero-train"
    return "python -m zero" if path.parts[-2:] == ("zero", "__main__.py") else TRAIN


def as_called(text: str) -> str:
    """Replace the commands and pages in a text by those of this installation."""
    text = re.sub(r"\bdocs/([\w-]+\.md)", lambda match: str(page(match[1])), text)
    called = program()
    if called == TRAIN:
        return text
    text = re.sub(r"scripts/(report|sample|export|import)\b", rf"{called} \1", text)
    shorter = " " * (len(TRAIN) - len(called))  # keeps columns beside commands aligned
    text = re.sub(rf"{re.escape(TRAIN)}(.*?  )", rf"{called}\1{shorter}", text)
    text = text.replace(TRAIN, called)
    text = re.sub(r"\b(torchrun (?:-\S+ \S+ )+)train\.py\b", r"\1-m zero", text)
    return re.sub(r"\btrain\.py\b", called, text)
