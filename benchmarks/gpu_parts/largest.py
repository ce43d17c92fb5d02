"""Part 4: the largest models that fit with `offload=auto`: the forecast of the plan, then real steps."""

import time
from pathlib import Path

import torch

import zero
from gpu_parts.devices import Gpu
from gpu_parts.run import Budget, Emit, Row, error_text
from gpu_parts.sizes import Model, Sizes
from gpu_parts.training import Running, Values, optimizer, tokens, traced
from zero.trainer.config import read
from zero.trainer.models import GPT, GPTConfig
from zero.trainer.planning.cost import step_seconds
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.probes import measured_rates
from zero.trainer.planning.traces.tracing import Traced


def train_largest(
    model: Model, host_bytes: int | None, gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget
) -> None:
    """Emit the forecast of one model and then a row for each step."""
    gpu.use_expandable_segments()
    config, rows = GPTConfig(**model.config), model.rows[0]
    known: Row = {"model": model.name, "parameters": config.parameters_numel, "tokens": rows * config.seq}
    remat = model.activations == "remat"
    counted = traced(config, rows, torch.bfloat16, remat=remat)
    try:
        plan = _plan(model, config, host_bytes, gpu, sizes, disk, counted.peak_bytes)
    except zero.ZeroError as refused:  # it does not fit: the message says why
        emit({"kind": "forecast", **known, "error": error_text(refused)})
        return
    print(plan, flush=True)
    emit({"kind": "forecast", **known, **_forecast(plan, gpu, disk, counted)})
    begin_s = time.monotonic()
    run = Running(plan, Values())
    emit({"kind": "built", **known, "seconds": round(time.monotonic() - begin_s, 1)})
    gpu.begin_peak()
    for number in range(sizes.largest_steps):
        batch, begin_s = tokens(config, rows, gpu, number), time.monotonic()
        metrics = run.step(batch)
        gpu.finish()
        row: Row = {"kind": "largest", **known, "step": number + 1, "step_s": time.monotonic() - begin_s}
        row |= {"loss": metrics.loss, "grad_norm": metrics.grad_norm, "peak_bytes": gpu.peak_bytes()}
        row |= {"flops": config.flops_per_token * known["tokens"], "peak_flops": gpu.peak_flops("bf16")}
        emit(row)
    begin_s = time.monotonic()
    run.drain()  # the deferred updates of the last step are still being written
    emit({"kind": "settled", **known, "seconds": round(time.monotonic() - begin_s, 1)})
    run.close()


def _plan(
    model: Model, config: GPTConfig, host_bytes: int | None, gpu: Gpu, sizes: Sizes, disk: Path, counted: int
) -> zero.Plan:
    with zero.empty():
        built = GPT(config)
    return zero.Plan(
        built,
        optimizer=optimizer(),
        world=gpu.world,
        precision="bf16",
        activations=model.activations,
        offload=zero.Offload("auto", path=str(disk), page_bytes=sizes.page_bytes),
        room=gpu.room(host_bytes, disk),
        activation_bytes=counted,
    )


def _forecast(plan: zero.Plan, gpu: Gpu, disk: Path, counted: Traced) -> Row:
    """Return bytes on each tier and the forecast of a step's time, from rates measured here in a few seconds."""
    bytes_of = {tier: sum(kinds.values()) for tier, kinds in plan.bytes.items()}
    config = read({"precision": {"compute": "bf16"}, "offload": {"path": str(disk)}})
    room = gpu.room(None, disk)
    device = "cpu" if gpu.simulated else "cuda"
    machine = Machine(1, 1, device, room.device, room.host, room.disk)  # type: ignore[arg-type]
    rates = measured_rates(config, machine, counted, disk="nvme" in bytes_of)
    seconds = step_seconds(plan, rates, counted.forward, counted.backward)
    return {"bytes": bytes_of, "step_s": seconds, "rates": rates.source}
