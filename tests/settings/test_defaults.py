"""Optimizers: the same defaults in Python and on the command line, those of torch; and schedules that cannot end."""

import inspect
from pathlib import Path

import pytest
import torch

import zero
from zero.core.precision import Precision
from zero.errors import ConfigError
from zero.settings import Settings, optimizers
from zero.settings.build import build_optimizer, build_precision

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-loop.md"
SECTIONS = {section.model_fields["name"].default: section for section in optimizers.Optim.__args__[0].__args__}
TORCHS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def of_python(name: str) -> dict[str, object]:
    return {key: parameter.default for key, parameter in inspect.signature(getattr(zero, name)).parameters.items()}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_default_is_the_same_in_python_and_on_the_command_line(name: str):
    python = {key: default for key, default in of_python(name).items() if key not in ("lr", "decay")}
    fields = {key: field.default for key, field in SECTIONS[name].model_fields.items()}
    shared = python.keys() & fields.keys() - {"blocks"}  # a list of texts and a dict, both empty
    assert {"clip", "weight_decay"} <= shared
    assert {key: fields[key] for key in shared} == {key: python[key] for key in shared}
    assert f"{fields['lr']:g}" in {f"{float(word.strip('.,;')):g}" for word in numbers()}, "the page tells the rate"


def numbers() -> list[str]:
    text = PAGE.read_text().partition("### Defaults in Python")[2].partition("##")[0]
    return [word for word in text.split() if word[0].isdigit()]


@pytest.mark.parametrize("name", TORCHS)
def test_a_default_is_that_of_torch(name: str):
    ours = of_python(name)
    theirs = {key: parameter.default for key, parameter in inspect.signature(TORCHS[name]).parameters.items()}
    if "betas" in theirs:
        theirs["beta1"], theirs["beta2"] = theirs["betas"]
    shared = (ours.keys() & theirs.keys()) - {"lr"}
    assert {"weight_decay"} <= shared
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


def test_a_momentum_that_would_pass_1_is_refused_before_it_trains():
    schedule = {"name": "one_cycle", "rise": 5, "fall": 5, "decay_every": 1, "momentum_decay_rate": 0.1}
    build_optimizer(Settings(steps=10, schedule=schedule))
    with pytest.raises(ConfigError, match=r"momentum_decay_rate=0\.1 brings the momentum to 1 within steps=100"):
        build_optimizer(Settings(steps=100, schedule=schedule))


def test_frozen_parameters_are_set_alike_in_python_and_on_the_command_line():
    config = Settings.read({"precision": {"compute": "bf16", "frozen": "nf4", "coded": ["blocks.*"]}})
    assert build_precision(config) == Precision("bf16", frozen="nf4", coded=["blocks.*"])
    assert build_precision(Settings()) == Precision()
