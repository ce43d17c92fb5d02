"""The start of a run: its processes, its folder, and the files that a failed run leaves.

`train` is the function of train.py. Each rank runs it in this process, in a child process, or in a process that
torchrun started.
"""

import contextlib
import json
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from zero.core import suggest
from zero.errors import CheckpointError, MachineError, Preempted
from zero.platform.run_files import publish, writing
from zero.trainer import launch
from zero.trainer.config import Config, defaults_for, read
from zero.trainer.launch.request import no_further_sigint

if TYPE_CHECKING:
    from zero.tracker.meter import Summary

    Train = Callable[[Config, Path], Summary]
    """The function that each rank runs. Other processes import it by its name."""


def run(train: "Train", config: Config, folder: Path, *, apart: bool = False) -> "Summary":
    """Run `train` on the ranks that the settings ask for and return the summary; also a failed run leaves its report.

    A single rank runs in this process, unless `apart` or `launch.max_restarts` is set.

    Args:
        apart: use a child process also for a single rank, so that the runs of a sweep share neither memory peaks nor
            crashes.

    Raises:
        Preempted: a signal asked the run to stop, and it has saved.
        CheckpointError: a signal asked the run to stop, and it could not save.
    """
    from zero.tracker.views.jsonl import STOPPED

    ranks, restarts = launch.count_ranks(config.launch.ranks, config.launch.device), config.launch.max_restarts
    config.on(ranks)  # raises ConfigError if the batch does not divide over the ranks
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_config(config, folder)
    processes = _processes(config, folder)
    with _failing(folder, final=True), warnings.catch_warnings():
        # the command line has printed this warning already
        warnings.filterwarnings("ignore", message="offload.path=.* is memory")
        if ranks == 1 and not apart and not restarts:
            summary = launch.inside(train, config, folder, processes=processes)
        else:
            summary = launch.launch(train, config, folder, ranks=ranks, processes=processes, max_restarts=restarts)
    if summary.exit_reason == STOPPED:
        done = f"stopped by a signal after step {summary.steps}"
        if summary.checkpoint is None:
            raise CheckpointError(f"{done}, but not saved. See {folder}/ranks/0.log.")
        raise Preempted(f"{done}. Continue with {suggest.typed(f'resume={suggest.word(str(summary.checkpoint))}')}")
    return summary


def run_under_torchrun(train: "Train", request: tuple[Config, Callable[[], Path]] | None, timeout_s: float) -> None:
    """Run `train` as a rank that torchrun started. After a restart by torchrun the run continues in its first folder.

    Args:
        request: on rank 0 the settings, and a function that makes the folder of a new run; None on other ranks.
        timeout_s: seconds to wait for rank 0's request.
    """
    from zero.distributed.world import open_world

    letter = ""
    with open_world(timeout_s, "cpu") as world:  # on the CPU, because a few bytes need no GPU
        begun = launch.Begun.of(world.gather_texts(launch.own_begun(), "what was begun"))
        if request is not None:
            begun = launch.Begun(begun.folder or str(request[1]().absolute()), begun.starts + 1)
            letter = json.dumps({"config": request[0].plain(), "begun": begun})
        sent = json.loads(world.share(letter))
    begun = launch.Begun(*sent["begun"])
    begun.keep()
    config, folder = read(sent["config"]), Path(begun.folder)
    if request is not None:
        write_config(config, folder)
    with _failing(folder, final=False):
        launch.joined(train, config, folder, processes=_processes(config, folder))


def write_config(config: Config, folder: Path) -> None:
    """Write config.yaml of a run, so that a reader sees the old or the new file, never a part.

    Raises:
        MachineError: the file cannot be written.
    """
    publish(folder / "config.yaml", yaml.safe_dump(config.plain(), sort_keys=False, allow_unicode=True))


def leave_failure(folder: Path, error: BaseException, *, final: bool) -> None:
    """Write summary.json and report.html of a run that failed, as far as the disk allows.

    Args:
        final: replace a reason that summary.json has already; otherwise that reason stays.
    """
    from zero.tracker import write_failure
    from zero.tracker.report.run import write_run as write_report

    with contextlib.suppress(MachineError):
        write_failure(folder, {"exit_reason": launch.describe(error)}, final=final)
    with contextlib.suppress(Exception):  # an error of the report must not hide `error`
        write_report(folder, defaults_for)


@contextlib.contextmanager
def _failing(folder: Path, *, final: bool) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        by_signal = isinstance(error, KeyboardInterrupt | launch.Interrupted)
        with no_further_sigint() if by_signal else contextlib.nullcontext():
            leave_failure(folder, error, final=final)
        stopped = launch.Interrupted(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else error
        if isinstance(stopped, launch.Interrupted):
            stopped.folder = folder
        raise stopped from None


def _processes(config: Config, folder: Path) -> launch.ProcessSettings:
    settings = config.launch
    return launch.ProcessSettings(
        folder / "ranks", settings.threads, settings.malloc, config.deterministic, settings.grace
    )
