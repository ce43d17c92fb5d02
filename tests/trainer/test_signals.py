"""Signals at random moments, and the run that goes on after each ends as the one that nobody disturbed.

A moment is a call of a method that stands for a phase, so that it is as random as its seed and as exact as a step.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

import train
from tests.conftest import LONG_S
from zero.checkpoint.files.disk import Disk
from zero.checkpoint.files.shard import ShardReader
from zero.engine.backward import BackwardPass
from zero.engine.forward import SiteRunner
from zero.engine.update.update import Updater
from zero.errors import Preempted
from zero.store.executor import Executor
from zero.testing import forked_ranks
from zero.trainer import checks, cli, job
from zero.trainer.launch import Interrupted
from zero.trainer.launch.request import no_further_sigint, signals_waiting
from zero.trainer.run import loop
from zero.trainer.run.evaluate import sample_text
from zero.trainer.run.loop import Run

SITES: dict[str, tuple[type, str]] = {
    "forward": (SiteRunner, "run"),
    "backward": (BackwardPass, "deliver"),
    "update": (Updater, "_update_offloaded"),
    "paging": (Executor, "_copy"),
    "save": (Disk, "pwrite"),
    "load": (ShardReader, "read"),
}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
IN_A_STEP = ("forward", "backward")
"""Sites that are called during the steps only, where the first Ctrl-C saves."""

STOPS = 6
STEPS, EVERY = 2 * STOPS + 8, 2
"""A start that is stopped makes at most two steps."""

TINY = ["debug=tiny", "val.every=0", "sample.tokens=0", "tracker.console=none", "launch.threads=1"]
TINY += [f"steps={STEPS}", "offload=infinity", "offload.path=.", "offload.page=4KiB", f"checkpoint.every={EVERY}"]

TRAIN = train.train

FREE = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
"""A user's environment: tests set how many threads there are."""

MOMENT = "ZERO_TEST_MOMENT"
"""Of the environment: what ranks in processes of their own are told."""


class Moment(NamedTuple):
    """When a rank signals a process: at a call of a site, counted from the beginning of the start."""

    site: str
    call: int
    signum: int
    rank: int = 0
    to_parent: bool = False


def at_calls(site: str, then: Callable[[int], None]) -> Any:
    """A patch of the site: `then` is told the number of each call before it is made, in whatever thread."""
    owner, name = SITES[site]
    real, numbers = getattr(owner, name), itertools.count(1)

    def watched(*args: Any, **keys: Any) -> Any:
        then(next(numbers))
        return real(*args, **keys)

    return patch.object(owner, name, watched)


@contextlib.contextmanager
def disturbed(moment: Moment) -> Iterator[None]:
    def signalling(call: int) -> None:
        if call == moment.call:
            parent = multiprocessing.parent_process()
            os.kill(parent.pid if moment.to_parent and parent else os.getpid(), moment.signum)  # type: ignore[arg-type]

    with at_calls(moment.site, signalling):
        yield


class Starts:
    """The starts of one run, each in a folder of its own; all save in `root` and go on from what is newest there."""

    def __init__(self, root: Path, *settings: str) -> None:
        words = [*TINY, "resume=latest", f"checkpoint.dir={root}", *settings]
        self._plain, self._root, self._numbers = cli.settings_in(cli.compose(words)), root, itertools.count()

    def start(self, *, behind: bool = False) -> int:
        """Returns the program's exit code, if nothing failed."""
        plain = {**self._plain, "checkpoint": {**self._plain["checkpoint"], "async": behind}}
        try:
            job.run(
                train.train,
                checks.parse_config(plain),
                self._root.with_name(f"{self._root.name}-{next(self._numbers)}"),
            )
        except Preempted as stopped:
            return stopped.exit_code
        return 0

    def bits(self) -> list[str]:
        """Return the bits of the last checkpoint."""
        indexes = sorted(max(self._root.iterdir()).glob("rank-*.json"))
        return [json.loads(index.read_text())["digests"] for index in indexes]


def counted(starts: Starts) -> dict[str, int]:
    """Train undisturbed; how often each site is called in two steps."""
    calls = dict.fromkeys(SITES, 0)
    with contextlib.ExitStack() as stack:
        for site in SITES:
            stack.enter_context(at_calls(site, lambda call, site=site: calls.update({site: call})))  # type: ignore[misc]
        assert starts.start() == 0
    return {site: max(1, 2 * count // STEPS) for site, count in calls.items()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_that_is_stopped_again_and_again_ends_as_the_one_that_never_was(here: Path) -> None:
    choose = random.Random(1)
    undisturbed, stopped = Starts(here / "undisturbed"), Starts(here / "stopped")
    most = counted(undisturbed)
    most["load"] = 5  # the one that was counted had nothing to load
    for number in range(STOPS):
        site = choose.choice(sorted(SITES) if number else sorted(SITES.keys() - {"load"}))
        moment = Moment(site, choose.randrange(most[site]) + 1, choose.choice(SIGNALS))
        behind = choose.random() < 0.5
        print(f"start {number}: {moment}{', saving behind' * behind}")
        with disturbed(moment):
            assert stopped.start(behind=behind) == 75
    assert stopped.start() == 0
    assert stopped.bits() == undisturbed.bits()
    assert not [path.name for path in here.iterdir() if not path.name.startswith(("stopped", "undisturbed"))]


def test_ctrl_c_saves_and_a_second_one_ends_the_run_at_once(here: Path, at_a_terminal: None) -> None:
    undisturbed, stopped = Starts(here / "undisturbed"), Starts(here / "stopped")
    most = counted(undisturbed)
    for site in IN_A_STEP:
        with disturbed(Moment(site, most[site] - 1, signal.SIGINT)):
            assert stopped.start() == 75
    first = Moment("forward", 1, signal.SIGINT)
    with disturbed(first), disturbed(Moment("save", 1, signal.SIGINT)), pytest.raises(Interrupted, match="SIGINT"):
        stopped.start()
    assert stopped.start() == 0
    assert stopped.bits() == undisturbed.bits()


def train_disturbed(config: Any, folder: Path) -> Any:
    """One rank in a process of its own."""
    moment = Moment(*json.loads(os.environ[MOMENT]))
    with disturbed(moment) if moment.rank == int(os.environ["RANK"]) else contextlib.nullcontext():
        return train.train(config, folder)


@pytest.mark.process
def test_it_does_not_matter_whom_of_two_ranks_the_signal_reaches(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, or the parent of both: all save after the same step."""
    choose = random.Random(1)
    undisturbed, stopped = (Starts(here / name, "launch.ranks=2", "steps=15") for name in ("undisturbed", "stopped"))
    for to_parent, by_ctrl_c in itertools.product((False, True), repeat=2):
        site = choose.choice(IN_A_STEP if by_ctrl_c else ("forward", "backward", "update", "paging"))
        signum = signal.SIGINT if by_ctrl_c else choose.choice(SIGNALS)
        moment = Moment(site, choose.randrange(1, 9), signum, choose.randrange(2), to_parent)
        print(moment)
        with monkeypatch.context() as patched:
            patched.setattr(train, "train", train_disturbed)
            patched.setenv(MOMENT, json.dumps(moment))
            with forked_ranks():
                assert stopped.start() == 75
    with forked_ranks():
        assert stopped.start() == 0
        assert undisturbed.start() == 0
    assert stopped.bits() == undisturbed.bits()


CTRL_C_AT_AN_IMPORT = """
import os, signal, sys


class Terminal:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE and ("--multiprocessing-fork" in sys.orig_argv) == IN_A_RANK:
            sys.meta_path.remove(self)
            os.killpg(0, signal.SIGINT)


signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
sys.meta_path.insert(0, Terminal())
"""
"""A module that Python runs at its start. A terminal's Ctrl-C goes to all processes of a run."""


def interrupted(here: Path, module: str, *words: object, in_a_rank: bool = False) -> tuple[int, str]:
    """The exit code of a program and what it says, where Ctrl-C comes as it imports a module."""
    program = CTRL_C_AT_AN_IMPORT.replace("MODULE", repr(module)).replace("IN_A_RANK", str(in_a_rank))
    (here / "sitecustomize.py").write_text(program)
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        env=FREE | {"PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        start_new_session=True,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("whose", "module"),
    [
        ("the only rank", "torch.fx"),
        ("the parent", "torch._C"),
        ("a rank", "torch.distributed.rpc"),
        ("a rank", "zero.trainer.run.loop"),
    ],
)
def test_ctrl_c_while_something_is_imported_ends_the_run_with_its_line(here: Path, whose: str, module: str) -> None:
    """Half of torch cannot be imported again, and a process that is only starting has nothing to say."""
    ranks = f"launch.ranks={1 if whose == 'the only rank' else 2}"
    exit_code, said = interrupted(here, module, train.__file__, *TINY, ranks, in_a_rank=whose == "a rank")
    assert exit_code == 130, said
    assert said.startswith("stopped by SIGINT. Nothing was saved. The first Ctrl-C during the steps saves"), said
    assert len(said.splitlines()) == 1


def test_ctrl_c_ends_a_command_with_its_line(here: Path) -> None:
    assert train.main([*TINY[:2], "steps=2", "checkpoint.every=2", "hydra.run.dir=run", "tracker.console=none"]) == 0
    sample = Path(train.__file__).parent / "scripts" / "sample"
    # numpy swallows a KeyboardInterrupt
    assert interrupted(here, "numpy", sample, "run", "def ") == (130, "stopped by SIGINT\n")


def test_ctrl_c_ends_an_answer_with_its_line(here: Path) -> None:
    assert interrupted(here, "numpy", train.__file__, "mode=plan") == (130, "stopped by SIGINT\n")


@pytest.mark.parametrize("module", ["zero.trainer.cli", "pydantic", "hydra"])
def test_ctrl_c_at_the_start_of_the_program_ends_it_quietly(here: Path, module: str) -> None:
    assert interrupted(here, module, train.__file__, *TINY) == (130, "")


@pytest.fixture
def at_a_terminal() -> Iterator[None]:
    """Signals are as in a program that somebody looks at, and afterwards as they were."""
    kinds = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {sig: signal.signal(sig, signal.SIG_DFL) for sig in kinds}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)


def test_signals_that_waited_come_in_their_order_and_one_that_is_ignored_hides_none(at_a_terminal: None) -> None:
    came: list[int] = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda signum, _: came.append(signum))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_waiting():
        for sig in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(sig)
        assert not came
    assert came == [signal.SIGINT, signal.SIGTERM]


def test_ctrl_c_while_a_failure_is_being_written_is_not_lost(here: Path, at_a_terminal: None) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    with patch.object(job, "leave_failure", interrupted):
        with pytest.raises(KeyboardInterrupt), job._failing(here, final=True):
            raise ValueError
        with pytest.raises(Interrupted), job._failing(here, final=True):
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["checkpoint.every=2"], ". Continue with: python train.py "),
        (["mode=eval", "resume=saved"], "\n"),
    ],
)
def test_ctrl_c_after_the_last_step_says_what_is_saved(
    here: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY[:2], "data=synthetic", "steps=2", *words]
    if "resume=saved" in words:
        assert train.main([*words[:-2], "checkpoint.every=2", "hydra.run.dir=saved"]) == 0
    with patch.object(Run, "_finish", side_effect=KeyboardInterrupt):
        assert train.main([*words, "hydra.run.dir=run"]) == 130
    assert capsys.readouterr().err.startswith(f"stopped by SIGINT{said}")


def train_asked_to_stop_in_the_sample(config: Any, folder: Path) -> Any:
    def signalled(logits: Any, data: Any, world: Any, config: Any) -> str:
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return sample_text(logits, data, world, config)

    with patch.object(loop, "sample_text", signalled):
        return TRAIN(config, folder)


def test_a_stop_during_the_final_sample_ends_the_sample_and_not_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "train", train_asked_to_stop_in_the_sample)
    words = [*TINY[:2], "steps=2", "sample.tokens=1000000", "launch.grace=5", "hydra.run.dir=run", "launch.ranks=2"]
    with forked_ranks():
        assert train.main(words) == 0
    assert capsys.readouterr().err == ""
    assert json.loads(Path("run/summary.json").read_text())["exit_reason"] == "finished"


def test_a_second_ctrl_c_changes_nothing_while_the_first_is_being_told(at_a_terminal: None) -> None:
    with no_further_sigint():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
