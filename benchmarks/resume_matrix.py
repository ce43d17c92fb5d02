#!/usr/bin/env python3
"""Kill runs, resume them with other settings, and compare their losses with undisturbed runs.

    benchmarks/resume_matrix.py                                     eight changes of stage, tier and number of ranks
    benchmarks/resume_matrix.py --crossing "zero.stage=3 launch.ranks=2 -> zero.stage=0 launch.ranks=1"

For each crossing there is an undisturbed run, the same run killed with SIGKILL after `--kill` steps, and a run that
resumes from its newest checkpoint with the settings on the right. The table shows the largest relative difference
between the losses of the third run and the first one. With the same number of ranks they are equal, bit by bit. Another
number of ranks adds in another order, so losses differ by rounding.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
CROSSINGS = (
    "zero.stage=3 offload=nvme launch.ranks=2 -> zero.stage=1 offload=none launch.ranks=1",
    "zero.stage=3 offload=nvme launch.ranks=2 -> zero.stage=0 offload=cpu launch.ranks=2",
    "zero.stage=3 offload=infinity launch.ranks=2 -> zero.stage=2 offload=nvme launch.ranks=2",
    "zero.stage=0 offload=none launch.ranks=1 -> zero.stage=3 offload=infinity launch.ranks=1",
    "zero.stage=0 offload=none launch.ranks=1 -> zero.stage=3 offload=nvme launch.ranks=2",
    "zero.stage=1 offload=cpu launch.ranks=2 -> zero.stage=3 offload=auto launch.ranks=2",
    "zero.stage=2 offload=nvme launch.ranks=2 -> zero.stage=3 offload=none launch.ranks=4",
    "zero.stage=3 offload=none launch.ranks=4 -> zero.stage=1 offload=nvme launch.ranks=2",
)


class Crossing(NamedTuple):
    """The settings of the killed run, and of the run that resumes it."""

    before: str
    after: str

    @classmethod
    def of(cls, text: str) -> "Crossing":
        before, arrow, after = (part.strip() for part in text.partition("->"))
        if not arrow:
            raise SystemExit(f"--crossing {text}: write BEFORE -> AFTER")
        return cls(before, after)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crossing", action="append", help="BEFORE -> AFTER; may be repeated")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--kill", type=int, default=50, help="steps after which the run is killed")
    parser.add_argument("--set", action="append", default=[], help="a further setting of every run, such as debug=tiny")
    return parser.parse_args()


def command(options: argparse.Namespace, settings: str, folder: Path) -> list[str]:
    common = [f"steps={options.steps}", f"checkpoint.every={options.every}", "tracker.every=1", "tracker.console=none"]
    run_settings = [f"hydra.run.dir={folder}", f"offload.path={folder.parent}", "val.every=0", "sample.tokens=0"]
    return [sys.executable, str(TRAIN), *common, *run_settings, *options.set, *settings.split()]


def losses(folder: Path) -> dict[int, float]:
    """Return step -> loss of the steps that the run has recorded so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["train/loss"] for row in rows}


def complete(line: list[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise SystemExit(f"exit {done.returncode}: {' '.join(line)}\n{done.stderr[-2000:]}")


def run_and_kill(line: list[str], folder: Path, after: int) -> int:
    """Run until step `after` is in metrics.jsonl, kill all processes of the run, and return the last recorded step."""
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as run:
        end_s = time.monotonic() + 1800
        while max(losses(folder), default=0) < after:
            if run.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"exit {run.returncode} before step {after}: {' '.join(line)}")
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)
    return max(losses(folder))


def row_of(options: argparse.Namespace, crossing: Crossing, folder: Path) -> str:
    """Make the three runs and return a row of the table."""
    complete(command(options, crossing.before, folder / "alone"))
    last = run_and_kill(command(options, crossing.before, folder / "killed"), folder / "killed", options.kill)
    again = command(options, crossing.after, folder / "again")
    complete([*again, f"resume={folder / 'killed'}"])
    alone, now = losses(folder / "alone"), losses(folder / "again")
    if max(now) != options.steps or set(now) != set(range(min(now), options.steps + 1)):
        raise SystemExit(f"{crossing}: steps {sorted(now)} are recorded after the resume")
    worst = max(abs(now[step] - alone[step]) / abs(alone[step]) for step in now)
    difference = "equal, bit by bit" if worst == 0 else f"{worst:.1e}"
    return f"| {crossing.before} | {last} | {min(now) - 1} | {crossing.after} | {difference} |"


def main() -> int:
    options = arguments()
    print("| killed run | killed after step | resumed from step | resumed as | largest difference |")
    print("|---|---|---|---|---|", flush=True)
    for text in options.crossing or CROSSINGS:
        with tempfile.TemporaryDirectory(prefix="resume_matrix_") as folder:
            print(row_of(options, Crossing.of(text), Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
