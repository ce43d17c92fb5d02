"""Whatever ends a rank, the user gets one line that names it, and no process is left behind."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero import launch
from zero.errors import ConfigError, NonFiniteGradientError, RankFailedError

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]


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
    signal.pause()


def die_on(rank: int, signum: int, ready: Path) -> None:
    """Rank `rank` dies by `signum`; the others then fail as a rank does that lost its connection."""
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signum)
    raise RuntimeError("connection closed by peer")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ranks"


def test_rank_0_answers_and_every_rank_has_a_log(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    before = dict(os.environ)
    seen = launch.launch(environment_of_rank, names, ranks=2, folder=folder, threads=3)
    assert os.environ == before
    assert seen["RANK"] == "0"
    assert seen["WORLD_SIZE"] == "2"
    assert seen["OMP_NUM_THREADS"] == seen["MKL_NUM_THREADS"] == "3"
    assert seen["MALLOC_MMAP_THRESHOLD_"] == str(4 * 1024**3)
    assert seen["MALLOC_TRIM_THRESHOLD_"] == str(16 * 1024**3)
    assert "printed by rank 1" in (folder / "1.log").read_text()
    assert (folder / "0.log").read_text().startswith("rank 0 of 2")
    assert capfd.readouterr() == ("printed by rank 0\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="malloc is not glibc's")
def test_a_lean_rank_keeps_no_large_tensor_in_its_heap(folder: Path) -> None:
    """What is freed there goes back to the system, so nothing is left between two tensors."""
    assert launch.launch(mapped_bytes_of_a_tensor, ranks=1, folder=folder, malloc="lean") >= 3 << 20
    assert launch.launch(mapped_bytes_of_a_tensor, ranks=1, folder=folder, malloc="raised") == 0


def test_a_deterministic_run_fixes_the_workspace_of_cublas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses cuBLAS in deterministic runs without it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert launch.environment(2, "auto", "default", True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in launch.environment(2, "auto", "default")
    assert launch.inside(workspace_of_cublas, folder=folder, deterministic=True) == ":4096:8"
    assert launch.launch(workspace_of_cublas, ranks=1, folder=folder, deterministic=True) == ":4096:8"
    assert workspace_of_cublas() is None
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert launch.inside(workspace_of_cublas, folder=folder, deterministic=True) == ":16:8"


@pytest.mark.parametrize(
    ("rank", "error", "cause", "exit_code"),
    [
        (0, ValueError("two\nlines"), "rank 0 failed: ValueError: two lines", 1),
        (1, NonFiniteGradientError("blocks.0"), "rank 1 failed: blocks.0", 6),
    ],
)
def test_a_rank_that_raises_ends_all(
    folder: Path, rank: int, error: Exception, cause: str, exit_code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch.launch(raise_on, rank, error, ranks=2, folder=folder)
    assert str(caught.value) == f"{cause} (log: {folder}/{rank}.log)"
    assert caught.value.exit_code == exit_code
    assert type(error).__name__ in (folder / f"{rank}.log").read_text()
    assert capfd.readouterr() == ("", "")


def test_a_rank_killed_for_memory_is_named_though_another_complains_first(folder: Path) -> None:
    with pytest.raises(RankFailedError, match=r"^rank 1 was killed by the system \(signal 9\).*memory.*batch\.micro"):
        launch.launch(die_on, 1, signal.SIGKILL, folder, ranks=2, folder=folder)


def test_the_earliest_note_is_the_cause(folder: Path) -> None:
    """The agent may find a survivor first: rank 0 exits because rank 1 raised."""
    notes = [
        {"time_ns": 5, "rank": 1, "cause": "ValueError: first", "exit_code": 1},
        {"time_ns": 6, "rank": 0, "cause": "lost rank 1", "exit_code": 5},
    ]
    error = launch._first_failure(0, 5, notes, folder)
    assert str(error).startswith("rank 1 failed: ValueError: first")
    assert "SIGSEGV" in str(launch._first_failure(1, -signal.SIGSEGV, notes[1:], folder))


def test_inside_passes_errors_through_and_logs_them(folder: Path) -> None:
    def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        launch.inside(fail, folder=folder)
    assert "ConfigError: no" in (folder / "0.log").read_text()


def test_out_of_memory_comes_with_advice() -> None:
    text = launch.describe(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"))
    assert "zero.activations=remat" in text


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_leaves_no_orphan(tmp_path: Path, signum: int) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from zero import launch\n"
        "from zero.errors import RankFailedError\n"
        "def entry():\n"
        "    Path(sys.argv[1], os.environ['RANK'] + '.pid').write_text(str(os.getpid()))\n"
        "    while True:\n"
        "        signal.pause()\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        launch.launch(entry, ranks=2, folder=Path(sys.argv[1]), grace_s=0.5)\n"
        "    except (launch.Interrupted, RankFailedError) as stopped:\n"
        "        sys.exit(stopped.exit_code)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    pipes = [tmp_path / f"{rank}.pid" for rank in range(2)]
    for pipe in pipes:
        os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, script, tmp_path], env=environ) as parent:
        pids = [int(pipe.read_text()) for pipe in pipes]  # waits for the rank to open its end
        parent.send_signal(signum)
        assert parent.wait(timeout=30) == 128 + signum
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
