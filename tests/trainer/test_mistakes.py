"""A hundred mistakes, typed as users type them: the table of `scripts/mistakes`, and a few through the real command."""

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mistakes():
    loader = importlib.machinery.SourceFileLoader("mistakes", str(ROOT / "scripts" / "mistakes"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("mistakes", loader))
    loader.exec_module(module)
    return module


def test_every_mistake_is_answered_with_the_word_that_mends_it(here, mistakes):
    found = list(mistakes.answers())
    assert len(found) == 125
    assert not [answer for answer in found if answer.wrong]
    assert not list(here.iterdir())


def test_an_answer_that_is_wrong_is_seen(here, mistakes):
    assert mistakes.answer_of_command("lr=1", "type optim.rate").wrong == "without 'type optim.rate'"
    assert mistakes.answer_of_command("debug=tiny", "").wrong == "a run began"
    assert mistakes.answer_of_python("step(state, [batch])", "").wrong == "it was accepted"
    assert mistakes.answer_of_python("nothing", "").wrong == "an error that is not ours"
    assert "is refused as well" in mistakes._followed("steps=x", "unknown key stepps; did you mean steps?")
    assert "is refused as well" in mistakes._followed("lr=1", "unknown key lr; type optim.lr=-1")


@pytest.mark.process
@pytest.mark.parametrize("words", ["lr=1e-3 steps=1", "--lr 1e-3 --bf16", "explain zero.stage"])
def test_the_command_says_it_too(here, mistakes, words):
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *words.split()],
        cwd=here, capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert dict(mistakes.COMMANDS).get(words, "written without dashes") in done.stderr
    assert not list(here.iterdir())
