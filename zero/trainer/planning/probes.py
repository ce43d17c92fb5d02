"""Rates at which this machine computes and moves bytes, measured in a few seconds."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from zero.distributed.routes import across_nodes, within_node
from zero.distributed.world import World
from zero.engine.plan import thread_count
from zero.errors import StoreError
from zero.platform.arena import Arena
from zero.platform.cuda import compute_device
from zero.platform.device import Device
from zero.platform.run_files import folders_of
from zero.progress import Progress, reported, silent
from zero.settings.build import build_precision
from zero.store import probe
from zero.trainer.config import Config
from zero.trainer.launch.process import cores
from zero.trainer.planning.cost import Rates
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.rates import assumed
from zero.trainer.planning.timed import fastest_s
from zero.trainer.planning.traces.operators import Product
from zero.trainer.planning.traces.tracing import Traced
from zero.trainer.planning.update_probes import host_update_numel, update_numel

PROBE_FLOPS: Mapping[str, float] = {"cpu": 1e8, "cuda": 1e12}
"""Largest number of operations of a matrix product that is timed, for each thread of a CPU or for a GPU: about a
millisecond. A longer product reaches no higher rate, and other work of the machine disturbs it more often."""

PROBE_PRODUCTS = 16
"""Number of matrix products that are timed: those with the most operations."""

PROBE_S: Mapping[str, float] = {"products": 0.6, "attention": 0.2, "elementwise": 0.15, "launches": 0.05, "other": 0.2}
"""Seconds for which each probe is repeated."""

PROBE_DISK_BYTES, PROBE_DISK_S = 64 * 2**20, 1.0
PROBE_COPY_BYTES, PROBE_NUMEL = 64 * 2**20, 4 * 2**20
PROBE_GATHER_BYTES: Mapping[str, int] = {"cpu": 2**20, "cuda": 2**25}
"""Bytes that each rank contributes to a timed gather. On a network of 100 Mbit/s, ranks on CPUs take a tenth of a
second."""
MOST_GATHERED_BYTES = 2**29
"""Limit on the bytes of a timed gather over all ranks together, which matters with many ranks."""
PROBE_GATHERS = 4


def between_ranks(world: World) -> dict[str, float]:
    """Return measured rates of gathers within each node and across nodes, with all ranks at the same time. Collective.

    Each rank's fastest of several gathers counts, and of all ranks the slowest. Empty unless several nodes have equally
    many ranks.
    """
    if world.local_size == world.size or not world.nodes_alike or world.size % world.local_size:
        return {}
    rates = {}
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
            fastest_s = torch.tensor([min(times_s)], dtype=torch.float64, device="cpu")
            slowest_s = world.exchange(fastest_s, what="times of a probe").max().item()
            rates[name] = (full.nbytes - shard.nbytes) / slowest_s
    return rates


def measured_rates(
    config: Config, machine: Machine, traced: Traced, *, disk: bool, progress: Progress = silent
) -> Rates:
    """Return rates measured on this machine: operators of a microbatch, the optimizer, copies, and the disk if used.

    The fastest of several repetitions counts, because other work of the machine slows the others. Rates of links
    between ranks are assumed, unless `machine` has measured ones. Takes two or three seconds, one of them for the disk,
    and some tens of megabytes.

    Args:
        traced: the trace of a microbatch, whose matrix products and tensor sizes are timed.
        disk: whether something may be offloaded to `offload.path`.
        progress: called with the number of rates measured so far.

    Raises:
        StoreError: no file can be made at `offload.path`, or the disk reports an error. The disk is measured first.
    """
    on_cpu = machine.device == "cpu"
    here = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    device, rates = compute_device(here), assumed(config, machine)
    probes: dict[str, Callable[[], float]] = {}
    if disk:
        probes["disk_read_bytes"] = lambda: _disk_bytes(config) / machine.ranks_per_node
    probes["flops"] = lambda: _flops(config, traced, device)
    if traced.attention is not None:
        probes["attention_flops"] = lambda: _attention_flops(config, traced, device)
    probes["memory_bytes"] = lambda: _memory_bytes(config, traced, device)
    probes["update_numel"] = lambda: update_numel(config, device, PROBE_S["other"])
    if device.shares_memory:
        probes["launch_s"] = lambda: _launch_s(device)
    else:
        probes["copy_in_bytes"] = lambda: _copy_bytes(device, to_host=False)
        probes["copy_out_bytes"] = lambda: _copy_bytes(device, to_host=True)
        probes["host_bytes"] = lambda: _host_bytes(device.host) / machine.ranks_per_node
        probes["host_update_numel"] = lambda: _host_update_numel(config, machine, device)
    results = {name: probed() for name, probed in reported([*probes.items()], "probe", progress)}
    known = {"host_update_numel": results["update_numel"]} | {name: rate for name, rate in results.items() if rate > 0}
    if "disk_read_bytes" in known:  # the probe reads and writes equally many bytes at the same time
        known["disk_write_bytes"] = known["disk_read_bytes"]
    return replace(rates, **known, source=_source(results, rates, machine))


def _source(results: Mapping[str, float], rates: Rates, machine: Machine) -> str:
    units = {
        "flops": (1e9, ",.0f", "GFLOP/s in products"),
        "attention_flops": (1e9, ",.0f", "GFLOP/s in attention"),
        "memory_bytes": (1e9, ",.1f", "GB/s elementwise"),
        "update_numel": (1e6, ",.0f", "million updates/s"),
        "copy_in_bytes": (1e9, ".1f", "GB/s from the host"),
        "copy_out_bytes": (1e9, ".1f", "GB/s to the host"),
        "host_bytes": (1e9, ".1f", "GB/s of host memory for each rank"),
        "host_update_numel": (1e6, ",.0f", "million updates/s by offload.threads on the host"),
        "disk_read_bytes": (1e9, ".1f", "GB/s read from disk, while as many are written, for each rank"),
    }
    parts = [
        f"{results[name] / unit:{digits}} {text}" for name, (unit, digits, text) in units.items() if results.get(name)
    ]
    links = [f"{rates.link_bytes / 1e9:.3g} GB/s between ranks"] * (machine.ranks_per_node > 1)
    links += [f"{rates.wire_bytes / 1e9:.3g} GB/s between nodes"] * (machine.ranks > machine.ranks_per_node)
    if machine.links:
        parts, links = [*parts, *links], []
    return f"measured here: {', '.join(parts)}" + (f"; assumed: {', '.join(links)}" if links else "")


def with_disk_or_without(
    config: Config, machine: Machine, traced: Traced, progress: Progress = silent
) -> tuple[Machine, Rates, list[str]]:
    """Measure a machine, with its disk if possible; returns the machine, its rates and notes.

    If no file can be made on the disk, the returned machine has no disk and a note gives the reason.
    """
    try:
        return machine, measured_rates(config, machine, traced, disk=True, progress=progress), []
    except StoreError as error:
        rates = measured_rates(config, machine, traced, disk=False, progress=progress)
        note = f"nothing can be offloaded to a disk here, so settings that need a disk are left out: {error}"
        return replace(machine, disk_bytes=0), rates, [note]


def _disk_bytes(config: Config) -> float:
    """Measure the bytes that the disks read per second while they write as many; 0 if none answered in time."""
    folders = folders_of(config.offload.paths)
    threads = max(1, thread_count(config.offload) // len(folders))
    return sum(probe(folder, size_bytes=PROBE_DISK_BYTES, threads=threads, limit_s=PROBE_DISK_S) for folder in folders)


def _flops(config: Config, traced: Traced, device: Device) -> float:
    """Measure the operations per second of a microbatch's matrix products, each at its own shape, shortened if long."""
    compute = build_precision(config).compute
    by_weight = sorted(traced.products, key=lambda product: -product.flops * traced.products[product])
    if not by_weight:
        return 0.0
    weights: Counter[Product] = Counter()
    for product in by_weight[:PROBE_PRODUCTS]:
        weights[product.shortened(_probe_flops(device))] += int(product.flops) * traced.products[product]
    works = [_multiply(product, compute, device) for product in weights]
    times_s = fastest_s(works, device, PROBE_S["products"])
    each_s = [flops / product.flops * s for (product, flops), s in zip(weights.items(), times_s, strict=True)]
    return sum(weights.values()) / sum(each_s)


def _probe_flops(device: Device) -> float:
    return PROBE_FLOPS[device.kind] * (torch.get_num_threads() if device.shares_memory else 1)


def _multiply(product: Product, compute: torch.dtype, device: Device) -> Callable[[], object]:
    def factor(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        values = torch.randn(product.batch, *shape, device=device.device).to(compute)
        values = values if product.batch > 1 else values[0]
        return values.mT if transposed else values

    a, b = factor(product.m, product.k, product.turned[0]), factor(product.k, product.n, product.turned[1])
    return lambda: a @ b


def _attention_flops(config: Config, traced: Traced, device: Device) -> float:
    """Measure the operations per second of fused attention, forward and backward; large shapes are reduced."""
    assert traced.attention is not None
    rows, heads, tokens, channels = traced.attention
    heads, compute = rows * heads, build_precision(config).compute
    if device.shares_memory:
        heads = min(heads, torch.get_num_threads())
    while tokens > 64 and heads * tokens**2 * channels > _probe_flops(device):
        tokens //= 2
    shape = (1, heads, tokens, channels)
    trains = traced.backward.attention_flops > 0
    query, key, value = (torch.randn(shape, device=device.device).to(compute).requires_grad_(trains) for _ in range(3))

    def work() -> None:
        result = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if trains:
            torch.autograd.grad(result, (query, key, value), torch.ones_like(result))

    flops = (14 if trains else 4) * heads * tokens**2 * channels
    return flops / fastest_s([work], device, PROBE_S["attention"])[0]


def _memory_bytes(config: Config, traced: Traced, device: Device) -> float:
    """Measure the bytes read and written per second by elementwise operators of a block, at the median size of a trace.

    The operators run on more tensors than a cache holds.
    """
    compute = build_precision(config).compute
    _, heads, _, channels = traced.attention or (1, 1, 1, 64)
    tokens = max(1, min(traced.elementwise_numel, PROBE_NUMEL) // (heads * channels))
    numel = tokens * heads * channels
    table = torch.ones(tokens, channels // 2, device=device.device)

    def work(x: torch.Tensor) -> None:
        wide = x.transpose(0, 1).to(torch.float32, copy=True)
        torch.cat([half * table for half in wide.chunk(2, dim=-1)], dim=-1).to(compute, copy=True)
        x + F.silu(x) * x

    nbytes, count = numel * (10 * compute.itemsize + 6 * 4), max(1, PROBE_NUMEL // numel)
    tensors = [torch.ones(tokens, heads, channels, device=device.device, dtype=compute) for _ in range(count)]
    times_s = fastest_s([partial(work, x) for x in tensors], device, PROBE_S["elementwise"])
    return nbytes * len(tensors) / sum(times_s)


def _launch_s(device: Device) -> float:
    """Measure the overhead of starting one operator, in seconds: the mean over a forward and a backward."""
    x, count = torch.ones(1, device=device.device, requires_grad=True), 32

    def work() -> None:
        y = x
        for _ in range(count):
            y = y * x
        y.backward()

    return fastest_s([work], device, PROBE_S["launches"])[0] / (3 * count)


def _host_update_numel(config: Config, machine: Machine, device: Device) -> float:
    """Measure the parameters that a rank's threads update per second while those of the node's other ranks do so."""
    busy = machine.ranks_per_node * thread_count(config.offload)
    return host_update_numel(config, device, PROBE_S["other"]) * min(1.0, cores() / busy)


def _copy_bytes(device: Device, *, to_host: bool) -> float:
    with closing(Arena(PROBE_COPY_BYTES, device)) as arena:
        host, there = arena.take(PROBE_COPY_BYTES), device.zeros(PROBE_COPY_BYTES, torch.uint8)
        work = partial(device.copy, *((host, there) if to_host else (there, host)))
        return PROBE_COPY_BYTES / fastest_s([work], device, PROBE_S["other"])[0]


def _host_bytes(host: Device) -> float:
    """Measure the bytes of host memory that are read and written per second in a copy by all threads."""
    source, target = (host.zeros(PROBE_COPY_BYTES, torch.uint8) for _ in range(2))
    return 2 * PROBE_COPY_BYTES / fastest_s([lambda: target.copy_(source)], host, PROBE_S["other"])[0]
