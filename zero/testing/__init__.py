"""Tools for tests: ranks as threads or processes of one machine, the test suite of a store."""

from zero.testing.processes import forked_ranks, run_processes
from zero.testing.store_contract import StoreContract
from zero.testing.thread_world import run_ranks

__all__ = [
    "StoreContract",
    "forked_ranks",
    "run_processes",
    "run_ranks",
]
