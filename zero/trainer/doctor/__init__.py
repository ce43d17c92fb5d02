"""Checks of this machine for a run: versions, memory, processors, GPUs and disks, with advice.

`checks` reports problems and never raises for them. It reads everything through a `Host`, so that a test can simulate
any machine. It changes nothing, but to measure a disk it writes an unlinked file of at most 256 MiB, for up to three
seconds with each number of threads.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

from zero.errors import MachineError
from zero.trainer.config import Config
from zero.trainer.doctor.disks import checkpoints, disk
from zero.trainer.doctor.host import Diagnosis, Host
from zero.trainer.doctor.processors import cpu, gpus, memory, shared_memory
from zero.trainer.doctor.software import versions_of_software, wandb


def checks(config: Config, host: Host | None = None) -> Iterator[Diagnosis]:
    """Check everything that a run with these settings depends on; yield each result as soon as it is known."""
    host = host or Host()
    all_checks: tuple[Callable[[Config, Host], Iterator[Diagnosis]], ...]
    all_checks = (versions_of_software, memory, shared_memory, cpu, gpus, disk, checkpoints, wandb)
    return itertools.chain.from_iterable(check(config, host) for check in all_checks)


def doctor_report(results: Iterable[Diagnosis]) -> str:
    """Return a line for each check, its advice below it, and the number of problems."""
    results = list(results)
    width = max((len(check.name) for check in results), default=0)
    lines = []
    for check in results:
        lines.append(f"{check.state:<4}  {check.name:<{width}}  {check.finding}")
        lines += [f"{'':<{width + 8}}-> {check.advice}"] if check.advice else []
    bad, warn = (sum(check.state == state for check in results) for state in ("bad", "warn"))
    return "\n".join([*lines, "", f"{len(results)} checks: {bad} bad, {warn} to look at"])


def exit_code(results: Iterable[Diagnosis]) -> int:
    """Return 0, or the exit code of a MachineError if anything is bad."""
    return MachineError.exit_code if any(check.state == "bad" for check in results) else 0
