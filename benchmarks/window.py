#!/usr/bin/env python
"""Print how much of an offloaded step is hidden behind compute, on the simulated clock. A JSON line for each setting.

    benchmarks/window.py                                                     H100 and RTX 4090, 4k to 32k tokens
    benchmarks/window.py --gpus h100-pcie5 --tokens 8192 --moments bf16 --presets optimizer,cpu,nvme,infinity
    benchmarks/window.py --models 7B,13B,34B,70B --presets cpu,nvme --planned        by the time model of plans alone

A small GPT in bf16 recomputes its activations and clips in every step. Its simulated products take as long for each
parameter as those of the large model on the GPU that is named (8 x tokens FLOPs for each parameter and step), and
memory, links and disks have that GPU's rates. So the share depends on neither model's size. The plan of the large model
says what share of the state fits in memory that is free on the GPU; the small model reads that share ahead.

ahead       that share
by_host     share of the state that the host updates, the rest on the GPU; `auto`: the share that the plan predicts best
planned_s   time of a step of the large model by its plan, with the same rates
share       time of a step with nothing offloaded / time of the offloaded step
limit       the same, if compute, each direction of copies and of files were alone and without a gap
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
    from tests.simulation.simulated_time import Rates

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Gpu(NamedTuple):
    """A GPU and its share of a host: memory, rates in a training step, of the PCIe link in each direction, of a disk.

    The host's memory is shared by copies, files and updates. Its cores update `CORE_UPDATE_NUMEL` parameters each.
    """

    memory_bytes: int
    flops_per_s: float
    device_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float
    cores: int
    disk_bytes_per_s: float = 6e9


GPUS = {
    "h100-pcie5": Gpu(80 * 2**30, 544e12, 3.35e12, 50e9, 400e9, 300e9, 12),
    "4090-pcie4": Gpu(24 * 2**30, 99e12, 1.0e12, 25e9, 25e9, 60e9, 12),
}
MODELS = {
    "7B": {"width": 4096, "layers": 32, "hidden": 11008},
    "13B": {"width": 5120, "layers": 40, "hidden": 13824},
    "34B": {"width": 8192, "layers": 48, "hidden": 22016},
    "70B": {"width": 8192, "layers": 80, "hidden": 28672},
}
"""Sizes of the large models, to which seconds are scaled."""
PRESETS = {
    "resident": {},
    "optimizer": {"optimizer": "cpu"},
    **{name: {"preset": name} for name in ("cpu", "nvme", "infinity")},
}
ROWS = ("update", "gather", "reduce", "page in", "page out")
DIRECTIONS = {
    "in": "bytes from the host",
    "out": "bytes to the host",
    "read": "bytes from files",
    "written": "bytes to files",
}
"""Name in a row -> name in the counts of the simulation."""
CORE_UPDATE_NUMEL = {"fp32": 1e8, "bf16": 5e7, "8bit": 4e7}
"""Parameters that one core of the host updates per second, by the format of moments, see docs/benchmarks.md."""
CORE_BYTES_PER_S = 24e9
"""Bytes that the host's operators read and write on one core, most of them in its cache: 240 for each parameter."""
WARM, STEPS = 4, 4
"""Steps until reads ahead and writes behind take turns as in a long run, and timed steps."""


class Setting(NamedTuple):
    """One row without its results."""

    gpu: str
    model: str
    preset: str
    moments: str
    tokens: int
    ranks: int
    compute: str | float


class Timed(NamedTuple):
    """A step on the simulated clock, for one rank: its seconds, bytes by `DIRECTIONS`, and exposed seconds by row."""

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
    parser.add_argument("--models", default="7B", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--planned", action="store_true", help="plan and do not simulate")
    parser.add_argument("--presets", default="optimizer,cpu", help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--moments", default="fp32,bf16", help="of fp32, bf16, 8bit")
    parser.add_argument("--computes", default="device,auto", help="of device, host, auto: who updates")
    parser.add_argument("--tokens", default="4096,8192,16384,32768", help="of a rank in a step")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12, help="of the simulated model")
    parser.add_argument("--width", type=int, default=64, help="of the simulated model")
    parser.add_argument("--page-bytes", type=int, default=16384, help="of the simulated model")
    return parser.parse_args()


def plan_of(
    model: "torch.nn.Module", world: "zero.World", preset: str, moments: str, ahead: int | None, **settings: Any
) -> "zero.Plan":
    import zero

    return zero.Plan(
        model,
        optimizer=zero.with_moments(zero.adamw(1e-4, clip=1e-6), moments),
        precision="bf16",
        activations="remat",
        offload=zero.Offload(**PRESETS[preset], ahead=ahead, **settings.pop("offload")),
        world=world,
        **settings,
    )


def bytes_ahead(plan: "zero.Plan", share: float) -> int:
    """Return `offload.ahead` for this share of the groups of pages that the GPU updates; for 1, slots for all parts."""
    groups = len(plan.placement.optimizer) - len(plan.slots.by_host)
    if share == 1:
        groups += len(plan.units) * plan.slots.staged_pages  # the last slot of a unit may be used in part
    return int(share * groups) * plan.slots.nbytes


def large_plan(setting: "Setting", compute: str | float) -> "zero.Plan":
    """Return the plan of the large model on the GPU, with room for any state in host memory and on disks."""
    import zero
    from zero.core.offload import Offload
    from zero.core.placement import Room, usable_bytes
    from zero.trainer.models import GPT, GPTConfig
    from zero.trainer.planning import PaperWorld

    sizes = MODELS[setting.model]
    with zero.empty():
        model = GPT(GPTConfig(vocab=32000, seq=4096, heads=32, tied=False, **sizes))
    # the input of each block, and a block's own tensors, counted as 34 inputs (Korthikanti et al. 2022, section 4.1)
    activation_bytes = 2 * setting.tokens * sizes["width"] * (sizes["layers"] + 34)
    world = PaperWorld(setting.ranks, local_size=setting.ranks, device="cuda")
    memory_bytes = GPUS[setting.gpu].memory_bytes
    room = Room(usable_bytes(Offload(), memory_bytes, memory_bytes), 2**41, 2**43)
    return plan_of(
        model, world, setting.preset, setting.moments, None, offload={"compute": compute}, room=room,
        activation_bytes=activation_bytes,
    )  # fmt: skip


def planned(setting: "Setting", plan: "zero.Plan") -> dict[str, Any]:
    """Return the columns of the large model's plan."""
    from zero.trainer.planning.cost import Ahead, Rates, step_seconds
    from zero.trainer.planning.traces.operators import OperatorWork

    gpu, ahead = GPUS[setting.gpu], Ahead.of(plan)
    # an update reads and writes parameter, rest of the master and moments, and reads the gradient, as the norm does
    update_bytes = 2 * (2 + 2 + {"fp32": 8, "bf16": 4, "8bit": 2.1}[setting.moments]) + 6
    update_numel = gpu.device_bytes_per_s / update_bytes
    rates = Rates(
        flops=gpu.flops_per_s,
        attention_flops=gpu.flops_per_s,
        memory_bytes=gpu.device_bytes_per_s,
        launch_s=0.0,
        copy_in_bytes=gpu.link_bytes_per_s,
        copy_out_bytes=gpu.link_bytes_per_s,
        disk_read_bytes=gpu.disk_bytes_per_s,
        disk_write_bytes=gpu.disk_bytes_per_s,
        host_bytes=gpu.host_bytes_per_s,
        link_bytes=gpu.network_bytes_per_s,
        wire_bytes=gpu.network_bytes_per_s,
        update_numel=update_numel,
        host_update_numel=gpu.cores * CORE_UPDATE_NUMEL[setting.moments],
        source="data sheets",
    )
    products = 2 * setting.tokens * plan.numel
    step_s = step_seconds(plan, rates, OperatorWork(products), OperatorWork(3 * products))
    resident_s = 4 * products / gpu.flops_per_s + plan.numel / update_numel / setting.ranks
    return {
        "by_host": plan.offload.host_share,
        "ahead": round(ahead.on_host if setting.preset in ("nvme", "infinity") else ahead.on_device, 2),
        "planned_s": step_s,
        "planned_share": round(resident_s / step_s, 3),
    }


def best(setting: Setting) -> tuple["zero.Plan", dict[str, Any]]:
    """Return the plan of the large model and its columns, with the share of updates by the host that it predicts best.

    Raises:
        DoesNotFit: no share fits.
    """
    shares = [number / 16 for number in range(17)] if setting.compute == "auto" else [setting.compute]
    plans = [large_plan(setting, share) for share in shares]
    columns = [planned(setting, plan) for plan in plans]
    return min(zip(plans, columns, strict=True), key=lambda pair: pair[1]["planned_s"])


def steps(
    world: "zero.World", small: Small, preset: str, moments: str, ahead: float, share: float, threads: int, folder: str
) -> Timed:
    """Train, and time steps after an update.

    Args:
        ahead: the share of the state that is read ahead.
        share: the share of the state that the host updates.
    """
    import torch

    import zero
    from zero.trainer.models import GPT, GPTConfig

    with world.exclusive(), zero.empty():
        model = GPT(GPTConfig(vocab=64, seq=16, layers=small.layers, heads=2, width=small.width))
    offload = {"path": folder, "page_bytes": small.page_bytes, "compute": share, "threads": threads}
    plan = plan_of(model, world, preset, moments, 0, offload=offload)
    plan = plan_of(model, world, preset, moments, bytes_ahead(plan, ahead), offload=offload)
    store = zero.open_store(plan)
    state, step = zero.init(plan, store), zero.make_step(plan, loss_of)
    row = torch.zeros(1, 17, dtype=torch.int64)
    for _ in range(WARM):
        state, _ = step(state, [row])
    streams = world.compute.streams
    begin, before = streams.main.agent.moment, streams.counts.copy()
    for _ in range(STEPS):
        state, metrics = step(state, [row])
    end, moved = streams.main.agent.moment, streams.counts - before
    with zero.record(state) as timeline:  # it waits for all copies at its begin
        for _ in range(STEPS):
            state, _ = step(state, [row])
    store.drain()
    assert metrics.grad_norm > 1e-6, "a step that is not clipped"
    store.close()
    exposed = timeline.hidden()
    step_s = (streams.seconds(end) - streams.seconds(begin)) / STEPS
    nbytes = {direction: moved[name] / STEPS for direction, name in DIRECTIONS.items()}
    return Timed(step_s, nbytes, {row: exposed[row].exposed_s / STEPS for row in ROWS})


def loss_of(model: "torch.nn.Module", row: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.nn.functional.cross_entropy(model(row[:, :-1]).flatten(0, 1).float(), row[:, 1:].flatten())


def timed(ranks: int, rates: "Rates", *args: Any) -> Timed:
    """Time a step of rank 0 at these rates."""
    from zero.testing import run_ranks
    from tests.simulation import simulated_gpu

    # kernels need not run to be timed, except sums over ranks, without which no gradient would be finite
    unrun = patch("triton.runtime.interpreter.InterpretedFunction.run") if ranks == 1 else nullcontext()
    with tempfile.TemporaryDirectory() as folder, simulated_gpu(races=True, fused=True, rates=rates), unrun:
        return run_ranks(ranks, steps, *args, folder)[0]


def rows(settings: list[Setting], small: Small | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting; without a share if the large model does not fit on the GPU.

    Args:
        small: the model to simulate; None to plan only.
    """
    from zero.core.placement import DoesNotFit
    from tests.simulation.simulated_time import Rates

    flops: dict[int, float] = {}  # ranks -> FLOPs of a step of the simulated model
    resident: dict[tuple[Any, ...], Timed] = {}
    numel = numel_of(small) if small else 0
    for setting in settings:
        gpu, of_resident = GPUS[setting.gpu], setting._replace(preset="resident")
        try:
            plan, columns = best(setting)
        except DoesNotFit as error:
            yield setting._asdict() | {"error": error.problem}
            continue
        row = setting._asdict() | columns
        if small is None:
            yield row
            continue
        fast = Rates(
            1.0, *gpu[2:5], CORE_BYTES_PER_S, gpu.cores, gpu.host_bytes_per_s, gpu.disk_bytes_per_s, launch_s=0.0
        )
        if setting.ranks not in flops:
            flops[setting.ranks] = timed(setting.ranks, fast, small, "resident", "fp32", 0.0, 0.0, 1).step_s
        products_s = 8 * setting.tokens * numel / gpu.flops_per_s
        rates = fast._replace(flops_per_s=flops[setting.ranks] / products_s)
        if of_resident not in resident:
            resident[of_resident] = timed(setting.ranks, rates, small, "resident", setting.moments, 0.0, 0.0, 1)
        plain_s = resident[of_resident].step_s
        where = setting.preset, setting.moments, row["ahead"], row["by_host"], gpu.cores
        offloaded = timed(setting.ranks, rates, small, *where)
        copied_s = max(offloaded.nbytes["in"], offloaded.nbytes["out"]) / gpu.link_bytes_per_s
        disk_s = max(offloaded.nbytes["read"], offloaded.nbytes["written"]) / gpu.disk_bytes_per_s
        scale = 1e3 * plan.numel / numel
        yield row | {
            "share": round(plain_s / offloaded.step_s, 3),
            "limit": round(plain_s / max(plain_s, copied_s, disk_s), 3),
            "step_ms": round(scale * offloaded.step_s),
            "bytes": {direction: round(nbytes / numel, 1) for direction, nbytes in offloaded.nbytes.items()},
            "exposed_ms": {kind: round(scale * seconds) for kind, seconds in offloaded.exposed_s.items()},
        }


def numel_of(small: Small) -> int:
    import zero
    from zero.trainer.models import GPT, GPTConfig

    with zero.empty():
        model = GPT(GPTConfig(vocab=64, seq=16, layers=small.layers, heads=2, width=small.width))
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    options = arguments()
    words = [options.gpus, options.models, options.presets, options.moments, options.tokens, options.computes]
    settings = [
        Setting(gpu, model, preset, moments, int(tokens), options.ranks, compute)
        for gpu, model, preset, moments, tokens, compute in product(*(word.split(",") for word in words))
    ]
    small = None if options.planned else Small(options.layers, options.width, options.page_bytes)
    for row in rows(settings, small):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
