#!/usr/bin/env python
"""Compare the bytes that a plan counts with the memory that a process really uses, in a few steps of training.

    benchmarks/plan_memory.py                                  the 340M model in bf16, offload none and nvme
    benchmarks/plan_memory.py --offload cpu --rows 2 --act remat

Each setting runs in its own process, with the malloc settings of train.py. `held` is the memory of tensors and of the
store between steps. `process` is how much the peak of resident memory (VmHWM) grew since the time before the first
allocation. Reads and writes several GB; takes a minute or two.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offload", default="none,nvme", help="presets, separated by commas")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--act", default="keep", help="zero.activations: keep, selective, remat or offload")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", default=None, help="folder for the offload file; default: a temporary one")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def train_with_preset(options: argparse.Namespace, preset: str) -> None:
    """Train in this process and print planned and measured bytes."""
    import torch

    import zero
    from zero.core.activations import ACTIVATIONS
    from zero.platform.host_memory import host_peak_bytes
    from zero.trainer.models import GPT, loss
    from zero.trainer.models.gpt_config import GPTConfig
    from zero.trainer.planning import against_measured, measured, trace
    from zero.trainer.planning.traces.activations import HEAP, RECOMPUTED_HEAP
    from zero.engine.model.split import split

    sizes = GPTConfig(width=options.width, layers=options.layers, heads=options.width // 64, seq=options.seq)
    with zero.empty():
        model = GPT(sizes)
    batch = torch.randint(0, 256, (options.rows, options.seq + 1), generator=torch.Generator().manual_seed(0))
    compute = zero.Precision(options.precision).compute
    traced = trace(
        model,
        split(model, world_size=1),
        loss,
        batch.to("meta"),
        compute=compute,
        policies=options.act,
    )
    _warm(compute)
    before_bytes = host_peak_bytes()
    plan = zero.Plan(
        model,
        optimizer=zero.adamw(1e-4, clip=1.0),
        world=zero.open_world(device="cpu"),
        stage=options.stage,
        precision=options.precision,
        activations=options.act,
        offload=zero.Offload(preset, path=options.folder),
        activation_bytes=int(traced.peak_bytes * (RECOMPUTED_HEAP if ACTIVATIONS[options.act].recomputes else HEAP)),
    )
    store = zero.open_store(plan)
    state, step = zero.init(plan, store), zero.make_step(plan, loss)
    print(f"VmHWM after init +{(host_peak_bytes() - before_bytes) / 2**20:.0f} MiB", flush=True)
    for _ in range(options.steps):
        state, metrics = step(state, [batch])
    print(f"VmHWM after steps +{(host_peak_bytes() - before_bytes) / 2**20:.0f} MiB, loss {metrics.loss:.3f}")
    print(plan)
    print(against_measured(plan, measured(state)))
    store.close()


def _warm(compute: "torch.dtype") -> None:
    """Let libraries allocate what they allocate once, such as compiled kernels and thread pools."""
    import torch
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(64, 64, requires_grad=True)
    checkpoint(lambda x: (x.to(compute) @ x.to(compute)).sum(), x, use_reentrant=False).backward()


def main() -> int:
    options = arguments()
    if options.one is not None:
        train_with_preset(options, options.one)
        return 0
    from zero.trainer.launch import MALLOC_VARIABLES, THRESHOLDS

    raised = dict(zip(MALLOC_VARIABLES, map(str, THRESHOLDS["raised"]), strict=True))
    for preset in options.offload.split(","):
        print(f"\noffload={preset}", flush=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            command = [sys.executable, __file__, *sys.argv[1:], f"--one={preset}", f"--folder={folder}"]
            subprocess.run(command, check=True, env=os.environ | raised, cwd=ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
