"""A rank in this process: the only rank, or a rank that torchrun started.

The output of a rank of torchrun goes to `ranks/<rank>.log`, except that the stdout of rank 0 stays on the terminal.
"""

import faulthandler
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from zero.errors import if_it_fails
from zero.platform.run_files import writing
from zero.trainer.launch.process import ProcessSettings, log_traceback, redirected, set_up, write_to_log
from zero.trainer.launch.request import FATAL_SIGNALS, STOP_SIGNALS, Request, import_torch, stacks_on_request
from zero.trainer.launch.world_size import restart_count


def inside(entry: Callable[..., Any], *args: Any, processes: ProcessSettings) -> Any:
    """Call `entry(*args)` as the only rank, in this process, so that a debugger works. Its errors are raised unchanged.

    Raises:
        Interrupted: `entry` did not return in time after a request to stop, or a signal in `FATAL_SIGNALS` arrived.
    """
    with ExitStack() as stack:
        if "WORLD_SIZE" not in os.environ:  # this process is the whole run, also if srun has started others
            os.environ["WORLD_SIZE"] = "1"
            stack.callback(os.environ.pop, "WORLD_SIZE", None)
        is_main = threading.current_thread() is threading.main_thread()  # others cannot set signal handlers
        if is_main:
            stack.enter_context(Request(processes.grace_s).handling(*STOP_SIGNALS, *FATAL_SIGNALS))
        import_torch()
        stack.enter_context(set_up(processes))
        log = stack.enter_context(_log(processes.folder, f"rank 0 of 1, process {os.getpid()}"))
        if is_main:
            stack.enter_context(stacks_on_request(log))
        try:
            return entry(*args)
        except Exception:
            with suppress(OSError):  # the disk may be what failed
                traceback.print_exc(file=log)
            raise


def joined(entry: Callable[..., Any], *args: Any, processes: ProcessSettings) -> Any:
    """Call `entry(*args)` as a rank in this process, which torchrun started. Its errors are raised unchanged.

    With `threads="auto"` the ranks of a node share its cores, unless torchrun has set OMP_NUM_THREADS. torchrun sends
    SIGTERM to all ranks when it is stopped itself, and also when a rank has failed. In the second case the connection
    to the failed rank breaks, and the error names that rank.

    Raises:
        Interrupted: `entry` did not return in time after a request to stop, or SIGINT arrived.
    """
    rank = int(os.environ["RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    log = processes.folder / f"{rank}.log"
    with ExitStack() as stack:
        stack.enter_context(set_up(processes, local_size if local_size > 1 else None))
        stack.enter_context(Request(processes.grace_s).handling(*STOP_SIGNALS, signal.SIGINT))
        with writing(log):
            processes.folder.mkdir(parents=True, exist_ok=True)
            again = restart_count()
            stack.enter_context(redirected(log, stdout=rank > 0, further=again > 0))
            of = f"of {os.environ['WORLD_SIZE']} on {socket.gethostname()}"
            write_to_log(f"rank {rank} {of}, process {os.getpid()}{f', restart {again}' if again else ''}\n")
        stack.enter_context(stacks_on_request(2))
        if not faulthandler.is_enabled():
            faulthandler.enable()
            stack.callback(faulthandler.disable)
        with if_it_fails(log_traceback):
            return entry(*args)


@contextmanager
def _log(folder: Path, first: str) -> Iterator[TextIO]:
    """Open 0.log for a rank whose output stays on the terminal, and write `first` into it.

    An OSError on closing is ignored, so that a full disk does not hide the run's own error.
    """
    path = folder / "0.log"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        log = path.open("w")
    try:
        with writing(path):
            print(first, file=log, flush=True)
        yield log
    finally:
        with suppress(OSError):
            log.close()
