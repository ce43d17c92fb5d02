"""Rates at which a described machine is assumed to compute and to move bytes; `probes` measures real rates."""

import math
from collections.abc import Mapping
from dataclasses import replace

from zero.engine.plan import thread_count
from zero.errors import ConfigError
from zero.trainer.config import Config
from zero.trainer.planning.cost import DISK_RATES, UPDATE_BYTES, Rates, scaled_work
from zero.trainer.planning.machine import Machine, described_gpu

CORES, CORE_UPDATE_NUMEL = 12, 1e8
"""Cores that a described node has for each GPU, and the parameters that each of them updates per second."""

GPU = Rates(
    flops=1.5e14,
    attention_flops=1.5e14,
    memory_bytes=2.5e12,
    launch_s=0.0,
    copy_in_bytes=2.4e10,
    copy_out_bytes=2.4e10,
    disk_read_bytes=6.75e9,
    disk_write_bytes=2.75e9,
    host_bytes=3e11,
    link_bytes=1e11,
    wire_bytes=1e10,
    update_numel=4e10,
    host_update_numel=CORES * CORE_UPDATE_NUMEL,
    source="",
)
"""Rates assumed for a GPU, and for a node with one drive of PCIe 4."""

CPU_RATES = Rates(
    flops=5e10,
    attention_flops=2e10,
    memory_bytes=1e10,
    launch_s=1e-5,
    copy_in_bytes=1e10,
    copy_out_bytes=1e10,
    disk_read_bytes=1e9,
    disk_write_bytes=1e9,
    host_bytes=math.inf,
    link_bytes=5e8,
    wire_bytes=1e8,
    update_numel=1e9,
    host_update_numel=1e9,
    source="assumed for each rank: 50 GFLOP/s, 0.5 GB/s to other ranks (0.1 between nodes), and 1 GB/s read "
    "from disk while as many are written for each node",
)
GPU_FP32_FLOPS, GPU_TF32_FLOPS = 2e13, 7.5e13

MEMORY_SHARE = 0.8
"""Share of the bandwidth of a GPU's memory that elementwise operators are assumed to reach."""

LANE_BYTES: Mapping[int, float] = {3: 0.75e9, 4: 1.5e9, 5: 3e9, 6: 6e9}
"""Bytes per second in each direction of a lane by generation of PCIe: three quarters of the nominal rate."""

OF_NODE = (*DISK_RATES, "host_bytes")
"""Rates that the ranks of a node share."""


def assumed(config: Config, machine: Machine) -> Rates:
    """Return assumed rates: those of `plan.gpu` and `plan.pcie` or round ones, and measured rates of links if any.

    Raises:
        ConfigError: `plan.gpu` is not known, or does not compute in the dtype.
    """
    if machine.device == "cpu":
        return _of_rank(CPU_RATES, machine)
    rates, name = GPU, "each GPU"
    single = "fp32" if config.precision.matmul == "highest" else "tf32"
    dtype = single if config.precision.compute == "fp32" else config.precision.compute
    flops = {"fp32": GPU_FP32_FLOPS, "tf32": GPU_TF32_FLOPS}.get(dtype, rates.flops)
    if (gpu := described_gpu(config)) is not None:
        name, flops, memory = gpu.words, gpu.share * gpu.flops(dtype), MEMORY_SHARE * gpu.memory * 1e12
        if not flops:
            raise ConfigError(f"plan.gpu={name} does not compute in {dtype}. Set precision=fp16.")
        rates = replace(rates, memory_bytes=memory, update_numel=memory / UPDATE_BYTES)
    generation, lanes = map(int, (config.plan.pcie or f"{gpu.pcie if gpu else 4}x16").split("x"))
    copied, threads = lanes * LANE_BYTES[generation], min(thread_count(config.offload), CORES)
    source = (
        f"assumed for {name}: {flops / 1e12:.3g} TFLOP/s, {rates.memory_bytes / 1e12:.3g} TB/s of its memory, "
        f"{copied / 1e9:.3g} GB/s to the host and as many back, 100 GB/s to other GPUs (10 between nodes), "
        f"{threads} threads that update; for each node {rates.host_bytes / 1e9:.0f} GB/s of host memory, and a disk "
        f"that reads {rates.disk_read_bytes / 1e9:.3g} and writes {rates.disk_write_bytes / 1e9:.3g} GB/s"
    )
    rates = replace(
        rates, flops=flops, attention_flops=flops, copy_in_bytes=copied, copy_out_bytes=copied, source=source,
        host_update_numel=threads * CORE_UPDATE_NUMEL,
    )  # fmt: skip
    return _of_rank(rates, machine)


def _of_rank(rates: Rates, machine: Machine) -> Rates:
    """Return the rates with a rank's share of what its node has, and with the measured links."""
    links = {"link_bytes": rates.link_bytes, "wire_bytes": rates.wire_bytes} | machine.links
    rates = scaled_work(rates, dict.fromkeys(OF_NODE, 1 / machine.ranks_per_node))
    return replace(rates, link_bytes=links["link_bytes"], wire_bytes=links["wire_bytes"])


def with_drives(rates: Rates, config: Config, drives: int) -> Rates:
    """Return the rates for the number of drives that `plan.disks` describes, if it does.

    Args:
        rates: those of `drives` drives.
    """
    if config.plan.disks is None:
        return rates
    share = config.plan.disks / drives
    source = f"{rates.source}; of the disk {share:g} times as much with plan.disks={config.plan.disks}"
    return replace(scaled_work(rates, dict.fromkeys(DISK_RATES, share)), source=source)
