"""The threads of a process on the cores of its GPU's NUMA node, on machines made of files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero.platform.numa import bind_near

GPU = "0000:3b:00.0"

PROGRAM = """
import os, sys, threading
from pathlib import Path
from zero.platform.numa import bind_near

end, cores = threading.Event(), {}
before = threading.Thread(target=end.wait)
before.start()
chosen = threading.Thread(target=end.wait)
chosen.start()
os.sched_setaffinity(chosen.native_id, {int(sys.argv[3])})
print(bind_near(sys.argv[1], Path(sys.argv[2])))
after = threading.Thread(target=end.wait)
after.start()
for thread in (threading.main_thread(), before, after, chosen):
    print(*sorted(os.sched_getaffinity(thread.native_id)))
end.set()
"""


def machine(top: Path, node: int, *cores: set[int]) -> Path:
    """A machine whose GPU is on a node, with the cores of each node; and a node that is memory only."""
    device = top / "sys/bus/pci/devices" / GPU
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    for number, those in enumerate((*cores, set[int]())):
        folder = top / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, sorted(those))) + "\n")
    return top


def test_threads_before_and_after_are_on_the_cores_of_the_gpu_but_not_one_with_cores_of_its_own(tmp_path):
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("needs two cores")
    top = machine(tmp_path, 1, {first}, set(others))
    command = [sys.executable, "-c", PROGRAM, GPU, str(top), str(first)]
    line, *cores = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert line == (
        f"GPU {GPU}: threads and memory of this rank on NUMA node 1, {len(others)} of {len(others) + 1} cores"
    )
    assert cores == [" ".join(map(str, others))] * 3 + [str(first)]


def test_ranges_of_cores_are_read(tmp_path, monkeypatch):
    top, bound = machine(tmp_path, 1, set(), set()), []
    for number, cores in enumerate(("0-3,8-11", "4-7,12")):
        (top / f"sys/devices/system/node/node{number}/cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {*range(13)})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: bound.append(cores))
    assert bind_near(GPU, top).endswith("NUMA node 1, 5 of 13 cores")
    assert bound
    assert all(cores == {4, 5, 6, 7, 12} for cores in bound)


@pytest.mark.parametrize(
    ("allowed", "node", "cores", "gpu"),
    [
        ({0, 1, 2, 3}, 0, [{0, 1, 2, 3}], GPU),
        ({0, 1, 2, 3}, -1, [{0, 1}, {2, 3}], GPU),
        ({0, 1, 2, 3}, 2, [{0, 1}, {2, 3}], GPU),
        ({0, 1, 2}, 1, [{0, 1}, {2, 3}], GPU),
        ({0, 1, 2, 3}, 1, [{0, 1}, {2, 3}], "0000:3c:00.0"),
    ],
    ids=["one node", "a node that is not known", "a node without cores", "cores that the user chose", "another GPU"],
)
def test_nothing_is_bound(tmp_path, monkeypatch, allowed, node, cores, gpu):
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: pytest.fail("bound"))
    assert bind_near(gpu, machine(tmp_path, node, *cores)) == ""
