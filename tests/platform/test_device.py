"""Memory readings, against what a process is made to hold."""

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from tests.conftest import LONG_S
from zero.platform import files
from zero.platform.device import work_alone
from zero.platform.files import memory_of

HELD_BYTES = 256 * 2**20

CHILD = f"""
from zero.platform.device import host_peak_bytes
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="getrusage counts the parent as well")
def test_the_peak_is_this_process_alone_and_does_not_fall():
    """A large parent must not show in its children: the ranks of a sweep are started by one process."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PARENT, CHILD], cwd=root, capture_output=True, text=True, check=True, timeout=LONG_S
    )
    before, after = map(int, done.stdout.split())
    assert 2**20 < before < 4 * HELD_BYTES
    assert HELD_BYTES <= after - before + 2**20 < 2 * HELD_BYTES


def test_threads_that_start_together_leave_the_default_number_of_kernel_threads_alone():
    default, gate, seen = torch.get_num_threads(), threading.Barrier(16), []

    def worker():
        gate.wait(timeout=LONG_S)
        work_alone()
        seen.append(torch.get_num_threads())

    for _ in range(20):
        threads = [threading.Thread(target=worker) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=LONG_S)
    later = []
    one_more = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    one_more.start()
    one_more.join(timeout=LONG_S)
    assert later == [default]
    assert set(seen) == {1}


@pytest.mark.parametrize("view", [memory_of, files.memory_of])
def test_the_bytes_of_a_tensor_keep_it_alive(view):
    """`bytes(memory_of(torch.get_rng_state()))` read what was free again, and the checkpoint could not be read."""
    tensor = torch.ones(64)
    alive, octets = weakref.ref(tensor), view(tensor)
    del tensor
    assert alive() is not None
    assert bytes(octets) == bytes(memory_of(torch.ones(64)))
    del octets
    assert alive() is None
