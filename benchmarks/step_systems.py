"""The systems that `step.py` compares, one function for each. This program runs one rank of one system.

All train the same GPT on the same rows with the same optimizer: fused AdamW, clipping at norm 1, gradients reduced in
fp32. Other settings are those that a system's own documentation recommends; `SYSTEMS` lists them.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zero.platform.host_memory import host_peak_bytes
from zero.trainer.data import TextConfig, open_data
from zero.trainer.models import GPT, GPTConfig, loss

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
SEED = 0

Step = Callable[[Tensor], float]


class Job(NamedTuple):
    """A system and the sizes of its model. `dtype` is fp32 or bf16; `rows` are per rank."""

    system: str
    dtype: str
    width: int
    layers: int
    seq: int
    rows: int

    @property
    def half(self) -> bool:
        return self.dtype == "bf16"

    def config(self) -> GPTConfig:
        return GPTConfig(width=self.width, layers=self.layers, heads=self.width // 64, seq=self.seq, tied=False)


def fill(name: str, parameter: Tensor) -> None:
    """Fill a parameter with values drawn from its name, so that every system starts with the same ones."""
    if parameter.ndim == 1:
        parameter.fill_(1.0)
        return
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    parameter.normal_(std=0.02, generator=generator)


def replica(config: GPTConfig) -> GPT:
    """Return the whole model with the initial values of every system."""
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    return model


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return torch's fused AdamW with weight decay on matrices only, as in this library by default."""
    decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def _gloo() -> None:
    dist.init_process_group("gloo")


def floor(job: Job) -> Step:
    """Build forward and backward of the replica, nothing else."""
    _gloo()
    model = replica(job.config()).to(torch.bfloat16 if job.half else torch.float32)

    def step(batch: Tensor) -> float:
        value = loss(model, batch)
        value.backward()
        model.zero_grad()
        return float(value.detach())

    return step


def ddp(job: Job) -> Step:
    """Build DDP with fp32 parameters; bf16 is torch.autocast around the forward, as torch's AMP pages recommend."""
    from torch.nn.parallel import DistributedDataParallel

    _gloo()
    # the rotary tables are constants: without this DDP would broadcast them every step
    model = DistributedDataParallel(replica(job.config()), broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = _adamw(model)

    def step(batch: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=job.half):
            value = loss(model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return step


def fsdp2(job: Job, *, hybrid: bool = False) -> Step:
    """Build fully_shard on each block and on the root; bf16 is MixedPrecisionPolicy(param bf16, reduce fp32).

    Args:
        hybrid: shard within each node, and replicate over nodes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _gloo()
    size, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shape, names = ((size // local, local), ("replicate", "shard")) if hybrid else ((size,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    keys: dict[str, Any] = {"mesh": mesh, "mp_policy": policy if job.half else MixedPrecisionPolicy()}
    model = replica(job.config())
    for block in model.blocks:
        fully_shard(block, **keys)
    fully_shard(model, **keys)
    optimizer = _adamw(model)

    def step(batch: Tensor) -> float:
        value = loss(model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return step


def _deepspeed(job: Job, stage: int, communication: str | None) -> Step:
    """Build DeepSpeed with torch's fused AdamW; bf16 is its bf16 mode with fp32 master."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = replica(job.config())
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": job.half},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }
    if communication is not None:
        settings["communication_data_type"] = communication
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=settings)
    del model

    def step(batch: Tensor) -> float:
        value = loss(engine, batch)
        engine.backward(value)
        engine.step()
        return float(value.detach())

    return step


def _zero(job: Job, stage: int, *, compiled: bool = False, **more: Any) -> Step:
    """Build a stage of this library with its defaults: lazy update, prefetch 1.

    Args:
        more: `bucket`, `gather`, `reduce` and `shard` of `zero.Plan`.
    """
    import zero

    world = zero.open_world()
    with zero.empty():
        model = GPT(job.config())
    plan = zero.Plan(
        model,
        optimizer=zero.adamw(LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP),
        stage=zero.Stage(stage),
        precision=zero.Precision(job.dtype),
        compile=compiled,
        world=world,
        **more,
    )
    store = zero.open_store(plan)
    state = zero.init(plan, store, weights=fill)
    take = zero.make_step(plan, loss)

    def step(batch: Tensor) -> float:
        nonlocal state
        state, metrics = take(state, [batch])
        return metrics.loss

    return step


class System(NamedTuple):
    """One row of the table."""

    build: Callable[[Job], Step]
    about: str
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    deepspeed: bool = False


SYSTEMS: dict[str, System] = {
    "floor": System(floor, "forward and backward of the replica on both ranks at once, in the dtype; no update"),
    "ddp": System(ddp, "DDP, gradient_as_bucket_view; bf16: fp32 parameters and gradients under autocast"),
    "fsdp2": System(
        fsdp2, "fully_shard per block and root; bf16: parameters gathered in bf16, gradients reduced in fp32"
    ),
}
for _stage in (1, 2, 3):
    SYSTEMS[f"deepspeed{_stage}"] = System(
        lambda job, stage=_stage: _deepspeed(job, stage, "fp32"),
        f"DeepSpeed ZeRO-{_stage}, communication_data_type fp32, throughput timer off; bf16: bf16.enabled",
        deepspeed=True,
    )
    SYSTEMS[f"deepspeed{_stage}-asis"] = System(
        lambda job, stage=_stage: _deepspeed(job, stage, None),
        f"DeepSpeed ZeRO-{_stage}, communication_data_type by default (the model's dtype)",
        dtypes=("bf16",),  # with an fp32 model it would be the same job as above
        deepspeed=True,
    )
for _stage in (0, 1, 2, 3):
    SYSTEMS[f"zero{_stage}"] = System(
        lambda job, stage=_stage: _zero(job, stage), f"zero.stage={_stage}, update=lazy, prefetch=1, reduce fp32"
    )
    SYSTEMS[f"zero{_stage}-apart"] = System(
        lambda job, stage=_stage: _zero(job, stage, bucket=0), f"zero.stage={_stage} zero.bucket=0"
    )
    SYSTEMS[f"zero{_stage}-bucket"] = System(
        lambda job, stage=_stage: _zero(job, stage, bucket=4 * 2**20), f"zero.stage={_stage} zero.bucket=4MiB"
    )
SYSTEMS["zero3-native"] = System(lambda job: _zero(job, 3, reduce="native"), "zero.stage=3 zero.reduce=native")
SYSTEMS["zero3-compiled"] = System(
    lambda job: _zero(job, 3, compiled=True), "the same with zero.compile=true; its first step compiles"
)
BETWEEN_NODES: dict[str, System] = {
    "fsdp2-hybrid": System(lambda job: fsdp2(job, hybrid=True), "fsdp2, sharded in each node, replicated over nodes"),
    "zero3-copies": System(lambda job: _zero(job, 3, shard="node"), "zero.stage=3 zero.shard=node"),
}
"""Systems that differ from those of `SYSTEMS` only on several nodes."""
for _stage in (1, 3):
    BETWEEN_NODES |= {
        f"zero{_stage}-straight": System(
            lambda job, stage=_stage: _zero(job, stage, gather="world"), f"zero.stage={_stage} zero.gather=world"
        ),
        f"zero{_stage}-gather": System(
            lambda job, stage=_stage: _zero(job, stage, gather="node"), f"zero.stage={_stage} zero.gather=node"
        ),
        f"zero{_stage}-node": System(
            lambda job, stage=_stage: _zero(job, stage, gather="node", reduce="node"),
            f"zero.stage={_stage} zero.gather=node zero.reduce=node",
        ),
    }


def forget_peak() -> None:
    """Reset `host_peak_bytes`; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(job: Job, warmup: int, steps: int, rows: str = "") -> dict[str, Any]:
    """Return the times of `steps` steps between barriers, after `warmup` unmeasured ones.

    Args:
        rows: a file to which rank 0 adds a line after each step.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = open_data(TextConfig(), job.seq, SEED)
    step = (SYSTEMS | BETWEEN_NODES)[job.system].build(job)
    if not dist.is_initialized():  # one rank needs none
        _gloo()
    gc.collect()
    times, busy, losses = [], [], []
    built = host_peak_bytes()
    for number in range(warmup + steps):
        if number == warmup:
            built = max(built, host_peak_bytes())
            forget_peak()
        batch = data.rows((number * size + rank) * job.rows, (number * size + rank + 1) * job.rows)
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(step(batch))
        dist.barrier()
        times.append(time.perf_counter() - start)
        busy.append(time.process_time() - cpu_start)
        if rows and rank == 0:
            with Path(rows).open("a") as lines:
                print(json.dumps({"step": number + 1}), file=lines)
    peaks, mean = torch.tensor([built, host_peak_bytes()], dtype=torch.int64), torch.tensor(losses) / size
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    return {
        "system": job.system,
        "dtype": job.dtype,
        "step_s": times[warmup:],
        "cpu_s": busy[warmup:],
        "warmup_s": times[:warmup],
        "loss": mean.tolist(),
        "build_peak_bytes": int(peaks[0]),
        "step_peak_bytes": int(peaks[1]),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("system", "dtype", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("width", "layers", "seq", "rows", "warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rows-file", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = Job(options.system, options.dtype, options.width, options.layers, options.seq, options.rows)
    result = measure(job, options.warmup, options.steps, options.rows_file)
    if os.environ["RANK"] == "0":
        Path(options.out).write_text(json.dumps(result))
    dist.barrier()
    # everything is closed, and threads of some systems make a normal exit slow
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
