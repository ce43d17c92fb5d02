"""Rows reach the disk as they are made, in JSON that any reader takes, and a view never ends a run."""

import io
import json
import sys

import pytest

from zero.config import read
from zero.tracker import ROW, Bar, Tracker, open_tracker, write_summary

FIRST = dict.fromkeys(ROW) | {
    "step": 10,
    "tokens": 1000,
    "train/loss": 3.25,
    "train/grad_norm": float("inf"),
    "train/skipped": 1,
    "speed/step_s": 0.5,
    "speed/tokens_per_s": 200.0,
    "memory/device_peak_bytes": 0,
    "memory/host_peak_bytes": 3 * 2**20,
}


def settings(console="auto", **tracker):
    return read({"steps": 40, "tracker": {"name": "jsonl", "console": console, **tracker}})


def test_a_row_is_on_disk_when_log_returns(tmp_path):
    with open_tracker(settings("none"), tmp_path) as tracker:
        tracker.log(FIRST)
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert tuple(row) == ROW
    assert row["train/grad_norm"] is None
    assert row["train/loss"] == 3.25


def test_a_pipe_gets_one_plain_line_per_row(tmp_path):
    stream = io.StringIO()
    with open_tracker(settings(), tmp_path, stream) as tracker:
        tracker.note("hello")
        tracker.log(FIRST)
        tracker.log(FIRST | {"step": 20, "val/loss": 3.0, "train/skipped": 0})
    hello, first, second = stream.getvalue().splitlines()
    assert hello == "hello"
    assert first == "step 10/40  loss 3.2500  200 tokens/s  3 MiB  1 skipped  0:15 left"
    assert second.startswith("step 20/40  loss 3.2500  val 3.0000  200 tokens/s  3 MiB  ")
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_bar_with_loss_speed_and_memory(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    bar = Bar(40, stream)
    bar.note("[bold]not markup")
    bar.log(FIRST)
    bar.close({}, 0)
    shown = stream.getvalue()
    assert "[bold]not markup" in shown
    assert "10/40" in shown
    assert "loss 3.2500" in shown


def test_the_other_ranks_say_nothing(capsys):
    with open_tracker(settings("lines"), None) as tracker:
        tracker.log(FIRST)
    assert capsys.readouterr() == ("", "")


def test_views_are_closed_with_the_exit_code_of_the_run():
    class View:
        def close(self, summary, exit_code):
            self.seen = dict(summary), exit_code

    view = View()
    with Tracker([view]) as tracker:
        tracker.finish({"steps": 3})
    assert view.seen == ({"steps": 3}, 0)

    class Broken(Exception):
        exit_code = 6

    with pytest.raises(Broken), Tracker([view]):
        raise Broken
    assert view.seen == ({}, 6)


def test_without_wandb_the_run_goes_on_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    stream = io.StringIO()
    with open_tracker(settings(name="wandb"), tmp_path, stream) as tracker:
        tracker.log(FIRST)
    assert "wandb is not installed" in stream.getvalue()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_a_wandb_run_without_a_key_is_offline(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_tracker(settings("none", name="wandb"), tmp_path) as tracker:
        tracker.log(FIRST)
        tracker.finish({"steps": 10, "plan_bytes": {}})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_a_summary_is_json_whatever_the_losses(tmp_path):
    write_summary(tmp_path, {"val_loss": float("nan"), "steps": 3, "plan_bytes": {"device": {"moments": 8}}})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "val_loss": None, "steps": 3, "plan_bytes": {"device": {"moments": 8}},
    }  # fmt: skip
