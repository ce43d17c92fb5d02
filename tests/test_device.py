"""Memory readings, against what a process is made to hold."""

import subprocess
import sys
from pathlib import Path

import pytest

HELD_BYTES = 256 * 2**20

CHILD = f"""
from zero.device import host_peak_bytes
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
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", PARENT, CHILD], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    before, after = map(int, done.stdout.split())
    assert 2**20 < before < 4 * HELD_BYTES
    assert HELD_BYTES <= after - before + 2**20 < 2 * HELD_BYTES
