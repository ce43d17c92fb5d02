#!/usr/bin/env python
"""Count what a training step launches on a GPU, on a simulated one, also for FSDP2. Prints a JSON line for each system.

    benchmarks/launches.py --width 1024 --layers 6 --ranks 1
    benchmarks/launches.py --width 2048 --systems none,cpu,nvme,infinity

Counted alike for all systems: torch operators that launch a kernel and are not called by other operators, in all
threads of rank 0, in the third step. For this library also: `groups`, the page groups that move in a step; how often
the training thread and the store's threads wait for the device; and the bytes that are copied each way.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest.mock import patch
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STAGES = {f"stage {number}": number for number in range(4)}
PRESETS = ("cpu", "nvme", "infinity")
SYSTEMS = ("forward and backward", "fsdp2", *STAGES, *PRESETS)
COUNTED = ("waits of the host", "waits of the store's threads", "bytes to the host", "bytes from the host")
WARM = 2
"""Steps before the counted step: the first allocates buffers, the second is the first after an update."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--moments", default="fp32", choices=("fp32", "bf16", "8bit"), help="of this library")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems, separated by commas; default: all")
    parser.add_argument("--most", type=int, default=0, help="how many of the most frequent operators to list")
    return parser.parse_args()


def model_of(width: int, layers: int) -> "torch.nn.Module":
    from zero.trainer.models import GPT, GPTConfig

    return GPT(GPTConfig(vocab=256, seq=16, layers=layers, heads=max(1, width // 64), width=width))


def plain(world: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Build a step of forward and backward only."""
    import torch

    model = model_of(settings["width"], settings["layers"])
    model = model.bfloat16() if settings["precision"] == "bf16" else model
    row = torch.zeros(1, 17, dtype=torch.int64)

    def step() -> None:
        model.zero_grad()
        loss_of(model, row).backward()

    return step, dict


def fsdp2(world: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Build a step of FSDP2: fully_shard on each block and the root, fused AdamW, clipping."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model_of(settings["width"], settings["layers"])
    mesh = init_device_mesh("cpu", (settings["ranks"],))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if settings["precision"] == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    row = torch.zeros(1, 17, dtype=torch.int64)

    def step() -> None:
        loss_of(model, row).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, dict


def ours(world: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Build a step of this library with a stage, or with stage 3 and an offload preset."""
    import torch

    import zero

    name = settings["system"]
    offload = zero.Offload(name if name in PRESETS else "none", path=settings["folder"])
    plan = zero.Plan(
        model_of(settings["width"], settings["layers"]),
        optimizer=zero.with_moments(zero.adamw(1e-3, clip=1.0), settings["moments"]),
        stage=STAGES.get(name, 3),
        precision=settings["precision"],
        offload=offload,
        world=world,
    )
    store = zero.open_store(plan)
    state, make = zero.init(plan, store), zero.make_step(plan, loss_of)
    row = torch.zeros(1, 17, dtype=torch.int64)

    def step() -> None:
        nonlocal state
        state, _ = make(state, [row])
        store.drain()

    groups = sum(not part.on_device for unit in state.runtime.units for part in unit.parts)
    return step, lambda: {"groups": groups, "page_bytes": plan.offload.page_bytes}


def loss_of(model: Any, row: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.nn.functional.cross_entropy(model(row[:, :-1]).flatten(0, 1).float(), row[:, 1:].flatten())


def counted(world: Any, settings: dict[str, Any]) -> dict[str, Any]:
    from tests.simulation.simulated_gpu import count_launches, simulated_gpu
    from zero.distributed.opening import open_default_group
    from zero.distributed.world import open_world

    patch("triton.runtime.interpreter.InterpretedFunction.run").start()  # kernels need not run to be counted
    made = {"forward and backward": plain, "fsdp2": fsdp2}.get(settings["system"], ours)
    if made is fsdp2:
        open_default_group()
    if made is ours:
        with simulated_gpu(fused=True):
            world = open_world()
    step, more = made(world, settings)
    for _ in range(WARM):
        step()
    operators: Counter[str] = count_launches(step)
    counts = {"launches": sum(operators.values()), **more()}
    if made is ours:
        counts |= waits_and_copies(settings)
    return {**counts, "most": operators.most_common(settings["most"])}


def waits_and_copies(settings: dict[str, Any]) -> dict[str, int]:
    """Count the waits and copies of a step on an instrumented device."""
    from tests.simulation.simulated_gpu import simulated_gpu
    from zero.distributed.world import open_world

    with simulated_gpu(races=True, fused=True) as simulation:
        step, _ = ours(open_world(), settings)
        for _ in range(WARM):
            step()
        before = simulation.counts
        step()
        counts = simulation.counts - before
    return {name: counts[name] for name in COUNTED}


def main() -> None:
    from zero.testing import run_processes

    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        for system in options.systems.split(","):
            if system not in SYSTEMS:
                sys.exit(f"--systems: {system!r} is not one of {', '.join(SYSTEMS)}")
            settings = {**vars(options), "system": system, "folder": folder}
            first = run_processes(options.ranks, counted, settings, timeout_s=1800.0)[0]
            line = {"system": system, "width": options.width, "layers": options.layers, "ranks": options.ranks, **first}
            if not options.most:
                del line["most"]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
