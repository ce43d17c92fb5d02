"""A rank that hangs is named within the deadline, with what it was at; the run goes on from what it has saved."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import train
import zero
from zero.errors import RankFailedError
from zero.testing import forked_ranks
from zero.trainer import cli, launch
from zero.trainer.config import read

pytestmark = pytest.mark.process

STEPS, EVERY = 8, 2
PATIENCE_S, GRACE_S = 3.0, 60.0
"""The deadline from the step on in which a rank hangs (ranks may take longer to start); and what may pass after it."""


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Hang(NamedTuple):
    """The call that stops a rank: that of the method that stands for a phase, once a step has begun."""

    phase: str
    rank: int
    step: int

    def method(self) -> tuple[type, str]:
        from zero.checkpoint.files.disk import Disk
        from zero.engine.backward import BackwardPass
        from zero.engine.forward import SiteRunner
        from zero.engine.update.update import Updater

        methods: dict[str, tuple[type, str]] = {
            "forward": (SiteRunner, "run"),
            "backward": (BackwardPass, "deliver"),
            "update": (Updater, "_update_offloaded"),
            "save": (Disk, "pwrite"),
        }
        return methods[self.phase]


HANGS = [
    Hang("forward", rank=1, step=5),
    Hang("backward", rank=0, step=5),
    Hang("update", rank=1, step=5),
    Hang("save", rank=1, step=8),
]
"""One in each start of the run."""

TOLD = """\
saved 2
saved 4
resuming from 4
resuming from 4
rejected 4: two starts from it have failed
resuming from 2
saved 4
saved 6
resuming from 6
saved 8
"""


def train_and_hang(plain: dict[str, Any], folder: Path) -> None:
    if launch.restart_count() < len(HANGS):
        arm(HANGS[launch.restart_count()], folder)
    train.train(read(plain), folder)


def arm(hang: Hang, folder: Path) -> None:
    """When both ranks are there one of them stops, and the other has lost its patience."""
    from zero.trainer.run.loop import Run

    owner, name = hang.method()
    real, open_world, microbatches = getattr(owner, name), zero.open_world, Run.microbatches
    worlds: list[zero.World] = []
    due = threading.Semaphore(0)

    def opened(*args: Any) -> zero.World:
        worlds.append(open_world(*args))
        return worlds[0]

    def counted(run: Run) -> Any:
        number = run._meter.steps + 1
        if number == hang.step and worlds[0].rank == hang.rank:
            due.release()
        elif number == hang.step:
            processes = worlds[0]._transport._processes
            processes.operations._timeout_s = processes._wait_s = PATIENCE_S / 2
        return microbatches(run)

    def stopping(*args: Any, **keys: Any) -> Any:
        if due.acquire(blocking=False):
            (folder / "hung").write_text(str(time.monotonic()))
            stop()
        return real(*args, **keys)

    zero.open_world = opened
    Run.microbatches = counted  # type: ignore[method-assign]
    setattr(owner, name, stopping)


def config_of(offload: Path) -> dict[str, Any]:
    overrides = ["debug=tiny", f"steps={STEPS}", f"checkpoint.every={EVERY}", "val.every=0", "sample.tokens=0"]
    overrides += ["offload=infinity", f"offload.path={offload}", "offload.page=4KiB", "launch.ranks=2"]
    return read(cli.settings_in(cli.compose([*overrides, "tracker.console=lines"]))).on(2).plain()


def attempts(log: str) -> list[str]:
    """A rank's log, start by start."""
    return re.split(r"^rank \d of 2, process ", log, flags=re.MULTILINE)[1:]


def test_a_run_that_hangs_in_each_phase_goes_on_each_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints are whole; after two failed starts from one it steps back, and says so."""
    (tmp_path / "offload").mkdir()
    waits_s, attempt = [], launch.ranks._attempt

    def timed(*args: Any) -> Any:
        try:
            return attempt(*args)
        except RankFailedError:
            waits_s.append(time.monotonic() - float((tmp_path / "hung").read_text()))
            raise

    monkeypatch.setattr(launch.ranks, "_attempt", timed)
    ranks, config = tmp_path / "ranks", config_of(tmp_path / "offload")
    how = launch.ProcessSettings(ranks, threads=1, grace_s=GRACE_S)
    with forked_ranks():
        launch.launch(train_and_hang, config, tmp_path, ranks=2, processes=how, max_restarts=len(HANGS))
    said, complaints = capfd.readouterr()
    logs = [attempts((ranks / f"{rank}.log").read_text()) for rank in range(2)]

    for number, (hang, line) in enumerate(zip(HANGS, complaints.splitlines(), strict=True)):
        assert line.startswith(f"restart {number + 1} of {len(HANGS)}: rank {1 - hang.rank} failed: ")
        assert f"waited {PATIENCE_S / 2:g} s in " in line
        assert f"No message from rank {hang.rank} (busy, stopped or dead)" in line
        assert re.search(rf", last phase of rank {hang.rank}: step \d+, (forward|backward|norm|save) ", line), line
        assert line.endswith(", stacks in the log of each)")
        for log in logs:
            assert "(most recent call first)" in log[number]
            assert "in train_and_hang" in log[number]
    assert max(waits_s) < PATIENCE_S + GRACE_S, waits_s

    events = re.findall(r"^(saved|resuming from|rejected) \S*/step-0*(\d+)(.*)$", said, flags=re.MULTILINE)
    assert "".join(f"{what} {step}{why}\n" for what, step, why in events) == TOLD
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len({(row["step"], row["train/loss"]) for row in rows}) == STEPS < len(rows)
    assert not list((tmp_path / "offload").iterdir())
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-0000000006", "step-0000000008"}
    for pid in (int(text.split()[0].rstrip(",")) for log in logs for text in log):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
