#!/usr/bin/env python3
"""Let nodes fail at random moments of one run, and check that it goes on from its last save as if nothing had happened.

    benchmarks/node_faults.py                          # 20 faults; prints the seed
    benchmarks/node_faults.py --faults 5 --seed 3
    benchmarks/node_faults.py --least 1                # the run goes on with the nodes that are left
    benchmarks/node_faults.py --ranks 2 --rate 1gbit --words "model=gpt_124m model.vocab=256"  # another model

Two nodes train at stage 3 under torchrun, whose rendezvous is on a third machine. Faults, on either node:

    ranks   its ranks are killed with SIGKILL; torchrun starts them again
    power   everything on it is killed; torchrun is started again some seconds later, as by a service manager
    wire    its wire is cut, and mended later; torchrun is started again wherever it gave up

With --least 2, the default, the run waits until both nodes are back: then the loss of every step, those that are made
twice included, must be that of a run without faults, bit by bit. With --least 1 it goes on with one node and takes the
other in when it is back. Sums of one rank are rounded otherwise than those of two, so a step that is made twice must
have the same loss to 1e-4 of it, and every step that of the run without faults to 1e-2. Either way each start must go
on from the newest save, in one folder, and the run must save and end when it is asked to. A fault takes half a minute.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import zero  # noqa: E402, F401 - first: where nothing is installed it says what to type

import psutil  # noqa: E402
from node_parts.nodes import SWITCH, Nodes, Wire, why_not  # noqa: E402 - found through the line above
from node_parts.run import Job, ranks_of, rows_in  # noqa: E402

FAULTS = ("ranks", "power", "wire")
NODES = 2
TIMEOUT_S = 10
EVERY = 10
CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
ENV = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}
LONGEST_S = 180.0
"""Seconds after a repair within which the run must make new steps."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--least", type=int, default=NODES, choices=(1, NODES), help="nodes that the run goes on with")
    parser.add_argument("--ranks", type=int, default=1, help="on each node")
    parser.add_argument("--rate", default="", help="of each wire, as 1gbit; no limit by default")
    parser.add_argument("--words", default="debug=tiny", help="of train.py: the model and its data")
    parser.add_argument("--kinds", default=",".join(FAULTS), help="which faults there are")
    return parser.parse_args()


@dataclass
class Cluster:
    """The nodes with torchrun on each, and the run that they make together."""

    nodes: Nodes
    job: Job
    folder: Path
    torchrun: dict[int, "subprocess.Popen[Any]"] = field(default_factory=dict)
    off: set[int] = field(default_factory=set)

    def start(self, node: int) -> None:
        with self.said_by(node).open("ab") as said:
            self.torchrun[node] = self.job.start(self.nodes, node, env=ENV, stdout=said, stderr=said, cwd=self.folder)

    def said_by(self, node: int) -> Path:
        return self.folder / f"node{node}.txt"

    def keep_up(self) -> bool:
        """Start torchrun again where it failed, as a service manager does; return whether the run has ended well."""
        codes = {node: torchrun.poll() for node, torchrun in self.torchrun.items() if node not in self.off}
        if 0 in codes.values():
            return True
        for node in [node for node, code in codes.items() if code]:
            self.start(node)
        return False

    def fail(self, fault: str, node: int) -> None:
        if fault == "wire":
            self.nodes.cut(node)
        elif fault == "power":
            self.off.add(node)
            self.nodes.kill(node)
        else:
            for rank in ranks_of(self.torchrun[node]):
                rank.kill()

    def repair(self, fault: str, node: int) -> None:
        if fault == "wire":
            self.nodes.mend(node)
        elif fault == "power":
            self.off.discard(node)
            self.start(node)

    def steps(self) -> list[int]:
        return [row["step"] for row in rows_in(self.folder / "run" / "metrics.jsonl")]

    def is_whole(self) -> bool:
        """Return whether the ranks of the last start are on both nodes."""
        starts = self.starts()
        return bool(starts) and starts[-1]["machines"] == "several"

    def starts(self) -> list[dict[str, Any]]:
        return [line for line in rows_in(self.folder / "run" / "starts.jsonl") if "from" in line]

    def stop(self) -> None:
        """Ask all torchruns to stop, as a scheduler does, and wait for them."""
        for launcher in self.torchrun.values():
            for torchrun in psutil.Process(launcher.pid).children():
                torchrun.terminate()
        for launcher in self.torchrun.values():
            launcher.wait()


def words(model: str, folder: Path, stop_at: int | None = None) -> list[str]:
    program = [str(HERE.parent / "train.py"), *model.split(), "steps=1000000", f"checkpoint.every={EVERY}"]
    program += [f"debug.stop_at={stop_at or 'null'}"]
    program += ["tracker.every=1", "tracker.console=none", "val.every=0", "sample.tokens=0", "checkpoint.keep=3"]
    return [*program, f"launch.timeout={TIMEOUT_S}", "launch.threads=1", f"hydra.run.dir={folder / 'run'}"]


def losses(options: argparse.Namespace, folder: Path, last: int) -> dict[int, float]:
    """Return the losses of a run without faults, by step."""
    folder.mkdir()
    with Nodes([Wire(options.rate)] * NODES) as nodes:
        cluster = Cluster(nodes, Job(words(options.words, folder, last), options.ranks), folder)
        for node in range(NODES):
            cluster.start(node)
        codes = [torchrun.wait() for torchrun in cluster.torchrun.values()]
    if any(codes):
        raise SystemExit(f"the run without faults has failed: see {folder}")
    return {row["step"]: row["train/loss"] for row in rows_in(folder / "run" / "metrics.jsonl")}


def pauses(seconds: float) -> Iterator[None]:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        yield
        time.sleep(0.1)


def inject_fault(cluster: Cluster, dice: random.Random, faults: list[str]) -> str:
    """Let one node fail, repair it, wait until the run makes new steps, and return a line about it."""
    fault, node = dice.choice(faults), dice.randrange(NODES)
    for _ in pauses(dice.uniform(0, 8)):
        cluster.keep_up()
    before, said = cluster.steps(), {other: len(cluster.said_by(other).read_bytes()) for other in range(NODES)}
    starts, start_s, named_s, gone_on_s, trains_s = len(cluster.starts()), time.monotonic(), None, None, None
    cluster.fail(fault, node)
    away_s = dice.uniform(0, 3 * TIMEOUT_S) if fault != "ranks" else 0.0
    is_repaired, seen = False, 0
    while True:
        now_s = time.monotonic() - start_s
        if not is_repaired and now_s >= away_s:
            cluster.repair(fault, node)
            is_repaired = True
        if named_s is None and f"on node{node}" in _said_since(cluster, 1 - node, said[1 - node]):
            named_s = now_s
        cluster.keep_up()
        new = cluster.steps()[len(before) :]
        if gone_on_s is None and len(cluster.starts()) > starts:
            gone_on_s, seen = now_s, len(new)
        if trains_s is None and gone_on_s is not None and len(new) > seen:
            trains_s = now_s
        if is_repaired and len(new) > EVERY and cluster.is_whole():
            break
        if now_s > away_s + LONGEST_S:
            raise SystemExit(f"{fault} of node{node}: no steps after {now_s:.0f} s; see {cluster.folder}")
        time.sleep(0.1)
    last = before[-1] if before else 0
    again = max(0, last + 1 - min(new))
    named = "" if named_s is None else f", named after {named_s:.1f} s"
    started = "" if gone_on_s is None else f"started again after {gone_on_s:.0f} s, "
    started += "" if trains_s is None else f"a step after {trains_s:.0f} s, "
    return (
        f"{fault} of node{node} at step {last}, away {away_s:.0f} s{named}; {started}steps with both nodes after "
        f"{now_s:.0f} s; {again} steps made twice"
    )


def _said_since(cluster: Cluster, node: int, position: int) -> str:
    with cluster.said_by(node).open("rb") as said:
        said.seek(position)
        return said.read().decode(errors="replace")


def check_starts(folder: Path) -> int:
    """Check that each start continues from the newest save before it; return the number of starts.

    The newest save may be one later than the file says: rank 0 can be killed after a save, before it writes the line.
    """
    lines = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    newest, starts = None, 0
    for line in lines:
        if "saved" in line:
            newest = line["saved"]
        else:
            starts += 1
            if _step(line["from"]) not in (_step(newest), _step(newest) + EVERY):
                raise SystemExit(f"start {starts} went on from {line['from']}, and not from {newest}")
    return starts


def _step(save: str | None) -> int:
    return 0 if save is None else int(Path(save).name.removeprefix("step-"))


def check_losses(folder: Path, expected: dict[int, float], *, bitwise: bool) -> str:
    """Check that every step has the loss that it has without faults; return the largest differences."""
    first: dict[int, float] = {}
    largest_twice = largest = 0.0
    for row in rows_in(folder / "metrics.jsonl"):
        step, loss = row["step"], row["train/loss"]
        largest_twice = max(largest_twice, abs(loss / first.setdefault(step, loss) - 1))
        largest = max(largest, abs(loss / expected[step] - 1))
    if largest_twice > (0 if bitwise else 1e-4) or largest > (0 if bitwise else 1e-2):
        raise SystemExit(
            f"losses differ: {largest_twice:.1e} where a step was made twice, {largest:.1e} from no faults"
        )
    return f"losses differ by {largest_twice:.1e} at most where a step was made twice, by {largest:.1e} from no faults"


def main() -> int:
    options = arguments()
    if refusal := why_not():
        print(refusal, file=sys.stderr)
        return 3
    dice, faults = random.Random(options.seed), options.kinds.split(",")
    folder = Path(tempfile.mkdtemp(prefix="node-faults-"))
    print(f"seed {options.seed}, {options.faults} faults, {options.least} to {NODES} nodes, in {folder}", flush=True)
    place = folder / "disturbed"
    place.mkdir()
    program = words(options.words, place)
    job = Job(program, options.ranks, least=options.least, max_restarts=1000, rendezvous=SWITCH, conf=CONF)
    with Nodes([Wire(options.rate)] * NODES) as nodes:
        job.host_rendezvous(nodes)
        cluster = Cluster(nodes, job, place)
        for node in range(NODES):
            cluster.start(node)
        while not cluster.steps():  # else there may be nothing yet that can fail
            time.sleep(0.1)
        for number in range(1, options.faults + 1):
            print(f"{number}: {inject_fault(cluster, dice, faults)}", flush=True)
        cluster.stop()
    last, starts = max(cluster.steps()), check_starts(place / "run")
    reason = json.loads((place / "run" / "summary.json").read_text())["exit_reason"]
    if reason != "stopped by a signal":
        raise SystemExit(f"the run was asked to stop, and ended otherwise: {reason}")
    apart = check_losses(place / "run", losses(options, folder / "undisturbed", last), bitwise=options.least == NODES)
    print(f"held: {last} steps in {starts} starts, each from the newest save, in one folder; {apart}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
