"""`scripts/nodes`: a run over network namespaces, the bytes on their wires, and what is left when all is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import LONG_S

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
PARTS = str(ROOT / "benchmarks")
sys.path.append(PARTS)

from node_parts.nodes import Nodes, Wire, remove_left_behind, why_not  # noqa: E402 - found through the line above
from node_parts.run import Job, ranks_of, rows_in  # noqa: E402

refusal = why_not()
pytestmark = pytest.mark.skipif(bool(refusal), reason=f"nodes: {refusal}")

TINY = ("debug=tiny", "steps=6", "tracker.every=1", "val.every=0", "sample.tokens=0", "launch.timeout=240")


@pytest.mark.alone
def test_two_nodes_train_and_their_wires_carry_what_the_rows_say(tmp_path):
    command = [sys.executable, SCRIPTS / "nodes", "--rate", "500mbit", "--", ROOT / "train.py", *TINY]
    done = subprocess.run(
        [*map(str, command), f"hydra.run.dir={tmp_path}"],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    said = rows[-1]["comm/gather_bytes"] + rows[-1]["comm/reduce_bytes"]
    table = {line.split()[0]: line.split()[1:4] for line in done.stdout.splitlines() if line.startswith("node")}
    # of the whole run: such a step takes no longer than it takes to read the counters
    sent = sum(float(table[node][2].replace(",", "")) for node in ("node0", "node1"))
    most = 1.4 * said * len(rows)
    assert said * len(rows) < sent < most, f"{done.stdout}: the rest is headers, the start, and what every row costs"


@pytest.mark.slow
def test_state_is_offloaded_to_each_nodes_own_disk_and_checkpoints_there_are_refused_before_training(tmp_path):
    disk = tmp_path / "disk"
    command = [sys.executable, SCRIPTS / "nodes", "--unshared", disk, "--", ROOT / "train.py", *TINY]

    def run(name: str, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*map(str, command), f"hydra.run.dir={tmp_path / name}", *words],
            cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LONG_S,
        )  # fmt: skip

    offloaded = run("nvme", "offload=nvme", f"offload.path={disk}")
    assert offloaded.returncode == 0, offloaded.stdout + offloaded.stderr
    assert len(rows_in(tmp_path / "nvme" / "metrics.jsonl")) == 6
    refused = run("refused", "checkpoint.every=2", f"checkpoint.dir={disk}")
    assert refused.returncode != 0
    assert "rank 1 of 2 does not see" in refused.stdout + refused.stderr, refused.stdout + refused.stderr
    assert not rows_in(tmp_path / "refused" / "metrics.jsonl"), "it was refused before the first step"


@pytest.mark.slow
def test_a_run_that_loses_a_rank_goes_on_from_its_last_save_in_its_folder(tmp_path):
    job = Job([str(ROOT / "train.py"), *TINY, "steps=60", "checkpoint.every=10"], max_restarts=3)
    how: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    how["env"] = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Nodes([Wire(), Wire()]) as nodes:
        first, second = (job.start(nodes, node, **how) for node in range(2))
        next(line for line in first.stdout if "saved" in line and "step-0000000020" in line)
        (rank,) = ranks_of(second)
        rank.kill()
        said = [node.communicate(timeout=LONG_S)[0] for node in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], said
    # torchrun may stop rank 0 before it waits for the lost rank
    assert "lost rank 1 on node1" in said[0] or "closing signal SIGTERM" in said[0], said[0]
    (folder,) = (tmp_path / "runs").glob("*/*")
    lines = rows_in(folder / "starts.jsonl")
    begin, again = (number for number, line in enumerate(lines) if "from" in line)
    assert lines[begin]["from"] is None
    assert lines[again]["from"] == lines[again - 1]["saved"]
    losses: dict[int, set[float]] = {}
    for row in rows_in(folder / "metrics.jsonl"):
        losses.setdefault(row["step"], set()).add(row["train/loss"])
    assert losses.keys() >= set(range(21, 61)), "the row of the saved step may be lost, as the rank died after it"
    assert all(len(values) == 1 for values in losses.values()), (
        "a step that is made twice has the same loss, bit by bit"
    )


@pytest.mark.alone
def test_what_a_killed_program_leaves_is_removed():
    """Its processes are gone with it; the names of its namespaces stay for the next one to find."""
    program = f"""
import subprocess, sys
sys.path.insert(0, {PARTS!r})
from node_parts.nodes import Nodes, Wire
nodes = Nodes([Wire(delay_s=0.001)])
up = nodes.start(0, ["sh", "-c", "echo up; exec sleep 1000"], stdout=subprocess.PIPE)
up.stdout.readline()
print(nodes._name, flush=True)
up.wait()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        name = maker.stdout.readline().strip()
        left = {f"{name}-{node}" for node in ("switch", "0")}
        pids = [int(pid) for namespace in left for pid in _ip("netns", "pids", namespace).split()]
        running = [psutil.Process(pid) for pid in pids]
        maker.kill()
    assert len(running) == 4, "the wire's program and the node's, and what watches over each"
    assert not psutil.wait_procs(running, timeout=LONG_S)[1]
    assert left <= set(remove_left_behind())
    assert name not in _ip("netns", "list")


def test_a_wire_that_is_cut_carries_nothing_until_it_is_mended():
    receive = "import socket, sys; s = socket.create_server(('', 7000)); print(flush=True); s.accept()[0].recv(1)"
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 7000), float(sys.argv[2])).send(b'1')"
    with Nodes([Wire(), Wire()]) as nodes:
        server = nodes.start(1, [sys.executable, "-c", receive], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        nodes.cut(1)
        command = [sys.executable, "-c", connect, nodes.address(1)]
        assert nodes.start(0, [*command, "0.2"], stderr=subprocess.DEVNULL).wait() != 0
        nodes.mend(1)
        assert nodes.start(0, [*command, "20"]).wait() == 0
        assert server.wait() == 0


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout
