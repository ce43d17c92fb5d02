"""Part 3: how fast every system trains the same GPT, in one process for each size of it.

One system is alive at a time: it is built, warmed up, timed and freed, and then comes the next one. When all have had
their turn they take another in the opposite order, as long as there is time. A step lasts from one event on the stream
that computes to the next, so that no system is made to wait for its own end.
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
from gpu_parts.doors import Gpu
from gpu_parts.run import Budget, Row, Tell, error_text
from gpu_parts.sizes import Model, Sizes
from gpu_parts.training import (
    CLIP,
    Away,
    Running,
    Values,
    activation_bytes,
    optimizer,
    recomputing,
    tokens,
    torch_optimizer,
    whole_model,
)
from zero.trainer.models import GPT, GPTConfig, loss

OURS = {
    "stage 3": Away("none"),
    "stage 3, cpu": Away("cpu"),
    "stage 3, cpu, update on the host": Away("cpu", "host"),
    "stage 3, nvme": Away("nvme"),
    "stage 3, auto": Away("auto"),
}
SYSTEMS = ("forward and backward", "FSDP2", *OURS)
"""In the order of their turns: what others are held against first."""


class Job(NamedTuple):
    """What all systems of one size are told."""

    gpu: Gpu
    sizes: Sizes
    model: Model
    config: GPTConfig
    values: Values
    disk: Path
    host_bytes: int | None
    activations: dict[int, int]
    """By rows of a step: bytes that forward and backward take by the library's count."""


class System(NamedTuple):
    """One that is alive."""

    step: Callable[[Tensor], Any]
    run: Running | None = None
    """Of ours."""


def tell_speed(
    model: Model, host_bytes: int | None, gpu: Gpu, sizes: Sizes, disk: Path, tell: Tell, budget: Budget
) -> None:
    """Every system in turn, as often as there is time for all of them."""
    config, remat = GPTConfig(**model.config), model.activations == "remat"
    counted = {rows: activation_bytes(config, rows, torch.bfloat16, remat=remat)[0] for rows in model.rows}
    job = Job(gpu, sizes, model, config, Values(), disk, host_bytes, counted)
    about = {"model": model.name, "parameters": config.parameters_numel, "activations": model.activations}
    tell({"kind": "model", **about, "seq": config.seq, "rows": list(model.rows)})
    for turn in range(sizes.rounds):
        begin_s = time.monotonic()
        for name in SYSTEMS if turn % 2 == 0 else reversed(SYSTEMS):
            _tell_system(name, turn, job, tell)
            gc.collect()  # nothing of it is in use any more, and the next one is to find an empty GPU
            gpu.forget()
        if budget.left_s < 1.1 * (time.monotonic() - begin_s):
            return


def _tell_system(name: str, turn: int, job: Job, tell: Tell) -> None:
    """A row for each size of the step, and in the first round one of what is in a step. An error is a row too."""
    known: Row = {"model": job.model.name, "system": name, "round": turn}
    begin_s = time.monotonic()
    try:
        with _alive(name, job) as system:
            built_s = time.monotonic() - begin_s
            for number, rows in enumerate(job.model.rows):
                tell({"kind": "speed", **known, "built_s": round(built_s, 1), **_timed(system, rows, job)})
                if number == 0 and turn == 0:
                    tell({"kind": "step", **known, **_looked_into(system, rows, job)})
    except Exception as error:  # one system that cannot run is no reason to leave out the others
        tell({"kind": "speed", **known, "error": error_text(error)})


@contextmanager
def _alive(name: str, job: Job) -> Iterator[System]:
    with ExitStack() as stack:
        if name in OURS:
            yield _ours(OURS[name], job, stack)
        else:
            yield (_plain if name == SYSTEMS[0] else _fsdp2)(job)


def _plain(job: Job) -> System:
    """Forward and backward alone, of a model in bf16."""
    model = whole_model(job.config, job.gpu, job.values, torch.bfloat16)
    if job.model.activations == "remat":
        recomputing(model)

    def step(rows: Tensor) -> None:
        loss(model, rows).backward()
        model.zero_grad()

    return System(step)


def _fsdp2(job: Job) -> System:
    """fully_shard of each block and of the root, bf16 with gradients in fp32, fused AdamW, clipping."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from zero.distributed.world import open_default_group

    open_default_group()
    mesh = init_device_mesh(job.gpu.device.type, (1,))
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


def _ours(away: Away, job: Job, stack: ExitStack) -> System:
    with zero.empty():
        model = GPT(job.config)
    plan = zero.Plan(
        model,
        optimizer=optimizer(),
        world=job.gpu.world(),
        precision="bf16",
        activations=job.model.activations,
        offload=zero.Offload(away.preset, path=str(job.disk), compute=away.compute, page_bytes=job.sizes.page_bytes),
        room=_room(job),
        activation_bytes=max(job.activations.values()),
    )
    run = stack.enter_context(closing(Running(plan, job.values)))
    return System(run.step, run)


def _room(job: Job) -> Any:
    """On a simulated GPU all there is: that one is made small for the part that needs little."""
    from zero.core.placement import NO_LIMIT

    return NO_LIMIT if job.gpu.simulated else job.gpu.room(job.host_bytes, job.disk)


# -- looking at one ----------------------------------------------------------------------------------------------------


def _timed(system: System, rows: int, job: Job) -> Row:
    """Times of steps that follow one another, and the peak of memory meanwhile."""
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
    told = [gpu.seconds(a, b) for a, b in pairwise(moments)]
    return {
        "rows": rows,
        "tokens": rows * job.config.seq,
        "step_s": told,
        "peak_bytes": gpu.peak_bytes(),
        "plan_bytes": None if system.run is None else _planned_bytes(system.run.plan, job.activations[rows]),
        "flops": job.config.flops_per_token * rows * job.config.seq,
        "peak_flops": gpu.peak_flops("bf16"),
    }


def _planned_bytes(plan: zero.Plan, activations: int) -> int:
    """On the GPU, with a step of this size; the plan counts the largest."""
    return sum(plan.bytes["device"].values()) - plan.activation_bytes + activations


def _looked_into(system: System, rows: int, job: Job) -> Row:
    """What a step launches and waits for, and what of the other work is hidden; each in a step of its own."""
    gpu, batch = job.gpu, tokens(job.config, rows, job.gpu)
    row: Row = {"rows": rows, "tokens": rows * job.config.seq}
    one = partial(system.step if system.run is None else system.run.settled_step, batch)
    one()
    row |= gpu.launches(one)
    row["syncs"] = gpu.syncs(lambda: system.step(batch))
    if system.run is not None:
        row |= recorded(system.run, batch)
    return row


def recorded(run: Running, batch: Tensor) -> Row:
    """One step's time, and of each row of its timeline the seconds that it was busy, and exposed."""
    run.step(batch)
    with zero.record(run.state) as timeline:
        run.step(batch)
    shares = {row: [share.busy_s, share.exposed_s] for row, share in timeline.hidden().items() if share.busy_s}
    return {"recorded_s": timeline.step_s, "shares": shares}
