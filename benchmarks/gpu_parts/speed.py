"""Part 3: how fast every system trains the same GPT, in one process for each size of the GPT.

One system at a time is built, warmed up, timed and freed. Then all take another turn in the opposite order, as long as
there is time. A step lasts from one event on the compute stream to the next, so that no system has to wait at its end.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero
from gpu_parts.devices import Gpu
from gpu_parts.run import Budget, Emit, Row, error_text
from gpu_parts.sizes import Model, Sizes
from gpu_parts.training import (
    CLIP,
    NO_OFFLOAD,
    Offloading,
    Running,
    Values,
    optimizer,
    recomputing,
    tokens,
    torch_optimizer,
    traced,
    whole_model,
)
from zero.trainer.models import GPT, GPTConfig, loss

REFERENCES = ("forward and backward", "FSDP2")
OFFLOADED: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 3, cpu": {"offloading": Offloading("cpu")},
    "stage 3, cpu, update on the host": {"offloading": Offloading("cpu", "host")},
    "stage 3, nvme": {"offloading": Offloading("nvme")},
    "stage 3, auto": {"offloading": Offloading("auto")},
}
ON_RANKS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 3, prefetch=0": {"prefetch": 0},
    "stage 3, reduce=native": {"reduce": "native"},
}
"""The settings of this library's systems, on one rank and on several. `REFERENCES` take their turns before them."""


class Job(NamedTuple):
    """The device, model, values and limits that all systems of one size have in common."""

    gpu: Gpu
    sizes: Sizes
    model: Model
    config: GPTConfig
    values: Values
    disk: Path
    host_bytes: int | None
    activations: dict[int, int]
    """Rows of a step -> bytes of its activations, as the library counts them."""
    ours: dict[str, dict[str, Any]]


class System(NamedTuple):
    """A system that is ready to train. `run` is None for systems other than this library."""

    step: Callable[[Tensor], Any]
    run: Running | None = None


def measure_speed(
    model: Model, host_bytes: int | None, gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget
) -> None:
    """Measure every system in turn, as often as there is time for all of them. On several ranks rows are per rank."""
    world = gpu.world
    config, remat = GPTConfig(**model.config), model.activations == "remat"
    counted = {rows: traced(config, rows, torch.bfloat16, remat=remat).peak_bytes for rows in model.rows}
    ours = OFFLOADED if world.size == 1 else ON_RANKS
    job = Job(gpu, sizes, model, config, Values(), disk, host_bytes, counted, ours)
    systems = (*REFERENCES, *ours)
    about = {"model": model.name, "parameters": config.parameters_numel, "activations": model.activations}
    emit({"kind": "model", **about, "seq": config.seq, "rows": list(model.rows)})
    for turn in range(sizes.rounds):
        begin_s = time.monotonic()
        for name in systems if turn % 2 == 0 else reversed(systems):
            _measure_system(name, turn, job, emit)
            gc.collect()  # so that the next system finds an empty GPU
            gpu.free_cached()
        is_late = budget.left_s < 1.1 * (time.monotonic() - begin_s)
        if world.exchange(torch.tensor([is_late])).any():  # the ranks must agree
            return


def _measure_system(name: str, turn: int, job: Job, emit: Emit) -> None:
    """Emit a row for each size of the step, in the first round also the content of a step. Errors are rows, too."""
    known: Row = {"model": job.model.name, "system": name, "round": turn}
    begin_s = time.monotonic()
    try:
        with _built(name, job) as system:
            built_s = time.monotonic() - begin_s
            for number, rows in enumerate(job.model.rows):
                emit({"kind": "speed", **known, "built_s": round(built_s, 1), **_timed(system, rows, job)})
                if number == 0 and turn == 0:
                    emit({"kind": "step", **known, **_inspected(system, rows, job)})
    except Exception as error:  # the other systems may still run
        emit({"kind": "speed", **known, "error": error_text(error)})


@contextmanager
def _built(name: str, job: Job) -> Iterator[System]:
    with ExitStack() as stack:
        if name in job.ours:
            yield _ours(job, stack, **job.ours[name])
        else:
            yield (_plain if name == REFERENCES[0] else _fsdp2)(job)


def _plain(job: Job) -> System:
    """Build forward and backward of the bf16 model, nothing else."""
    model = whole_model(job.config, job.gpu, job.values, torch.bfloat16)
    if job.model.activations == "remat":
        recomputing(model)

    def step(rows: Tensor) -> None:
        loss(model, rows).backward()
        model.zero_grad()

    return System(step)


def _fsdp2(job: Job) -> System:
    """Build FSDP2: fully_shard on each block and the root, bf16 with gradients in fp32, fused AdamW, clipping."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from zero.distributed.opening import open_default_group

    open_default_group()
    mesh = init_device_mesh(job.gpu.device.type, (job.gpu.world.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = whole_model(job.config, job.gpu, job.values)
    if job.model.activations == "remat":
        recomputing(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    adamw = torch_optimizer(list(model.parameters()))

    def step(rows: Tensor) -> None:
        loss(model, rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()

    return System(step)


def _ours(job: Job, stack: ExitStack, *, offloading: Offloading = NO_OFFLOAD, **settings: Any) -> System:
    with zero.empty():
        model = GPT(job.config)
    plan = zero.Plan(
        model,
        optimizer=optimizer(),
        world=job.gpu.world,
        precision="bf16",
        activations=job.model.activations,
        offload=offloading.offload(job.disk, job.sizes.page_bytes),
        room=_room(job),
        activation_bytes=max(job.activations.values()),
        **settings,
    )
    run = stack.enter_context(closing(Running(plan, job.values)))
    return System(run.step, run)


def _room(job: Job) -> Any:
    """Return the room of a plan: no limit on a simulated GPU, whose small room is only for the largest models."""
    from zero.core.placement import NO_LIMIT

    return NO_LIMIT if job.gpu.simulated else job.gpu.room(job.host_bytes, job.disk)


# -- measurements -----------------------------------------------------------------------------------------------------


def _timed(system: System, rows: int, job: Job) -> Row:
    """Time consecutive steps, and measure the peak of memory during them."""
    gpu, batch = job.gpu, tokens(job.config, rows, job.gpu)
    gpu.begin_peak()
    for _ in range(job.sizes.warm):
        system.step(batch)
    gpu.finish()
    moments = [gpu.moment()]
    for _ in range(job.sizes.timed):
        system.step(batch)
        moments.append(gpu.moment())
    gpu.finish()
    times = [gpu.seconds(a, b) for a, b in pairwise(moments)]
    return {
        "rows": rows,
        "tokens": rows * job.config.seq,
        "step_s": times,
        "peak_bytes": gpu.peak_bytes(),
        "plan_bytes": None if system.run is None else _planned_bytes(system.run.plan, job.activations[rows]),
        "flops": job.config.flops_per_token * rows * job.config.seq,
        "peak_flops": gpu.peak_flops("bf16"),
    }


def _planned_bytes(plan: zero.Plan, activations: int) -> int:
    """Return the bytes on the GPU with a step of this size. The plan itself counts the largest step."""
    return sum(plan.bytes["device"].values()) - plan.activation_bytes + activations


def _inspected(system: System, rows: int, job: Job) -> Row:
    """Count launches and waits of a step, and measure the hidden share of other work; each in a step of its own."""
    gpu, batch = job.gpu, tokens(job.config, rows, job.gpu)
    row: Row = {"rows": rows, "tokens": rows * job.config.seq}
    take_step = partial(system.step if system.run is None else system.run.drained_step, batch)
    take_step()
    row |= gpu.launches(take_step)
    row["syncs"] = gpu.syncs(lambda: system.step(batch))
    if system.run is not None:
        row |= recorded(system.run, batch)
    return row


def recorded(run: Running, batch: Tensor) -> Row:
    """Return the time of one step, and for each row of its timeline [seconds busy, seconds exposed]."""
    run.step(batch)
    with zero.record(run.state) as timeline:
        run.step(batch)
    shares = {row: [share.busy_s, share.exposed_s] for row, share in timeline.hidden().items() if share.busy_s}
    return {"recorded_s": timeline.step_s, "shares": shares}
