"""For tests of your own: many ranks, as threads or as processes; what a store must do, and disks that fail."""

from zero.testing.contract import StoreContract
from zero.testing.faults import FaultyFiles, ThrottledStore
from zero.testing.processes import forked_ranks, run_processes
from zero.testing.races import RaceError
from zero.testing.simulated import simulated_gpu
from zero.testing.threads import ThreadWorld, run_ranks

__all__ = [
    "FaultyFiles",
    "RaceError",
    "StoreContract",
    "ThreadWorld",
    "ThrottledStore",
    "forked_ranks",
    "run_processes",
    "run_ranks",
    "simulated_gpu",
]
