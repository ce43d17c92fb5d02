#!/usr/bin/env python3
"""Compare the steps of several checkouts of this repository, in turns: seconds, last loss and planned bytes.

    git worktree add ../before 3fe8eb3a
    benchmarks/revisions.py ../before . --pairs 3

A GPT of 85 million parameters trains on two ranks, one thread each, at stages 1 and 3, in bf16 and fp32, with nothing
and with everything but parameters on a disk. Equal losses and bytes mean that no bit and no plan has changed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 6, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--pairs", type=int, default=2, help="times that each checkout runs")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        stage, precision, offload = chosen.one
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(int(stage), precision, offload, folder)))
        return
    for case in product("13", ("bf16", "fp32"), ("none", "nvme")):
        for pair, tree in product(range(chosen.pairs), chosen.trees):
            env = {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(Path(__file__).resolve()), str(tree), "--one", *case]
            done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=True)
            seconds, loss, nbytes = json.loads(done.stdout.splitlines()[-1])
            print(
                f"stage {' '.join(case)}, pair {pair + 1}, {tree}: {seconds:.3f} s, {loss:.9f}, {nbytes} bytes",
                flush=True,
            )


def measured(stage: int, precision: str, offload: str, folder: str) -> tuple[float, float, int]:
    """Return the median seconds of a step, the last loss and the bytes of the plan, of rank 0."""
    from zero.testing import run_processes

    return run_processes(2, trained, stage, precision, offload, folder, timeout_s=600.0)[0]


def trained(world: Any, stage: int, precision: str, offload: str, folder: str) -> tuple[float, float, int]:
    import torch

    import zero
    from zero.trainer.models import GPT, GPTConfig, loss

    with zero.empty():
        model = GPT(GPTConfig(width=768, layers=12, heads=12, seq=256, tied=False))
    plan = zero.Plan(
        model,
        optimizer=zero.adamw(3e-4, clip=1.0),
        world=world,
        stage=stage,
        precision=precision,
        offload="none" if offload == "none" else zero.Offload(offload, path=[folder]),
    )
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss)
    generator, seconds, last = torch.Generator().manual_seed(world.rank), list[float](), 0.0
    for _ in range(STEPS):
        rows, begin_s = torch.randint(0, 255, (1, 257), generator=generator), time.perf_counter()
        state, metrics = step(state, [rows])
        last = metrics.loss
        seconds.append(time.perf_counter() - begin_s)
    nbytes = sum(sum(kinds.values()) for kinds in plan.bytes.values())
    state.close()
    return statistics.median(seconds[WARM_UP:]), last, nbytes


if __name__ == "__main__":
    main()
