#!/usr/bin/env python
"""Time steps with zero.activations=auto under budgets between what remat needs and what keep needs.

    benchmarks/activations.py                       9 units of a GPT, five budgets, three rounds
    benchmarks/activations.py --rounds 5 --shares 0,0.5,1
    benchmarks/activations.py --chunks 1,2,4,0      zero.activations=remat with each of these values of zero.rows

A budget is a share of the way from the bytes that a plan with remat takes to those of a plan with keep. Each runs in a
process of its own, one after the other in every round, with malloc set to give large tensors back at once, as
launch.malloc=lean does. `peak` is how much the resident memory of the process grew since before the first allocation.
With `--chunks` `planned` has the bytes of tensors and no holes of the heap, and `budget` is 0.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", default="0,0.25,0.5,0.75,1", help="of the way from remat to keep")
    parser.add_argument("--chunks", default=None, help="values of zero.rows, in place of shares; 0: all rows at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps in a round, after two others")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--one", type=float, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def train_at_share(options: argparse.Namespace) -> dict[str, Any]:
    """Train in this process under the budget of `--one`; return the chosen units, seconds of the steps, and bytes."""
    import torch
    import torch._dynamo  # torch's checkpoint imports it in its first call

    from step_systems import forget_peak

    import zero
    from zero.platform.host_memory import host_peak_bytes
    from zero.settings.build import build_plan
    from zero.tracker import Tracker
    from zero.trainer.config import read
    from zero.trainer.models import GPT, loss
    from zero.trainer.planning import resolve_auto
    from zero.trainer.planning.traces.activations import ActivationTraces

    def settings(activations: str, budget: int | str = "auto", rows: int = 0) -> Any:
        sizes = {"width": options.width, "layers": options.layers, "heads": options.width // 64, "seq": options.seq}
        return read(
            {
                "model": sizes,
                "batch": {"global": options.rows, "micro": options.rows},
                "precision": {"compute": options.precision},
                "zero": {"activations": activations, "stage": 0, "rows": rows},
                "offload": {"host_budget": budget},
                "launch": {"malloc": "lean"},
            }
        )

    def planned(config: Any) -> zero.Plan:
        return build_plan(config, model, world, **ActivationTraces(config, model).planned(options.rows, "cpu"))

    world = zero.open_world(device="cpu")
    with zero.empty():
        model = GPT(settings("keep").model)
    if options.chunks is not None:
        chosen = settings("remat", rows=int(options.one))
        traced_bytes = ActivationTraces(chosen, model).of(options.rows, "cpu").peak_bytes
        plan = build_plan(chosen, model, world, activation_bytes=traced_bytes)
        budget_bytes = 0
    else:
        least, greatest = (sum(planned(settings(word)).bytes["device"].values()) for word in ("remat", "keep"))
        budget_bytes = int(least + options.one * (greatest - least))
        auto = settings("auto", budget_bytes)
        config, *_ = resolve_auto(auto, ActivationTraces(auto, model), world, Tracker())
        plan = planned(config)
    tokens = torch.randint(0, 256, (options.rows, options.seq + 1), generator=torch.Generator().manual_seed(0))
    _warm(tokens)
    forget_peak()
    before_bytes = host_peak_bytes()
    state, step = zero.init(plan, zero.open_store(plan), seed=0), zero.make_step(plan, loss)
    step_s = []
    for _ in range(2 + options.steps):
        start_s = time.perf_counter()
        state, _ = step(state, [tokens])
        step_s.append(time.perf_counter() - start_s)
    return {
        "again": [*plan.activations.values()].count("remat"),
        "units": len(plan.activations),
        "step_s": step_s[2:],
        "budget": budget_bytes,
        "planned": sum(plan.bytes["device"].values()),
        "peak": host_peak_bytes() - before_bytes,
    }


def _warm(tokens: Any) -> None:
    """Train one step of a model of one narrow block, to load threads, kernels and their buffers."""
    import zero
    from zero.trainer.models import GPT, GPTConfig, loss

    with zero.empty():
        model = GPT(GPTConfig(width=64, layers=1, heads=1, seq=tokens.shape[1] - 1))
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), activations="remat", world=zero.open_world(device="cpu"))
    with contextlib.closing(zero.open_store(plan)) as store:
        zero.make_step(plan, loss)(zero.init(plan, store, seed=0), [tokens[:1]])


def main() -> int:
    options = arguments()
    if options.one is not None:
        print(json.dumps(train_at_share(options)))
        return 0
    from zero.trainer.launch import MALLOC_VARIABLES, THRESHOLDS

    lean = dict(zip(MALLOC_VARIABLES, map(str, THRESHOLDS["lean"]), strict=True))
    shares = [float(share) for share in (options.chunks or options.shares).split(",")]
    runs: dict[float, list[dict[str, Any]]] = {share: [] for share in shares}
    for _ in range(options.rounds):
        for share in shares:
            command = [sys.executable, __file__, *sys.argv[1:], f"--one={share}"]
            done = subprocess.run(command, check=True, env=os.environ | lean, cwd=ROOT, stdout=subprocess.PIPE)
            runs[share].append(json.loads(done.stdout))
    print(f"{'budget':>12} {'planned':>12} {'peak':>12} {'units again':>12} {'step, s':>9} {'of last':>8}")
    medians = {share: statistics.median(s for run in results for s in run["step_s"]) for share, results in runs.items()}
    for share, results in runs.items():
        first, peak_bytes = results[0], max(run["peak"] for run in results)
        row = " ".join(f"{value / 1e6:>9.0f} MB" for value in (first["budget"], first["planned"], peak_bytes))
        ratio = medians[share] / medians[shares[-1]]
        print(f"{row} {first['again']:>5} of {first['units']:<3} {medians[share]:>9.3f} {ratio:>8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
