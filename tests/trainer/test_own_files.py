"""A settings file of the user's own is an option. A mistake in it is one line with file and line number."""

from itertools import pairwise
from pathlib import Path

import pytest

import train
from zero.trainer.compose import compose, settings_in

GLOBAL = "# @package _global_\n"
NESTED = "".join(f"{name}: &{name} [{9 * f'*{before}, '}x]\n" for before, name in pairwise("abcdefghij"))

MISTAKES = {
    "no package": ("steps: 2\n", ", line 1: the first line must be # @package _global_"),
    "empty": ("", ", line 1: the first line must be # @package _global_"),
    "a comment before the package": (
        f"# mine\n{GLOBAL}steps: 2\n",
        ", line 1: the first line must be # @package _global_",
    ),
    "a bracket open on an earlier line": (f"{GLOBAL}steps: [1\nseed: 3\n", ", line 2: expected ',' or ']', but got"),
    "an open quote": (f"{GLOBAL}mode: 'train\nsteps: 2\n", ", line 2: found unexpected end of stream"),
    "an open bracket": (f"{GLOBAL}steps: 2\nzero: {{stage: 3\n", ", line 3: expected ',' or '}', but got"),
    "a tab": (f"{GLOBAL}zero:\n\tstage: 3\n", ", line 3: found character '\\t' that cannot start any token"),
    "twice": (f"{GLOBAL}steps: 2\nsteps: 3\n", ", line 3: steps is there twice"),
    "no mapping": (f"{GLOBAL}- steps\n", ", line 2: the file must hold keys with values, such as steps: 100"),
    "no text": (b"\xff\xfe", ": the file must be UTF-8 text"),
    "an unknown key": (f"{GLOBAL}zero:\n  stge: 3\n", ", line 3: unknown key zero.stge; did you mean zero.stage?"),
    "dots": (f"{GLOBAL}zero.stage: 3\n", ", line 2: a key has no dots; write zero: {stage: ...}"),
    "a section": (f"{GLOBAL}zero: 3\n", ", line 2: zero is a section; write its keys on the next lines, indented"),
    "no override": (f"{GLOBAL}defaults:\n  - /model: gpt_124m\n", ", line 3: write - override /model: gpt_124m"),
    "no slash": (f"{GLOBAL}defaults:\n  - override model: gpt_124m\n", ", line 3: write - override /model: gpt_124m"),
    "no slash before hydra": (
        f"{GLOBAL}defaults:\n  - override hydra/launcher: basic\n",
        ", line 3: write - override /hydra/launcher: basic",
    ),
    "an override before a base": (
        f"{GLOBAL}defaults:\n  - override /model: gpt_nano\n  - gpt_1b\n",
        ", line 4: write - gpt_1b above the entries that begin with override",
    ),
    "no list": (
        f"{GLOBAL}override /model: gpt_124m\n",
        ", line 2: write - override /model in the list under defaults:",
    ),
    "an option as a value": (
        f"{GLOBAL}steps: 2\nmodel: gpt_124m\n",
        ", line 3: write - override /model: gpt_124m in the list under defaults:",
    ),
    "an unknown option": (
        f"{GLOBAL}defaults:\n  - override /model: gpt_nona\n",
        ", line 3: model=gpt_nona does not exist; did you mean gpt_nano?",
    ),
    "an unknown group": (
        f"{GLOBAL}defaults:\n  - override /modle: gpt_nano\n",
        ", line 3: there is no group modle; did you mean model?",
    ),
    "an unknown base": (f"{GLOBAL}defaults: [gpt_2b]\n", ", line 2: experiment=gpt_2b does not exist; did you mean"),
    "aliases of aliases": (f"{GLOBAL}a: &a [x, x]\n{NESTED}", ": its aliases make more than 10000 values; write out"),
    "an alias of itself": (f"{GLOBAL}zero: &a {{stage: *a}}\n", ": values are nested too deeply, or an alias repeats"),
    "a large file": (GLOBAL + "#" * 2**20, ": the file has more than 1 MiB; a file of settings has a few lines"),
}


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_a_file_is_one_line_that_begins_with_file_and_line(here, kind, capsys):
    content, said = MISTAKES[kind]
    written(here / "own/experiment/mine.yaml", content)
    assert train.main(["hydra.searchpath=[own]", "experiment=mine"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"own/experiment/mine.yaml{said}")
    assert printed.count("\n") == 1


def test_a_file_that_another_file_chooses_is_checked_too(here, capsys):
    written(here / "own/model/small.yaml", "defaults: [gpt_nano]\nwdth: 64\n")
    written(here / "own/experiment/mine.yaml", f"{GLOBAL}defaults:\n  - override /model: small\n")
    assert train.main(["hydra.searchpath=[own]", "experiment=mine"]) == 2
    assert capsys.readouterr().err == (
        "own/model/small.yaml, line 2: unknown key model.wdth; did you mean model.width?\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra.searchpath=own"], "hydra.searchpath=own: must be a list: 'hydra.searchpath=[file://own]'\n"),
        (["hydra.searchpath=[nowhere]"], "hydra.searchpath: nowhere is not a folder\n"),
        (["hydra.searchpath=[own]", "experiment=nine"], "experiment=nine does not exist; did you mean mine?\n"),
        (
            ["hydra.searchpath=[own]", "experiment=gpt_1b"],
            "own/experiment/gpt_1b.yaml: experiment=gpt_1b is an option of conf/ already; give the file another name\n",
        ),
        (
            ["hydra.searchpath=[own]", "model=bare", "model.heads=2"],
            "own/model/bare.yaml: model.heads is not in it; begin it with defaults: [OPTION], an option of model\n",
        ),
    ],
    ids=str,
)
def test_an_option_that_no_file_makes_is_refused(here, words, said, capsys):
    written(here / "own/experiment/mine.yaml", f"{GLOBAL}steps: 2\n")
    written(here / "own/experiment/gpt_1b.yaml", f"{GLOBAL}steps: 2\n")
    written(here / "own/model/bare.yaml", "width: 64\n")
    assert train.main(words) == 2
    assert capsys.readouterr().err == said


def test_a_file_counts_before_the_command_line_and_after_the_options_that_it_chooses(here):
    written(here / "own/model/small.yaml", "defaults: [gpt_nano]\nwidth: 64\nlayers: 3\n")
    written(
        here / "own/experiment/mine.yaml",
        f"{GLOBAL}defaults:\n  - override /model: small\n  - override /optim: lion\n"
        "steps: 2\nmodel: {layers: 5}\noptim: {lr: 1e-3}\nhydra: {run: {dir: mine}}\n",
    )
    composed = compose(["hydra.searchpath=[own]", "experiment=mine", "steps=7"])
    settings = settings_in(composed)
    assert (settings["steps"], settings["optim"]["name"], settings["optim"]["lr"]) == (7, "lion", 1e-3)
    assert {settings["model"][key] for key in ("width", "layers")} == {64, 5}
    assert settings["model"]["heads"] == settings_in(compose([]))["model"]["heads"]
    assert composed.hydra.run.dir == "mine"


@pytest.mark.parametrize("word", ["data.folder=~/texts", "data.folder='~/texts'"])
def test_a_path_may_begin_at_home(here, monkeypatch, word):
    monkeypatch.setenv("HOME", str(here / "home, sweet"))
    written(here / "home, sweet/texts/a.txt", "some words\n" * 500)
    (here / "home, sweet/x").mkdir()
    run = ["debug=tiny", "steps=1", "sample.tokens=0", "tracker.console=none", "hydra.run.dir=~/run"]
    saves = ["offload=nvme", "offload.path=[~/x]", "checkpoint.dir='~/saved'", "checkpoint.every=1"]
    assert train.main([*run, word, *saves]) == 0
    assert train.main([*run, word, "mode=eval", "resume='~/saved'"]) == 0
    assert {path.name for path in (here / "home, sweet").iterdir()} == {"texts", "x", "run", "saved"}
    assert [path.name for path in here.iterdir()] == ["home, sweet"]
