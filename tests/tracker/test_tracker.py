"""Rows reach the disk as they are made, in JSON that any reader takes, and a view never ends a run."""

import io
import json
import re
import resource

import pytest

from zero.errors import MachineError
from zero.tracker import (
    ROW,
    BarView,
    Jsonl,
    Lines,
    Tracker,
    View,
    open_tracker,
    write_failure,
    write_summary,
)
from zero.tracker.views.console import column_words, fit
from zero.trainer.config import read

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
    with open_tracker(settings("none").tracker, tmp_path, steps=40) as tracker:
        tracker.log(FIRST)
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert tuple(row) == ROW
    assert row["train/grad_norm"] is None
    assert row["train/loss"] == 3.25


def test_a_row_that_was_cut_short_costs_no_other(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with open_tracker(settings("none").tracker, tmp_path, steps=40) as tracker:
        tracker.log(FIRST)
    first, cut, row = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert (json.loads(first), cut, json.loads(row)["train/loss"]) == ({"step": 1}, '{"st', 3.25)


class Clock:
    """A clock that a test moves on."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream):
    """The last picture on a terminal, a line each."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue().rsplit("\x1b[2K")[-1])
    return [line.rstrip() for line in text.splitlines()]


FULL = FIRST | {
    "step": 1200,
    "train/loss": 2.3456,
    "train/grad_norm": 1.234,
    "train/lr": 3e-4,
    "train/skipped": 0,
    "speed/tokens_per_s": 12345.6,
    "speed/mfu": 0.412,
    "speed/stall_fraction": 0.034,
    "memory/device_peak_bytes": 12.3 * 2**30,
    "memory/host_peak_bytes": 34.5 * 2**30,
    "memory/nvme_bytes": 100 * 2**30,
}


def test_a_pipe_gets_one_plain_line_per_row(tmp_path):
    stream = io.StringIO()
    with open_tracker(settings().tracker, tmp_path, stream, steps=40) as tracker:
        tracker.note("hello")
        tracker.log(FIRST)
        tracker.log(FIRST | {"step": 20, "val/loss": 3.0, "train/skipped": 0})
    hello, first, second = stream.getvalue().splitlines()
    assert hello == "hello"
    assert first == "step 10/40  loss 3.2500  norm inf  200 tok/s  1 skipped  memory 3 MiB  0:15 left"
    assert second.startswith("step 20/40  loss 3.2500  val 3.0000  norm inf  200 tok/s  memory 3 MiB  ")
    assert "\x1b" not in stream.getvalue()


def test_a_full_line_fits_120_columns():
    stream = io.StringIO()
    Lines(20000, stream, Clock()).log(FULL)
    assert stream.getvalue() == (
        "step 1200/20000 loss 2.3456 norm 1.23 lr 3.0e-4 12,346 tok/s mfu 41% stall 3% "
        "gpu/host/disk 12/34/100 GiB 2:36:40 left\n"
    )
    assert len(stream.getvalue()) < 120
    assert "lr 0" in [word.text for word in column_words(FULL | {"train/lr": 0.0})], "a warm-up may begin at nothing"


def test_where_there_is_less_room_the_least_important_words_go_first():
    all_of_them = column_words(FULL)
    assert fit(all_of_them, 200).count("  ") == len(all_of_them) - 1
    before = set(all_of_them)
    for columns in range(120, 3, -1):
        line = fit(all_of_them, columns)
        kept = {word for word in all_of_them if word.text in line}
        assert len(line) <= columns
        assert kept <= before
        gone = [word.rank for word in all_of_them if word not in kept]
        assert not gone or min(gone) > max([word.rank for word in kept], default=-1)
        before = kept
    assert fit(all_of_them, 12) == "loss 2.3456"


def test_time_left_is_that_of_the_steps_after_the_first_row():
    clock, stream = Clock(), io.StringIO()
    lines = Lines(40, stream, clock)
    for step, passed_s in ((10, 30.0), (20, 5.0), (30, 5.0)):
        clock.now_s += passed_s
        lines.log(FIRST | {"step": step})
    assert [line.rpartition("  ")[2] for line in stream.getvalue().splitlines()] == [
        "0:15 left", "0:10 left", "0:05 left",
    ]  # fmt: skip


def test_a_step_that_was_recorded_does_not_bend_the_time_left():
    clock, stream = Clock(), io.StringIO()
    lines = Lines(40, stream, clock)
    for step, passed_s, step_s in ((10, 30.0, 0.5), (20, 5.0, 0.5), (21, 500.0, None), (30, 4.5, 0.5)):
        clock.now_s += passed_s
        lines.log(FIRST | {"step": step, "speed/step_s": step_s})
    assert stream.getvalue().endswith("0:05 left\n")


def test_in_a_pipe_a_longer_work_says_now_and_then_how_far_it_is():
    clock, stream = Clock(), io.StringIO()
    lines = Lines(40, stream, clock)
    for done in range(101):
        lines.progress("initial values", done, 100)
        clock.now_s += 0.5
    assert stream.getvalue().splitlines() == [
        "initial values: 10%, 0:45 left",
        "initial values: 30%, 0:35 left",
        "initial values: 50%, 0:25 left",
        "initial values: 70%, 0:15 left",
        "initial values: 90%, 0:05 left",
        "initial values: done in 0:50",
    ]


def test_in_a_pipe_a_short_work_says_nothing():
    clock, stream = Clock(), io.StringIO()
    lines = Lines(40, stream, clock)
    for what in ("saving", "saving", "validation"):  # one after another, also of one name
        for done in range(5):
            lines.progress(what, done, 4)
            clock.now_s += 1
    lines.progress("nothing", 0, 0)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_a_terminal_gets_every_value_that_it_has_room_for(monkeypatch, columns):
    """In one line, or with the values in a second line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    bar = BarView(20000, stream, Clock())
    bar.note("[bold]not markup")
    bar.log(FULL)
    bar.close({}, 0)
    lines = shown(stream)
    assert "[bold]not markup" in stream.getvalue()
    assert len(lines) == (1 if columns == 200 else 2)
    assert lines[0].startswith("step 1200/20000  ")
    assert lines[0].endswith("2:36:40 left") == (columns >= 40)
    assert max(map(len, lines)) <= columns
    for word in ("loss 2.3456", "norm 1.23", "lr 3.0e-4"):
        assert word in lines[-1]
    assert ("━" in lines[0]) == (columns >= 80)
    assert ("12,346 tok/s" in lines[0]) == (columns >= 80)
    assert ("12/34/100 GiB" in lines[-1]) == (columns >= 80)


@pytest.mark.parametrize("columns", [40, 80])
def test_before_the_first_row_a_terminal_says_what_the_run_waits_for(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    clock, stream = Clock(), Terminal()
    bar = BarView(40, stream, clock)
    seen = []
    for what in (None, "the data", "the first step"):
        if what is not None:
            bar.waiting(what)
        clock.now_s += 62
        bar._live.refresh()
        (line,) = shown(stream)
        seen.append(line.replace("━", "").split("  ", 1)[1].strip())
        assert len(line) <= columns
    short = ["waits for the model  1:02", "waits for the data  1:02"]
    assert seen == [*short, "waits for the first step" + "  1:02" * (columns == 80)]
    bar.log(FULL)
    bar._live.refresh()
    assert "waits" not in " ".join(shown(stream))


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("view", [Lines, BarView])
def test_a_terminal_breaks_lines_at_spaces_only(monkeypatch, columns, view):
    """A number or a path that the terminal breaks looks like another one."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, path = Terminal(), "/runs/" + 12 * "averylongname/"
    note = f"stage 3, 2 ranks, bfloat16 compute, update lazy, 124,475,904 parameters in 14 units\nresuming from {path}"
    console = view(20000, stream, Clock())
    console.note(note)
    console.log(FULL)
    console.close({}, 0)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()]
    assert [line for line in lines if len(line) > columns and line != path] == []
    assert " ".join(note.split()) in " ".join(" ".join(lines).split())
    assert any("loss 2.3456" in line for line in lines)


def test_a_terminal_shows_a_longer_work_above_and_takes_it_away(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    clock, stream = Clock(), Terminal()
    bar = BarView(40, stream, clock)
    bar.progress("saving", 0, 4)
    bar._live.refresh()
    assert len(shown(stream)) == 1, "a work that is over at once would only flicker"
    clock.now_s += 2
    bar.progress("saving", 1, 4)
    bar._live.refresh()
    saving, step = shown(stream)
    assert saving.startswith("saving  ━")
    assert saving.endswith("25%  0:06 left")
    assert step.startswith("step 0/40")
    bar.progress("saving", 4, 4)
    bar._live.refresh()
    assert len(shown(stream)) == 1
    bar.close({}, 0)
    assert not shown(stream), "there was no step"


def test_what_is_said_after_the_last_step_stands_below_its_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    clock, stream = Clock(), Terminal()
    bar = BarView(1200, stream, clock)
    clock.now_s += 62
    bar.log(FULL)
    bar.note("sample:")
    bar.progress("saving", 0, 4)
    clock.now_s += 2
    bar.progress("saving", 1, 4)
    bar._live.refresh()
    assert [line.split()[0] for line in shown(stream)] == ["saving"], "a work is shown even then"
    bar.progress("saving", 4, 4)
    bar.close({}, 0)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    before, _, after = text.partition("sample:")
    step, values = [line.rstrip() for line in before.splitlines() if line.strip()][-2:]
    assert step.endswith("in 1:02")
    assert "loss 2.3456" in values
    assert "step" not in after


def test_a_console_that_is_gone_ends_nothing(tmp_path):
    """A terminal that was closed, or `| head`."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with open_tracker(settings().tracker, tmp_path, Gone(), steps=40) as tracker:
        tracker.note("hello")
        tracker.log(FIRST)
        tracker.progress("saving", 1, 2)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_a_view_that_cannot_be_opened_is_told_of_once_and_ends_nothing(tmp_path):
    class Gone(io.StringIO):
        def isatty(self):
            raise ValueError("I/O operation on closed file")

    def fails(config, facts, run_id):
        raise OSError("no such link\nand more")

    with open_tracker(settings().tracker, tmp_path, Gone(), steps=40) as tracker:
        tracker.log(FIRST)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    lines = Lines(40, io.StringIO())
    with Tracker([lines], {"W&B": fails}) as tracker:
        tracker.begin(settings().plain(), {})
        tracker.log(FIRST)
    first, second = lines._stream.getvalue().splitlines()
    assert first == "W&B gets no rows from now on: no such link. metrics.jsonl has every row."
    assert second.startswith("step 10/40")


def test_rows_that_cannot_be_kept_end_a_run(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with (
        pytest.raises(MachineError, match=r"metrics\.jsonl .*No space"),
        open_tracker(settings("none").tracker, tmp_path, steps=40) as tracker,
    ):
        tracker.log(FIRST)


def test_the_other_ranks_say_nothing(capsys):
    with open_tracker(settings("lines").tracker, None, steps=40) as tracker:
        tracker.begin(settings().plain(), {})
        tracker.log(FIRST)
        tracker.progress("saving", 1, 2)
        tracker.note("hello")
    assert capsys.readouterr() == ("", "")


def test_views_are_closed_with_the_exit_code_of_the_run():
    class Seen(View):
        def close(self, summary, exit_code):
            self.seen = dict(summary), exit_code

    view = Seen()
    for exit_code in (0, 75):
        with Tracker([view]) as tracker:
            tracker.finish({"steps": 3}, exit_code)
        assert view.seen == ({"steps": 3}, exit_code)

    class Broken(Exception):
        exit_code = 6

    with pytest.raises(Broken), Tracker([view]):
        raise Broken
    assert view.seen == ({}, 6)


def test_a_summary_is_json_whatever_the_losses(tmp_path):
    write_summary(tmp_path, {"val_loss": float("nan"), "steps": 3, "plan_bytes": {"device": {"moments": 8}}})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "val_loss": None, "steps": 3, "plan_bytes": {"device": {"moments": 8}},
    }  # fmt: skip


def test_a_file_that_cannot_be_closed_does_not_hide_why_the_run_ended_or_leave_a_view_open(tmp_path):
    class View:
        closed = None

        def close(self, summary, exit_code):
            self.closed = exit_code

    class Broken(Jsonl):
        def close(self, summary, exit_code):
            super().close(summary, exit_code)
            raise OSError("no space")

    class Bad(Exception):
        exit_code = 6

    view = View()
    with pytest.raises(Bad), Tracker([Broken(tmp_path / "a"), view]):
        raise Bad
    assert view.closed == 6
    with pytest.raises(OSError, match="no space"), Tracker([Broken(tmp_path / "b"), view]):
        pass
    assert view.closed == 0


def test_a_failure_is_written_though_the_summary_before_it_cannot_be_read(tmp_path):
    (tmp_path / "summary.json").write_text("")
    write_failure(tmp_path, {"exit_reason": "the loss is not finite"})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"exit_reason": "the loss is not finite"}


def test_a_summary_that_cannot_be_written_leaves_the_one_before_and_nothing_else(tmp_path):
    write_summary(tmp_path, {"steps": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, hard))
    try:
        with pytest.raises(MachineError, match=r"summary\.json cannot be written: EFBIG") as refused:
            write_summary(tmp_path, {"steps": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
