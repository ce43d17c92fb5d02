"""Many ranks in one test, as threads or as processes, and the contract of a store: public, for tests of your own."""

from zero.testing.contract import StoreContract
from zero.testing.processes import run_processes
from zero.testing.threads import ThreadWorld, run_ranks

__all__ = ["StoreContract", "ThreadWorld", "run_processes", "run_ranks"]
