"""torchrun on nodes: the command of each, the host of their rendezvous, and what the wires carried in each step."""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from node_parts.nodes import SWITCH, Nodes, Traffic

PORT = 29500
POLL_S = 0.02
"""Seconds between a row and the reading of the wires' counters, at most."""

_STORE = f"""
import sys, signal
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], {PORT}, is_master=True, wait_for_workers=False)
print("ready", flush=True)
signal.pause()
"""


@dataclass(frozen=True)
class Job:
    """One run of torchrun on several nodes.

    Attributes:
        words: the program and its arguments, such as ("train.py", "zero.stage=3").
        ranks: on each node.
        least: nodes with which it may go on; as many as there are by default.
        max_restarts: how often each node starts its ranks again.
        rendezvous: the node whose torchrun hosts the rendezvous, or SWITCH for a host that is no node.
        conf: torchrun's --rdzv-conf, such as "last_call_timeout=5".
        pinned: whether node n runs on core n alone (modulo the cores of this machine).
    """

    words: Sequence[str]
    ranks: int = 1
    least: int | None = None
    max_restarts: int = 0
    rendezvous: int | str = 0
    conf: str = ""
    pinned: bool = False

    def start(self, nodes: Nodes, node: int, **options: Any) -> "subprocess.Popen[Any]":
        """Start torchrun on a node; `options` are those of `Nodes.start`."""
        node_count = len(nodes.wires)
        hosts = f"is_host={int(node == self.rendezvous)}"
        torchrun = ["-m", "torch.distributed.run", f"--nnodes={self.least or node_count}:{node_count}"]
        torchrun += [f"--nproc-per-node={self.ranks}", f"--max-restarts={self.max_restarts}", "--rdzv-id=nodes"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.address(self.rendezvous)}:{PORT}"]
        torchrun += [f"--rdzv-conf={','.join(filter(None, (hosts, self.conf)))}"]
        torchrun += [f"--local-addr={nodes.address(node)}"]
        return nodes.start(node, [*self.core(node), sys.executable, *torchrun, *self.words], **options)

    def core(self, node: int) -> list[str]:
        """Return the words before a command that pin it to the core of a node; empty if nodes are not pinned."""
        return ["taskset", "--cpu-list", str(node % (os.cpu_count() or 1))] if self.pinned else []

    def keep_busy(self, nodes: Nodes, node: int, programs: int) -> None:
        """Start programs on a node's core that only compute, so that its ranks get a part of it."""
        for _ in range(programs):
            nodes.start(node, [*self.core(node), sys.executable, "-c", "while True: pass"])

    def host_rendezvous(self, nodes: Nodes) -> None:
        """Start the store of the rendezvous on the switch, if `rendezvous` is SWITCH."""
        if self.rendezvous != SWITCH:
            return
        store = nodes.start(SWITCH, [sys.executable, "-c", _STORE, nodes.address(SWITCH)], stdout=subprocess.PIPE)
        assert store.stdout is not None
        if store.stdout.readline() != b"ready\n":
            raise OSError("the store of the rendezvous did not start")


def ranks_of(torchrun: "subprocess.Popen[Any]") -> list[psutil.Process]:
    """Return the ranks of a node: grandchildren of the process of `Job.start`. Empty if that process is gone."""
    try:
        return [rank for process in psutil.Process(torchrun.pid).children() for rank in process.children()]
    except psutil.NoSuchProcess:
        return []


class Readings:
    """The counters of all wires, read each time a run has written a row of metrics.jsonl.

    Args:
        rows: the file, which need not be there yet.
    """

    def __init__(self, nodes: Nodes, rows: Path) -> None:
        self._nodes, self._rows, self._size = nodes, rows, 0
        self.at: dict[int, list[Traffic]] = {}  # by the step of the row

    def read_if_new(self) -> None:
        """Read the counters if there is a new row."""
        size = self._rows.stat().st_size if self._rows.exists() else 0
        if size == self._size:
            return
        traffic = [self._nodes.traffic(node) for node in range(len(self._nodes.wires))]
        self._size = size
        self.at[int(rows_in(self._rows)[-1]["step"])] = traffic

    def per_step(self, node: int) -> Iterator[tuple[float, float]]:
        """Yield (sent, received) bytes of a node in a step, between each two rows."""
        steps = sorted(self.at)
        for first, then in itertools.pairwise(steps):
            before, after = self.at[first][node], self.at[then][node]
            count = then - first
            yield (
                (after.sent_bytes - before.sent_bytes) / count,
                (after.received_bytes - before.received_bytes) / count,
            )


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl without the last one if it is half written."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(job: Sequence["subprocess.Popen[Any]"], readings: Readings) -> int:
    """Wait until torchrun has ended on every node, or has failed on one; return its exit code, or 0."""
    while True:
        codes = [torchrun.poll() for torchrun in job]
        readings.read_if_new()
        if any(codes) or None not in codes:
            return next((code for code in codes if code), 0)
        time.sleep(POLL_S)


def table(nodes: Nodes, readings: Readings, rows: Sequence[dict[str, Any]], ranks: int) -> str:
    """Return a table of the bytes of each wire, and lines from the run's own rows; `ranks` are those of one node."""
    lines = [f"{'node':6}{'sent/step':>16}{'received/step':>16}{'sent in all':>16}{'sent again':>12}"]
    for node in range(len(nodes.wires)):
        total, pairs = nodes.traffic(node), list(readings.per_step(node))
        sent, received = (f"{statistics.median(column):,.0f}" for column in zip(*pairs, strict=True)) if pairs else "--"
        lines.append(f"node{node:<2}{sent:>16}{received:>16}{total.sent_bytes:>16,}{total.resent_segments:>12,}")
    lines.append("bytes on the wire, medians between rows; segments that TCP sent again")
    timed = [row for row in rows if row.get("speed/step_s") is not None]
    if timed:
        moved = timed[-1]["comm/gather_bytes"] + timed[-1]["comm/reduce_bytes"]
        per_row = timed[-1]["step"] - (rows[-2]["step"] if len(rows) > 1 else 0)
        step_s, wait_s = (statistics.median(row[key] for row in timed) for key in ("speed/step_s", "comm/wait_s"))
        lines.append(
            f"the run: {moved / per_row:,.0f} bytes per step between all ranks, {step_s:.3f} s per step, of which the "
            f"rank that waited longest waited {wait_s:.3f} s for others"
        )
        slow, count = Counter(row["comm/slowest_rank"] for row in timed).most_common(1)[0]
        busy_s = statistics.median(row["comm/slowest_s"] for row in timed if row["comm/slowest_rank"] == slow)
        where = f"rank {slow} on node{slow // ranks}"
        lines.append(f"slowest in {count} of {len(timed)} rows: {where}, {busy_s:.3f} s of a step without its waits")
    return "\n".join(lines)
