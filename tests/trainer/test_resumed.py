"""A resumed run prints what differs from the run that saved, with settings to type that undo each difference."""

import re
import shlex
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import zero
from zero.checkpoint.contents import flats
from zero.checkpoint.format.manifest import entries
from zero.distributed.world import World
from zero.errors import CheckpointError
from zero.settings.build import build_optimizer
from zero.trainer.compose import compose, settings_in
from zero.trainer.config import Config, read
from zero.trainer.run.refusals import differences, refuse_other_model, refuse_other_moments


@cache
def settled(*words: str) -> Config:
    return read(settings_in(compose(words)))


def planned(config: Config) -> zero.Plan:
    """A matrix, a bias and an embedding with the optimizer of a run."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    return zero.Plan(model, optimizer=build_optimizer(config), world=World.solo())


def saved_by(config: Config):
    """As much of a checkpoint as is looked at: the entries that a run with this optimizer leaves."""
    return SimpleNamespace(
        folder=Path("runs/x/checkpoints/step-0000000004"),
        facts={"config": config.plain()},
        manifest=SimpleNamespace(entries=entries(flats(planned(config), {}))),
    )


def advice(refused) -> list[str]:
    """The words after `Add`."""
    return re.search(r"\. Add (.*?), or ", str(refused.value))[1].split(" ")


MODELS = [
    ["model=gpt_nano"],
    ["model=gpt_124m", "model.vocab=50304", "model.tied=false"],
    ["debug=tiny"],
    ["model=hf", "model.path=some/folder", "model.seq=64"],
    ["model=hf", "model.path=gpt2"],
]


@pytest.mark.parametrize("theirs", MODELS, ids=" ".join)
def test_what_to_add_for_another_model_makes_it_the_same(theirs):
    saved = settled(*theirs)
    for ours in MODELS:
        mine = settled("mode=eval", "resume=latest", *ours)
        if mine.model == saved.model:
            refuse_other_model(mine, saved_by(saved))
            continue
        with pytest.raises(CheckpointError) as refused:
            refuse_other_model(mine, saved_by(saved))
        of_one_kind = mine.model.name == saved.model.name
        assert settled(*(ours if of_one_kind else []), *advice(refused)).model == saved.model
        refuse_other_model(settled(*ours, "checkpoint.partial=[head.*]"), saved_by(saved))


def test_what_to_add_for_an_evaluation_has_the_data_too():
    saved = settled("debug=tiny", "data=tokens", "data.path=t.bin", "data.vocab=256")
    with pytest.raises(CheckpointError) as refused:
        refuse_other_model(settled("mode=eval", "resume=latest"), saved_by(saved))
    assert settled("debug=tiny", *advice(refused)).data == saved.data
    folders = settled("debug=tiny", "data.folder=x", "data.skip=[a,b]")
    with pytest.raises(CheckpointError) as refused:
        refuse_other_model(settled("mode=eval", "resume=latest", "data=synthetic"), saved_by(folders))
    assert settled(*advice(refused)).data == folders.data


PATHS = ["a b", "a,b", "it's", 'a "b"', "back\\slash", "a\\'b", 'a\\"b', "end\\", "é", "~/x", "1e3"]
PATHS += ["a=b", "[a]", "x" * 90, "null"]


@pytest.mark.parametrize("path", PATHS)
def test_what_to_add_is_the_whole_path_as_a_shell_and_hydra_read_it(path):
    saved = settled("model=hf", "model.path=x")
    saved = saved.model_copy(update={"model": saved.model.model_copy(update={"path": path})})
    with pytest.raises(CheckpointError) as refused:
        refuse_other_model(settled("model=hf", "model.path=y"), saved_by(saved))
    words = shlex.split(re.search(r"\. Add (.*), or list in", str(refused.value))[1])
    assert settled("model=hf", *words).model.path == str(Path(path).expanduser())


OPTIMIZERS = [
    ["optim=adamw", "optim.lr=0.01"],
    ["optim=lion", "optim.beta1=0.8"],
    ["optim=sgd", "optim.momentum=0"],
    ["optim=adamw", "optim.ema=0.5"],
    ["optim=muon"],
]


@pytest.mark.parametrize("theirs", OPTIMIZERS, ids=" ".join)
def test_what_to_add_for_other_moments_makes_them_the_same(theirs):
    saved = settled(*theirs)
    for ours in OPTIMIZERS:
        mine = settled(*ours)
        kept = [{(entry.name, entry.kind) for entry in saved_by(config).manifest.entries} for config in (mine, saved)]
        kept = [{key for key in keys if key[1] != "parameter"} for keys in kept]
        lacking, beyond = (a - b for a, b in (kept, kept[::-1]))
        lacking = {key for key in lacking if key[1] != "ema"}  # a mean of the parameters may begin at any time
        if not lacking | beyond:
            refuse_other_moments(mine, planned(mine), saved_by(saved))
            continue
        with pytest.raises(CheckpointError) as refused:
            refuse_other_moments(mine, planned(mine), saved_by(saved))
        same = settled(*(ours if mine.optim.name == saved.optim.name else []), *advice(refused))
        assert same.optim == saved.optim
        named = set(re.search(r"checkpoint\.partial=\[(.*?)\]", str(refused.value))[1].split(","))
        matched = {key for key in kept[0] | kept[1] if any(fnmatch(f"{key[1]}/{key[0]}", pattern) for pattern in named)}
        assert matched == lacking | beyond, "what both have is loaded"


def test_a_checkpoint_that_nobody_described_is_answered_by_its_moments():
    mine = settled()
    bare = saved_by(settled("optim=sgd", "optim.momentum=0"))
    bare.facts = {}
    with pytest.raises(CheckpointError, match=r"lacks mu, nu, which optim=adamw keeps\. Add checkpoint.partial=\[mu/"):
        refuse_other_moments(mine, planned(mine), bare)


def said(theirs: Config, ours: Config) -> list[str]:
    return list(differences({"config": theirs.plain()}, {"config": ours.plain()}))


def test_what_changes_nothing_in_the_result_is_not_mentioned():
    elsewhere = ["zero.stage=0", "launch.ranks=2", "offload=cpu", "checkpoint.every=2", "tracker.every=1", "resume=x"]
    assert said(settled(), settled(*elsewhere)) == []
    assert said(settled(), settled("mode=eval", "resume=x", "steps=9", "optim=sgd", "schedule=constant")) == []


def test_what_changes_the_result_is_one_line():
    (line,) = said(settled(), settled("batch.global=16", "optim=lion", "data=synthetic", "seed=3", "debug=tiny"))
    for words in ("seed=3 (was 0)", "batch.global=16 (was 8)", "optim=lion (was adamw)", "data=synthetic (was text)"):
        assert words in line
    assert "\n" not in line
    (line,) = said(settled(), settled("mode=eval", "resume=x", "val.rows=8", "val.every=3"))
    assert line.endswith(": val.rows=8 (was 64)")


def test_a_run_of_another_version_is_compared_by_what_both_know():
    theirs = settled().plain()
    theirs["optim"]["invented"] = 1
    (line,) = differences({"config": theirs}, {"config": settled("optim.lr=0.1").plain()})
    assert line.endswith("optim.lr=0.1 (was 0.001)")
