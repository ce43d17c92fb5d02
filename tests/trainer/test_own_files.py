"""A settings file of the user's own is an option. A mistake in it is one line."""

from pathlib import Path

import pytest

import train
from zero.trainer import compose as composing
from zero.trainer.compose import compose, notes_of, settings_in

GLOBAL = "# @package _global_\n"

MISTAKES = {
    "no package": ("steps: 2\n", "experiment=mine: the first line of the file must be # @package _global_"),
    "an open bracket": (f"{GLOBAL}steps: 2\nzero: {{stage: 3\n", "experiment/mine.yaml"),
    "dots": (f"{GLOBAL}zero.stage: 3\n", "zero.stage: a key has no dots. Write the section"),
    "twice": (f"{GLOBAL}steps: 2\nsteps: 3\n", "experiment/mine.yaml"),
    "an unknown key": (f"{GLOBAL}zero:\n  stge: 3\n", "zero.stge is not a setting. Did you mean zero.stage?"),
    "a section that the model lacks": (
        f"{GLOBAL}model:\n  lora: {{rank: 8}}\n",
        "model.lora is not a key of the option chosen for model. See mode=explain explain.key=model.lora.rank.",
    ),
    "the name of an option in place of its settings": (f"{GLOBAL}model: gpt_124m\n", "model is a section of keys."),
    "an unknown option": (f"{GLOBAL}defaults:\n  - override /model: gpt_nona\n", "Could not find 'model/gpt_nona'"),
    "an unknown base": (f"{GLOBAL}defaults: [gpt_2b]\n", "Could not load 'experiment/gpt_2b'"),
}


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_a_file_is_one_line(here, kind, capsys):
    content, said = MISTAKES[kind]
    written(here / "own/experiment/mine.yaml", content)
    assert train.main(["hydra.searchpath=[own]", "experiment=mine"]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


def test_a_mistake_in_a_file_that_another_file_chooses_names_the_key(here, capsys):
    written(here / "own/model/small.yaml", "defaults: [gpt_nano]\nwdth: 64\n")
    written(here / "own/experiment/mine.yaml", f"{GLOBAL}defaults:\n  - override /model: small\n")
    assert train.main(["hydra.searchpath=[own]", "experiment=mine"]) == 2
    assert capsys.readouterr().err == "model.wdth is not a setting. Did you mean model.width?\n"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("own", "hydra.searchpath=own: must be a list, such as 'hydra.searchpath=[own]'."),
        ("null", "hydra.searchpath=null: must be a list, such as 'hydra.searchpath=[own]'."),
        ("[nowhere]", "hydra.searchpath: nowhere is not a folder."),
        ("[own]", "experiment=nine does not exist. Did you mean mine?"),
        ("[twin]", "twin/model/gpt_nano.yaml: model=gpt_nano is an option of conf/. Give the file another name."),
    ],
)
def test_an_option_that_no_file_makes_or_that_two_make_is_refused(here, capsys, place, said):
    written(here / "own/experiment/mine.yaml", f"{GLOBAL}steps: 2\n")
    written(here / "twin/model/gpt_nano.yaml", "width: 64\n")
    assert train.main([f"hydra.searchpath={place}", "experiment=nine"]) == 2
    assert capsys.readouterr().err == f"{said}\n"


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


def test_a_path_may_begin_at_home(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "home, sweet"))
    written(here / "home, sweet/texts/a.txt", "some words\n" * 500)
    (here / "home, sweet/x").mkdir()
    run = ["debug=tiny", "steps=1", "sample.tokens=0", "tracker.console=none", "hydra.run.dir=~/run"]
    saves = ["offload=nvme", "offload.path=[~/x]", "checkpoint.dir='~/saved'", "checkpoint.every=1"]
    assert train.main([*run, "data.folder='~/texts'", *saves]) == 0
    assert train.main([*run, "data.folder=~/texts", "mode=eval", "resume='~/saved'"]) == 0
    assert {path.name for path in (here / "home, sweet").iterdir()} == {"texts", "x", "run", "saved"}
    assert [path.name for path in here.iterdir()] == ["home, sweet"]


def test_a_section_of_a_preset_is_left_out_where_the_model_lacks_it(monkeypatch):
    monkeypatch.setattr(composing, "_option", lambda group, name: {"model": {"lora": {"rank": 8}}})
    composed = compose([])
    composed.model = {**composed.model, "lora": {"rank": 8}}
    assert "lora" not in settings_in(composed)["model"]
    composed = compose(["model=hf", "model.path=x"])
    composed.model.lora.rank = 8
    assert settings_in(composed)["model"]["lora"]["rank"] == 8


def test_a_typed_section_is_not_taken_for_a_change_by_a_preset():
    assert [*notes_of(compose(["model=hf", "model.path=x", "model.lora={rank:8}"]))] == []
