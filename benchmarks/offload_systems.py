"""The systems that `offload.py` compares, one function for each. This program runs one system.

All train the same GPT on the same rows: bf16 with an fp32 master or fp32, AdamW, clipping at norm 1, one rank. The
lower bounds are compute alone, and the file traffic alone: no system can be faster than either.

What DeepSpeed's NVMe offload needs on a CPU (0.19.8): `DS_ACCELERATOR=cpu`, and three extensions that it compiles on
first use into ~/.cache/torch_extensions: async_io (needs Debian's libaio-dev), pin_memory, and cpu_adam for
DeepSpeedCPUAdam, the only optimizer that it offloads by default. A C++ compiler and ninja must be on the PATH. On two
cores that takes six minutes, so `offload.py` runs `build_deepspeed` before it measures. DS_BUILD_AIO=1 is not
needed. In the `aio` section unknown keys are ignored without a message, among them `thread_count`, which many pages
name; the number of threads is `intra_op_parallelism`.
"""

import argparse
import contextlib
import gc
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import step_systems
from step_systems import BETAS, CLIP, EPS, LR, SEED, WEIGHT_DECAY, fill, forget_peak, replica

from zero.platform.host_memory import host_peak_bytes
from zero.store import NvmeStore, Page, Store, Ticket
from zero.trainer.data import TextConfig, open_data
from zero.trainer.models import GPT, GPTConfig, loss

Step = Callable[[Tensor], dict[str, float]]


class Job(NamedTuple):
    """A system and the model that it trains.

    Offloaded state is in files below `path`. `io_threads` None: the store measures the best number.
    `disk_gbps`: the rate of the disk behind a `Door`, in 1e9 bytes per second; 0: as fast as it is.
    `second_path`: a folder on another disk, for the systems that use two. `dtype`: of compute, bf16 or fp32.
    `ahead`: bytes that ours reads before their turn; None: its default.
    """

    system: str
    width: int
    layers: int
    heads: int
    seq: int
    rows: int
    tied: bool
    io_threads: int | None
    path: str
    disk_gbps: float = 0
    second_path: str = ""
    dtype: str = "bf16"
    ahead: int | None = None

    def config(self) -> GPTConfig:
        return GPTConfig(width=self.width, layers=self.layers, heads=self.heads, seq=self.seq, tied=self.tied)


class Running(NamedTuple):
    """A system that is ready to train.

    Attributes:
        step: takes rows (b, t + 1) int64; returns numbers of this step by name: `loss`, and times and bytes.
        numel: parameters of the model.
        facts: further results: sizes from the plan, bytes of activations.
        close: closes it.
    """

    step: Step
    numel: int
    facts: dict[str, Any]
    close: Callable[[], None] = lambda: None


def _numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Compute alone


def compute(job: Job, remat: bool = False) -> Running:
    """Build forward and backward of the model in the dtype of compute, each with its time; no update."""
    model = replica(job.config()).to(torch.bfloat16 if job.dtype == "bf16" else torch.float32)
    if remat:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    facts: dict[str, Any] = {}

    def step(batch: Tensor) -> dict[str, float]:
        # torch's checkpoint keeps tensors without these hooks
        with contextlib.nullcontext() if facts or remat else _saved(model, facts):
            start = time.perf_counter()
            value = loss(model, batch)
        between = time.perf_counter()
        value.backward()
        model.zero_grad()
        end = time.perf_counter()
        return {"loss": float(value.detach()), "forward_s": between - start, "backward_s": end - between}

    return Running(step, _numel(model), facts)


@contextlib.contextmanager
def _saved(model: nn.Module, facts: dict[str, Any]) -> Iterator[None]:
    """Count the bytes that forward keeps for backward: each storage once, without parameters."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield
    facts["activation_bytes"] = sum(kept.values())


# This library


def _plan(
    job: Job,
    preset: str,
    *,
    verify: bool = True,
    master: str = "auto",
    moments: str = "fp32",
    disks: int = 1,
    **settings: Any,
) -> Any:
    """Return a plan at stage 3, otherwise with default settings."""
    import zero

    paths = [job.path, job.second_path][:disks]
    with zero.empty():
        model = GPT(job.config())
    optimizer = zero.adamw(LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP)
    return zero.Plan(
        model,
        optimizer=zero.with_moments(optimizer, moments),
        stage=3,
        precision=zero.Precision(job.dtype, master=master),  # type: ignore[arg-type]
        offload=zero.Offload(
            preset,
            path=paths if disks > 1 else job.path,
            threads=job.io_threads,
            ahead=job.ahead,
            verify=verify,
        ),
        world=zero.open_world(),
        **settings,
    )


def ours(job: Job, preset: str, **settings: Any) -> Running:
    """Build this library at stage 3 with an offload preset."""
    import zero

    plan = _plan(job, preset, **settings)
    store = zero.open_store(plan, disk=_door(job, plan) if job.disk_gbps else None)
    state = zero.init(plan, store, weights=fill)
    take = zero.make_step(plan, loss)

    def step(batch: Tensor) -> dict[str, float]:
        nonlocal state
        before = store.traffic
        state, metrics = take(state, [batch])
        return {"loss": metrics.loss} | _moved(before, store.traffic)

    return Running(step, plan.numel, {"plan_bytes": plan.bytes}, store.close)


class Passing:
    """A transfer that ends no earlier than `until_s`."""

    def __init__(self, ticket: Ticket, until_s: float) -> None:
        self._ticket, self._until_s = ticket, until_s

    @property
    def ended(self) -> bool:
        return self._ticket.ended and time.perf_counter() >= self._until_s

    def wait(self) -> None:
        self._ticket.wait()
        time.sleep(max(0.0, self._until_s - time.perf_counter()))


class Door(Store):
    """A store that lets no more than `bytes_per_s` through, reads and writes together, one after the other."""

    def __init__(self, inner: Store, bytes_per_s: float) -> None:
        self._inner, self._bytes_per_s = inner, bytes_per_s
        self._lock, self._free_s = threading.Lock(), 0.0

    def read(self, page: Page, into: Tensor) -> Ticket:
        return Passing(self._inner.read(page, into), self._until_s(into.nbytes))

    def write(self, page: Page, source: Tensor) -> Ticket:
        return Passing(self._inner.write(page, source), self._until_s(source.nbytes))

    def _until_s(self, nbytes: int) -> float:
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + nbytes / self._bytes_per_s
            return self._free_s

    def allocate_all(self, sizes: Mapping[Page, tuple[int, torch.dtype]]) -> None:
        self._inner.allocate_all(sizes)

    def rename(self, page: Page, name: Page) -> None:
        self._inner.rename(page, name)

    def free(self, page: Page) -> None:
        self._inner.free(page)

    def in_place(self, page: Page) -> Tensor | None:
        return self._inner.in_place(page)

    @property
    def allocated_bytes(self) -> int:
        return self._inner.allocated_bytes

    def close(self) -> None:
        self._inner.close()


def _door(job: Job, plan: Any) -> Door:
    """Return a store of the plan's pages in a file, behind a `Door`."""
    nbytes = sum(spec.block_bytes for page, spec in plan.pages.store_pages().items() if plan.tier(page) == "nvme")
    return Door(NvmeStore(Path(job.path), capacity_bytes=nbytes), 1e9 * job.disk_gbps)


def _moved(before: Any, after: Any) -> dict[str, float]:
    names = ("read_bytes", "write_bytes", "read_s", "write_s", "busy_s", "wait_s")
    return {name: getattr(after, name) - getattr(before, name) for name in names}


# The file traffic alone


def traffic(job: Job, preset: str, **settings: Any) -> Running:
    """Build the reads and writes of a step, with the same store, pages and threads, but without compute.

    `nvme`: reads and writes every page of master and moments. `infinity`: a forward that also reads the gradients,
    writes the parameters and reads them for each unit; then a backward that reads the parameters again, except for
    units that are still in gathered buffers, and writes the gradients. Each ends when the last byte is written.
    """
    import zero

    plan = _plan(job, preset, **settings)
    store = zero.open_store(plan)
    passes = _Traffic(plan, store)
    passes.fill()

    def step(batch: Tensor) -> dict[str, float]:
        before, start = store.traffic, time.perf_counter()
        passes.forward()
        between = time.perf_counter()
        passes.backward()
        end = time.perf_counter()
        return {"forward_s": between - start, "backward_s": end - between} | _moved(before, store.traffic)

    return Running(step, plan.numel, {"plan_bytes": plan.bytes}, store.close)


class _Traffic:
    """The reads and writes of a step. Updates of page groups do nothing."""

    def __init__(self, plan: Any, store: Any) -> None:
        from zero.store import PageGroup, Page

        self._store, self._order = store, [unit.index for unit in plan.units]
        self._held, _ = plan.sizes.gathered_at_turns()
        moved: dict[str, dict[int, dict[Page, Any]]] = {"param": {}, "grad": {}}
        groups: dict[tuple[int, int], list[Page]] = {}
        for page, spec in plan.pages.store_pages().items():
            groups.setdefault((page.unit, page.number), []).append(page)
            if page.kind in moved:
                moved[page.kind].setdefault(page.unit, {})[page] = spec
        self._params, self._grads = (_Buffers(moved[page_kind]) for page_kind in ("param", "grad"))
        kinds = (plan.passes.state_kinds, ("grad",), plan.passes.written_kinds)
        self._groups = [
            PageGroup(*key, *(tuple(page for page in pages if page.kind in some) for some in kinds))
            for key, pages in groups.items()
        ]

    def fill(self) -> None:
        """Write every page once: a page that was never written is a hole in the file and costs no time to read."""
        self._store.expect(self._groups)
        self.forward()
        self.backward()

    def forward(self) -> None:
        # all at once and in order, as a lazy update does
        for place, group in enumerate(self._groups):
            self._store.modify(group, _nothing, (place,))
        for unit in self._order:
            self._params.move(unit, self._store.read)
        self._params.wait()
        self._store.drain()

    def backward(self) -> None:
        for unit in reversed(self._order):
            if unit not in self._held:
                self._params.move(unit, self._store.read)
            self._grads.move(unit, self._store.write)
        self._params.wait()
        self._grads.wait()
        self._store.drain()


class _Buffers:
    """Three buffers in turn, each as long as the longest unit's pages of one kind: in use, ahead and behind."""

    def __init__(self, units: dict[int, dict[Any, Any]]) -> None:
        from zero.platform.host_memory import aligned_zeros

        self._units, self._turn = units, 0
        lengths = [sum(spec.numel for spec in pages.values()) for pages in units.values()]
        dtypes = [spec.dtype for pages in units.values() for spec in pages.values()]
        self._buffers = [aligned_zeros(max(lengths), dtypes[0], torch.device("cpu")) for _ in range(3) if lengths]
        self._tickets: list[list[Any]] = [[] for _ in self._buffers]

    def move(self, unit: int, transfer: Callable[..., Any]) -> None:
        """Start the transfer of a unit's pages as soon as their buffer is free."""
        pages = self._units.get(unit)
        if pages is None:
            return
        self._turn = (self._turn + 1) % len(self._buffers)
        for ticket in self._tickets[self._turn]:
            ticket.wait()
        numels = [spec.numel for spec in pages.values()]
        parts = self._buffers[self._turn][: sum(numels)].split(numels)
        self._tickets[self._turn] = [transfer(page, part) for page, part in zip(pages, parts, strict=True)]

    def wait(self) -> None:
        for ticket in (ticket for tickets in self._tickets for ticket in tickets):
            ticket.wait()


def _nothing(tensors: tuple[Tensor, ...]) -> None:
    """Compute nothing, in the place of an update."""


# Other libraries


def fsdp2(job: Job) -> Running:
    """Build FSDP2 as in `step.py`: fully_shard per block and root, fp32 reduction, fused AdamW."""
    step = step_systems.fsdp2(step_systems.Job("fsdp2", job.dtype, job.width, job.layers, job.seq, job.rows))
    numel = sum(parameter.numel() for parameter in GPT(job.config()).to("meta").parameters())
    return Running(lambda batch: {"loss": step(batch)}, numel, {})


def deepspeed_settings(job: Job, device: str, tuned: bool) -> dict[str, Any]:
    """Return DeepSpeed's JSON for the job; `tuned` adds the settings that its guides recommend."""
    offload: dict[str, Any] = {"device": device, "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": job.dtype == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if device == "nvme":
        offload["nvme_path"] = job.path
    if tuned:
        settings |= {"timers": {"throughput": {"enabled": False}}, "data_types": {"grad_accum_dtype": "fp32"}}
        settings["zero_optimization"]["sub_group_size"] = 30_000_000
    if tuned and device == "nvme":
        offload |= {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
        settings["aio"] = {
            "intra_op_parallelism": 4,
            "queue_depth": 32,
            "block_size": 1 << 20,
            "single_submit": False,
            "overlap_events": True,
        }
    return settings


def deepspeed(job: Job, device: str, tuned: bool) -> Running:
    """Build DeepSpeed's ZeRO-3 with offloaded optimizer state and DeepSpeedCPUAdam."""
    import deepspeed as library

    library.init_distributed(dist_backend="gloo", verbose=False)
    model = replica(job.config())
    numel = _numel(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    settings = deepspeed_settings(job, device, tuned)
    engine, _, _, _ = library.initialize(model=model, model_parameters=groups, config=settings)
    del model, groups

    def step(batch: Tensor) -> dict[str, float]:
        start = time.perf_counter()
        value = loss(engine, batch)
        forward = time.perf_counter()
        engine.backward(value)
        backward = time.perf_counter()
        engine.step()
        end = time.perf_counter()
        times = {"forward_s": forward - start, "backward_s": backward - forward, "update_s": end - backward}
        return {"loss": float(value.detach())} | times

    return Running(step, numel, {"settings": settings})


def build_deepspeed() -> None:
    """Compile DeepSpeed's extensions if that was not done before. Takes minutes."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    for builder in (AsyncIOBuilder(), CPUAdamBuilder()):
        if not builder.is_compatible(verbose=True):
            raise SystemExit(
                f"DeepSpeed cannot build {builder.NAME} here; see the lines above (libaio-dev? a compiler?)"
            )
        builder.load(verbose=False)


class System(NamedTuple):
    """One row of the table."""

    build: Callable[[Job], Running]
    about: str
    deepspeed: bool = False


SYSTEMS: dict[str, System] = {
    "compute": System(compute, "forward and backward of the model, nothing else"),
    "compute-remat": System(partial(compute, remat=True), "the same with each block computed again in backward"),
    "io-nvme": System(partial(traffic, preset="nvme"), "master and moments read and written once, nothing else"),
    "io-infinity": System(
        partial(traffic, preset="infinity", activations="remat"),
        "as above with gradients and parameters too: of forward, then of backward",
    ),
    "zero-none": System(partial(ours, preset="none"), "offload=none, update=lazy"),
    "zero-none-serial": System(partial(ours, preset="none", update="serial"), "offload=none, update=serial"),
    "zero-cpu": System(partial(ours, preset="cpu"), "offload=cpu, update=lazy"),
    "zero-cpu-serial": System(partial(ours, preset="cpu", update="serial"), "offload=cpu, update=serial"),
    "zero-nvme": System(partial(ours, preset="nvme"), "offload=nvme, update=lazy"),
    "zero-nvme-whole": System(partial(ours, preset="nvme", master="whole"), "offload=nvme, precision.master=whole"),
    "zero-nvme-bf16": System(partial(ours, preset="nvme", moments="bf16"), "offload=nvme, optim.moments=bf16"),
    "zero-nvme-8bit": System(partial(ours, preset="nvme", moments="8bit"), "offload=nvme, optim.moments=8bit"),
    "zero-nvme-two-disks": System(partial(ours, preset="nvme", disks=2), "offload=nvme, offload.path=[A,B]"),
    "zero-nvme-serial": System(partial(ours, preset="nvme", update="serial"), "offload=nvme, update=serial"),
    "zero-nvme-unverified": System(
        partial(ours, preset="nvme", verify=False), "offload=nvme, update=lazy, offload.verify=false"
    ),
    "zero-infinity": System(
        partial(ours, preset="infinity", activations="remat"), "offload=infinity, update=lazy, activations=remat"
    ),
    "zero-infinity-whole": System(
        partial(ours, preset="infinity", activations="remat", master="whole"),
        "offload=infinity, activations=remat, precision.master=whole",
    ),
    "zero-infinity-bf16": System(
        partial(ours, preset="infinity", activations="remat", moments="bf16"),
        "offload=infinity, activations=remat, optim.moments=bf16",
    ),
    "zero-infinity-serial": System(
        partial(ours, preset="infinity", activations="remat", update="serial"),
        "offload=infinity, update=serial, activations=remat",
    ),
    "fsdp2": System(fsdp2, "fully_shard per block and root, fused AdamW, no offload"),
    "deepspeed-cpu": System(
        partial(deepspeed, device="cpu", tuned=True),
        "ZeRO-3, offload_optimizer cpu, sub_group_size 3e7, throughput timer off, grad_accum_dtype fp32",
        deepspeed=True,
    ),
    "deepspeed-nvme": System(
        partial(deepspeed, device="nvme", tuned=True),
        "ZeRO-3, offload_optimizer nvme, tuned: as above, buffer_count 12, pipelined, aio 4 threads x depth 32",
        deepspeed=True,
    ),
    "deepspeed-nvme-defaults": System(
        partial(deepspeed, device="nvme", tuned=False),
        "ZeRO-3, offload_optimizer nvme, its defaults",
        deepspeed=True,
    ),
}


def disk_bytes() -> tuple[int, int]:
    """Return (read, written): bytes that this process moved from and to disks, counted by the kernel; Linux only."""
    counters = dict(re.findall(r"^(\w+): (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE))
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def measure(job: Job, warmup: int, steps: int) -> dict[str, Any]:
    """Return the numbers of `steps` steps by name, after `warmup` unmeasured ones."""
    data = open_data(TextConfig(), job.seq, SEED)
    running = SYSTEMS[job.system].build(job)
    gc.collect()
    per_step: dict[str, list[float]] = {}
    life = 0
    for number in range(warmup + steps):
        if number == warmup:
            life = host_peak_bytes()
            forget_peak()
        batch = data.rows(number * job.rows, (number + 1) * job.rows)
        before, start = disk_bytes(), time.perf_counter()
        numbers = running.step(batch)
        numbers["step_s"] = time.perf_counter() - start
        numbers["disk_read_bytes"], numbers["disk_write_bytes"] = (
            after - earlier for after, earlier in zip(disk_bytes(), before, strict=True)
        )
        for name, value in numbers.items():
            per_step.setdefault(name, []).append(value)
    peak = host_peak_bytes()
    running.close()
    return {
        "system": job.system,
        "dtype": job.dtype,
        "numel": running.numel,
        "warmup_s": per_step["step_s"][:warmup],
        **{name: values[warmup:] for name, values in per_step.items()},
        "step_peak_bytes": peak,
        "life_peak_bytes": max(life, peak),
        "torch": torch.__version__,
        **running.facts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-deepspeed", action="store_true", help="compile DeepSpeed's extensions and exit")
    for name in ("system", "path", "out"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--second-path", default="")
    for name in ("width", "layers", "heads", "seq", "rows", "tied", "warmup", "steps", "threads", "io-threads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--disk-gbps", type=float, default=0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--ahead", type=int, default=0)
    options = parser.parse_args()
    if options.build_deepspeed:
        build_deepspeed()
        return
    torch.set_num_threads(options.threads)
    sizes = (options.width, options.layers, options.heads, options.seq, options.rows, bool(options.tied))
    job = Job(
        options.system,
        *sizes,
        options.io_threads or None,
        options.path,
        options.disk_gbps,
        options.second_path,
        options.dtype,
        options.ahead or None,
    )
    result = measure(job, options.warmup, options.steps)
    Path(options.out).write_text(json.dumps(result))
    # everything is closed, and threads of some systems make a normal exit slow
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
