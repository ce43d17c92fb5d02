"""How fast a machine computes and moves bytes: measured here within seconds, or assumed for a described machine."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from zero.core.kept import Kept
from zero.core.layout import Layout
from zero.distributed.routes import across_nodes, within_node
from zero.distributed.world import World
from zero.engine.update import Piece
from zero.errors import StoreError
from zero.platform.cuda import compute_device
from zero.platform.device import Arena, Device
from zero.platform.run_files import folders_of
from zero.progress import Progress, reported, silent
from zero.settings.build import build_optimizer, build_precision
from zero.store import probe
from zero.trainer.config import Config
from zero.trainer.planning.cost import Rates
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.tracing import Product, Traced

GPU = Rates(
    flops=1.5e14,
    attention_flops=1.5e14,
    memory_bytes=2.5e12,
    launch_s=0.0,
    copy_bytes=4e10,
    disk_bytes=6e9,
    link_bytes=1e11,
    wire_bytes=1e10,
    update_numel=4e10,
    host_update_numel=1e9,
    source="assumed for each GPU: 150 TFLOP/s (fp32 20, TF32 75), 40 GB/s to the host and back, 100 GB/s to other GPUs "
    "(10 between nodes), and 6 GB/s of disk for each node",
)
CPU = Rates(
    flops=5e10,
    attention_flops=2e10,
    memory_bytes=1e10,
    launch_s=1e-5,
    copy_bytes=1e10,
    disk_bytes=2e9,
    link_bytes=5e8,
    wire_bytes=1e8,
    update_numel=1e9,
    host_update_numel=1e9,
    source="assumed for each rank: 50 GFLOP/s, 0.5 GB/s to other ranks (0.1 between nodes), and 2 GB/s of disk for "
    "each node",
)
GPU_FP32_FLOPS, GPU_TF32_FLOPS = 2e13, 7.5e13

PROBE_FLOPS: Mapping[str, float] = {"cpu": 1e8, "cuda": 1e12}
"""Most operations of a product that is timed, for each thread of a CPU: about a millisecond. A longer one is no faster,
and is disturbed more often by what else the machine does."""

PROBE_PRODUCTS = 16
"""How many products are timed: those that most operations belong to."""

PROBE_S: Mapping[str, float] = {"products": 0.6, "attention": 0.2, "elementwise": 0.15, "launches": 0.05, "other": 0.2}
"""How long turns are repeated."""

BUSY_S, BUSY_SHARE = 0.05, 0.8
"""How long it is tried whether a thread has a core to itself, and the share of that time that it then has at least."""

PROBE_DISK_BYTES, PROBE_DISK_S = 64 * 2**20, 1.0
PROBE_COPY_BYTES, PROBE_NUMEL = 64 * 2**20, 4 * 2**20
PROBE_GATHER_BYTES: Mapping[str, int] = {"cpu": 2**20, "cuda": 2**25}
"""Of each rank. On a slow wire, of 100 Mbit/s, it takes a CPU's ranks a tenth of a second."""
MOST_GATHERED_BYTES = 2**29
"""Of all ranks together: of thousands each sends less."""
PROBE_GATHERS = 4


def assumed(config: Config, machine: Machine) -> Rates:
    """Round numbers for the kind of machine; whatever is computed from them names them."""
    rates = GPU if machine.device == "cuda" else CPU
    rates = replace(rates, disk_bytes=rates.disk_bytes / machine.ranks_per_node)
    if machine.device == "cuda" and config.precision.compute == "fp32":
        flops = GPU_FP32_FLOPS if config.precision.matmul == "highest" else GPU_TF32_FLOPS
        rates = replace(rates, flops=flops, attention_flops=flops)
    found = {"link_bytes": rates.link_bytes, "wire_bytes": rates.wire_bytes} | machine.links
    return replace(rates, link_bytes=found["link_bytes"], wire_bytes=found["wire_bytes"])


def between_ranks(world: World) -> dict[str, float]:
    """Rates of gathers within each node and across nodes, in which all ranks take part at once. Collective.

    The best of several counts, and the slowest rank. Where ranks are not on nodes alike, nothing is measured.
    """
    if world.local_size == world.size or not world.nodes_alike or world.size % world.local_size:
        return {}
    found = {}
    for name, part in (("link_bytes", within_node(world, "gather")), ("wire_bytes", across_nodes(world, "gather"))):
        shard_bytes = min(PROBE_GATHER_BYTES[world.compute.kind], MOST_GATHERED_BYTES // part.size)
        shard = world.compute.zeros(shard_bytes, torch.uint8)
        full, times_s = world.compute.zeros(part.size * shard.numel(), torch.uint8), []
        for _ in range(PROBE_GATHERS if part.size > 1 else 0):
            world.barrier("a probe")
            begin_s = time.perf_counter()
            part.gather(shard, full, what="a probe").wait()
            world.compute.join()
            times_s.append(time.perf_counter() - begin_s)
        if times_s:
            mine = torch.tensor([min(times_s)], dtype=torch.float64, device="cpu")
            found[name] = (full.nbytes - shard.nbytes) / world.exchange(mine, what="times of a probe").max().item()
    return found


def measured(config: Config, machine: Machine, traced: Traced, *, disk: bool, progress: Progress = silent) -> Rates:
    """Rates of this machine: what a microbatch computes, in pieces; the optimizer, copies, and the disk if it is used.

    The best of several turns counts: what the machine does when it does nothing else. Links between ranks are assumed,
    unless the machine has measured ones.
    Takes two or three seconds, one of them for the disk, and some tens of megabytes.

    Args:
        traced: a microbatch, whose own products and sizes are timed.
        disk: whether something may be offloaded to `offload.path`.
        progress: is given the number of rates known so far.

    Raises:
        StoreError: no file can be made there, or the disk reports an error; nothing else was measured yet.
    """
    device, rates = compute_device(torch.device(machine.device)), assumed(config, machine)
    bench = _Bench(device)
    probes: dict[str, Callable[[], float]] = {}
    if disk:
        probes["disk_bytes"] = lambda: _disk_bytes(config) / machine.ranks_per_node
    probes["flops"] = lambda: _flops(config, traced, bench)
    if traced.attention is not None:
        probes["attention_flops"] = lambda: _attention_flops(config, traced, bench)
    probes["memory_bytes"] = lambda: _memory_bytes(config, traced, bench)
    probes["update_numel"] = lambda: _update_numel(config, bench)
    if device.shares_memory:
        probes["launch_s"] = lambda: _launch_s(bench)
    else:
        probes["copy_bytes"] = lambda: _copy_bytes(bench)
        probes["host_update_numel"] = lambda: _update_numel(config, _Bench(device.host))
    found = {name: probed() for name, probed in reported([*probes.items()], "probe", progress)}
    found = {"host_update_numel": found["update_numel"]} | {name: rate for name, rate in found.items() if rate > 0}
    busy = ", timed on one thread because the cores have other work" if bench.busy else ""
    return replace(rates, **found, source=_source(found, rates, machine) + busy)


def _source(found: Mapping[str, float], rates: Rates, machine: Machine) -> str:
    source = f"measured here: {found['flops'] / 1e9:,.0f} GFLOP/s in products"
    source += f", {found['attention_flops'] / 1e9:,.0f} in attention" if "attention_flops" in found else ""
    source += f", {found['memory_bytes'] / 1e9:,.1f} GB/s elementwise"
    source += f", {found['update_numel'] / 1e6:,.0f} million updates/s"
    source += f", {found['copy_bytes'] / 1e9:.1f} GB/s to the host and back" if "copy_bytes" in found else ""
    source += f", {found['disk_bytes'] / 1e9:.1f} GB/s of disk for each rank" if "disk_bytes" in found else ""
    links = [f"{rates.link_bytes / 1e9:.3g} GB/s between ranks"] * (machine.ranks_per_node > 1)
    links += [f"{rates.wire_bytes / 1e9:.3g} GB/s between nodes"] * (machine.ranks > machine.ranks_per_node)
    return source + (", " if machine.links else "; assumed: ") * bool(links) + ", ".join(links)


def with_disk_or_without(
    config: Config, machine: Machine, traced: Traced, progress: Progress = silent
) -> tuple[Machine, Rates, list[str]]:
    """The machine, its rates and notes, where the disk is optional: if no file can be made on it, the machine has none
    and a note says why."""
    try:
        return machine, measured(config, machine, traced, disk=True, progress=progress), []
    except StoreError as refused:
        rates = measured(config, machine, traced, disk=False, progress=progress)
        note = f"nothing can be offloaded to a disk here, so what needs one is left out: {refused}"
        return replace(machine, disk_bytes=0), rates, [note]


class _Bench:
    """Where works are timed.

    A CPU's cores may have other work. Then a thread waits for another one that does not get a core, for any length of
    time. A work is timed there on the clock of one thread, and taken to be done by all as fast.

    Attributes:
        device: that computes.
        threads: of a CPU that a work is done by.
        busy: whether its cores have been found to have other work.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.threads = torch.get_num_threads() if device.shares_memory else 1
        begin_s, own_s = time.perf_counter(), time.thread_time()
        while time.perf_counter() < begin_s + BUSY_S:
            pass
        self.busy = self.threads > 1 and time.thread_time() - own_s < BUSY_SHARE * BUSY_S

    def seconds(self, works: Sequence[Callable[[], object]], limit_s: float) -> list[float]:
        """Of each work, in turns for so long. All threads are as slow as one only where they wait for cores."""
        if not self.device.shares_memory:
            return self._turns(works, limit_s)
        alone_s = self.alone_s(works, limit_s / self.threads)
        if self.threads == 1:
            return alone_s
        shared_s = alone_s if self.busy else self._turns(works, limit_s / 2)
        self.busy |= sum(shared_s) >= sum(alone_s)
        return [one_s / self.threads for one_s in alone_s] if self.busy else shared_s

    def alone_s(self, works: Sequence[Callable[[], object]], limit_s: float) -> list[float]:
        """By this thread, on its own clock."""
        if self.threads > 1:
            torch.set_num_threads(1)
        try:
            return self._turns(works, limit_s, alone=True)
        finally:
            if self.threads > 1:
                torch.set_num_threads(self.threads)

    def _turns(self, works: Sequence[Callable[[], object]], limit_s: float, *, alone: bool = False) -> list[float]:
        """At least one after the first, which may load things; what one thread does alone is timed on its own clock."""
        clock = time.thread_time if alone else time.perf_counter
        for work in works:
            work()
        self.device.join()
        taken_s: list[list[float]] = [[] for _ in works]
        end_s = time.perf_counter() + limit_s
        while not taken_s[-1] or time.perf_counter() < end_s:
            for work, times_s in zip(works, taken_s, strict=True):
                begin_s = clock()
                work()
                self.device.join()
                times_s.append(max(clock() - begin_s, 1e-9))
        return [statistics.median(times_s) if alone else min(times_s) for times_s in taken_s]


def _disk_bytes(config: Config) -> float:
    """Read and written per second; 0 if the disk did not answer in time."""
    speeds = [probe(one, size_bytes=PROBE_DISK_BYTES, limit_s=PROBE_DISK_S) for one in folders_of(config.offload.paths)]
    return 1e9 * sum(speed.read_gbps + speed.write_gbps for speed in speeds)


def _flops(config: Config, traced: Traced, bench: _Bench) -> float:
    """Operations per second of the products of a microbatch, each timed at its own shape, shortened if it is long."""
    compute = build_precision(config).compute
    heaviest = sorted(traced.products, key=lambda one: -one.flops * traced.products[one])[:PROBE_PRODUCTS]
    if not heaviest:
        return 0.0
    weights: Counter[Product] = Counter()
    for product in heaviest:
        weights[product.shortened(_most_flops(bench))] += int(product.flops) * traced.products[product]
    times_s = bench.seconds([_multiply(one, compute, bench.device) for one in weights], PROBE_S["products"])
    each_s = [flops / one.flops * s for (one, flops), s in zip(weights.items(), times_s, strict=True)]
    return sum(weights.values()) / sum(each_s)


def _most_flops(bench: _Bench) -> float:
    return PROBE_FLOPS[bench.device.kind] * bench.threads


def _multiply(product: Product, compute: torch.dtype, device: Device) -> Callable[[], object]:
    def factor(rows: int, columns: int, turned: bool) -> torch.Tensor:
        shape = (columns, rows) if turned else (rows, columns)
        made = torch.randn(product.batch, *shape, device=device.device).to(compute)
        return (made.mT if turned else made) if product.batch > 1 else (made[0].mT if turned else made[0])

    a, b = factor(product.m, product.k, product.turned[0]), factor(product.k, product.n, product.turned[1])
    return lambda: a @ b


def _attention_flops(config: Config, traced: Traced, bench: _Bench) -> float:
    """Operations per second of fused attention, forward and backward, at its own shape, with fewer heads and tokens."""
    assert traced.attention is not None
    device, (rows, heads, tokens, channels) = bench.device, traced.attention
    heads, compute = rows * heads, build_precision(config).compute
    if device.shares_memory:
        heads = min(heads, bench.threads)
    while tokens > 64 and 4 * heads * tokens**2 * channels > 4 * _most_flops(bench):
        tokens //= 2
    shape = (1, heads, tokens, channels)
    trains = traced.backward.attention_flops > 0
    query, key, value = (torch.randn(shape, device=device.device).to(compute).requires_grad_(trains) for _ in range(3))

    def work() -> None:
        made = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if made.requires_grad:
            torch.autograd.grad(made, (query, key, value), torch.ones_like(made))

    flops = (14 if query.requires_grad else 4) * heads * tokens**2 * channels
    return flops / bench.seconds([work], PROBE_S["attention"])[0]


def _memory_bytes(config: Config, traced: Traced, bench: _Bench) -> float:
    """Bytes read and written per second by what a block has beside products, on tensors as large as most of it makes.

    There are as many of them as a cache does not hold.
    """
    compute = build_precision(config).compute
    _, heads, _, channels = traced.attention or (1, 1, 1, 64)
    tokens = max(1, min(traced.elementwise_numel, PROBE_NUMEL) // (heads * channels))
    numel = tokens * heads * channels
    table = torch.ones(tokens, channels // 2, device=bench.device.device)

    def work(x: torch.Tensor) -> None:
        wide = x.transpose(0, 1).to(torch.float32, copy=True)
        torch.cat([half * table for half in wide.chunk(2, dim=-1)], dim=-1).to(compute, copy=True)
        x + F.silu(x) * x

    nbytes = numel * (10 * compute.itemsize + 6 * 4)
    count, device = max(1, PROBE_NUMEL // numel), bench.device.device
    tensors = [torch.ones(tokens, heads, channels, device=device, dtype=compute) for _ in range(count)]
    times_s = bench.seconds([partial(work, x) for x in tensors], PROBE_S["elementwise"])
    return nbytes * len(tensors) / sum(times_s)


def _launch_s(bench: _Bench) -> float:
    """What an operator takes beside its work, in forward and backward."""
    x, count = torch.ones(1, device=bench.device.device, requires_grad=True), 32

    def work() -> None:
        y = x
        for _ in range(count):
            y = y * x
        y.backward()

    return bench.alone_s([work], PROBE_S["launches"])[0] / (3 * count)


def _update_numel(config: Config, bench: _Bench) -> float:
    """Parameters per second that are updated, their gradient's norm taken before: in pieces, as the engine does."""
    device, optimizer, precision = bench.device, build_optimizer(config), build_precision(config)
    now, kept = optimizer.groups[0](1)._replace(lr=0.0, weight_decay=0.0), Kept(precision.master, optimizer)
    grad = torch.zeros(PROBE_NUMEL, device=device.device)
    param = torch.zeros(PROBE_NUMEL, dtype=precision.compute, device=device.device)
    state = [device.zeros(kept.numel(kind, PROBE_NUMEL), dtype) for kind, dtype in kept.dtypes.items()]
    layout = Layout.of({"probe": (PROBE_NUMEL,)}, world_size=1)

    def work(start: int) -> None:
        stop = min(PROBE_NUMEL, start + device.piece_numel)
        piece, places = Piece(0, param, state, grad).cut(start, stop), layout.pieces(start, stop)
        device.sum_of_squares(piece.grad_K)
        with kept.opened([piece.param_K], [piece.kept], [places], 1) as (masters, *moments):
            optimizer.update(list(masters), [piece.grad_K], tuple(list(one) for one in moments), now, 1.0, {})

    works = [partial(work, start) for start in range(0, PROBE_NUMEL, device.piece_numel)]
    return PROBE_NUMEL / sum(bench.seconds(works, PROBE_S["other"]))


def _copy_bytes(bench: _Bench) -> float:
    device = bench.device
    with closing(Arena(PROBE_COPY_BYTES, device)) as arena:
        host, there = arena.take(PROBE_COPY_BYTES), device.zeros(PROBE_COPY_BYTES, torch.uint8)

        def work() -> None:
            device.copy(there, host)
            device.copy(host, there)

        return 2 * PROBE_COPY_BYTES / bench.seconds([work], PROBE_S["other"])[0]
