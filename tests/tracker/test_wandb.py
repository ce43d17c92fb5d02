"""The records of W&B, read back from its own file; nothing that W&B does can end or hold up a run."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

import train
import zero
from tests.common import wandb_file
from tests.common.wandb_sweeps import Sweeps, serving
from tests.conftest import LONG_S
from zero.errors import ConfigError, NumericsError, Preempted
from zero.tracker import ROW, Lines, Tracker, open_tracker
from zero.tracker.views.threaded import ThreadedView
from zero.tracker.views.wandb import has_key, mode_of, name_and_group, run_id_of
from zero.trainer import launch
from zero.trainer.config import read

NEVER, ONCE = "offload/read_bytes", "comm/gather_bytes"
"""A metric that is 0 throughout the runs here, and one that is 0 after the first row."""

PLAN = {"device": {"parameters": 400, "moments": 0}, "nvme": {"moments": 800}}
FACTS = {"plan_bytes": PLAN, "ranks": 2, "data": "0badcafe"}


def settings(**tracker):
    return read({"steps": 40, "tracker": {"name": "wandb", "console": "lines", "mode": "offline", **tracker}})


ASKED = settings(artifacts=True, tags=["small", "test"], notes="what W&B gets", entity="us")
SETTLED = ASKED.on(2)
"""The settings of most tests' run after it has settled them."""


def row(step, **more):
    return dict.fromkeys(ROW) | {"step": step, "tokens": 100 * step, "train/loss": 3 / step, "train/skipped": 0} | more


def jsonl(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _away_from_home(tmp_path_factory, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that went through everything, what was said of it, and what W&B wrote."""
    folder, stream = tmp_path_factory.mktemp("finished"), io.StringIO()
    (folder / "report.html").write_text("<p>how it went")
    checkpoint = folder / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("weights of great value")
    with open_tracker(ASKED.tracker, folder, stream, steps=40) as tracker:
        tracker.begin(SETTLED.plain(), FACTS)
        tracker.log(row(1, **{NEVER: 0, ONCE: 7}))
        scaled = {"train/skipped": 1, "train/loss_scale": 65536.0}
        tracker.log(row(2, **scaled, **{"val/loss": 2.5, NEVER: 0, ONCE: 0}))
        tracker.saved(checkpoint, 2)
        for step in (3, 4):
            failed = {"train/loss": math.nan, "train/skipped": step - 1, "train/loss_scale": 1.0}
            tracker.log(row(step, **failed, **{NEVER: 0, ONCE: 0}))
        tracker.report(folder / "report.html")
        best = {"val_loss": 2.5, "best_val_loss": 2.5}
        tracker.finish({"steps": 4, **best, "seconds": 9.0, "ranks": 2, "plan_bytes": PLAN})
    return SimpleNamespace(
        folder=folder, said=stream.getvalue(), run_id=tracker.run_id, written=wandb_file.read(folder)
    )


def test_jsonl_and_wandb_agree_row_by_row(finished):
    shown = [logged_row for logged_row in finished.written.rows if "step" in logged_row]
    assert len(shown) == 4
    for ours, theirs in zip(jsonl(finished.folder), shown, strict=True):
        assert {"step", "tokens"} <= theirs.keys(), "both axes are in every row"
        known = {key: value for key, value in theirs.items() if not (isinstance(value, float) and math.isnan(value))}
        assert known == {key: value for key, value in ours.items() if value is not None and key != NEVER}


def test_what_a_run_does_not_have_gets_no_chart(finished):
    """Zeros of offload without offload; but a zero after something else is a value."""
    shown = [logged_row for logged_row in finished.written.rows if "step" in logged_row]
    assert [NEVER in logged_row for logged_row in shown] == [False] * 4
    assert [logged_row.get(ONCE) for logged_row in shown] == [7, 0, 0, 0]


def test_every_section_is_drawn_against_the_step(finished):
    sections = {key.split("/")[0] for key in ROW if "/" in key}
    metrics = finished.written.metrics
    assert {f"{section}/*" for section in sections} <= metrics.keys()
    assert {metric.step_metric for name, metric in metrics.items() if name != "step"} == {"step"}
    assert metrics["step"].options.hidden, "the axis has no chart of its own"


def test_the_config_is_the_settled_one_and_what_was_found_out(finished):
    config = dict(finished.written.config)
    about = config.pop("run")
    assert config == json.loads(json.dumps(SETTLED.plain()))
    assert {key: about[key] for key in FACTS} == FACTS
    assert set(about["versions"]) == {"python", "torch", "wandb"}
    assert not any("plan" in row for row in finished.written.rows), "what does not change is no chart"


def test_the_run_has_its_name_id_and_end(finished):
    run = finished.written.run
    assert (run.display_name, run.run_group, run.job_type) == (finished.folder.name, "", "train")
    assert (list(run.tags), run.notes, run.entity) == (["small", "test"], "what W&B gets", "us")
    assert run.run_id == finished.run_id
    assert finished.written.exit_code == 0


def test_each_figure_is_once_in_the_summary(finished):
    """W&B makes its summary of the newest rows; only what these do not have is added."""
    ours = {key: value for key, value in finished.written.summary.items() if not key.startswith("_")}
    assert {"step", "tokens", "train/loss", "val/loss", "best_val_loss", "seconds"} <= set(ours)
    assert (ours["val/loss"], ours["best_val_loss"], ours["seconds"]) == (2.5, 2.5, 9.0)
    assert not {"steps", "val_loss", "ranks", "plan_bytes"} & set(ours)


def test_the_report_is_a_page(finished):
    (page,) = finished.folder.glob("wandb/latest-run/files/media/html/*.html")
    assert page.read_text() == "<p>how it went"


def test_a_checkpoint_is_a_reference_to_where_it_lies(finished):
    (artifact,) = [candidate for candidate in finished.written.artifacts if candidate.type == "checkpoint"]
    (entry,) = artifact.manifest.contents
    assert entry.ref == (finished.folder / "checkpoints/step-3/manifest.json").as_uri()
    assert not entry.local_path, "nothing is copied"


def test_an_offline_run_says_how_to_look_at_it_and_how_to_send_it(finished):
    (place,) = finished.folder.glob("wandb/offline-run-*")
    assert finished.said.endswith(f"\n  wandb leet {place}\n  wandb sync {place}\n")


# Names and ids


def test_a_job_of_a_sweep_is_named_after_its_overrides_in_the_group_of_its_sweep(tmp_path):
    job = tmp_path / "12-00-00" / "3"
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra" / "overrides.yaml").write_text("- zero.stage=1\n- offload=nvme\n- 'zero.units=[Block]'\n")
    (job / ".hydra" / "hydra.yaml").write_text("hydra:\n  mode: RUN\n")
    assert name_and_group(settings().tracker, job) == ("3", None)
    (job / ".hydra" / "hydra.yaml").write_text("hydra:\n  job:\n    num: 3\n  mode: MULTIRUN\n")
    assert name_and_group(settings().tracker, job) == ("zero.stage=1 offload=nvme zero.units=[Block]", "12-00-00")
    (job.parent / "multirun.yaml").write_text(
        "hydra:\n  overrides:\n    task:\n    - zero.stage=1\n    - offload=cpu,nvme\n"
    )
    assert name_and_group(settings().tracker, job)[0] == "offload=nvme zero.units=[Block]"
    deep = job.parent / "a" / "b"
    shutil.copytree(job, deep)
    assert name_and_group(settings().tracker, deep) == ("offload=nvme zero.units=[Block]", "12-00-00")
    assert name_and_group(settings(run="mine", group="ours").tracker, job) == ("mine", "ours")
    assert run_id_of(settings().plain(), job, "theirs00") != "theirs00", (
        "jobs that begin at one checkpoint are several runs"
    )


def test_what_the_settings_leave_open_is_wandbs_own_variable(tmp_path, monkeypatch):
    def opened(name, **tracker):
        folder = tmp_path / name
        folder.mkdir()
        with open_tracker(settings(console="none", **tracker).tracker, folder, steps=40) as tracker:
            tracker.begin(settings().plain(), {})
            tracker.log(row(1))
        run = wandb_file.read(folder).run
        return run.project, run.display_name, run.run_group, list(run.tags), run.notes

    assert opened("plain") == ("functional-zero", "plain", "", [], "")
    given = {"PROJECT": "theirs", "NAME": "first", "RUN_GROUP": "all", "TAGS": "a,b", "NOTES": "said"}
    for name, value in given.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert opened("variables") == ("theirs", "first", "all", ["a", "b"], "said")
    own = {"project": "ours", "run": "second", "group": "some", "tags": ["c"], "notes": "more"}
    assert opened("settings", **own) == ("ours", "second", "some", ["c"], "more")


def test_a_resumed_run_keeps_its_id_and_an_evaluation_has_its_own(tmp_path):
    assert run_id_of(settings().plain(), tmp_path, "before00") == "before00"
    assert run_id_of(settings().plain(), tmp_path, None) != run_id_of(settings().plain(), tmp_path, None)
    evaluation = read({"mode": "eval", "resume": "latest", "tracker": {"name": "wandb"}})
    assert run_id_of(evaluation.plain(), tmp_path, "before00") != "before00"


def test_a_run_that_goes_on_is_the_same_one_in_wandb_at_whatever_step(finished, tmp_path):
    with open_tracker(settings(console="none").tracker, tmp_path, steps=40) as tracker:
        tracker.begin(settings().plain(), {}, finished.run_id)
        tracker.log(row(2))
    written = wandb_file.read(tmp_path)
    assert written.run.run_id == tracker.run_id == finished.run_id
    assert written.rows == [{"step": 2, "tokens": 200, "train/loss": 1.5, "train/skipped": 0}]
    assert run_id_of(settings().plain(), tmp_path, None) == finished.run_id, (
        "another start in this folder without a checkpoint"
    )


# How a run ends


def until(happened):
    deadline_s = time.monotonic() + LONG_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def rank_of_a_run(folder: Path, how: str) -> None:
    """Trains in its way: three rows, then the end that is asked for."""
    with (
        zero.open_world(60.0) as world,
        open_tracker(settings(console="none").tracker, folder if world.rank == 0 else None, steps=40) as tracker,
    ):
        tracker.begin(settings().plain(), FACTS)
        for step in (1, 2, 3):
            tracker.log(row(step))
        if world.rank == 0:
            until(lambda: any(folder.glob("wandb/*run-*/*.wandb")))
            if how == "crash":
                raise NumericsError("injected")
        world.barrier("until rank 0 is here, or gone")
        os.kill(os.getpid(), signal.SIGTERM)
        until(launch.preempted)
        tracker.finish({"steps": 3}, exit_code=Preempted.exit_code)


@pytest.mark.process
@pytest.mark.parametrize(("how", "ranks", "exit_code"), [("crash", 2, 6), ("SIGTERM", 1, 75)])
def test_the_exit_code_is_that_of_the_run_and_only_rank_0_wrote(tmp_path, how, ranks, exit_code):
    begin, more = (launch.launch, {"ranks": 2}) if ranks > 1 else (launch.inside, {})
    with contextlib.suppress(zero.ZeroError):
        begin(rank_of_a_run, tmp_path, how, processes=launch.ProcessSettings(tmp_path / "ranks", threads=1), **more)
    written = wandb_file.read(tmp_path)  # there is one
    assert [logged_row["step"] for logged_row in written.rows if "step" in logged_row] == [1, 2, 3]
    assert written.exit_code == exit_code
    assert len(jsonl(tmp_path)) == 3


# W&B is in the way


class Broken:
    """A wandb that fails where it is told to. `init` takes every mode unless told otherwise."""

    __version__ = "0"

    class Settings:
        model_fields = ()

        def __init__(self, **_):
            pass

    def __init__(self, folder, **parts):
        self.modes, self.logged, self.ended = [], [], []
        self.__dict__ |= parts
        self._dir = str(folder / "wandb" / "run" / "files")

    def init(self, mode, **_):
        self.modes.append(mode)
        self.refuse(mode)
        return SimpleNamespace(
            id="x", url="https://wandb.example/x", dir=self._dir, log=self.log, summary={}, finish=self.finish,
            define_metric=lambda *_, **__: None,
        )  # fmt: skip

    def refuse(self, mode):
        pass

    def log(self, row):
        self.logged.append(row)

    def finish(self, exit_code):
        self.ended.append(exit_code)

    def teardown(self, exit_code):
        pass


def run_with(broken, folder, monkeypatch, **tracker):
    """Three rows past a wandb that is `broken`; returns what was said."""
    monkeypatch.setitem(sys.modules, "wandb", broken)
    stream = io.StringIO()
    with open_tracker(settings(**tracker).tracker, folder, stream, steps=40) as tracker:
        tracker.begin(settings().plain(), {})
        for step in (1, 2, 3):
            tracker.log(row(step))
    assert [logged_row["step"] for logged_row in jsonl(folder)] == [1, 2, 3]
    return stream.getvalue()


def raises(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize("what", ["refuse", "log", "finish", "teardown"])
@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_whatever_wandb_raises_is_said_once_and_ends_nothing(tmp_path, monkeypatch, what, kind):
    """SystemExit is what it answers with when its own process was killed."""
    broken = Broken(tmp_path, **{what: raises(kind("out of order\nand more"))})
    said = run_with(broken, tmp_path, monkeypatch)
    assert said.count("W&B gets no rows from now on: out of order. metrics.jsonl has every row.") == 1
    assert said.count("out of order") == 1
    assert "and more" not in said


def test_a_wandb_that_is_not_installed_ends_nothing(tmp_path, monkeypatch):
    assert run_with(None, tmp_path, monkeypatch).count("W&B gets no rows from now on: wandb is not installed") == 1


def test_without_a_network_a_run_is_offline(tmp_path, monkeypatch):
    def no_network(mode):
        if mode == "online":
            raise OSError("no route to wandb_v1_abcdefghijklmnopqrstuv1")

    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    broken = Broken(tmp_path, refuse=no_network)
    said = run_with(broken, tmp_path, monkeypatch, mode="auto")
    assert broken.modes == ["online", "offline"]
    assert said.count("W&B is offline for this run: no route to ***\n") == 1
    assert [logged_row["step"] for logged_row in broken.logged] == [1, 2, 3]


def test_a_network_that_drops_what_is_sent_is_an_offline_run_within_seconds(tmp_path, monkeypatch):
    """The real W&B, and a socket that takes connections and never answers."""
    stream = io.StringIO()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        begun_s = time.monotonic()
        with open_tracker(settings(mode="auto").tracker, tmp_path, stream, steps=40) as tracker:
            tracker.begin(SETTLED.plain(), FACTS)
            tracker.log(row(1))
            until(lambda: "W&B is offline for this run: " in stream.getvalue() or tracker.note(""))
            assert time.monotonic() - begun_s < 60, "W&B itself would try for 90 s"
            tracker.finish({"steps": 1})
    said, written = stream.getvalue(), wandb_file.read(tmp_path)
    assert said.count("W&B is offline for this run: ") == 1
    assert "left out" not in said
    assert (written.run.run_id, written.exit_code) == (tracker.run_id, 0)
    assert [logged_row["step"] for logged_row in written.rows if "step" in logged_row] == [1]
    (place,) = tmp_path.glob("wandb/*run-*-*")
    assert said.endswith(f"\n  wandb sync {place}\n")


def test_a_run_that_is_online_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    said = run_with(Broken(tmp_path), tmp_path, monkeypatch, mode="auto")
    assert "W&B: https://wandb.example/x" in said
    assert "wandb sync" not in said


def test_a_wandb_that_hangs_holds_up_nothing():
    """Neither a row nor the end of the run: what does not return is left behind."""
    release, abandoned = threading.Event(), []

    class Hanging:
        def log(self, row):
            assert release.wait(LONG_S)

        def close(self, summary, exit_code):
            raise AssertionError("never reached")

    stream = io.StringIO()
    begun_s = time.monotonic()
    with Tracker([Lines(3, stream), ThreadedView(Hanging, lambda: abandoned.append(True), patience_s=0.2)]) as tracker:
        for step in (1, 2, 3):
            tracker.log(row(step))
    assert time.monotonic() - begun_s < 60
    assert abandoned
    assert "W&B gets no rows from now on: its last rows were not written within 0 s after the run" in stream.getvalue()
    release.set()


def test_a_wandb_that_takes_nothing_is_left_before_memory_runs_out():
    begun, release = threading.Event(), threading.Event()
    behind = ThreadedView(lambda: (begun.set(), release.wait(LONG_S))[1], lambda: None)
    assert begun.wait(30)
    for step in range(1, 1002):
        behind.log(row(step))
    with pytest.raises(TimeoutError, match="more than 1000 of its rows"):
        behind.log(row(1002))
    release.set()


STOPPED = """
import sys, time
from functools import partial
from pathlib import Path
import psutil
from zero.trainer.config import read
from zero.tracker.views.threaded import ThreadedView
from zero.tracker.views.wandb import WandbRun, abandon

config, folder = read({"tracker": {"name": "wandb", "mode": "offline"}}), Path(sys.argv[1])
say = lambda text: None
opened = partial(WandbRun, config.plain(), config.tracker, folder, {}, run_id="x", say=say)
behind = ThreadedView(opened, abandon, patience_s=0.3)
behind.log({"step": 1})
while not (cores := [one for one in psutil.Process().children() if one.name() == "wandb-core"]):
    time.sleep(0.01)
while sys.argv[2] == "writing" and not any(folder.glob("wandb/*run-*/*.wandb")):
    time.sleep(0.01)
cores[0].suspend()
try:
    behind.close({}, 0)
except TimeoutError:
    print("left behind", cores[0].pid)
"""


@pytest.mark.parametrize("when", ["being started", "writing"])
def test_a_process_of_wandb_that_is_stopped_holds_up_nothing(tmp_path, when):
    """The real one: Python's end would wait for it without end."""
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED, tmp_path, when], capture_output=True, text=True, timeout=LONG_S, check=False
    )
    said, _, pid = ended.stdout.rpartition(" ")
    assert (ended.returncode, said) == (0, "left behind"), ended.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


def test_the_commit_and_the_packages_are_kept_unless_switched_off(tmp_path, monkeypatch):
    repository = tmp_path / "code"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", repository]
    subprocess.run(["git", "init", "--quiet", repository], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "first"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.chdir(repository)
    for versions in (True, False):
        folder = tmp_path / str(versions)
        folder.mkdir()
        with open_tracker(settings(versions=versions, console="none").tracker, folder, steps=40) as tracker:
            tracker.begin(settings().plain(), {})
            tracker.log(row(1))
        requirements = list(folder.glob("wandb/latest-run/files/requirements.txt"))
        assert wandb_file.read(folder).run.git.commit == (commit if versions else "")
        assert len(requirements) == versions
        assert all("torch==" in path.read_text() for path in requirements)


# Sweeps of W&B

SWEEP = Path(__file__).resolve().parents[2] / "examples" / "wandb_sweep.yaml"


@pytest.mark.slow
def test_the_commands_of_wandb_run_the_sweep(here):
    """`wandb sweep` and `wandb agent` themselves, with a server of this machine that chooses the values."""
    (here / "train.py").symlink_to(SWEEP.parents[1] / "train.py")
    tiny = {
        "steps": 2,
        "debug": "tiny",
        "launch.threads": 1,
        "tracker.mode": "offline",
        "offload": "none",
        "val.every": 1,
    }
    chosen = [tiny | {"optim.lr": lr, "optim.weight_decay": decay} for lr, decay in ((0.001, 0.0), (0.01, 0.1))]
    server = Sweeps(chosen)
    with serving(server.answer) as address:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = os.environ | {"WANDB_BASE_URL": address, "WANDB_API_KEY": "k" * 40, "PATH": path}

        def wandb(*words):
            given = [sys.executable, "-m", "wandb", *words]
            ended = subprocess.run(given, env=env, capture_output=True, text=True, timeout=LONG_S, check=False)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            return ended.stdout + ended.stderr

        said = wandb("sweep", str(SWEEP))
        assert yaml.safe_load(server.config) == yaml.safe_load(SWEEP.read_text())
        agent = re.search(r"wandb (agent us/functional-zero/sweep1)\n", said)
        wandb(*agent[1].split())
    folders = sorted(here.glob("runs/*/*"))
    assert [wandb_file.read(folder).run.run_id for folder in folders] == ["run0", "run1"]
    for folder, values in zip(folders, chosen, strict=True):
        config = yaml.safe_load((folder / ".hydra" / "config.yaml").read_text())
        assert (config["optim"]["lr"], config["optim"]["weight_decay"]) == (
            values["optim.lr"],
            values["optim.weight_decay"],
        )
        assert [row["val/loss"] > 0 for row in wandb_file.read(folder).rows if "step" in row] == [True, True]


# Who is asked


def test_whoever_asked_for_an_online_run_without_a_key_is_told_before_training(tmp_path, monkeypatch):
    def said(**tracker):
        stream = io.StringIO()
        with open_tracker(settings(**tracker).tracker, tmp_path, stream, steps=40):
            return stream.getvalue()

    online = "W&B is offline for this run: there is no key. Run `wandb login`, or export WANDB_API_KEY.\n"
    assert said(mode="online") == online
    assert said(mode="auto") == said(mode="offline") == ""
    monkeypatch.setenv("WANDB_MODE", "online")
    assert said(mode="auto") == online
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert said(mode="auto") == said(mode="online") == ""


def test_disabled_means_no_file_no_process_and_no_thread(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would be an error
    processes, threads = psutil.Process().children(), threading.active_count()
    for mode, variable in (("disabled", "online"), ("auto", "disabled")):
        monkeypatch.setenv("WANDB_MODE", variable)
        stream = io.StringIO()
        with open_tracker(settings(mode=mode).tracker, tmp_path, stream, steps=40) as tracker:
            tracker.begin(settings().plain(), FACTS)
            tracker.log(row(1))
            assert threading.active_count() == threads
        assert "W&B" not in stream.getvalue()
        assert tracker.run_id is None
    assert psutil.Process().children() == processes
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_only_a_run_with_a_key_goes_online(tmp_path, monkeypatch):
    """Without one W&B would ask on the terminal, where a run is drawing its bar."""
    auto, online = settings(mode="auto").tracker, settings(mode="online").tracker
    assert not has_key()
    assert mode_of(auto) == mode_of(online) == "offline"
    netrc = Path(os.environ["HOME"]) / ".netrc"
    netrc.write_text("machine example.org\n  login me\n  password wandb\n")
    assert not has_key()
    netrc.write_text("machine api.wandb.ai\n  login user\n  password x\n")
    assert mode_of(auto) == mode_of(online) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.our-company.example:8080/x")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert mode_of(auto) == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert (mode_of(auto), mode_of(online)) == ("offline", "online")


# No secrets

CANARY = "5ec12e7c0ffee5ec12e7c0ffee5ec12e7c0ffee5"


def test_no_byte_of_a_secret_is_written(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    monkeypatch.setenv("WANDB_BASE_URL", f"https://user:{CANARY}@wandb.example")
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{CANARY}@proxy.example:1")
    monkeypatch.setenv("HF_TOKEN", f"hf_{CANARY}")
    monkeypatch.setattr(sys, "argv", ["train.py", f"token={CANARY}"])
    with open_tracker(settings().tracker, tmp_path, steps=40) as tracker:
        tracker.begin(settings().plain(), FACTS)
        tracker.log(row(1))
        tracker.finish({"steps": 1})
    said = capfd.readouterr()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
    assert CANARY not in said.out + said.err


@pytest.mark.parametrize(
    "override",
    [
        "tracker.run={}",
        "+token={}",
        "data.folder=https://me:{}@host.example/x",
        "tracker.run='{}",
        "{}",
        "-m seed={},2",
    ],
)
def test_a_setting_that_looks_secret_is_refused_before_anything_is_written(tmp_path, monkeypatch, capfd, override):
    """Also where Hydra would have repeated what it cannot read."""
    monkeypatch.chdir(tmp_path)
    assert train.main([word.format(CANARY) for word in override.split(" ")]) == 2
    said = capfd.readouterr()
    assert CANARY not in said.out + said.err
    assert "looks like a secret" in said.err
    assert not list(tmp_path.iterdir())


def test_a_secret_in_a_file_of_settings_is_refused_too():
    with pytest.raises(ConfigError, match=r"^tracker\.project: this looks like a secret") as refused:
        settings(project=f"https://me:{CANARY}@wandb.example")
    assert CANARY not in str(refused.value)


def test_nothing_of_the_machine_or_the_command_is_kept(finished):
    kept = {path.name for path in finished.folder.glob("wandb/latest-run/files/*")}
    assert not kept & {"wandb-metadata.json", "conda-environment.yaml", "config.yaml", "diff.patch"}
    written = (finished.folder / "wandb" / "latest-run").resolve().glob("*.wandb")
    assert not re.search(rb"test_wandb\.py", next(written).read_bytes())
