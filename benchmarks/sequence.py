#!/usr/bin/env python
"""Measure the activations of one row that 1, 2 and 4 ranks share (zero.sequence), and the time of a step.

    benchmarks/sequence.py                            a GPT of width 256, 4 blocks, a row of 4,096 tokens
    benchmarks/sequence.py --seq 8192 --act remat

Ranks are gloo processes of this machine with a thread each, at stage 0, with malloc set as launch.malloc=lean does.
`live` is the most bytes that tensors of a step take at once on a rank, by torch's profiler. `process` is how much the
peak of resident memory (VmHWM) grew in the timed steps.
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks that share the row")
    parser.add_argument("--act", default="keep", help="zero.activations: keep, selective or remat")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one other")
    return parser.parse_args()


def settings(options: argparse.Namespace, ranks: int) -> Any:
    from zero.trainer.config import read

    sizes = {"width": options.width, "layers": options.layers, "heads": options.width // 64, "seq": options.seq}
    zero_ = {"sequence": ranks, "stage": 0, "activations": options.act}
    return read({"model": sizes, "batch": {"global": 1}, "zero": zero_, "launch": {"malloc": "lean"}})


def train(world: Any, options: argparse.Namespace) -> tuple[int, int, float, float]:
    """Train as one rank of the group; return live bytes, growth of the process, seconds of a step and the last loss."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from step_systems import forget_peak

    import zero
    from zero.platform.host_memory import host_peak_bytes
    from zero.settings.build import build_plan
    from zero.trainer.data.windows import slice_of
    from zero.trainer.run.task import build_task

    config = settings(options, world.size).on(world.size)
    task = build_task(config, world)
    plan = build_plan(config, task.model, world)
    row = torch.randint(0, 256, (1, options.seq + 1), generator=torch.Generator().manual_seed(0))
    batch = [slice_of(row, world.rank, world.size)]
    state, step = zero.init(plan, zero.open_store(plan), seed=0), zero.make_step(plan, task.loss)
    state, _ = step(state, batch)
    forget_peak()
    before_bytes = host_peak_bytes()
    start_s = time.perf_counter()
    for _ in range(options.steps):
        state, metrics = step(state, batch)
    step_s, grown_bytes = (time.perf_counter() - start_s) / options.steps, host_peak_bytes() - before_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(state, batch)
    live = peak = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, grown_bytes, step_s, metrics.loss


def main() -> int:
    options = arguments()
    from zero.trainer.launch import MALLOC_VARIABLES, THRESHOLDS

    os.environ |= dict(zip(MALLOC_VARIABLES, map(str, THRESHOLDS["lean"]), strict=True))  # of the ranks, forked later
    from zero.testing import run_processes
    from zero.trainer.planning import ActivationTraces, PaperWorld
    from zero.trainer.run.task import build_task

    print(f"{'ranks':>5} {'planned':>12} {'live':>12} {'of one':>7} {'process':>12} {'of one':>7} {'step, s':>8}  loss")
    first: tuple[int, int] | None = None
    for ranks in map(int, options.ranks.split(",")):
        config, world = settings(options, ranks), PaperWorld(ranks, local_size=ranks, device="cpu")
        planned_bytes = ActivationTraces(config, build_task(config, world).model).of(1, "cpu").peak_bytes
        results = run_processes(ranks, partial(train, options=options), timeout_s=600.0)
        live, grown = max(result[0] for result in results), max(result[1] for result in results)
        first = first or (live, grown)
        sizes = f"{planned_bytes / 1e6:>9.1f} MB {live / 1e6:>9.1f} MB {live / first[0]:>7.2f}"
        print(f"{ranks:>5} {sizes} {grown / 1e6:>9.1f} MB {grown / first[1]:>7.2f} {results[0][2]:>8.2f}", end="  ")
        print(f"{results[0][3]:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
