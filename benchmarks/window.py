#!/usr/bin/env python
"""Print how much of an offloaded step is hidden behind compute, on the simulated clock. A JSON line for each setting.

    benchmarks/window.py                                                     H100 and RTX 4090, 4k to 32k tokens
    benchmarks/window.py --gpus h100-pcie5 --tokens 8192 --moments bf16 --presets optimizer,cpu,nvme,infinity

A small GPT in bf16 recomputes its activations and clips in every step. Its simulated products take as long for each
parameter as those of the large model on the GPU that is named (8 x tokens FLOPs for each parameter and step), and
memory, links and disks have that GPU's rates. So the share depends on neither model's size.

share       time of a step with nothing offloaded / time of the offloaded step
limit       the same, if compute, each direction of copies and each direction of files were alone and without a gap
bytes       bytes per parameter and step, copied from and to the host, read from and written to files
exposed_ms  time in which compute waits, by the rows of `zero.record`, for the large model

No disk is measured: an access of a file takes its bytes at the rate of the table below, beside the others.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

    import zero
    from zero.testing.simulated_time import Rates

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Gpu(NamedTuple):
    """Rates of a GPU in a training step, of its PCIe link in each direction, and of one disk."""

    flops_per_s: float
    device_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    disk_bytes_per_s: float = 6e9


GPUS = {"h100-pcie5": Gpu(544e12, 3.35e12, 50e9, 400e9), "4090-pcie4": Gpu(99e12, 1.0e12, 25e9, 25e9)}
MODELS = {"7B": 7e9}
"""Parameters of the large models, to which seconds are scaled."""
PRESETS = {
    "resident": {},
    "optimizer": {"optimizer": "cpu"},
    **{name: {"preset": name} for name in ("cpu", "nvme", "infinity")},
}
ROWS = ("update", "gather", "reduce", "page in", "page out")
WAYS = {
    "in": "bytes from the host",
    "out": "bytes to the host",
    "read": "bytes from files",
    "written": "bytes to files",
}
"""Name in a row -> name in the counts of the simulation."""
STEPS = 2
"""Timed steps."""


class Setting(NamedTuple):
    """One row without its results."""

    gpu: str
    model: str
    preset: str
    moments: str
    tokens: int
    ranks: int


class Timed(NamedTuple):
    """A step on the simulated clock: its seconds, bytes by `WAYS`, and exposed seconds by row; all for one rank."""

    step_s: float
    nbytes: dict[str, float]
    exposed_s: dict[str, float]


class Small(NamedTuple):
    """Sizes of the simulated model, and the bytes of a page of it in fp32."""

    layers: int
    width: int
    page_bytes: int


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default=",".join(GPUS), help=f"of {', '.join(GPUS)}")
    parser.add_argument("--presets", default="optimizer,cpu", help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--moments", default="fp32,bf16", help="of fp32, bf16, 8bit")
    parser.add_argument("--tokens", default="4096,8192,16384,32768", help="of a rank in a step")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12, help="of the simulated model")
    parser.add_argument("--width", type=int, default=64, help="of the simulated model")
    parser.add_argument("--page-bytes", type=int, default=16384, help="of the simulated model")
    return parser.parse_args()


def steps(world: "zero.World", small: Small, preset: str, moments: str, folder: str) -> Timed:
    """Train, and time steps after an update."""
    import torch

    import zero
    from zero.trainer.models import GPT, GPTConfig

    with world.exclusive(), zero.empty():
        model = GPT(GPTConfig(vocab=64, seq=16, layers=small.layers, heads=2, width=small.width))
    plan = zero.Plan(
        model,
        optimizer=zero.with_moments(zero.adamw(1e-4, clip=1e-6), moments),
        precision="bf16",
        activations="remat",
        offload=zero.Offload(**PRESETS[preset], path=folder, page_bytes=small.page_bytes),
        world=world,
    )
    store = zero.open_store(plan)
    state, step = zero.init(plan, store), zero.make_step(plan, loss_of)
    row = torch.zeros(1, 17, dtype=torch.int64)
    state, _ = step(state, [row])  # follows no update
    store.drain()
    counts = world.compute.streams.counts
    before = counts.copy()
    state, _ = step(state, [row])  # the first one after an update, which had ended before
    with zero.record(state) as timeline:
        for _ in range(STEPS):
            state, metrics = step(state, [row])
    store.drain()
    nbytes = {way: (counts[name] - before[name]) / (1 + STEPS) for way, name in WAYS.items()}
    assert metrics.grad_norm > 1e-6, "a step that is not clipped"
    store.close()
    exposed = timeline.hidden()
    return Timed(timeline.step_s / STEPS, nbytes, {row: exposed[row].exposed_s / STEPS for row in ROWS})


def loss_of(model: "torch.nn.Module", row: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.nn.functional.cross_entropy(model(row[:, :-1]).flatten(0, 1).float(), row[:, 1:].flatten())


def timed(ranks: int, rates: "Rates", *args: Any) -> Timed:
    """Time a step of rank 0 at these rates."""
    from zero.testing import run_ranks, simulated_gpu

    # kernels need not run to be timed, except sums over ranks, without which no gradient would be finite
    unrun = patch("triton.runtime.interpreter.InterpretedFunction.run") if ranks == 1 else nullcontext()
    with tempfile.TemporaryDirectory() as folder, simulated_gpu(races=True, fused=True, rates=rates), unrun:
        return run_ranks(ranks, steps, *args, folder)[0]


def rows(settings: list[Setting], small: Small) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting."""
    from zero.testing.simulated_time import Rates

    flops: dict[int, float] = {}  # ranks -> FLOPs of a step of the simulated model
    resident: dict[tuple[Any, ...], Timed] = {}
    numel = numel_of(small)
    for setting in settings:
        gpu, of_resident = GPUS[setting.gpu], setting._replace(preset="resident")
        fast = Rates(1.0, gpu.device_bytes_per_s, *gpu[2:4], 1e10, gpu.disk_bytes_per_s, launch_s=0.0)
        if setting.ranks not in flops:
            flops[setting.ranks] = timed(setting.ranks, fast, small, "resident", "fp32").step_s
        products_s = 8 * setting.tokens * numel / gpu.flops_per_s
        rates = fast._replace(flops_per_s=flops[setting.ranks] / products_s)
        if of_resident not in resident:
            resident[of_resident] = timed(setting.ranks, rates, small, "resident", setting.moments)
        plain_s = resident[of_resident].step_s
        offloaded = timed(setting.ranks, rates, small, setting.preset, setting.moments)
        copied_s = max(offloaded.nbytes["in"], offloaded.nbytes["out"]) / gpu.link_bytes_per_s
        disk_s = max(offloaded.nbytes["read"], offloaded.nbytes["written"]) / gpu.disk_bytes_per_s
        scale = 1e3 * MODELS[setting.model] / numel
        yield setting._asdict() | {
            "share": round(plain_s / offloaded.step_s, 3),
            "limit": round(plain_s / max(plain_s, copied_s, disk_s), 3),
            "step_ms": round(scale * offloaded.step_s),
            "bytes": {way: round(nbytes / numel, 1) for way, nbytes in offloaded.nbytes.items()},
            "exposed_ms": {row: round(scale * seconds) for row, seconds in offloaded.exposed_s.items()},
        }


def numel_of(small: Small) -> int:
    import zero
    from zero.trainer.models import GPT, GPTConfig

    with zero.empty():
        model = GPT(GPTConfig(vocab=64, seq=16, layers=small.layers, heads=2, width=small.width))
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    options = arguments()
    words = [options.gpus, ",".join(MODELS), options.presets, options.moments, options.tokens]
    settings = [
        Setting(gpu, model, preset, moments, int(tokens), options.ranks)
        for gpu, model, preset, moments, tokens in product(*(word.split(",") for word in words))
    ]
    for row in rows(settings, Small(options.layers, options.width, options.page_bytes)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
