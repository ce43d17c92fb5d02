"""The table of a sweep says what the folders of its jobs say, at any moment, and finds the best of them."""

import csv
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given, settings, strategies as st

import train
from tests.common.browser import DARK, LIGHT, needs_chromium, shown
from tests.conftest import LONG_S
from zero.errors import MachineError
from zero.platform.files import Files
from zero.tracker.report import sweep
from zero.tracker.report.jobs import comparison, differing, jobs_in
from zero.trainer import cli, job as processes
from zero.trainer.config import keys

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "debug=tiny",
    "data=synthetic",
    "launch.threads=1",
    "launch.ranks=1",
    "sample.tokens=0",
    "tracker.console=none",
]


def job(folder: Path, number: object, *overrides: str, losses=(5.0, 4.0), speeds=(10, 100, 300), **summary) -> Path:
    """The folder of one job, as a run leaves it."""
    own = folder / str(number)
    (own / ".hydra").mkdir(parents=True)
    (own / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    rows = [
        {"step": step, "train/loss": loss, "speed/tokens_per_s": speed}
        for step, (loss, speed) in enumerate(zip_longest(losses, speeds), start=1)
    ]
    (own / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary:
        (own / "summary.json").write_text(json.dumps(summary))
    return own


def finished(**more) -> dict:
    return {
        "exit_reason": "finished",
        "steps": 9,
        "val_loss": 4.0,
        "train_loss": 4.1,
        "host_peak_bytes": 1 << 30,
    } | more


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def page(folder: Path) -> str:
    """The words of sweep.html; fails unless it is whole."""
    root = ElementTree.fromstring((folder / "sweep.html").read_text().removeprefix("<!DOCTYPE html>\n"))
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    return " ".join(" ".join(root.itertext()).split())


def test_a_row_says_what_the_run_left(tmp_path):
    job(tmp_path, 0, "zero.stage=1", "steps=9", speeds=(1, 100, 300, 200), **finished(device_peak_bytes=1 << 20))
    job(tmp_path, 1, "zero.stage=3", "steps=9", speeds=(1, 100), **finished(val_loss=3.5))
    job(tmp_path, 2, "+zero.stage=0", "steps=9", **finished(exit_reason="rank 1 failed: no | room\nat all"))
    sweep_results = sweep.write_sweep(tmp_path)
    assert [swept_job.name for swept_job in sweep_results.jobs] == ["0", "1", "2"]
    assert sweep_results.best.name == "1"
    assert [swept_job.name for swept_job in sweep_results.failed] == ["2"]

    rows = table(tmp_path)
    assert [row["zero.stage"] for row in rows] == ["1", "3", "0"]
    assert "steps" not in rows[0], "all have the same"
    assert [row["status"] for row in rows] == ["finished", "finished", "failed"]
    assert [row["best"] for row in rows] == ["0", "1", "0"]
    assert [float(row["tokens_per_s"]) for row in rows] == [200, 100, 200]
    assert [float(row["speed"]) for row in rows] == [1, 0.5, 1]
    assert [row["val_loss"] for row in rows] == ["4.0", "3.5", "4.0"]
    assert [row["device_peak_bytes"] for row in rows] == ["1048576", "", ""]
    assert rows[2]["cause"] == "rank 1 failed: no | room at all"

    assert "3 jobs: 2 finished, 1 failed" in page(tmp_path)
    assert "rank 1 failed: no | room at all" in page(tmp_path)
    assert "All with steps=9." in page(tmp_path)


def test_jobs_are_found_by_what_they_leave(tmp_path):
    """`hydra.sweep.subdir` may be any text, slashes and what a URL would read otherwise included."""
    for name in ("b/lr=0.1 #1", "a/10", "a/9"):
        (job(tmp_path, name, f"name={name}", **finished()) / "report.html").touch()
    (tmp_path / "a" / "9" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "a" / "9" / "checkpoints" / "step-1" / "config.yaml").touch()
    job(tmp_path, "c/d", exit_reason=f"rank 0 failed (log: {tmp_path}/c/d/ranks/0.log)")
    sweep_results = sweep.write_sweep(tmp_path)
    assert [swept_job.name for swept_job in sweep_results.jobs] == ["a/9", "a/10", "b/lr=0.1 #1", "c/d"]
    assert sweep_results.failed[0].cause == "rank 0 failed (log: c/d/ranks/0.log)"
    assert 'href="b/lr%3D0.1%20%231/report.html"' in (tmp_path / "sweep.html").read_text()
    assert jobs_in(tmp_path / "a" / "9") == [], "a run is no sweep"


def test_only_what_differs_has_a_column(tmp_path):
    job(tmp_path, 0, "a=1", "b=1", "c=1", **finished())
    assert differing(sweep.write_sweep(tmp_path).jobs) == ["a", "b", "c"], "of one job everything"
    job(tmp_path, 1, "a=1", "b=2", "c=1", "d=x", **finished())
    assert differing(sweep.write_sweep(tmp_path).jobs) == ["b", "d"]
    assert [key for key in table(tmp_path)[0] if len(key) == 1] == ["b", "d"]
    assert [row["d"] for row in table(tmp_path)] == ["", "x"]


def test_the_best_has_finished_and_of_equals_is_the_fastest(tmp_path):
    job(tmp_path, 0, "a=0", speeds=(1, 10), **finished())
    job(tmp_path, 1, "a=1", speeds=(1, 30), **finished())
    job(tmp_path, 2, "a=2", speeds=(1, 30), **finished())
    job(tmp_path, 3, "a=3", **finished(val_loss=0.1, exit_reason="stopped by a signal"))
    job(tmp_path, 4, "a=4", **finished(val_loss=None))
    assert sweep.write_sweep(tmp_path).best.name == "1"


def test_a_job_that_diverged_has_no_loss_and_is_not_the_best(tmp_path):
    """Its summary has null, because JSON has no NaN, and its rows the losses from before."""
    rows = {"losses": (5.0, 1.0, None), "speeds": (1, 1, 1)}
    job(tmp_path, 0, **rows, **finished(train_loss=None, val_loss=None))
    job(tmp_path, 1, **finished(val_loss=3.0))
    job(tmp_path, 2, **rows, exit_reason="NumericsError: step 3")
    sweep.write_sweep(tmp_path)
    jobs = table(tmp_path)
    assert [row["best"] for row in jobs] == ["0", "1", "0"]
    assert [row["train_loss"] for row in jobs] == ["", "4.1", ""]
    assert [row["val_loss"] for row in jobs] == ["", "3.0", ""]


def test_a_terminal_gets_the_table_with_the_figures_looked_at_first(tmp_path):
    job(tmp_path, 0, "zero.stage=1", "steps=9", speeds=(1, 100, 300, 200), **finished())
    job(tmp_path, 1, "zero.stage=3", "steps=9", speeds=(1, 100), **finished(val_loss=1.5))
    job(tmp_path, 2, "zero.stage=0", "steps=9", **finished(exit_reason="rank 1 failed: no room"))
    head, *rows = sweep.plain(sweep.write_sweep(tmp_path)).splitlines()
    assert head.split()[:4] == ["run", "zero.stage", "val", "loss"]
    assert [row.split()[:2] for row in rows] == [["0", "1"], ["1", "3"], ["2", "0"]]
    assert [row.split()[-1] for row in rows][1:] == ["best", "failed"]
    assert max(map(len, [head, *rows])) <= 80
    narrow = sweep.plain(sweep.write_sweep(tmp_path), 40)
    assert narrow.splitlines()[0].split() == ["run", "zero.stage", "val", "loss"]
    assert max(map(len, narrow.splitlines())) <= 40


def test_a_half_done_sweep_can_be_read(tmp_path):
    assert sweep.write_sweep(tmp_path).jobs == ()
    assert table(tmp_path) == []
    job(tmp_path, 0, "a=1", **finished())
    job(tmp_path, 1, "a=2", exit_reason="running, or ended without a word", val_loss=2.0)
    job(tmp_path, 10, "a=3", losses=(), speeds=())
    (tmp_path / ".submitit").mkdir()
    (tmp_path / "2").mkdir()
    sweep_results = sweep.write_sweep(tmp_path)
    assert [(swept_job.name, swept_job.status) for swept_job in sweep_results.jobs] == [
        ("0", "finished"),
        ("1", "running"),
        ("10", "running"),
    ]
    assert sweep_results.best.name == "0"
    assert "3 jobs: 1 finished, 2 running" in page(tmp_path)


def test_losses_share_their_axes_and_numbers_have_a_chart(tmp_path):
    for number, lr in enumerate((1e-4, 1e-3, 1e-2, 1e-1)):
        job(
            tmp_path, number, f"optim.lr={lr}", "x=1", losses=(5, 4 - number / 10), **finished(val_loss=4 - number / 10)
        )
    sweep.write_sweep(tmp_path)
    html = (tmp_path / "sweep.html").read_text()
    root = ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n"))
    charts = [element.attrib["aria-label"] for element in root.iter() if element.tag.endswith("svg")]
    assert charts[:2] == ["training loss: 4 charts"] * 2, "for a wide and for a narrow window"
    assert charts[2].startswith("validation loss against optim.lr: optim.lr from 4 at optim.lr 0.0001 to 3.7 at 0.1")
    firsts = [element.attrib["d"].split("L")[0] for element in root.iter() if element.attrib.get("class") == "line"]
    assert len(firsts) == 8
    assert len(set(firsts[:4])) == len(set(firsts[4:])) == 1, "the same loss has another place"


def test_jobs_with_equal_losses_are_compared_by_speed_and_memory(tmp_path):
    """Every stage has the same bits: the page says so, and shows what differs."""
    for stage in range(3):
        job(tmp_path, stage, f"zero.stage={stage}", speeds=(1, 10 + stage), **finished(host_peak_bytes=stage + 1 << 20))
    result = sweep.write_sweep(tmp_path)
    text = page(tmp_path)
    said = "All 3 jobs have the same losses to the bit, so they differ in speed and memory alone."
    assert f"{said} Each: steps done 9, train loss 4.1000, val loss 4.0000." in text
    assert "job zero.stage tokens/s speed host peak" in text
    assert "Tokens/s of each job" in text
    assert "Host peak of each job" in text
    assert "Loss of all jobs" in text
    assert "Validation loss against" not in text
    assert "fastest" in text
    lines = sweep.plain(result, 60).splitlines()
    assert " ".join(lines[-2:]) == said
    assert max(map(len, lines)) <= 60


def test_jobs_that_differ_in_a_bit_of_a_loss_are_not_equal(tmp_path):
    job(tmp_path, 0, "a=0", losses=(5.0, 4.0), **finished())
    job(tmp_path, 1, "a=1", losses=(5.0, math.nextafter(4.0, 5)), **finished())
    assert comparison(sweep.write_sweep(tmp_path).jobs) == ""
    assert "Speed and memory" not in page(tmp_path)
    job(tmp_path, 2, "a=2", losses=(5.0, 4.0), **finished())
    job(tmp_path, 3, "a=3", losses=(5.0, 4.0), **finished(val_loss=3.9))
    job(tmp_path, 4, "a=4", losses=(5.0, 4.0), exit_reason="stopped by a signal")
    assert comparison(sweep.write_sweep(tmp_path).jobs).endswith("alone: 0 = 2.")
    assert "0, 2" in page(tmp_path)
    assert "Tokens/s of each job" in page(tmp_path)


@needs_chromium
@pytest.mark.parametrize("scheme", [DARK, LIGHT], ids=["dark", "light"])
def test_nothing_of_a_sweep_is_cut_in_a_narrow_or_a_wide_window(tmp_path, scheme):
    wide = "averylongwordwithoutaspace" * 9
    for number, rate in enumerate((1e-4, 1e-3, 1e-2, 1e-1)):
        job(tmp_path, number, f"optim.lr={rate}", "offload=infinity", f"data.folder={wide}", **finished())
    job(tmp_path, 4, "optim.lr=7", "offload=none", f"data.folder={wide}", exit_reason=f"failed: {wide}")
    for seen in shown([sweep.write_sweep(tmp_path).page], scheme, tmp_path):
        assert (seen.scrolls, seen.cut, seen.split, seen.pale) == (0, [], [], []), seen
        assert 7.5 < seen.font < 99


def test_nothing_in_a_sweep_can_become_markup(tmp_path):
    evil = "<script>alert(1)</script>|\n`&"
    job(tmp_path, 0, f"a={evil}", f"<b>={evil}", **finished(exit_reason=evil))
    job(tmp_path, 1, "a=1", **finished())
    sweep.write_sweep(tmp_path)
    assert "<script" not in (tmp_path / "sweep.html").read_text()
    assert "<script>alert(1)</script>|" in page(tmp_path)
    assert table(tmp_path)[0]["a"] == evil


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["finished", "boom", None]), st.floats() | st.none(), st.text(max_size=5)), max_size=5
    )
)
def test_any_jobs_have_a_table(tmp_path_factory, jobs):
    folder = tmp_path_factory.mktemp("sweep")
    for number, (reason, loss, text) in enumerate(jobs):
        job(folder, number, f"key={text}", exit_reason=reason, val_loss=loss)
    sweep_results = sweep.write_sweep(folder)
    losses = [
        swept_job.val_loss
        for swept_job in sweep_results.jobs
        if swept_job.status == "finished" and swept_job.val_loss is not None
    ]
    assert (sweep_results.best is None) == (not losses)
    assert sweep_results.best is None or sweep_results.best.val_loss == min(losses)
    assert len(table(folder)) == len(jobs)
    page(folder)


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    job(tmp_path, 0, "a=1", **finished())
    sweep.write_sweep(tmp_path)
    before = {name: (tmp_path / f"sweep.{name}").read_text() for name in ("csv", "html")}
    job(tmp_path, 1, "a=2", **finished())

    def full(*_):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(Files, "replace", full)
    with pytest.raises(MachineError, match=r"sweep\.csv cannot be written: .*no space left"):
        sweep.write_sweep(tmp_path)
    assert {name: (tmp_path / f"sweep.{name}").read_text() for name in before} == before


def test_the_recipes_name_settings_that_exist():
    recipes = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("scale", "schedulers", "sweeps"))
    named = set(re.findall(r"(?<![\w./-])([a-z]+(?:\.[a-z_]+)*)=[^ =]", recipes)) - {
        "first",
        "parents",
    }  # of a shell, of Python
    known = {*keys(), *(path.name for path in cli.CONF.iterdir() if path.is_dir())}
    assert {"zero.stage", "resume", "offload"} <= named
    assert {name for name in named if not name.startswith("hydra")} <= known


# Sweeps that run


def program(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "train.py", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=LONG_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_sweep_of_two_by_two_is_a_table_after_every_job(here, monkeypatch, capfd):
    """Jobs whose host budget holds no buffer fail when their plan is made, and the sweep goes on."""
    write, seen = sweep.write_sweep, []

    def counting(folder: Path) -> sweep.Sweep:
        seen.append((write(folder), len(table(folder))))
        return seen[-1][0]

    monkeypatch.setattr(sweep, "write_sweep", counting)
    run = processes.run  # in this process: tests/trainer/test_cli.py sees to it that each job has its own
    monkeypatch.setattr(processes, "run", lambda train, config, folder, apart: run(train, config, folder))
    asked = [
        "zero.stage=1,3",
        "offload.host_budget=1GiB,1MiB",
        "offload=nvme",
        "model.width=128",
        "hydra.sweep.dir=sweep",
        "hydra.sweep.subdir=at/job-${hydra.job.num}",
    ]
    assert train.main(["-m", *asked, *QUICK, "launch.malloc=default"]) == 2
    assert [length for _, length in seen][:4] == [1, 2, 3, 4]
    sweep_results = seen[-1][0]
    assert [swept_job.status for swept_job in sweep_results.jobs] == ["finished", "failed"] * 2
    assert all("offload.host_budget" in swept_job.cause for swept_job in sweep_results.failed)
    assert capfd.readouterr().err.count("offload.host_budget") >= 2, "a failure was not printed"

    rows = table(here / "sweep")
    assert [(row["zero.stage"], row["offload.host_budget"]) for row in rows] == [
        ("1", "1GiB"), ("1", "1MiB"), ("3", "1GiB"), ("3", "1MiB"),
    ]  # fmt: skip
    assert "offload" not in rows[0]
    for number in (0, 2):
        own = here / "sweep" / "at" / f"job-{number}"
        summary = json.loads((own / "summary.json").read_text())
        said = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
        assert float(rows[number]["val_loss"]) == summary["val_loss"] == said[-1]["val/loss"]
        assert float(rows[number]["train_loss"]) == summary["train_loss"]
        assert int(rows[number]["host_peak_bytes"]) == summary["host_peak_bytes"]
        speeds = [row["speed/tokens_per_s"] for row in said[1:] if row["speed/tokens_per_s"]]  # one was recorded
        assert statistics.median(speeds) == float(rows[number]["tokens_per_s"])
    assert rows[0]["val_loss"] == rows[2]["val_loss"], "a stage has changed the result"
    assert "4 jobs: 2 finished, 2 failed" in page(here / "sweep")


def test_a_job_that_cannot_be_is_a_row_with_its_cause_and_the_others_run(here, monkeypatch, capsys):
    def run(train, config, folder, apart):
        (folder / "summary.json").write_text(json.dumps(finished()))
        return SimpleNamespace(val_loss=4.0)

    monkeypatch.setattr(processes, "run", run)
    assert train.main(["-m", "zero.stage=0,3", "offload=infinity,none", *QUICK, "hydra.sweep.dir=sweep"]) == 2
    said = "offload=infinity keeps parameters on disk, which only zero.stage=3 can"
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"warning: 1 of 4 runs cannot start: {said}")
    assert "(in the run zero.stage=0 offload=infinity)" in first
    assert last.startswith(said)
    rows = table(here / "sweep")
    assert [(row["zero.stage"], row["offload"], row["status"]) for row in rows] == [
        ("0", "infinity", "failed"), ("0", "none", "finished"), ("3", "infinity", "finished"), ("3", "none", "finished")
    ]  # fmt: skip
    assert [said in row["cause"] for row in rows] == [True, False, False, False]
    assert said in page(here / "sweep")


@pytest.mark.process
@pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None
    if importlib.util.find_spec("hydra_plugins")
    else True,
    reason="hydra-optuna-sweeper is not installed; it comes with the extra [sweep]",
)
def test_optuna_searches_and_goes_on_after_a_failed_trial(here):
    search = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=1",
    ]
    space = ["optim.lr=tag(log, interval(1e-4, 1e-1))", "offload.host_budget=choice(1GiB,1MiB)", "offload=nvme"]
    done = program("-m", *search, *space, "model.width=128", "hydra.sweep.dir=sweep", *QUICK, cwd=here)
    assert "Traceback" not in done.stderr, done.stderr
    sweep_results = sweep.write_sweep(here / "sweep")
    assert len(sweep_results.jobs) == 4
    assert {swept_job.status for swept_job in sweep_results.jobs} == {"finished", "failed"}, "choose another seed"
    assert done.returncode == 2
    result = yaml.safe_load((here / "sweep" / "optimization_results.yaml").read_text())
    assert result["best_value"] == sweep_results.best.val_loss
    assert str(result["best_params"]["optim.lr"]) == sweep_results.best.overrides["optim.lr"]
    assert all(1e-4 <= float(swept_job.overrides["optim.lr"]) <= 1e-1 for swept_job in sweep_results.jobs)


@pytest.mark.process
@pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None
    if importlib.util.find_spec("hydra_plugins")
    else True,
    reason="hydra-submitit-launcher is not installed; it comes with the extra [sweep]",
)
def test_submitit_runs_jobs_side_by_side_and_their_failures_are_known_here(here):
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5", "hydra.sweep.dir=sweep"]
    done = program(
        "-m", *launcher, "offload.host_budget=1GiB,1MiB", "offload=nvme", "model.width=128", *QUICK, cwd=here
    )
    assert [row["status"] for row in table(here / "sweep")] == ["finished", "failed"]
    assert done.returncode != 0
    assert "offload.host_budget" in done.stderr, "a failure was not printed"
