"""Checks of memory, CPU and GPUs."""

import contextlib
import platform
import re
from collections.abc import Iterator
from typing import NamedTuple

from zero.core.sizes import GiB, size_text
from zero.platform.host_memory import memory_groups
from zero.trainer.config import Config
from zero.trainer.doctor.host import Diagnosis, Host, judge

VECTORS = (
    *("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"),
    *("asimd", "asimdhp", "sve", "bf16"),
)
HALF_UNITS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""Flags of x86 and ARM CPUs: vector units (VECTORS), and units that multiply bf16 or fp16 (HALF_UNITS)."""


def memory(config: Config, host: Host) -> Iterator[Diagnosis]:
    total, free = host.memory()
    finding = f"{size_text(total)}, {size_text(free)} free"
    limit, used = min(_group_limits(host), default=(total, 0))
    if limit < total:
        finding += f", container limit {size_text(limit)}, {size_text(used)} of it in use"
        free = min(free, max(limit - used, 0))
    advice = "end other programs, raise the container's limit, or move state to a disk: offload=nvme"
    yield judge("memory", finding, (free < GiB, "bad", advice), (free < 4 * GiB, "warn", advice))


def _group_limits(host: Host) -> Iterator[tuple[int, int]]:
    """Yield (limit, use) in bytes of each memory cgroup of this process that has a limit."""
    for folder, *files in memory_groups(host.root):
        with contextlib.suppress(OSError, ValueError):  # the group is absent, or its limit is "max"
            limit, used = (int((folder / name).read_text()) for name in files)
            yield limit, used


def shared_memory(config: Config, host: Host) -> Iterator[Diagnosis]:
    total, free = host.space("/dev/shm")
    advice = "start the container with --shm-size=8g or --ipc=host, because several GPUs exchange data through it"
    finding = size_text(total) if total < GiB else f"{size_text(total)}, {size_text(free)} free"
    yield judge("/dev/shm", finding, (total < GiB, "warn", advice))


def cpu(config: Config, host: Host) -> Iterator[Diagnosis]:
    info = host.text("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    flags = set(" ".join(re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.MULTILINE)[:1]).split())
    known = [name for name in VECTORS if name in flags]
    cores, allowed = host.cores(), _quota(host)
    name = model[1] if model else platform.machine()
    yield Diagnosis("CPU", "ok", f"{name}, {cores} cores, {' '.join(known) or 'no vector units known'}")
    if allowed < cores - 0.5:
        advice = f"set launch.threads={max(1, int(allowed))} divided by the ranks, because further threads only wait"
        yield Diagnosis("CPU quota", "warn", f"the container may use {allowed:g} of {cores} cores", advice)
    compute = config.precision.compute
    if compute in HALF_UNITS and not _smi(host) and not HALF_UNITS[compute] & flags:
        advice = "set precision=fp32, which is faster here but takes twice the memory"
        yield Diagnosis("CPU and dtype", "warn", f"no unit for {compute}: it is emulated", advice)


def _quota(host: Host) -> float:
    """Return the number of cores that the container may use; infinity without a limit."""
    match = re.match(r"(\d+) (\d+)", host.text("/sys/fs/cgroup/cpu.max"))
    return int(match[1]) / int(match[2]) if match else float("inf")


class _Gpu(NamedTuple):
    name: str
    total_bytes: int
    free_bytes: int
    driver: str
    capability: float


def _smi(host: Host) -> list[_Gpu]:
    fields = "name,memory.total,memory.free,driver_version,compute_cap"
    printed = host.output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    rows = (re.fullmatch(r"(.+), (\d+), (\d+), ([\d.]+), ([\d.]+)", line.strip()) for line in printed.splitlines())
    return [_Gpu(row[1], int(row[2]) * 2**20, int(row[3]) * 2**20, row[4], float(row[5])) for row in rows if row]


def gpus(config: Config, host: Host) -> Iterator[Diagnosis]:
    gpus, usable = _smi(host), host.torch_gpus()
    ranks = config.launch.ranks
    if not gpus and not usable:
        lost = host.text("/proc/driver/nvidia/version")
        finding = "a driver, but no GPU answers" if lost else "none, the CPU computes"
        yield judge("GPUs", finding, (lost, "bad", "see nvidia-smi, and start a container with --gpus all"))
        return
    if not usable:
        advice = f"install a torch that was built for driver {gpus[0].driver}, or unset CUDA_VISIBLE_DEVICES"
        yield Diagnosis("GPUs", "bad", f"{len(gpus)}, and torch can use none", advice)
        return
    models = sorted({f"{gpu.name} {size_text(gpu.total_bytes)}" for gpu in gpus})
    driver = f", driver {gpus[0].driver}" if gpus else ""
    yield Diagnosis("GPUs", "ok", f"{usable} for torch: {', '.join(models) or 'not seen by nvidia-smi'}{driver}")
    if ranks != "auto" and ranks > usable:
        yield Diagnosis("GPUs and ranks", "bad", f"launch.ranks={ranks} of {usable} GPUs", f"set launch.ranks={usable}")
    taken = [str(number) for number, gpu in enumerate(gpus) if gpu.free_bytes < 0.9 * gpu.total_bytes]
    if taken:
        yield Diagnosis(
            "GPU memory", "warn", f"in use on GPU {', '.join(taken)}", "end the programs that nvidia-smi lists"
        )
    if config.precision.compute == "bf16" and any(gpu.capability < 8 for gpu in gpus):
        yield Diagnosis("GPU and dtype", "warn", "bf16 is emulated before compute capability 8.0", "set precision=fp16")
