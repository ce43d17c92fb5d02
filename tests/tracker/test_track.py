"""A loop of one's own has the rows, the files and the page of a run, in units that fit it."""

import argparse
import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F

import zero
from tests.conftest import LONG_S
from zero.errors import ConfigError
from zero.testing import run_ranks
from zero.tracker import ROW
from zero.tracker.report.run import write_run

ROOT = Path(__file__).resolve().parents[2]


def loss_fn(model, batch):
    images, labels = batch
    scores = model(images)
    return F.cross_entropy(scores, labels), {"accuracy": (scores.argmax(-1) == labels).float().mean()}


def begun(world, **settings):
    """A classifier of small pictures, and its step."""
    with world.exclusive(), zero.empty():
        model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    plan = zero.Plan(model, optimizer=zero.adamw(lr=1e-2), world=world, **settings)
    return plan, zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss_fn)


def batch(number=0, rows=8):
    draw = torch.Generator().manual_seed(number)
    return torch.randn(rows, 12, generator=draw), torch.randint(4, (rows,), generator=draw)


def trained(world, folder, loops=6, fails=None, **options):
    """A run in a loop of one's own; what `zero.track` gave."""
    _, state, step = begun(world)
    with zero.track(state, folder, **{"samples": 8, "every": 2, **options}) as track:
        for number in range(loops):
            state, metrics = step(state, [batch(number)])
            track(state, metrics)
        if fails is not None:
            raise fails
    return track


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_loop_has_rows_a_summary_a_trace_and_a_page(tmp_path, capsys):
    folder = tmp_path / "runs" / "mine"
    track = trained(zero.open_world(), folder, loops=7, steps=9, config={"lr": 0.01, "path": Path("data")})
    rows = rows_of(folder)
    assert track.folder == folder
    assert [row["step"] for row in rows] == [2, 4, 6, 7], "the last steps are a row, too"
    assert [row["samples"] for row in rows] == [16, 32, 48, 56]
    assert set(rows[0]) == {key.replace("tokens", "samples") for key in ROW} | {"train/accuracy"}
    assert rows[0]["speed/samples_per_s"] > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps"], summary["samples"]) == ("finished", 7, 56)
    assert summary["samples_per_s"] > 0
    assert sum(summary["measured_bytes"]["device"].values()) > 0
    assert not any("tokens" in key for key in summary)
    spans = zero.Timeline.read(folder / "trace.json").spans
    assert {"before the step", "forward 1", "backward 1", "norm"} <= {span.name for span in spans}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["lr"], config["path"], config["loop"]["stage"], config["loop"]["samples"]) == (0.01, "data", 3, 8)
    said = capsys.readouterr().out
    assert "step 2/9  loss " in said
    assert " samples/s" in said
    assert f"report {folder / 'report.html'}" in said
    page = (folder / "report.html").read_text()
    words = ["Samples per second", "56 samples", "of 9", "accuracy", "loop.stage", "stage 3", "One step", "finished"]
    assert [word for word in words if word not in page] == []
    assert [word for word in ("okens per second", "nats per token", "Settings that differ") if word in page] == []


def test_the_script_makes_the_page_again(tmp_path):
    trained(zero.open_world(), tmp_path)
    before = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/report", tmp_path], capture_output=True, text=True, timeout=LONG_S, check=True
    )
    assert done.stdout == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text() == before


def test_whoever_counts_tokens_gets_tokens(tmp_path):
    trained(zero.open_world(), tmp_path, samples=None, tokens=100, flops=1e3)
    assert set(rows_of(tmp_path)[0]) == {*ROW, "train/accuracy"}
    assert rows_of(tmp_path)[-1]["tokens"] == 600
    page = (tmp_path / "report.html").read_text()
    assert "Tokens per second" in page
    assert "nats per token" in page


def test_whoever_counts_nothing_gets_the_time_of_a_step(tmp_path, capsys):
    trained(zero.open_world(), tmp_path, samples=None)
    assert set(rows_of(tmp_path)[0]) == {key for key in ROW if "tokens" not in key} | {"train/accuracy"}
    assert " s/step" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "per second" not in page.replace("bytes a second", "")


def test_an_evaluation_is_a_row_with_the_mean_of_the_ranks(tmp_path):
    def loop(world):
        plan, state, step = begun(world)
        evaluate = zero.make_forward(plan, loss_fn)
        with zero.track(state, tmp_path, samples=8, every=100) as track:
            for number in range(6):
                state, metrics = step(state, [batch(10 * number + world.rank)])
                val = {}
                if state.step == 5:
                    with track.paused():
                        evaluate(state, batch())
                        val = {"loss": torch.tensor(2.0 + world.rank), "accuracy": 0.5 * world.rank}
                track(state, metrics, val)
        return track.folder

    assert set(run_ranks(2, loop)) == {tmp_path}
    first, last = rows_of(tmp_path)
    assert (first["step"], first["val/loss"], first["val/accuracy"]) == (5, 2.5, 0.25)
    assert first["samples"] == 5 * 16, "of both ranks"
    assert (last["step"], last["val/loss"]) == (6, None)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["best_val_loss"], summary["val_loss"], summary["ranks"]) == (2.5, 2.5, 2)


@pytest.mark.parametrize("between", ["evaluate", "save", "a pause"])
def test_the_update_of_a_step_is_in_its_row_also_where_something_else_would_make_it(tmp_path, between, monkeypatch):
    """Each row has the writes of one step, half of what the plan says; reads may be ahead of it."""
    monkeypatch.chdir(tmp_path)

    plan, state, step = begun(zero.open_world(), offload=zero.Offload("nvme", path=".", page_bytes=4096))
    evaluate = zero.make_forward(plan, loss_fn)
    with zero.track(state, tmp_path, every=1, timeline=False) as track:
        for number in range(4):
            state, metrics = step(state, [batch(number)])
            with track.paused():
                if between == "evaluate":
                    evaluate(state, batch())
                elif between == "save":
                    zero.save(state, tmp_path / "checkpoints")
                else:  # the store's threads need nobody who waits for them
                    time.sleep(0.05)
            track(state, metrics)
    planned = json.loads((tmp_path / "summary.json").read_text())["plan_step_bytes"]["disk"]
    assert [row["offload/write_bytes"] for row in rows_of(tmp_path)] == 4 * [planned / 2]


def test_a_step_beside_an_evaluation_is_not_recorded_and_a_recording_of_ones_own_comes_first(tmp_path):
    plan, state, step = begun(zero.open_world())
    evaluate = zero.make_forward(plan, loss_fn)
    recorded = []
    with zero.track(state, tmp_path, samples=8, every=1) as track:
        for number in range(8):
            if number == 2:
                with zero.record(state) as timeline:
                    state, metrics = step(state, [batch(number)])
                assert timeline.spans, "it does not know of the other"
            else:
                state, metrics = step(state, [batch(number)])
            if number in (3, 4):
                with track.paused():
                    evaluate(state, batch())
            track(state, metrics)
            recorded.append((tmp_path / "trace.json").exists())
    assert recorded == [False] * 5 + [True] * 3
    speeds = [row["speed/samples_per_s"] for row in rows_of(tmp_path)]
    assert [speed is None for speed in speeds] == [number in (2, 5) for number in range(8)], "it is nobody's time"


def test_a_loop_that_goes_on_adds_rows_and_another_one_leaves_them_alone(tmp_path, caplog):
    world = zero.open_world()
    _, state, step = begun(world)
    with zero.track(state, tmp_path, samples=8, every=1) as track:
        state, metrics = step(state, [batch()])
        track(state, metrics)
        track.saved(zero.save(state, tmp_path / "checkpoints", progress=track.progress))
    assert json.loads((tmp_path / "summary.json").read_text())["checkpoint"].endswith("checkpoints/step-0000000001")
    _, state, step = begun(world)
    checkpoint, _ = zero.open_latest(world, tmp_path / "checkpoints")
    state = zero.load(state, checkpoint)
    with zero.track(state, tmp_path, samples=8, every=1) as track:
        state, metrics = step(state, [batch()])
        track(state, metrics)
    assert [(row["step"], row["samples"]) for row in rows_of(tmp_path)] == [(1, 8), (2, 16)]
    assert trained(world, tmp_path).folder == tmp_path / "run-2"
    assert len(rows_of(tmp_path)) == 2
    assert "has the rows of another run" in caplog.text


def test_a_loop_that_goes_on_knows_the_best_and_the_time_of_its_earlier_starts(tmp_path):
    """Losses up to the step that it goes on from: of step 4, which it makes again, only the time is its own."""
    folder, seconds = tmp_path / "run", []
    world = zero.open_world()

    def start(val, checkpoint=None):
        _, state, step = begun(world)
        state = state if checkpoint is None else zero.load(state, checkpoint)
        with zero.track(state, folder, every=2, timeline=False) as track:
            for loss in val:
                state, metrics = step(state, [batch()])
                track(state, metrics._replace(loss=loss), {"loss": loss} if state.tried % 2 == 0 else {})
                if state.tried == 3:
                    zero.save(state, tmp_path / "checkpoints")
        seconds.append(json.loads((folder / "summary.json").read_text())["seconds"])
        return json.loads((folder / "summary.json").read_text())

    first = start([5.0, 3.0, 4.0, 1.0])
    assert (first["best_train_loss"], first["best_val_loss"]) == (1.0, 1.0)
    checkpoint, _ = zero.open_latest(world, tmp_path / "checkpoints")
    second = start([7.0], checkpoint)
    assert (second["steps"], second["best_train_loss"], second["best_val_loss"]) == (4, 3.0, 3.0)
    third = start([6.0, 2.5], checkpoint)
    assert (third["steps"], third["best_train_loss"], third["best_val_loss"]) == (5, 2.5, 3.0)
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


@pytest.mark.parametrize("slow", [0, 1])
def test_the_page_names_the_rank_that_is_held_up(tmp_path, slow):
    def loop(world):
        _, state, step = begun(world)
        with zero.track(state, tmp_path, samples=8, every=1, timeline=False) as track:
            for number in range(5):
                if world.rank == slow:
                    time.sleep(0.15)
                state, metrics = step(state, [batch(number)])
                track(state, metrics)

    run_ranks(2, loop)
    assert re.search(
        rf"<dt>Slowest</dt><dd>rank {slow}</dd><p>in [345] of 5 rows", (tmp_path / "report.html").read_text()
    )


@pytest.mark.parametrize(
    ("error", "reason", "status"),
    [
        (ValueError("no such\nlabel"), "ValueError: no such label", "failed"),
        (KeyboardInterrupt(), "stopped by SIGINT", "stopped"),
    ],
)
def test_a_loop_that_fails_leaves_a_page_that_says_why(tmp_path, error, reason, status):
    with pytest.raises(type(error)):
        trained(zero.open_world(), tmp_path, loops=4, fails=error)
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == reason
    assert f">{status}<" in (tmp_path / "report.html").read_text()
    assert trained(zero.open_world(), tmp_path / "next").folder.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 5}, "samples and tokens are two units of one speed"),
        ({"samples": 0}, "samples=0: must be a whole number from 1"),
        ({"steps": 1.5}, "steps=1.5: must be a whole number from 1"),
        ({"tracker": "tensorbord"}, "tracker=tensorbord does not exist. Did you mean tensorboard?"),
        ({"tracker": {"name": "wandb", "tag": ["x"]}}, "tag is not a setting. Did you mean tags?"),
        ({"every": 0}, "every=0: must be at least 1"),
        ({"config": {"loop": 1}}, "config has loop"),
        ({"config": {("lr", 1): 1}}, "config cannot be written as settings: keys must be str"),
        ({"tracker": None}, "tracker is None. Pass one or several of jsonl, wandb, tensorboard, or settings"),
        ({"flops": "many"}, "flops='many': must be a number above 0"),
        ({"flops": -1}, "flops=-1: must be a number above 0"),
        ({"flops": 1e9, "samples": None}, "flops is for one sample or one token. Pass samples or tokens, too"),
        (
            {"config": argparse.Namespace(lr=1)},
            "config is a Namespace, not a mapping. Write config=vars(args)",
        ),
        ({"config": {"key": "5ec12e7c0ffee5ec12e7c0ffee5ec12e7c0ffee5"}}, "looks like a secret"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, options, message):
    _, state, _ = begun(zero.open_world())
    with pytest.raises(ConfigError) as refused:
        zero.track(state, tmp_path, **{"samples": 8, **options})
    assert message in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_each_step_is_counted_inside_of_the_block_or_refused(tmp_path):
    _, state, step = begun(zero.open_world())
    state, metrics = step(state, [batch()])
    tracking = zero.track(state, tmp_path, samples=8)
    with pytest.raises(ConfigError, match=r"outside of its block\. Write with"):
        tracking(state, metrics)
    with tracking as track:
        state, metrics = step(state, [batch()])
        track(state, metrics)
        with pytest.raises(ConfigError, match=r"has counted 2 steps, and this state is at step 2\. Call track"):
            track(state, metrics)
        state, metrics = step(state, [batch()])
        with pytest.raises(ConfigError, match="takes a dict of numbers as its third argument, not a float"):
            track(state, metrics, 0.5)
        with pytest.raises(ConfigError, match="'loss' of an evaluation is None, but must be a number"):
            track(state, metrics, {"loss": None})
        track(state, metrics, {"loss": 0.5})
    with pytest.raises(ConfigError, match="outside of its block"):
        track(state, metrics)
    with pytest.raises(ConfigError, match=r"track\.saved was called outside of its block"):
        track.saved(tmp_path)

    def now_and_then():
        nonlocal state
        with zero.track(state, tmp_path, samples=8) as track:
            for number in range(6):
                state, metrics = step(state, [batch()])
                if number % 3 == 2:
                    track(state, metrics)

    with pytest.raises(ConfigError, match=r"has counted \d steps, and this state is at step \d+\. Call track"):
        now_and_then()


def test_a_state_of_before_is_tracked_in_a_block_of_its_own(tmp_path):
    plan, state, step = begun(zero.open_world())
    with zero.track(state, tmp_path / "run", samples=8, every=1) as track:
        for number in range(4):
            state, metrics = step(state, [batch()])
            track(state, metrics)
            if number == 1:
                zero.save(state, tmp_path / "checkpoints")
        checkpoint, _ = zero.open_latest(plan.world, tmp_path / "checkpoints")
        state = zero.load(state, checkpoint)
        state, metrics = step(state, [batch()])
        with pytest.raises(ConfigError, match=r"has counted 4 steps, and this state is at step 3\. Call track"):
            track(state, metrics)
    state = zero.load(state, checkpoint)
    with zero.track(state, tmp_path / "run", samples=8, every=1) as track:
        state, metrics = step(state, [batch()])
        track(state, metrics)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows][-2:] == [4, 3]


def test_charts_are_chosen_by_name_or_by_settings(tmp_path):
    pytest.importorskip("tensorboard")
    trained(zero.open_world(), tmp_path / "a", tracker=("tensorboard",))
    settings = {"name": "wandb", "mode": "disabled", "tensorboard": True, "console": "none"}
    trained(zero.open_world(), tmp_path / "b", tracker=settings)
    trained(zero.open_world(), tmp_path / "c", tracker={"name": "tensorboard"})
    assert all(list((tmp_path / name / "tensorboard").iterdir()) for name in "abc")


def test_wandb_gets_the_settings_and_the_rows(tmp_path, monkeypatch):
    from tests.common import wandb_file

    monkeypatch.setenv("WANDB_MODE", "offline")
    trained(zero.open_world(), tmp_path, tracker="wandb", config={"lr": 0.01})
    written = wandb_file.read(tmp_path)
    assert written.config["lr"] == 0.01
    assert written.config["loop"]["samples"] == 8
    assert [row["samples"] for row in written.rows if "step" in row] == [16, 32, 48]
    assert written.summary["samples_per_s"] > 0


def test_a_terminal_has_a_bar_where_the_steps_are_known(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for steps in (6, None):
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        trained(zero.open_world(), tmp_path / str(steps), steps=steps)
        assert ("━" in terminal.getvalue()) == (steps is not None)


def test_a_page_of_a_loop_is_made_while_it_runs(tmp_path):
    _, state, step = begun(zero.open_world())
    with zero.track(state, tmp_path, samples=8, every=1) as track:
        state, metrics = step(state, [batch()])
        track(state, metrics)
        assert "So far" in write_run(tmp_path).read_text()
