"""Whatever ends a rank, the user gets one line that names it, and no process is left behind.

Asked to stop by a signal, wherever it arrives, all ranks return from the same step. Ranks that fail start again.
"""

import ctypes
import itertools
import multiprocessing.context
import multiprocessing.util
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

import zero
from tests.conftest import LONG_S
from zero import errors
from zero.errors import ConfigError, DeadlineError, NumericsError, RankFailedError
from zero.platform.memory_watch import Reading
from zero.testing import forked_ranks
from zero.trainer import launch
from zero.trainer.launch.ranks import FINAL

pytestmark = pytest.mark.process


def environment_of_rank(names: tuple[str, ...]) -> dict[str, str | None]:
    print("printed by rank", os.environ["RANK"])
    return {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", *names)}


def mapped_bytes_of_a_tensor() -> int:
    """Bytes that malloc mapped on their own while a tensor of 3 MiB is alive, beyond what it had before."""
    names = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    info = ctypes.CDLL(None).mallinfo2
    info.restype = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    before = info().hblkhd
    held = torch.ones(3 << 18)
    return info().hblkhd - before if held.sum() else -1


def workspace_of_cublas() -> str | None:
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def raise_on(rank: int, error: BaseException) -> None:
    if int(os.environ["RANK"]) == rank:
        raise error
    wait_elsewhere()


def wait_elsewhere() -> None:
    """For ever, whatever handlers run meanwhile."""
    threading.Event().wait()


def die_on(rank: int, signum: int, folder: Path) -> None:
    """Rank `rank` dies by `signum`; the others then fail as a rank does that lost its connection."""
    if int(os.environ["RANK"]) == rank:
        (folder / "ready").touch()
        os.kill(os.getpid(), signum)
    while not (folder / "ready").exists():
        time.sleep(0.01)
    raise RuntimeError("connection closed by peer")


def tell_pid(folder: Path) -> int:
    """Wait until the parent reads who this rank is; returns the rank."""
    rank = int(os.environ["RANK"])
    (folder / f"{rank}.fifo").write_text(str(os.getpid()))
    return rank


def step_until_asked(folder: Path) -> int:
    """A trainer in small: after each step the ranks agree whether one was asked to stop. Returns the steps done."""
    rank = tell_pid(folder)
    with zero.open_world(LONG_S) as world:
        for step in itertools.count():
            if "1" in world.gather_texts(str(int(launch.preempted())), "asked to stop"):
                (folder / f"{rank}.stopped").write_text(str(step))
                return step
    raise AssertionError("endless")


def wait_in_a_collective(folder: Path) -> None:
    """Rank 0 waits for rank 1 in a collective, where Python runs no handler; rank 1 never comes."""
    rank = tell_pid(folder)
    with zero.open_world(LONG_S) as world:
        if rank == 0:
            world.gather_texts("x", "what rank 1 has")
        wait_elsewhere()


def wait_for_nothing(folder: Path) -> None:
    tell_pid(folder)
    wait_elsewhere()


def raise_without_closing() -> None:
    """Rank 1 does, in a world that rank 0 then waits in."""
    world = zero.open_world(LONG_S)
    world.barrier("start")
    if world.rank == 1:
        raise ValueError("bad batch")
    world.barrier("the end")


def die_when_asked(folder: Path) -> None:
    """Rank 1 does; rank 0 takes no notice."""
    with (folder / "starts").open("a") as starts:
        starts.write("start\n")
    if tell_pid(folder) == 0:
        wait_elsewhere()
    while not launch.preempted():  # a thread hears the signal, perhaps after `pause` would have returned
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_turn(kills: int) -> tuple[int, str]:
    """In start i rank i % 2 is killed, in the first `kills` starts; returns what the last start knows of itself."""
    if launch.restart_count() < kills:
        if int(os.environ["RANK"]) == launch.restart_count() % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_elsewhere()
    with zero.open_world(LONG_S) as world:
        return launch.restart_count(), " ".join(world.gather_texts(os.environ["TORCHELASTIC_RESTART_COUNT"], "starts"))


def start_and_raise(folder: Path, error: BaseException) -> None:
    """Rank 1 does; rank 0 waits, or has not even started then."""
    if os.environ["RANK"] == "1":
        with (folder / "starts").open("a") as starts:
            starts.write("start\n")
    raise_on(1, error)


def turn_in_a_circle() -> None:
    """Rank 1 does, and never comes to where rank 0 waits for it."""
    with zero.open_world(LONG_S) as world:
        world.at("step 3, forward")
        world.barrier("step 3")
        while world.rank == 1:
            pass
        world.at("step 3, backward")
        processes = world._transport._processes  # type: ignore[attr-defined]
        processes.operations._timeout_s = processes._wait_s = 0.25
        world.barrier("the end")


def await_text(path: Path, text: str) -> None:
    end_s = time.monotonic() + LONG_S
    while text not in path.read_text():
        assert time.monotonic() < end_s, f"{path} never came to hold {text!r}"
        time.sleep(0.01)


def launched(
    entry: Callable[..., Any],
    folder: Path,
    send: Callable[[list[int]], None],
    *args: Any,
    grace_s: float = 30.0,
    max_restarts: int = 0,
) -> Any:
    """Return the message of `launch` about two ranks; a thread calls `send` with their pids once they run."""
    folder.mkdir(parents=True)
    fifos = [folder / f"{rank}.fifo" for rank in range(2)]
    for fifo in fifos:
        os.mkfifo(fifo)
    sender = threading.Thread(target=lambda: send([int(fifo.read_text()) for fifo in fifos]), daemon=True)
    sender.start()
    try:
        how = launch.ProcessSettings(folder, grace_s=grace_s)
        return launch.launch(entry, folder, *args, ranks=2, processes=how, max_restarts=max_restarts)
    finally:
        sender.join(10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ranks"


@pytest.fixture(autouse=True)
def _hangup_is_heard() -> Iterator[None]:
    """Also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def _forked() -> Iterator[None]:
    """For what happens to ranks once they run. How they are started is for the other tests."""
    with forked_ranks():
        yield


def test_rank_0_answers_and_every_rank_has_a_log(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    before = dict(os.environ)
    seen = launch.launch(environment_of_rank, names, ranks=2, processes=launch.ProcessSettings(folder, threads=3))
    assert os.environ == before
    assert seen["RANK"] == "0"
    assert seen["WORLD_SIZE"] == "2"
    assert seen["OMP_NUM_THREADS"] == seen["MKL_NUM_THREADS"] == "3"
    assert seen["MALLOC_MMAP_THRESHOLD_"] == str(4 * 1024**3)
    assert seen["MALLOC_TRIM_THRESHOLD_"] == str(16 * 1024**3)
    assert "printed by rank 1" in (folder / "1.log").read_text()
    assert (folder / "0.log").read_text().startswith("rank 0 of 2")
    assert capfd.readouterr() == ("printed by rank 0\n", "")


def test_ranks_start_where_another_library_has_set_a_start_method_of_its_own(folder: Path) -> None:
    """joblib sets `loky`, and a new interpreter does not know that method."""
    before = multiprocessing.get_start_method()
    method = type("Method", (multiprocessing.context.SpawnContext,), {"_name": "loky"})()
    try:
        with patch.dict(multiprocessing.context._concrete_contexts, loky=method):
            multiprocessing.set_start_method("loky", force=True)
        assert (
            launch.launch(environment_of_rank, (), ranks=1, processes=launch.ProcessSettings(folder))["WORLD_SIZE"]
            == "1"
        )
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.skipif(sys.platform != "linux", reason="malloc is not glibc's")
def test_a_lean_rank_keeps_no_large_tensor_in_its_heap(folder: Path) -> None:
    """Freed memory goes back to the system there, so nothing is left between two tensors."""
    assert (
        launch.launch(mapped_bytes_of_a_tensor, ranks=1, processes=launch.ProcessSettings(folder, malloc="lean"))
        >= 3 << 20
    )


def test_a_deterministic_run_fixes_the_workspace_of_cublas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses cuBLAS in deterministic runs without it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    plain, fixed = launch.ProcessSettings(folder, malloc="default"), launch.ProcessSettings(folder, deterministic=True)
    assert launch.environment(2, fixed)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in launch.environment(2, plain)
    assert launch.inside(workspace_of_cublas, processes=fixed) == ":4096:8"
    assert workspace_of_cublas() is None
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert launch.inside(workspace_of_cublas, processes=fixed) == ":16:8"


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize(
    ("rank", "error", "cause", "exit_code"),
    [
        (0, ValueError("two\nlines"), "rank 0 failed: ValueError: two lines", 1),
        (1, NumericsError("blocks.0"), "rank 1 failed: blocks.0", 6),
    ],
)
def test_a_rank_that_raises_ends_all(
    folder: Path, rank: int, error: Exception, cause: str, exit_code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch.launch(raise_on, rank, error, ranks=2, processes=launch.ProcessSettings(folder))
    assert str(caught.value) == f"{cause} (log: {folder}/{rank}.log)"
    assert caught.value.exit_code == exit_code
    assert type(error).__name__ in (folder / f"{rank}.log").read_text()
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("_forked")
def test_a_rank_that_was_killed_is_named_though_another_complains_first(folder: Path) -> None:
    with pytest.raises(
        RankFailedError, match=r"^rank 1 was killed by the system \(signal 9\), or by another process: "
    ) as caught:
        launch.launch(die_on, 1, signal.SIGKILL, folder, ranks=2, processes=launch.ProcessSettings(folder))
    held = r"the ranks held [\d.]+ [MG]iB \(the largest [\d.]+ [MG]iB\) and [\d.]+ GiB were free\. Continue with"
    assert re.search(held, str(caught.value))


def test_memory_is_blamed_where_little_was_free(folder: Path) -> None:
    scarce = Reading(largest_bytes=3 << 30, all_bytes=6 << 30, free_bytes=1 << 30)
    said = str(launch.ranks._first_failure({1: -signal.SIGKILL}, [], folder, scarce))
    assert "most likely because host memory ran out: shortly before, the ranks held 6.0 GiB" in said
    assert "mode=plan" in said


@pytest.mark.usefixtures("_forked")
def test_a_rank_that_raises_without_closing_its_world_is_named_by_the_others_too(folder: Path) -> None:
    with pytest.raises(RankFailedError, match=r"^rank 1 failed: ValueError: bad batch"):
        launch.launch(raise_without_closing, ranks=2, processes=launch.ProcessSettings(folder))
    assert "RankFailedError: rank 1 failed first: ValueError: bad batch (rank 0" in (folder / "0.log").read_text()


def test_the_earliest_note_is_the_cause(folder: Path) -> None:
    """A survivor may end first: rank 0 exits because rank 1 raised."""
    notes = [
        {"time_ns": 5, "rank": 1, "cause": "ValueError: first", "exit_code": 1},
        {"time_ns": 6, "rank": 0, "cause": "lost rank 1", "exit_code": 5},
    ]
    error = launch.ranks._first_failure({0: 5, 1: 1}, notes, folder)
    assert str(error).startswith("rank 1 failed: ValueError: first")
    assert "SIGSEGV" in str(launch.ranks._first_failure({0: 5, 1: -signal.SIGSEGV}, notes[1:], folder))


def test_what_followed_from_a_failure_is_not_the_cause() -> None:
    board = launch.board.Board(2)
    board.leave_note(1, RankFailedError("rank 0 failed first"))
    board.leave_note(0, NumericsError("the loss is not finite"))
    assert [note["rank"] for note in board.notes()] == [0, 1]


def test_inside_passes_errors_through_and_logs_them(folder: Path) -> None:
    def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        launch.inside(fail, processes=launch.ProcessSettings(folder))
    assert "ConfigError: no" in (folder / "0.log").read_text()


def test_out_of_memory_comes_with_advice() -> None:
    text = launch.describe(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"))
    assert text.endswith("you tried 9 bytes. mode=plan with the same settings shows settings that take less memory")


@pytest.mark.parametrize(
    ("signum", "exit_code", "said"),
    [(signal.SIGINT, 130, ""), (signal.SIGTERM, 143, ": the run had not ended 2.1 s after the request to stop")],
)
def test_a_signal_to_the_parent_leaves_no_orphan(tmp_path: Path, signum: int, exit_code: int, said: str) -> None:
    """Ranks that return no more, since they are stopped, are ended when the grace is over."""
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from zero.trainer import launch\n"
        "def entry():\n"
        "    Path(sys.argv[1], os.environ['RANK'] + '.pid').write_text(str(os.getpid()))\n"
        "    while True: signal.pause()\n"
        "if __name__ == '__main__':\n"
        "    launch.ranks._LATE_S = -0.1\n"  # so that the parent is sooner than the ranks
        "    try:\n"
        "        launch.launch(entry, ranks=2, processes=launch.ProcessSettings(Path(sys.argv[1]), grace_s=2.2))\n"
        "    except launch.Interrupted as stopped:\n"
        "        print(stopped)\n"
        "        sys.exit(stopped.exit_code)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    pipes = [tmp_path / f"{rank}.pid" for rank in range(2)]
    for pipe in pipes:
        os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, script, tmp_path], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pipe.read_text()) for pipe in pipes]  # waits for the rank to open its end
        parent.send_signal(signum)
        assert parent.wait(timeout=LONG_S) == exit_code
        assert parent.stdout is not None
        assert parent.stdout.read().startswith(f"stopped by {signal.Signals(signum).name}{said}")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("where", ["rank", "parent"])
def test_a_sigterm_at_any_time_lets_all_ranks_return_from_the_same_step(tmp_path: Path, where: str) -> None:
    """There is one request even if a scheduler signals every process and the parent passes its own signal on."""
    rng = random.Random(where)
    for trial in range(2):
        delay_s, rank = rng.uniform(0, 0.4), rng.randrange(2)
        print(f"trial {trial}: {where} {rank} after {delay_s:.3f} s")

        def send(pids: list[int], delay_s: float = delay_s, rank: int = rank, trial: int = trial) -> None:
            time.sleep(delay_s)
            every = [*pids, os.getpid()] if trial % 2 else [os.getpid()]
            for pid in [pids[rank]] if where == "rank" else every:
                os.kill(pid, signal.SIGTERM)

        folder = tmp_path / str(trial)
        steps = launched(step_until_asked, folder, send)
        assert [(folder / f"{each}.stopped").read_text() for each in range(2)] == [str(steps)] * 2
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGALRM])
def test_a_signal_that_ends_the_run_is_told_by_its_name(folder: Path, signum: signal.Signals) -> None:
    with pytest.raises(launch.Interrupted) as caught:
        launched(wait_in_a_collective, folder, lambda _: os.kill(os.getpid(), signum))
    assert str(caught.value) == f"stopped by {signum.name}"
    assert caught.value.exit_code == 128 + signum


@pytest.mark.usefixtures("_forked")
def test_what_nohup_keeps_away_ends_no_run(folder: Path) -> None:
    def send(_: list[int]) -> None:
        for signum in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), signum)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launched(step_until_asked, folder, send) >= 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_forked")
def test_sigusr2_to_the_parent_shows_where_every_rank_is_and_the_run_goes_on(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def send(_: list[int]) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        for rank in range(2):
            await_text(folder / f"{rank}.log", "in step_until_asked")
        os.kill(os.getpid(), signal.SIGTERM)

    assert launched(step_until_asked, folder, send) >= 0
    assert capfd.readouterr().err == f"SIGUSR2: each rank writes its stacks into {folder}/<rank>.log\n"


@pytest.mark.usefixtures("_forked")
def test_a_rank_that_is_late_is_ended_inside_its_collective_and_says_where_it_was(folder: Path) -> None:
    with pytest.raises(launch.Interrupted) as caught:
        launched(wait_in_a_collective, folder, lambda pids: os.kill(pids[0], signal.SIGTERM), grace_s=1.5)
    late = "stopped by SIGTERM: rank 0 had not ended 1.5 s after the request to stop. Raise launch.grace"
    assert str(caught.value) == f"{late} (log: {folder}/0.log)"
    assert caught.value.exit_code == 143
    assert "in wait_in_a_collective" in (folder / "0.log").read_text()


def ask_for_the_end(_: int) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(_: int) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize(
    ("end", "said"),
    [
        (ask_for_the_end, "stopped by SIGTERM: rank 0 had not ended 1 s after"),
        (interrupt, "stopped by SIGINT"),
        (kill, "rank 0 was killed"),
    ],
)
def test_a_rank_that_somebody_has_stopped_does_not_hold_up_the_end(
    folder: Path, end: Callable[[int], None], said: str
) -> None:
    ends_s = []

    def send(pids: list[int]) -> None:
        os.kill(pids[1], signal.SIGSTOP)
        ends_s.append(time.monotonic())
        end(pids[0])

    with pytest.raises((launch.Interrupted, RankFailedError), match=f"^{said}"):
        launched(wait_for_nothing, folder, send, grace_s=1.0)
    assert time.monotonic() - ends_s[0] < 25


@pytest.mark.usefixtures("_forked")
def test_killed_ranks_start_again_and_the_cause_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Their logs hold all attempts."""
    assert launch.launch(die_in_turn, 2, ranks=2, processes=launch.ProcessSettings(folder), max_restarts=2) == (
        2,
        "2 2",
    )
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("restart 1 of 2: rank 0 was killed by the system (signal 9)")
    assert second.startswith("restart 2 of 2: rank 1 was killed by the system (signal 9)")
    lines = (folder / "0.log").read_text().splitlines()
    attempts = [line.partition(", restart ")[2] for line in lines if line.startswith("rank 0 of 2")]
    assert attempts[0] == ""
    assert attempts[-1] == "2 of 2"


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize(("error", "starts"), [(ConfigError("no"), 1), (ValueError("perhaps"), 2)])
def test_what_another_start_would_meet_again_is_not_restarted(folder: Path, error: Exception, starts: int) -> None:
    folder.mkdir()
    with pytest.raises(RankFailedError, match=r"^rank 1 failed") as caught:
        launch.launch(start_and_raise, folder, error, ranks=2, processes=launch.ProcessSettings(folder), max_restarts=1)
    assert (folder / "starts").read_text().count("start") == starts
    assert caught.value.exit_code == getattr(error, "exit_code", 1)


def test_only_what_may_pass_is_restarted() -> None:
    final = (errors.LayoutError, errors.HandshakeError, errors.StoreError, errors.CheckpointError, errors.Preempted)
    assert {error.exit_code for error in (*final, NumericsError)} == set(FINAL)
    assert not {errors.ZeroError.exit_code, DeadlineError.exit_code, RankFailedError.exit_code} & set(FINAL)


@pytest.mark.usefixtures("_forked")
def test_a_run_that_was_asked_to_stop_is_not_restarted(folder: Path) -> None:
    """A rank that fails while it saves ends the run; the one that takes no notice does not hold it up."""
    began_s = time.monotonic()
    with pytest.raises(RankFailedError, match=r"^rank 1 was killed by the system"):
        launched(die_when_asked, folder, lambda _: os.kill(os.getpid(), signal.SIGUSR1), max_restarts=3)
    assert (folder / "starts").read_text().count("start") == 2
    assert time.monotonic() - began_s < launch.ProcessSettings(folder).grace_s / 2


def listened() -> set[str]:
    """Return the addresses on which this rank and the parent of the ranks accept connections."""
    with zero.open_world(LONG_S, "cpu") as world:
        world.barrier("both listen")
        both = [psutil.Process(pid).net_connections("inet") for pid in (os.getpid(), os.getppid())]
    return {entry.laddr.ip for entries in both for entry in entries if entry.status == psutil.CONN_LISTEN}


def test_only_this_machine_can_connect_to_ranks_on_it_and_to_their_store(folder: Path) -> None:
    with patch.dict(os.environ):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        assert launch.launch(listened, ranks=2, processes=launch.ProcessSettings(folder)) == {"127.0.0.1"}


@pytest.mark.usefixtures("_forked")
def test_a_missed_deadline_shows_where_every_rank_was(folder: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch.launch(turn_in_a_circle, ranks=2, processes=launch.ProcessSettings(folder))
    assert str(caught.value) == (
        "rank 0 failed: rank 0 waited 0.25 s in barrier of the end (step 3, backward). No message from rank 1 (busy, "
        f"stopped or dead), last phase of rank 1: step 3, forward (log: {folder}/0.log, stacks in the log of each)"
    )
    assert caught.value.exit_code == 5
    for rank in range(2):
        assert "in turn_in_a_circle" in (folder / f"{rank}.log").read_text()


def ask_oneself(*signals: int) -> bool:
    before = launch.preempted()
    for signum in signals:
        os.kill(os.getpid(), signum)
    return launch.preempted() and not before


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("start", [launch.inside, launch.joined])
def test_a_rank_in_this_process_is_asked_too(
    folder: Path, start: Callable[..., Any], signum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    kept = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGINT)
    before = [signal.getsignal(each) for each in kept]
    assert start(ask_oneself, signum, processes=launch.ProcessSettings(folder))
    assert not launch.preempted()
    with pytest.raises(launch.Interrupted, match=r"^stopped by SIGTERM: the run had not ended 0.02 s after"):
        start(lambda: ask_oneself(signum) and wait_elsewhere(), processes=launch.ProcessSettings(folder, grace_s=0.02))
    assert [signal.getsignal(each) for each in kept] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("signum", [signal.SIGQUIT, signal.SIGALRM, signal.SIGXCPU])
def test_a_signal_that_ends_a_rank_in_this_process_is_told_by_its_name(folder: Path, signum: signal.Signals) -> None:
    with pytest.raises(launch.Interrupted, match=f"^stopped by {signum.name}$"):
        launch.inside(ask_oneself, signum, processes=launch.ProcessSettings(folder))


@pytest.mark.parametrize("start", [launch.inside, launch.joined])
def test_a_rank_in_this_process_shows_where_it_is(
    folder: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    start(ask_oneself, signal.SIGUSR2, processes=launch.ProcessSettings(folder))
    assert "in ask_oneself" in (folder / "0.log").read_text()


@pytest.mark.parametrize(
    ("nodes", "restarts", "shared", "notes"), [(2, 1, True, 1), (1, 1, True, 0), (2, 0, True, 0), (2, 1, False, 0)]
)
def test_nodes_that_could_not_come_back_are_told_of(nodes, restarts, shared, notes, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(shared))
    assert len(launch.notes_on_torchrun()) == notes


def test_ranks_that_torchrun_starts_again_learn_of_their_run_from_any_node(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    new = launch.own_begun()
    assert launch.Begun.of([new, new]) == ("", 0)
    launch.Begun("runs/a", 3).keep()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_1" / "1" / "error.json"))
    assert launch.Begun.of([new, launch.own_begun()]) == ("runs/a", 3)
    assert launch.restart_count() == 2
