"""A settings file of the user's own is an option. A mistake in it is one line with file and line number."""

from pathlib import Path

import pytest

import train
from zero.trainer.compose import compose, settings_in

GLOBAL = "# @package _global_\n"

MISTAKES = {
    "no package": ("steps: 2\n", ": the first line must be # @package _global_"),
    "a comment before the package": (f"# mine\n{GLOBAL}steps: 2\n", ": the first line must be # @package _global_"),
    "an open bracket": (
        f"{GLOBAL}steps: 2\nzero: {{stage: 3\n",
        ", line 4: expected ',' or '}', but got '<stream end>'",
    ),
    "a tab": (f"{GLOBAL}zero:\n\tstage: 3\n", ", line 3: found character '\\t' that cannot start any token"),
    "twice": (f"{GLOBAL}steps: 2\nsteps: 3\n", ": while constructing a mapping in "),
    "no mapping": (f"{GLOBAL}- steps\n", ": must hold keys with values, such as steps: 100"),
    "no text": (b"\xff\xfe", " cannot be read: 'utf-8' codec can't decode byte 0xff"),
    "an unknown key": (f"{GLOBAL}zero:\n  stge: 3\n", ": zero.stge is not a setting. Did you mean zero.stage?"),
    "dots": (f"{GLOBAL}zero.stage: 3\n", ": zero.stage: a key has no dots. Write the section, and"),
    "no override": (
        f"{GLOBAL}defaults:\n  - /model: gpt_124m\n",
        ": Multiple values for model. To override a value use 'override model: gpt_124m'",
    ),
    "an unknown option": (f"{GLOBAL}defaults:\n  - override /model: gpt_nona\n", ": In "),
    "an unknown group": (f"{GLOBAL}defaults:\n  - override /modle: gpt_nano\n", ": In "),
    "an unknown base": (f"{GLOBAL}defaults: [gpt_2b]\n", ": In 'experiment/mine': Could not load 'experiment/gpt_2b'"),
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


def test_a_mistake_in_a_file_that_another_file_chooses_names_the_key(here, capsys):
    written(here / "own/model/small.yaml", "defaults: [gpt_nano]\nwdth: 64\n")
    written(here / "own/experiment/mine.yaml", f"{GLOBAL}defaults:\n  - override /model: small\n")
    assert train.main(["hydra.searchpath=[own]", "experiment=mine"]) == 2
    assert capsys.readouterr().err == "model.wdth is not a setting. Did you mean model.width?\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra.searchpath=own"], "hydra.searchpath=own: must be a list. Write 'hydra.searchpath=[own]'.\n"),
        (["hydra.searchpath=[nowhere]"], "hydra.searchpath: nowhere is not a folder.\n"),
        (["hydra.searchpath=[own]", "experiment=nine"], "experiment=nine does not exist. Did you mean mine?\n"),
        (
            ["hydra.searchpath=[own]", "experiment=gpt_1b"],
            "own/experiment/gpt_1b.yaml: experiment=gpt_1b is an option of conf/. Give the file another name.\n",
        ),
        (
            ["hydra.searchpath=[own]", "model=bare", "model.heads=2"],
            "own/model/bare.yaml: model.heads is a setting of model=gpt_nano, gpt_124m, gpt_1b, gpt_340m or gpt_7b "
            "only. Choose such an option, or leave it out.\n",
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
