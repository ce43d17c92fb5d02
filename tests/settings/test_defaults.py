"""Defaults of optimizers: those of Python and of the command line, and that the docs tell every difference."""

import inspect
import re
from pathlib import Path

import pytest

import zero
from zero.settings import optim

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-loop.md"
SECTIONS = {section.model_fields["name"].default: section for section in optim.Optim.__args__[0].__args__}


def differences(name: str) -> dict[str, tuple[object, object]]:
    """What both have, by setting: in Python, on the command line."""
    python = {key: one.default for key, one in inspect.signature(getattr(zero, name)).parameters.items()}
    fields = SECTIONS[name].model_fields
    both = {key: (python[key], fields[key].default) for key in python if key in fields and key not in ("lr", "decay")}
    return {key: defaults for key, defaults in both.items() if defaults[0] != defaults[1]}


@pytest.mark.parametrize("name", SECTIONS)
def test_the_docs_tell_every_default_that_differs_and_no_other(name):
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    told = {row[0]: row[1:3] for row in cells if row and row[0].startswith("`")}
    found = {key: [str(one) for one in defaults] for key, defaults in differences(name).items()}
    assert found.pop("clip") == told["`clip` of each"]
    assert found == {re.sub(r".* `|`", "", key): row for key, row in told.items() if key.startswith(f"`{name}` `")}
    rates = dict(re.findall(r"`(\w+)` ([\d.e-]+)", told["`lr` of each"][1]))
    assert float(rates[name]) == SECTIONS[name].model_fields["lr"].default


def test_the_defaults_of_python_are_those_of_torch():
    import torch

    ours, theirs = (inspect.signature(one).parameters for one in (zero.adamw, torch.optim.AdamW))
    assert (ours["beta1"].default, ours["beta2"].default) == theirs["betas"].default
    assert ours["weight_decay"].default == theirs["weight_decay"].default
    assert ours["eps"].default == theirs["eps"].default
