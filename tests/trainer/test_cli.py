"""The command line as its user sees it: a run folder, or one line and an honest exit code.

Refusals run in this process, with torch's import forbidden, except one that is timed as a whole program.
"""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

import train
from tests.common.held import live_threads, open_files
from tests.conftest import LONG_S
from zero.errors import MachineError, NumericsError, Preempted, RankFailedError
from zero.platform.run_files import hold
from zero.testing import forked_ranks
from zero.tracker import ROW
from zero.trainer import cli, job
from zero.trainer.config import read
from zero.trainer.launch import Interrupted

ROOT = Path(__file__).resolve().parents[2]
TINY = ["debug=tiny", "data=synthetic"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def program(*arguments: str, cwd: Path, **how) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "train.py", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=LONG_S, check=False, **how,
    )  # fmt: skip


def torchrun(*arguments: str, cwd: Path, **how) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *TORCHRUN, ROOT / "train.py", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=LONG_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, **how,
    )  # fmt: skip


def said_by_us(stderr: str) -> list[str]:
    """Without the account that torchrun gives of its children: lines of its logger, then a traceback."""
    lines = stderr.split("Traceback (most recent call last)")[0].splitlines()
    return [line for line in lines if not re.match(r"[IWE]\d{4} ", line)]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_mistake_is_answered_within_two_seconds_and_without_torch(here):
    watch = (
        "import runpy, sys\n"
        "sys.argv = ['train.py', 'data.folder=nowhere']\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert 'torch' not in sys.modules, 'torch was imported'\n"
        "    assert end.code == 2, end.code\n"
        "else:\n"
        "    raise AssertionError('accepted')\n"
    )
    begin_s = time.perf_counter()
    # what the process itself used, so that a busy machine does not fail the test
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", watch], cwd=here, capture_output=True, text=True, check=False, timeout=LONG_S
    )
    after = os.times()
    assert done.returncode == 0, done.stderr
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert min(used_s, time.perf_counter() - begin_s) < 2
    assert not list(here.iterdir())


@pytest.mark.parametrize("words", [["hydra.run.dir=two"], ["-m", "seed=1,2", "hydra.sweep.dir=two"]], ids=" ".join)
def test_a_folder_that_another_run_writes_is_refused_and_left_alone(here, monkeypatch, capsys, words):
    monkeypatch.setattr(job, "run", lambda *_, **__: SimpleNamespace(val_loss=1.0))
    other_run = hold("hydra.run.dir", here / "two")
    assert train.main([*TINY, *words]) == 2
    assert capsys.readouterr().err == f"{words[-1]}: another run is writing there. Give another folder.\n"
    assert not list((here / "two").iterdir())
    os.close(other_run)
    assert train.main([*TINY, *words]) == train.main([*TINY, *words]) == 0, "a run goes on where one has ended"


def test_options_may_stand_anywhere(here, monkeypatch, capsys):
    began = []
    monkeypatch.setattr(
        job, "run", lambda train, config, folder, apart: began.append((config.zero.stage, config.steps)) or 1 / 0
    )
    assert train.main([*TINY, "zero.stage=0,3", "-m", "steps=2"]) == 1
    assert began == [(0, 2), (3, 2)]
    capsys.readouterr()
    assert train.main(["zero.stage=2", "-c", "job", "data=synthetic"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["zero"]["stage"], shown["data"]["name"]) == (2, "synthetic")


def test_whoever_stops_reading_ends_what_is_printed_without_a_word(here):
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "mode=explain"],
        cwd=here, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    os.close(writes)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


# Runs


def test_a_model_that_debug_makes_small_is_said(here, capsys):
    """A typed key wins over a preset, and a typed option does not: Hydra's order."""
    asked = ["debug=tiny", "model=gpt_124m", "mode=explain", "explain.key=zero.stage"]
    assert train.main(asked) == 0
    sets = "model.width=32 model.layers=2 model.heads=2 model.seq=32"
    assert capsys.readouterr().err == f"warning: debug=tiny replaces settings of model=gpt_124m: {sets}\n"
    typed = [f"model.{key}={value}" for key, value in (("width", 64), ("layers", 1), ("heads", 1), ("seq", 32))]
    assert train.main([*asked, *typed]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.process
def test_a_run_leaves_a_complete_folder(here):
    done = program(*TINY, "launch.ranks=2", "batch.accumulate=2", cwd=here)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder,) = here.glob("runs/*/*")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    hydra = {f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")}
    pages = {"report.html", "trace.json"}
    assert names == {"config.yaml", "metrics.jsonl", "summary.json", "starts.jsonl", "ranks/0.log", "ranks/1.log"} | (
        hydra | pages
    )

    table = rows(folder)
    assert all(tuple(row) == ROW for row in table)
    assert [row["step"] for row in table] == [1, 2, 3, 4]
    assert [row["val/loss"] is not None for row in table] == [False, True, False, True]
    assert [row["tokens"] for row in table] == [128, 256, 384, 512]
    assert all(row["memory/host_peak_bytes"] > 2**20 for row in table)
    assert [row["speed/step_s"] is not None for row in table] == [True, True, True, False], "step 4 was recorded"

    summary = summary_of(folder)
    assert summary["exit_reason"] == "finished"
    assert (summary["steps"], summary["ranks"]) == (4, 2)
    assert summary["val_loss"] == table[-1]["val/loss"]
    assert summary["best_train_loss"] == min(row["train/loss"] for row in table)
    assert summary["plan_bytes"]["device"]["moments"] > 0

    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["batch"] == {"global": 4, "micro": 1, "accumulate": 2}
    assert settings["launch"]["ranks"] == 2

    lines = done.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 4
    assert any(line.startswith("moments") for line in lines), "the plan was not printed"
    assert "sample:" not in lines, "nobody reads token numbers"
    assert "sample" not in summary


def test_a_run_can_be_repeated_from_its_settings(here, capsys):
    """The run folder says all that the run depends on."""
    assert train.main([*TINY, "sample.tokens=0", "launch.malloc=default"]) == 0
    (folder,) = here.glob("runs/*/*")
    config = read(yaml.safe_load((folder / "config.yaml").read_text()))
    (here / "again").mkdir()
    summary = train.train(config, here / "again")
    first = [{key: row[key] for key in ROW if key.split("/")[0] in ("train", "val", "step")} for row in rows(folder)]
    again = [{key: row[key] for key in first[0]} for row in rows(here / "again")]
    assert first == again
    assert summary.val_loss == again[-1]["val/loss"]


def test_offload_changes_where_state_sleeps_and_nothing_else(here, monkeypatch):
    """Every preset at the stages that have it: the losses of a run without, and nothing left open or on disk."""
    monkeypatch.chdir(here)
    (here / "disk").mkdir()
    quiet = [*TINY, "sample.tokens=0", "launch.malloc=default", "tracker.console=none", "offload.page=8KiB"]
    presets = {0: ["none", "nvme"], 3: ["none", "cpu", "infinity"]}
    for stage, names in presets.items():
        losses = {}
        for name in names:
            before = open_files(here), live_threads()
            run = [f"zero.stage={stage}", f"offload={name}", "offload.path=disk", f"hydra.run.dir={stage}-{name}"]
            assert train.main([*quiet, *run]) == 0
            assert (open_files(here), live_threads()) == before, name
            assert not list((here / "disk").iterdir()), name
            table, summary = rows(here / f"{stage}-{name}"), summary_of(here / f"{stage}-{name}")
            assert all(tuple(row) == ROW for row in table)
            losses[name] = [(row["train/loss"], row["train/grad_norm"], row["val/loss"]) for row in table]
            wrote = name in ("nvme", "infinity")
            assert (summary["offload_written_bytes"] > 0) == wrote, name
            assert ("written per step" in (summary["endurance"] or "")) == wrote, name
            assert any(row["offload/bytes_per_param"] > 0 for row in table) == wrote, name
            if name == "nvme":  # and a validation after the second and the last step makes their updates
                written = sum(row["offload/write_bytes"] for row in table)
                assert written == 4 * summary["plan_step_bytes"]["disk"] / 2, "as much is read"
        assert all(seen == losses["none"] for seen in losses.values()), losses


def test_a_run_that_fails_closes_its_store_too(here, monkeypatch, capsys):
    def broken(*args, **settings):
        raise OSError(5, "the data went away")

    monkeypatch.setattr("zero.trainer.run.loop.validation_loss", broken)
    before = open_files(here), live_threads()
    assert train.main([*TINY, "sample.tokens=0", "launch.malloc=default", "offload=infinity"]) == 1
    assert "the data went away" in capsys.readouterr().err
    assert (open_files(here), live_threads()) == before


@pytest.mark.process
def test_a_sweep_gives_each_run_its_folder_and_its_process_and_goes_on_after_a_failure(here):
    (here / "bad.bin").write_bytes(bytes([9, 0] * 3000 + [0, 1] * 3000))  # the second half is token 256
    (here / "good.bin").write_bytes(bytes([9, 0] * 6000))
    data = ["data=tokens", "data.path=bad.bin,good.bin", "data.vocab=256"]
    done = program("-m", "debug=tiny", *data, "sample.tokens=0", "tracker.console=none", cwd=here)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "the data holds token 256" in line
    folders = sorted(here.glob("runs/*/*/[01]"))
    assert [yaml.safe_load((folder / "config.yaml").read_text())["data"]["path"] for folder in folders] == [
        "bad.bin",
        "good.bin",
    ]
    reasons = [summary_of(folder)["exit_reason"] for folder in folders]
    assert "the data holds token 256" in reasons[0]
    assert reasons[1] == "finished"
    first_lines = [(folder / "ranks" / "0.log").read_text().splitlines()[0] for folder in folders]
    assert len(set(first_lines)) == 2, "both runs were one process"


def test_a_sweep_that_is_asked_to_stop_starts_no_further_job(here, monkeypatch, capsys):
    began = []

    def stopped(train, config, folder, *, apart):
        began.append(config.seed)
        raise Preempted("stopped by a signal, after a save")

    monkeypatch.setattr(job, "run", stopped)
    assert train.main(["-m", *TINY, "seed=3,1,2", "hydra.sweep.dir=sweep"]) == Preempted.exit_code
    assert began == [3]
    printed = capsys.readouterr()
    assert printed.err == "stopped by a signal, after a save\n"
    assert "1 job: " in printed.out
    assert [path.name for path in (here / "sweep").iterdir() if path.is_dir()] == ["0"], "another one was begun"


def test_ctrl_c_in_a_sweep_shows_its_table_and_how_to_go_on(here, monkeypatch, capsys):
    def run(train, config, folder, *, apart):
        summary = {"exit_reason": "finished", "val_loss": 2.0}
        if config.seed == 1:
            (folder / "checkpoints" / "step-25").mkdir(parents=True)
            (folder / "starts.jsonl").write_text(json.dumps({"saved": str(folder / "checkpoints" / "step-25")}) + "\n")
            summary = {"exit_reason": "stopped by SIGINT"}
        (folder / "summary.json").write_text(json.dumps(summary))
        if config.seed == 1:
            stopped = Interrupted(signal.SIGINT)
            stopped.folder = folder
            raise stopped
        return SimpleNamespace(val_loss=2.0)

    monkeypatch.setattr(job, "run", run)
    asked = ["-m", *TINY, "seed=3,1,2,5", "hydra.sweep.dir=my sweep", "checkpoint.every=5"]
    assert train.main(asked) == 130
    printed = capsys.readouterr()
    assert "2 jobs: 1 finished, 1 stopped: my sweep/sweep.html" in printed.out
    assert printed.err == (
        "stopped by SIGINT in run 1. Continue with: python train.py debug=tiny data=synthetic seed=1 "
        "checkpoint.every=5 'resume=\"my sweep/1/checkpoints/step-25\"'\n"
    )


@pytest.mark.parametrize("every", [0, 500])
def test_ctrl_c_before_anything_was_saved_says_what_would_have(here, monkeypatch, every, capsys):
    def run(train, config, folder, *, apart):
        job.write_config(config, folder)
        stopped = Interrupted(signal.SIGINT)
        stopped.folder = folder
        raise stopped

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert train.main([*TINY, f"checkpoint.every={every}"]) == 130
    advice = (
        "The first Ctrl-C during the steps saves, and a second one ends the run"
        if every
        else "Set checkpoint.every=100: then the first Ctrl-C during the steps saves"
    )
    assert capsys.readouterr().err == f"\nstopped by SIGINT. Nothing was saved. {advice}\n"


def test_endless_skips_end_a_run_with_a_row_that_shows_them(here, monkeypatch, capsys):
    import zero.trainer.run.loop as training
    import zero.trainer.run.task as task

    monkeypatch.setattr(training, "MOST_SKIPPED", 3)
    loss_of = task.loss_of
    monkeypatch.setattr(task, "loss_of", lambda *given: lambda *batch: float("nan") * loss_of(*given)(*batch))
    quiet = ["tracker.every=100", "val.every=0", "tracker.console=none"]
    assert train.main([*TINY, *quiet, "steps=9", "hydra.run.dir=run"]) == NumericsError.exit_code
    (row,) = rows(here / "run")
    assert (row["step"], row["train/skipped"], row["train/loss"]) == (3, 3, None)
    assert "the last 3 steps were skipped" in capsys.readouterr().err


@pytest.mark.parametrize("spoiled", ["report.html", "trace.json"])
def test_a_page_that_cannot_be_written_does_not_end_a_run(here, spoiled, capsys):
    (here / "run" / spoiled).mkdir(parents=True)
    assert train.main([*TINY, "steps=4", "hydra.run.dir=run", "tracker.console=lines"]) == 0
    assert summary_of(here / "run")["exit_reason"] == "finished"
    assert "warning: no " in capsys.readouterr().out


def _limited(nbytes: int) -> dict:
    """Of a program: a file may have so many bytes, and then the system refuses it."""
    return {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))}


def test_a_full_run_folder_is_one_line_that_names_the_file(here, capsys):
    (here / "run" / "ranks").mkdir(parents=True)
    (here / "run" / "ranks" / "0.log").symlink_to("/dev/full")
    assert train.main([*TINY, "hydra.run.dir=run", "tracker.console=none"]) == MachineError.exit_code
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "run/ranks/0.log cannot be written: ENOSPC (No space left on device). Free space there, or set hydra" in said


def test_what_is_in_the_way_inside_a_run_folder_is_named(here, capsys):
    (here / "run").mkdir()
    (here / "run" / ".hydra").touch()
    assert train.main([*TINY, "hydra.run.dir=run"]) == 2
    said = f"hydra.run.dir=run: {here}/run/.hydra: is not a folder. Give a folder where this user may write.\n"
    assert capsys.readouterr().err == said


@pytest.mark.process
def test_a_log_that_cannot_be_written_is_the_failure_of_its_rank(here, capsys):
    (here / "run" / "ranks").mkdir(parents=True)
    (here / "run" / "ranks" / "1.log").symlink_to("/dev/full")
    with forked_ranks():
        assert train.main([*TINY, "hydra.run.dir=run", "launch.ranks=2"]) == MachineError.exit_code
    said = capsys.readouterr().err
    assert said.startswith(f"rank 1 failed: {here}/run/ranks/1.log cannot be written: ENOSPC")
    assert said.count("\n") == 1


@pytest.mark.process
def test_a_disk_that_fills_while_training_ends_a_run_and_leaves_nothing_half_written(here):
    quiet = ["sample.tokens=0", "tracker.every=1", "steps=60", "val.every=0", "hydra.run.dir=run"]
    done = program(*TINY, *quiet, cwd=here, **_limited(6000))
    assert done.returncode == MachineError.exit_code
    assert f"{here}/run/metrics.jsonl cannot be written: EFBIG (File too large). Raise the limit" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "metrics.jsonl cannot be written" in summary_of(here / "run")["exit_reason"]
    assert [path.name for path in (here / "run").glob(".*")] == [".hydra"]


@pytest.mark.parametrize(("memory", "code"), [("80GiB", 0), ("1MiB", 2)])
def test_a_plan_in_which_nothing_fits_is_printed_and_exits_with_2(here, memory, code, capsys):
    paper = ["plan.host_memory=1MiB", "plan.disk=1MiB", f"plan.device_memory={memory}"]
    assert train.main(["mode=plan", "plan.all=true", *TINY, *paper]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    assert ("nothing fits" in printed.out) == (code == 2)
    assert "offload=infinity" in printed.out
    assert not list(here.iterdir())


def test_whatever_goes_wrong_with_a_page_is_a_warning(here, monkeypatch, capsys):
    def fails(*_):
        raise ValueError("no such colour")

    monkeypatch.setattr("zero.tracker.report.run.write_run", fails)
    assert train.main([*TINY, "hydra.run.dir=run", "tracker.console=lines"]) == 0
    assert "warning: no report: ValueError: no such colour" in capsys.readouterr().out

    jobs = []
    monkeypatch.setattr("zero.tracker.report.sweep.write_sweep", fails)
    monkeypatch.setattr(
        job, "run", lambda train, config, folder, apart: jobs.append(folder) or SimpleNamespace(val_loss=1.0)
    )
    assert train.main(["-m", *TINY, "seed=1,2", "hydra.sweep.dir=sweep"]) == 1
    assert len(jobs) == 2, "the sweep went on"
    assert capsys.readouterr().err == "ValueError: no such colour\n"


# Under torchrun


def by_hand(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run two ranks with torchrun's variables, as a scheduler sets them; returns what the last one said."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, ROOT / "train.py", *arguments],
            cwd=cwd, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=LONG_S) for rank in ranks]
    return subprocess.CompletedProcess(arguments, max(rank.returncode for rank in ranks), *said[-1])


@pytest.mark.process
@pytest.mark.parametrize("start", [torchrun, by_hand])
def test_torchrun_gives_the_same_run(here, start):
    done = start(*TINY, "launch.threads=1", cwd=here)
    assert done.returncode == 0, done.stderr
    (folder,) = here.glob("runs/*/*")
    files = {"config.yaml", "metrics.jsonl", "summary.json", "starts.jsonl", "trace.json", "report.html"}
    assert {path.name for path in folder.iterdir()} == files | {".hydra", "ranks"}
    assert yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()) == [*TINY, "launch.threads=1"]
    for rank in range(2):
        assert (folder / "ranks" / f"{rank}.log").read_text().startswith(f"rank {rank} of 2")
    assert train.main([*TINY, "tracker.console=none"]) == 0
    _, alone = sorted(here.glob("runs/*/*"))
    losses = [[row["train/loss"] for row in rows(run_folder)] for run_folder in (folder, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # the order of addition differs between world sizes


@pytest.mark.process
def test_a_mistake_under_torchrun_is_one_line_exit_code_2_and_no_folder(here):
    done = torchrun("zero.stage=7", cwd=here)
    assert done.returncode == 1  # torchrun's own; it tells that of the rank
    assert said_by_us(done.stderr) == ["zero.stage=7: must be 0, 1, 2 or 3, or auto"]
    assert "exitcode  : 2" in done.stderr
    assert "traceback : zero.stage=7: must be 0, 1, 2 or 3, or auto" in done.stderr.splitlines()[-2]
    assert done.stderr.count("zero.stage=7") == 2, "ours first, torchrun's last"
    assert not list(here.iterdir())


@pytest.mark.parametrize(("rank", "file", "prints"), [("0", True, True), ("1", True, False), ("1", False, True)])
def test_ranks_tell_torchrun_and_the_first_of_a_machine_tells_the_user(
    tmp_path, monkeypatch, capsys, rank, file, prints
):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    variables = {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in (variables | {"TORCHELASTIC_ERROR_FILE": str(path)} if file else variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "_as_one_rank", lambda arguments, train: cli.compose(["zero.stge=1"]))
    assert train.main(["zero.stge=1"]) == 2
    line = "zero.stge is not a setting. Did you mean zero.stage?"
    assert capsys.readouterr().err == (f"{line}\n" if prints else "")
    if file:
        assert ProcessFailure(0, 1, 2, str(path)).message["message"] == line


@pytest.mark.process
def test_a_rank_killed_under_torchrun_is_named_in_the_summary(here):
    """torchrun ends the other rank at once; it has a moment to find out why."""
    with subprocess.Popen(
        [sys.executable, *TORCHRUN, ROOT / "train.py", *TINY, "steps=100000", "val.every=0"],
        cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as running:  # fmt: skip
        folder = _after_a_step(running, here)
        os.kill(_process_of_rank(1, folder), signal.SIGKILL)
        _, said = running.communicate(timeout=LONG_S)
    assert running.returncode == 1
    summary = summary_of(folder)
    assert said_by_us(said) == [summary["exit_reason"]]
    assert "rank 0 lost rank 1" in summary["exit_reason"]
    assert "memory" in summary["exit_reason"]
    assert summary["steps"] >= 1
    assert not _alive_after(running.pid)


# Ends that nobody planned


def _after_a_step(running: subprocess.Popen[str], here: Path) -> Path:
    """The folder of a run that has made a step."""
    for line in running.stdout:
        if line.startswith("step "):
            break
    (folder,) = here.glob("runs/*/*")
    return folder


def _process_of_rank(rank: int, folder: Path) -> int:
    first_line = (folder / "ranks" / f"{rank}.log").read_text().splitlines()[0]
    return int(first_line.split("process ")[1])


def _alive_in_group(group: int) -> list[psutil.Process]:
    """Its processes, without dead ones that nobody has waited for yet."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _alive_after(group: int, limit_s: float = 10) -> list[psutil.Process]:
    """Return the processes that stay. multiprocessing's resource tracker ends a moment after its pipe closes."""
    end_s = time.monotonic() + limit_s
    while (alive := _alive_in_group(group)) and time.monotonic() < end_s:
        psutil.wait_procs(alive, timeout=0.1)
    return alive


@pytest.mark.process
def test_a_rank_that_was_killed_is_named_with_what_the_ranks_held(here):
    arguments = [*TINY, "steps=100000", "val.every=0", "launch.ranks=2"]
    with subprocess.Popen(
        [sys.executable, ROOT / "train.py", *arguments],
        cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as running:  # fmt: skip
        folder = _after_a_step(running, here)
        os.kill(_process_of_rank(1, folder), signal.SIGKILL)
        _, said = running.communicate(timeout=LONG_S)
    assert running.returncode == RankFailedError.exit_code
    assert said.count("\n") == 1
    assert "rank 1 was killed by the system (signal 9)" in said
    assert "the ranks held" in said
    assert not _alive_after(running.pid)
    summary = summary_of(folder)
    assert summary["exit_reason"] == said.strip()
    assert summary["steps"] >= 1
    assert summary["train_loss"] > 0


@pytest.mark.process
def test_ctrl_c_saves_where_the_run_has_checkpoints(here):
    arguments = [*TINY, "steps=100000", "val.every=0", "launch.ranks=2", "checkpoint.every=50000"]
    with subprocess.Popen(
        [sys.executable, ROOT / "train.py", *arguments],
        cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as running:  # fmt: skip
        folder = _after_a_step(running, here)
        os.killpg(running.pid, signal.SIGINT)
        out, said = running.communicate(timeout=LONG_S)
    assert running.returncode == 75
    assert out.count("Ctrl-C: the run finishes this step and saves") == 1
    assert said.startswith("stopped by a signal after step")
    assert said.count("\n") == 1
    summary = summary_of(folder)
    assert Path(summary["checkpoint"]).is_dir()
    assert not _alive_after(running.pid)


@pytest.mark.process
def test_ctrl_c_is_one_line_and_exit_code_130(here):
    arguments = [*TINY, "steps=100000", "val.every=0", "launch.ranks=2"]
    with subprocess.Popen(
        [sys.executable, ROOT / "train.py", *arguments],
        cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as running:  # fmt: skip
        folder = _after_a_step(running, here)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: parent and ranks alike
        _, said = running.communicate(timeout=LONG_S)
    assert running.returncode == 130
    assert said.startswith("stopped by SIGINT. Nothing was saved. Set checkpoint.every=100")
    assert said.count("\n") == 1
    assert not _alive_after(running.pid)
    summary = summary_of(folder)
    assert summary["exit_reason"] == "stopped by SIGINT"
    assert summary["steps"] >= 1
    assert summary["plan_bytes"]["device"]["moments"] > 0
    assert rows(folder)[0]["step"] == 1


@pytest.mark.parametrize(
    ("val", "save", "recorded"),
    [(100, 100, 3), (2, 100, 4), (3, 100, 3), (2, 3, 6), (3, 4, 3), (2, 5, 4), (1, 100, 3), (100, 1, 3)],
)
def test_the_recorded_step_follows_another_one(val, save, recorded):
    """After a validation all units of a toy are whole, and its timeline would show no gather."""
    from zero.trainer.run.loop import step_to_record

    assert step_to_record(3, 50, lambda number: number % val == 0 or number % save == 0) == recorded


def test_a_schedule_is_compared_with_the_steps_that_follow_from_epochs(here, capsys):
    """And not with the default of `steps`: 800 warm-up steps are too many for one epoch here and few for 50."""
    (here / "texts").mkdir()
    for number in range(40):
        (here / "texts" / f"{number}.txt").write_text(f"text {number} " * 100)
    words = ["debug=tiny", "data.folder=texts", "val.every=0", "sample.tokens=0", "debug.stop_at=2"]
    assert train.main([*words, "epochs=1", "schedule.warmup=900"]) == 2
    steps = int(re.search(r"rows, (\d+) steps", capsys.readouterr().out)[1])
    assert 10 < steps < 900
    assert train.main([*words, "epochs=1", f"schedule.warmup={steps}"]) == 2
    assert f"no step of steps={steps} is left for the decay" in capsys.readouterr().err
    assert train.main([*words, "epochs=1", f"schedule.warmup={steps - 1}"]) == 0
    assert train.main([*words, "epochs=50", "schedule.warmup=900"]) == 0
    assert train.main([*words, "epochs=1", f"debug.stop_at={steps + 1}"]) == 2
    assert f"debug.stop_at={steps + 1} is above steps={steps}." in capsys.readouterr().err
