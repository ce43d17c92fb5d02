"""The set-up of a rank's process: threads, malloc, environment variables and log."""

import ctypes
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zero.trainer.launch.request import signals_waiting

Malloc = Literal["raised", "lean", "default"]

THRESHOLDS: Mapping[Malloc, tuple[int, int]] = {"raised": (4 << 30, 16 << 30), "lean": (2 << 20, 16 << 20)}
"""Thresholds of glibc's malloc, in bytes. A tensor of at least the first size gets a mapping of its own, which is
returned to the system when the tensor is freed. Free memory at the end of the heap is returned when it exceeds the
second size."""

MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
CUBLAS_WORKSPACE = ":4096:8"

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them


@dataclass(frozen=True)
class ProcessSettings:
    """The set-up of the processes of ranks.

    Attributes:
        folder: folder of the logs `<rank>.log`, which also have the traceback of an error.
        threads: torch's threads in each process; auto: an equal share of the cores, or the number that torchrun sets.
        malloc: glibc's thresholds, see `environment`.
        deterministic: whether torch's deterministic algorithms will be used.
        grace_s: seconds to return from `entry` after a request to stop. The default is torchrun's.
    """

    folder: Path
    threads: int | Literal["auto"] = "auto"
    malloc: Malloc = "raised"
    deterministic: bool = False
    grace_s: float = 30.0


def environment(ranks: int, processes: ProcessSettings) -> dict[str, str]:
    """Return the environment variables of child ranks, without variables that the user has set.

    A number of threads in `processes` replaces the user's OMP_NUM_THREADS and MKL_NUM_THREADS.

    Page faults of newly mapped tensors can cost more than an optimizer step. With `malloc="raised"` glibc keeps freed
    memory for the next tensor, and several hundred MB may stay unused. With "lean" the memory of every large tensor is
    returned to the system at once. Deterministic runs need a fixed cuBLAS workspace before the first matrix product.
    """
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(_threads(processes, ranks)))
    variables |= dict(zip(MALLOC_VARIABLES, map(str, THRESHOLDS.get(processes.malloc, ())), strict=False))
    if processes.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    settled = {} if processes.threads == "auto" else {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    return {name: value for name, value in variables.items() if name in settled or name not in os.environ}


def set_up(processes: ProcessSettings, ranks: int | None = None) -> AbstractContextManager[None]:
    """Set up this process as a rank. Environment variables are set during the body only, malloc and threads for good.

    Args:
        ranks: number of ranks that share the cores if `processes.threads` is auto; None: keep torch's number of
            threads.
    """
    _set_thresholds(THRESHOLDS.get(processes.malloc, ()))
    if processes.threads != "auto" or (ranks is not None and "OMP_NUM_THREADS" not in os.environ):
        with signals_waiting():
            import torch

        torch.set_num_threads(_threads(processes, ranks or 1))
    fixed = processes.deterministic and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    return environ({"CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE} if fixed else {})


def _threads(processes: ProcessSettings, ranks: int) -> int:
    return max(1, cores() // ranks) if processes.threads == "auto" else processes.threads


def redirect(path: Path, *, stdout: bool, further: bool = False) -> None:
    """Redirect stderr, and stdout if `stdout`, to the file `path`, for native code too (file descriptors 2 and 1).

    Args:
        further: append to the file; otherwise it is emptied first.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if further else os.O_TRUNC), 0o644)
    for descriptor in (1, 2) if stdout else (2,):
        os.dup2(log, descriptor)
    os.close(log)


@contextmanager
def redirected(path: Path, *, stdout: bool, further: bool = False) -> Iterator[None]:
    """Redirect stderr, and stdout if `stdout`, during the body; see `redirect`."""
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    redirect(path, stdout=stdout, further=further)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the disk may be full
                stream.flush()
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)


@contextmanager
def environ(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during the body, for children, which read them when their interpreter starts."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def write_to_log(text: str) -> None:
    """Write to stderr without the buffer of sys.stderr.

    If a full disk rejects the text now, the buffer would keep it and print it on the terminal later.
    """
    sys.stderr.flush()
    os.write(2, text.encode(errors="replace"))


def log_traceback() -> None:
    """Write the traceback of the current exception to stderr, as far as the disk allows."""
    with suppress(OSError):  # the disk may be what failed
        write_to_log(traceback.format_exc())


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _set_thresholds(thresholds: Sequence[int]) -> None:
    """Set glibc's thresholds, unless malloc is not glibc's or the user has set them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or set(MALLOC_VARIABLES) & os.environ.keys():
        return
    for parameter, nbytes in zip((M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), thresholds, strict=False):
        mallopt(parameter, min(nbytes, 2**31 - 1))  # mallopt takes a C int
