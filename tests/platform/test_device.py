"""Memory readings, against what a process is made to hold."""

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import torch

from tests.conftest import LONG_S
from zero.platform.device import work_alone
from zero.platform.files import memory_of

HELD_BYTES = 256 * 2**20

CHILD = f"""
from zero.platform.host_memory import host_peak_bytes
before = host_peak_bytes()
held = b"x" * {HELD_BYTES}
del held
print(before, host_peak_bytes())
"""

PARENT = f"""
import subprocess, sys
held = b"x" * {4 * HELD_BYTES}
print(subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True, check=True).stdout)
"""


def test_the_peak_is_this_process_alone_and_does_not_fall():
    """A large parent must not show in its children: the ranks of a sweep are started by one process."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PARENT, CHILD], cwd=root, capture_output=True, text=True, check=True, timeout=LONG_S
    )
    before, after = map(int, done.stdout.split())
    assert 2**20 < before < 4 * HELD_BYTES
    assert HELD_BYTES <= after - before + 2**20 < 2 * HELD_BYTES


def test_a_thread_that_works_alone_changes_the_number_of_no_other_thread():
    """Threads that begin meanwhile, and later ones, compute with the default number: else their sums differ."""
    default, gate = torch.get_num_threads(), threading.Barrier(16)
    alone: list[int] = []
    others: list[int] = []

    def worker():
        gate.wait(timeout=LONG_S)
        work_alone()
        alone.append(torch.get_num_threads())

    def other():
        gate.wait(timeout=LONG_S)
        others.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        for _ in range(20):
            threads = [threading.Thread(target=target) for target in (worker, other) * 8]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=LONG_S)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(default)
    assert set(alone) == {1}
    assert set(others) == {2}


def test_the_bytes_of_a_tensor_keep_it_alive():
    """`bytes(memory_of(torch.get_rng_state()))` read what was free again, and the checkpoint could not be read."""
    tensor = torch.ones(64)
    alive, octets = weakref.ref(tensor), memory_of(tensor)
    del tensor
    assert alive() is not None
    assert bytes(octets) == bytes(memory_of(torch.ones(64)))
    del octets
    assert alive() is None
