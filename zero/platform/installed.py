"""What of the program is installed here: its packages, its pages, and the commands that can be typed.

Texts are written for a checkout: `python train.py`, `scripts/export`, `docs/scale.md`. A wheel has what stands at the
top of the repository in `zero/application`, and is started by `zero-train` or `python -m zero`.
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
"""How texts begin a command."""


def require(*packages: str) -> None:
    """Refuse a Python that does not have one of them, by their names in an import.

    Raises:
        ModuleNotFoundError: with the line to type.
    """
    for package in packages:
        if find_spec(package) is None:
            checkout = f"type `source .venv/bin/activate` (scripts/train makes .venv), or `{install()}`"
            wheel = f"type `{sys.executable} -m {install()}`"
            raise ModuleNotFoundError(
                f"{sys.executable} has no {package}: {wheel if _IN_WHEEL else checkout}", name=package
            )


def install(extra: str = "") -> str:
    """What to type for the packages that zero needs, or those of an `extra` of it.

    In a checkout that is zero itself. A wheel names the packages that are missing: no index has a zero that is ours.
    """
    if not _IN_WHEEL:
        return f"pip install -e '.[{extra}]'" if extra else "pip install -e ."
    wanted = [
        one.strip()
        for one, _, marker in (line.partition(";") for line in metadata.requires("functional-zero") or ())
        if (re.search(rf"""extra == ["']{extra}["']""", marker) if extra else "extra ==" not in marker)
    ]
    missing = [one for one in wanted if not _is_installed(re.split(r"[^\w.-]", one)[0])]
    return f"pip install {shlex.join(missing or wanted)}"


def _is_installed(distribution: str) -> bool:
    return any(True for _ in metadata.distributions(name=distribution))


def page(name: str) -> Path:
    """A page of docs/, as it can be opened from the current folder."""
    path, here = TOP / "docs" / name, Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def program() -> str:
    """What one types to start it: train.py in a checkout, a command or a module where it is installed."""
    path = Path(sys.argv[0])
    if path.name == "zero-train":
        return "zero-train"
    return "python -m zero" if path.parts[-2:] == ("zero", "__main__.py") else TRAIN


def as_called(text: str) -> str:
    """With the commands and pages in it as they are here: whoever installed a wheel has no train.py beside him."""
    text = re.sub(r"\bdocs/([\w-]+\.md)", lambda found: str(page(found[1])), text)
    called = program()
    if called == TRAIN:
        return text
    text = re.sub(r"scripts/(report|sample|export|import)\b", rf"{called} \1", text)
    shorter = " " * (len(TRAIN) - len(called))  # what stands beside commands stays below each other
    text = re.sub(rf"{re.escape(TRAIN)}(.*?  )", rf"{called}\1{shorter}", text)
    text = text.replace(TRAIN, called)
    text = re.sub(r"\b(torchrun (?:-\S+ \S+ )+)train\.py\b", r"\1-m zero", text)
    return re.sub(r"\btrain\.py\b", called, text)
