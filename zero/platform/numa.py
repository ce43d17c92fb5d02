"""The NUMA node of a rank's GPU: the threads of the process run on its cores, and take the node's memory.

Linux places memory on the node of the thread that touches it first, so bound threads are enough. No memory policy is
set, and the user's own (`numactl --interleave=all`) applies. torch binds in the same way, but only in torchrun.
"""

import os
from contextlib import suppress
from pathlib import Path


def bind_near(address: str, top: Path = Path("/")) -> str:
    """Bind all threads of this process, and those that they will start, to the cores of the node of a GPU.

    Nothing changes on a machine with one node, or if the process may not run on all cores, because `taskset`,
    `numactl`, `torchrun --numa-binding` or a container has chosen cores.

    Args:
        address: the GPU's address, such as "0000:3b:00.0".
        top: a folder in place of `/`, for tests.

    Returns:
        A line for the log; "" if nothing changed.
    """
    try:
        node = int((top / f"sys/bus/pci/devices/{address}/numa_node").read_text())
        lists = {path.parent.name: path.read_text() for path in (top / "sys/devices/system/node").glob("node*/cpulist")}
    except (OSError, ValueError):
        return ""
    cores = {name: _numbers(text) for name, text in lists.items() if text.strip()}  # a node may have memory only
    allowed = os.sched_getaffinity(0)
    near = cores.get(f"node{node}", set())  # the number is -1 if the system does not know the node
    if len(cores) < 2 or not near or allowed != set().union(*cores.values()):
        return ""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # the thread has ended
            if os.sched_getaffinity(thread) == allowed:
                os.sched_setaffinity(thread, near)
    return f"GPU {address}: threads and memory of this rank on NUMA node {node}, {len(near)} of {len(allowed)} cores"


def _numbers(ranges: str) -> set[int]:
    """Return the numbers in a list of ranges, such as "0-15,64-79"."""
    ends = [part.partition("-") for part in ranges.strip().split(",")]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}
