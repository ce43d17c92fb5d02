"""The best checkpoint, early stop, and validation before the first step; with losses that the test chooses."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import train
from tests.trainer.test_chat import rows_of
from zero.testing import forked_ranks
from zero.trainer.commands import export_checkpoint, sample
from zero.trainer.run import loop
from zero.trainer.run.best import best_in

TINY = ["debug=tiny", "sample.tokens=0", "tracker.console=lines", "launch.threads=1", "val.every=2"]
BEST = "checkpoint.best=val/loss"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def losses(monkeypatch) -> list[float]:
    """The losses of the next validations."""
    left: list[float] = []
    monkeypatch.setattr(loop, "validation_loss", lambda *_, **__: left.pop(0))
    return left


def summary_of(folder: str) -> dict[str, Any]:
    return dict(json.loads((Path(folder) / "summary.json").read_text()))


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def best_of(root: Path) -> int | None:
    checkpoint = best_in(root)
    return None if checkpoint is None else int(checkpoint.name[5:])


@pytest.mark.parametrize("behind", [False, True])
def test_the_best_checkpoint_stays_beside_the_newest(here, losses, behind):
    losses += [5.0, 3.0, 4.0, 4.5, 4.4, 4.1]
    words = ["steps=12", "checkpoint.every=2", "checkpoint.keep=2", BEST, f"checkpoint.async={behind}".lower()]
    assert train.main([*TINY, *words, "hydra.run.dir=run"]) == 0
    root = here / "run" / "checkpoints"
    assert steps_in(root) == [4, 10, 12]
    assert best_of(root) == 4
    assert (summary_of("run")["best_val_step"], summary_of("run")["best_val_loss"]) == (4, 3.0)


def test_without_other_saves_only_the_best_are_saved(here, losses):
    losses += [5.0, 3.0, 4.0, 2.0, 2.0, 2.5]
    assert train.main([*TINY, "steps=12", BEST, "hydra.run.dir=run"]) == 0
    assert steps_in(here / "run" / "checkpoints") == [4, 8]
    assert best_of(here / "run" / "checkpoints") == 8


def test_a_resumed_run_knows_the_best_of_the_first(here, losses):
    losses += [5.0, 1.0, 3.0, 2.0, 2.5, 0.5]
    words = ["steps=12", "checkpoint.every=2", BEST, "checkpoint.dir=saved", "resume=latest"]
    assert train.main([*TINY, *words, "debug.stop_at=6", "hydra.run.dir=first"]) == 0
    assert best_of(here / "saved") == 4
    assert train.main([*TINY, *words, "debug.stop_at=10", "hydra.run.dir=second"]) == 0
    assert best_of(here / "saved") == 4
    assert 4 in steps_in(here / "saved")
    assert train.main([*TINY, *words, "hydra.run.dir=third"]) == 0
    assert best_of(here / "saved") == 12


def test_the_best_is_resumed_exported_and_sampled(here, losses, capsys):
    losses += [5.0, 1.0, 3.0, 3.0]
    words = ["steps=8", "checkpoint.every=8", BEST, "checkpoint.dir=saved", "hydra.run.dir=run", "data=text"]
    assert train.main([*TINY, *words]) == 0
    capsys.readouterr()
    losses += [7.0]
    words = ["mode=eval", "data=text", "checkpoint.dir=saved", "resume=best", "val.rows=4"]
    assert train.main([*TINY, *words, "hydra.run.dir=eval"]) == 0
    assert "evaluating saved/step-0000000004" in capsys.readouterr().out
    for path in ("saved/best", "run"):  # the run's summary names the folder of its checkpoints
        assert export_checkpoint.main([path, "--to", "torch", "--out", f"{path.replace('/', '-')}.pt"]) == 0
        assert sample.main([path, "def", "--tokens", "1"]) == 0
    said = capsys.readouterr()
    assert "step-0000000004" in said.out + said.err
    assert "step-0000000008" in said.out + said.err
    losses += [3.0]
    assert train.main([*TINY, "steps=5", "resume=saved/best", "hydra.run.dir=more"]) == 0
    assert rows_of(here / "more")[-1]["step"] == 5
    assert train.main([*TINY, "steps=5", "checkpoint.dir=saved", "resume=best"]) == 4
    assert "exists, but this run starts from step 4" in capsys.readouterr().err


def test_no_best_is_one_line(here, capsys):
    assert train.main([*TINY, "steps=5", "resume=best"]) == 4
    said = capsys.readouterr().err
    assert "resume=best: no run has saved with checkpoint.best. Give latest, or the path of a step." in said
    assert said.count("\n") == 1


def test_patience_ends_the_run_after_validations_without_a_lower_loss(here, losses, capsys):
    losses += [5.0, 3.0, 4.0, 3.0, 9.0]
    words = ["steps=40", "val.patience=2", "checkpoint.every=30", BEST, "hydra.run.dir=run"]
    assert train.main([*TINY, *words]) == 0
    assert (summary_of("run")["exit_reason"], summary_of("run")["steps"]) == ("val.patience reached", 8)
    assert steps_in(here / "run" / "checkpoints") == [4, 8], "the last step is saved too"
    assert "val.patience: the validation loss was lowest at step 4, 3.0000" in capsys.readouterr().out
    assert train.main([*TINY, "val.every=0", "val.patience=2"]) == 2
    assert capsys.readouterr().err == "val.patience counts validations, but val.every=0 makes one. Set val.every=100.\n"


@pytest.mark.process
def test_ranks_stop_early_together(here):
    words = ["steps=200", "val.patience=1", "optim.lr=30", "launch.ranks=2", BEST, "hydra.run.dir=run"]
    with forked_ranks():
        assert train.main([*TINY, *words]) == 0
    summary = summary_of("run")
    assert summary["exit_reason"] == "val.patience reached"
    assert summary["steps"] == summary["best_val_step"] + 2 < 200
    assert best_of(here / "run" / "checkpoints") == summary["best_val_step"]


def test_a_validation_before_the_first_step(here, losses):
    losses += [6.0, 5.0, 4.0]
    assert train.main([*TINY, "steps=4", "val.at_start=true", "checkpoint.every=4", "hydra.run.dir=run"]) == 0
    rows = [(row["step"], row["val/loss"]) for row in rows_of(here / "run")]
    assert [row for row in rows if row[1] is not None] == [(0, 6.0), (2, 5.0), (4, 4.0)]
    first = rows_of(here / "run")[0]
    assert (first["step"], first["speed/step_s"], first["train/loss"]) == (0, None, None)
    losses += [3.0]
    again = ["steps=6", "val.at_start=true", "resume=run", "hydra.run.dir=again"]
    assert train.main([*TINY, *again]) == 0
    assert [row["step"] for row in rows_of(here / "again") if row["val/loss"] is not None] == [6]


def test_a_run_that_patience_ended_goes_on_with_new_patience(here, losses):
    losses += [3.0, 4.0, 4.0]
    words = ["val.patience=2", "checkpoint.every=30"]
    assert train.main([*TINY, *words, "steps=40", "hydra.run.dir=first"]) == 0
    losses += [5.0, 2.0, float("nan"), 2.5]
    assert train.main([*TINY, *words, "steps=40", "resume=first", "hydra.run.dir=again"]) == 0
    assert (summary_of("again")["steps"], summary_of("again")["best_val_step"]) == (14, 10)
    assert summary_of("again")["exit_reason"] == "val.patience reached"


def test_a_loss_on_other_validation_data_is_not_compared(here, losses):
    losses += [1.0]
    assert train.main([*TINY, "steps=2", "checkpoint.every=2", "hydra.run.dir=first"]) == 0
    losses += [5.0, 4.0, 3.0]
    words = ["steps=8", "val.rows=3", "val.patience=2", BEST, "resume=first", "hydra.run.dir=again"]
    assert train.main([*TINY, *words]) == 0
    assert (summary_of("again")["exit_reason"], summary_of("again")["best_val_step"]) == ("finished", 8)
    assert best_of(here / "again" / "checkpoints") == 8


def test_ctrl_c_saves_a_run_that_keeps_its_best_checkpoint(here, losses, monkeypatch):
    losses += [1.0] * 50
    real = loop.Run.microbatches

    def interrupted(run):
        if run._meter.steps == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return real(run)

    monkeypatch.setattr(loop.Run, "microbatches", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert train.main([*TINY, "steps=90", BEST, "hydra.run.dir=run"]) == 75
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps_in(here / "run" / "checkpoints") == [2, 5]
