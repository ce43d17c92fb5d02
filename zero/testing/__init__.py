"""Tools for tests: ranks as threads or processes of one machine, a simulated GPU, the test suite of a store."""

from zero.testing.processes import forked_ranks, run_processes
from zero.testing.races import RaceError
from zero.testing.simulated_gpu import simulated_gpu
from zero.testing.store_contract import StoreContract
from zero.testing.thread_world import ThreadWorld, run_ranks

__all__ = [
    "RaceError",
    "StoreContract",
    "ThreadWorld",
    "forked_ranks",
    "run_processes",
    "run_ranks",
    "simulated_gpu",
]
