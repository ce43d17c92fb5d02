"""How fast a machine computes and moves bytes: measured here within seconds, or assumed for a described machine."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from zero.core.kept import Kept
from zero.core.layout import Layout
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

GPU = Rates(
    flops=1.5e14,
    copy_bytes=4e10,
    disk_bytes=6e9,
    link_bytes=1e11,
    update_numel=4e10,
    host_update_numel=1e9,
    source="assumed for each GPU: 150 TFLOP/s (fp32 20), 40 GB/s to the host and back, 100 GB/s to other GPUs "
    "(10 between nodes), and 6 GB/s of disk for each node",
)
CPU = Rates(
    flops=5e10,
    copy_bytes=1e10,
    disk_bytes=2e9,
    link_bytes=1e9,
    update_numel=1e9,
    host_update_numel=1e9,
    source="assumed for each rank: 50 GFLOP/s, 1 GB/s to other ranks, and 2 GB/s of disk for each node",
)
GPU_FP32_FLOPS, BETWEEN_NODES_BYTES = 2e13, 1e10

PROBE_FLOPS: Mapping[str, float] = {"cpu": 3e9, "cuda": 2e12}
"""Most operations in a turn of the compute that is measured: some hundredths of a second, except for a CPU's fp16."""

PROBE_FEW_TOKENS, PROBE_TOKENS = 8, 4096
PROBE_S = 0.2
"""How long turns are repeated."""

PROBE_MATRIX_NUMEL: Mapping[str, int] = {"cpu": 2**22, "cuda": 2**25}
PROBE_DISK_BYTES, PROBE_DISK_S = 64 * 2**20, 1.0
PROBE_COPY_BYTES, PROBE_NUMEL = 64 * 2**20, 4 * 2**20


def assumed(config: Config, machine: Machine) -> Rates:
    """Round numbers for the kind of machine; whatever is computed from them names them."""
    rates = GPU if machine.device == "cuda" else CPU
    rates = replace(rates, disk_bytes=rates.disk_bytes / machine.ranks_per_node)
    if machine.device == "cuda" and config.precision.compute == "fp32":
        rates = replace(rates, flops=GPU_FP32_FLOPS)
    if machine.device == "cuda" and machine.ranks > machine.ranks_per_node:
        rates = replace(rates, link_bytes=BETWEEN_NODES_BYTES)
    return rates


def measured(config: Config, machine: Machine, model: nn.Module, *, disk: bool, progress: Progress = silent) -> Rates:
    """Rates of this machine: a shortened row forward and backward, the optimizer, copies, and the disk if it is used.

    Links between ranks are assumed. Takes two or three seconds, one of them for the disk.

    Args:
        disk: whether something may be offloaded to `offload.path`.
        progress: is given the number of rates known so far.

    Raises:
        StoreError: no file can be made there, or the disk reports an error; nothing else was measured yet.
    """
    device, rates = compute_device(torch.device(machine.device)), assumed(config, machine)
    probes: dict[str, Callable[[], float]] = {}
    if disk:
        probes["disk_bytes"] = lambda: _disk_bytes(config) / machine.ranks_per_node
    probes["flops"] = lambda: _flops(config, model, device)
    probes["update_numel"] = lambda: _update_numel(config, device)
    if not device.shares_memory:
        probes["copy_bytes"] = lambda: _copy_bytes(device)
        probes["host_update_numel"] = lambda: _update_numel(config, device.host)
    found = {name: probed() for name, probed in reported([*probes.items()], "probe", progress)}
    found = {"host_update_numel": found["update_numel"]} | {name: rate for name, rate in found.items() if rate > 0}
    source = f"measured here: {found['flops'] / 1e9:,.0f} GFLOP/s, {found['update_numel'] / 1e6:,.0f} million updates/s"
    source += f", {found['copy_bytes'] / 1e9:.1f} GB/s to the host and back" if "copy_bytes" in found else ""
    source += f", {found['disk_bytes'] / 1e9:.1f} GB/s of disk for each rank" if "disk_bytes" in found else ""
    source += f"; assumed: {rates.link_bytes / 1e9:g} GB/s between ranks" if machine.ranks > 1 else ""
    return replace(rates, **found, source=source)


def with_disk_or_without(
    config: Config, machine: Machine, model: nn.Module, progress: Progress = silent
) -> tuple[Machine, Rates, list[str]]:
    """The machine, its rates and notes, where the disk is optional: if no file can be made on it, the machine has none
    and a note says why."""
    try:
        return machine, measured(config, machine, model, disk=True, progress=progress), []
    except StoreError as refused:
        rates = measured(config, machine, model, disk=False, progress=progress)
        note = f"nothing can be offloaded to a disk here, so what needs one is left out: {refused}"
        return replace(machine, disk_bytes=0), rates, [note]


def _rate(work: Callable[[int], object], device: Device, most: int = 1) -> float:
    """`count` per second of `work(count)`: the best of several turns, because others may use the machine too.

    Args:
        most: the largest count of a turn. It is smaller where a turn would last longer than turns are repeated for.
    """

    def shortest_s(count: int) -> float:
        """Of two turns: the first may load things."""
        times_s = []
        for _ in range(2):
            begin_s = time.perf_counter()
            work(count)
            device.join()
            times_s.append(time.perf_counter() - begin_s)
        return max(min(times_s), 1e-6)

    few = min(PROBE_FEW_TOKENS, most)
    fixed_s, few_s = shortest_s(1), shortest_s(few)
    count = max(few, min(most, int(few * PROBE_S / max(few_s - fixed_s, 1e-6))))
    end_s = time.perf_counter() + PROBE_S
    best_s = shortest_s(count)
    while time.perf_counter() < end_s:
        best_s = min(best_s, shortest_s(count))
    return count / best_s


def _disk_bytes(config: Config) -> float:
    """Read and written per second; 0 if the disk did not answer in time."""
    speeds = [probe(one, size_bytes=PROBE_DISK_BYTES, limit_s=PROBE_DISK_S) for one in folders_of(config.offload.paths)]
    return 1e9 * sum(speed.read_gbps + speed.write_gbps for speed in speeds)


def _flops(config: Config, model: nn.Module, device: Device) -> float:
    """Operations per second of forward and backward of the largest matrices that the model multiplies with.

    The model itself may be too large to run, so a stack of products of its shapes runs in its place.
    """
    matrices = {
        tuple(p.shape) for p in model.parameters() if p.ndim == 2 and p.numel() <= PROBE_MATRIX_NUMEL[device.kind]
    }
    shapes = sorted(matrices, key=lambda shape: shape[0] * shape[1])[-3:] or [(1024, 1024)]
    compute = build_precision(config).compute
    weights = [torch.randn(shape, device=device.device).to(compute) for shape in shapes]
    flops = 6 * sum(weight.numel() for weight in weights)
    most = max(16, min(int(PROBE_FLOPS[device.kind] / flops), PROBE_TOKENS))
    inputs = [torch.randn(most, weight.shape[1], device=device.device).to(compute) for weight in weights]

    def work(tokens: int) -> None:
        for rows, weight in zip(inputs, weights, strict=True):
            x = rows[:tokens]
            out = x @ weight.T
            (out @ weight, out.T @ x)

    return flops * _rate(work, device, most)


def _update_numel(config: Config, device: Device) -> float:
    optimizer, precision = build_optimizer(config), build_precision(config)
    now, kept = optimizer.groups[0](1)._replace(lr=0.0, weight_decay=0.0), Kept(precision.master, optimizer)
    grad = torch.zeros(PROBE_NUMEL, device=device.device)
    param = torch.zeros(PROBE_NUMEL, dtype=precision.compute, device=device.device)
    state = [torch.zeros(PROBE_NUMEL, dtype=dtype, device=device.device) for dtype in kept.dtypes.values()]
    places = Layout.of({"probe": (PROBE_NUMEL,)}, world_size=1).pieces(0, PROBE_NUMEL)

    def work(_: int) -> None:
        with kept.opened([param], [state], [places], 1) as (masters, *moments):
            optimizer.update(list(masters), [grad], tuple(list(one) for one in moments), now, 1.0, {})

    return PROBE_NUMEL * _rate(work, device)


def _copy_bytes(device: Device) -> float:
    arena = Arena(PROBE_COPY_BYTES, device)
    host, there = arena.take(PROBE_COPY_BYTES), device.zeros(PROBE_COPY_BYTES, torch.uint8)

    def work(_: int) -> None:
        device.copy(there, host)
        device.copy(host, there)

    try:
        return 2 * PROBE_COPY_BYTES * _rate(work, device)
    finally:
        arena.close()
