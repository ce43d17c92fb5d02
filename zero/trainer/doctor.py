"""Checks of this machine for a run: versions, memory, processors, GPUs and disks, with advice.

`checks` reports problems and never raises for them. It reads everything through a `Host`, so that a test can simulate
any machine. It changes nothing, but to measure a disk it writes an unlinked file of at most 256 MiB, for up to three
seconds with each number of threads.
"""

import contextlib
import importlib.metadata
import itertools
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from zero.core.sizes import GiB, size_text
from zero.engine.plan import THREADS
from zero.errors import MachineError, StoreError
from zero.platform.device import memory_groups
from zero.platform.installed import install
from zero.platform.run_files import MEMORY, folders_of, mount_of, takes_files
from zero.store.nvme import probe
from zero.tracker.settings import Wandb
from zero.tracker.wandb import has_key, mode_of
from zero.trainer.config import Config
from zero.trainer.launch.process import cores

State = Literal["ok", "warn", "bad"]

MOST_THREADS = 64
"""Limit of the threads with which a disk is measured."""

NETWORK = re.compile(r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|ceph|glusterfs|beegfs|afs|9p|virtiofs|fuse\..*|pvfs2")
VECTORS = (
    *("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"),
    *("asimd", "asimdhp", "sve", "bf16"),
)
HALF_UNITS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""Flags of x86 and ARM CPUs: vector units (VECTORS), and units that multiply bf16 or fp16 (HALF_UNITS)."""


class Check(NamedTuple):
    """The result of one check."""

    name: str
    state: State
    finding: str
    advice: str = ""
    """Empty if the state is "ok"."""


class Host:
    """Readings of the machine that is checked.

    Args:
        root: the folder with /proc, /sys and the mounts; a test passes another one than `/`.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, path: str) -> str:
        """Return a file's text; "" if it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""

    def memory(self) -> tuple[int, int]:
        """Return (total, available) bytes of host memory."""
        memory = psutil.virtual_memory()
        return memory.total, memory.available

    def space(self, folder: str) -> tuple[int, int]:
        """Return (total, free) bytes of the file system at `folder`; zeros if there is no such folder."""
        try:
            return shutil.disk_usage(folder)[::2]
        except OSError:
            return 0, 0

    def output(self, *command: str) -> str:
        """Return the output of a command; "" if there is no such command or it fails."""
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return ""

    def cores(self) -> int:
        return cores()

    def version(self, package: str) -> str:
        """Return the version of an installed package; "" if it is not installed."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def torch_gpus(self) -> int:
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def checks(config: Config, host: Host | None = None) -> Iterator[Check]:
    """Check everything that a run with these settings depends on; yield each result as soon as it is known."""
    host = host or Host()
    all_checks: tuple[Callable[[Config, Host], Iterator[Check]], ...]
    all_checks = (_versions, _memory, _shared_memory, _cpu, _gpus, _disk, _checkpoints, _wandb)
    return itertools.chain.from_iterable(check(config, host) for check in all_checks)


def report(results: Iterable[Check]) -> str:
    """Return a line for each check, its advice below it, and the number of problems."""
    results = list(results)
    width = max((len(check.name) for check in results), default=0)
    lines = []
    for check in results:
        lines.append(f"{check.state:<4}  {check.name:<{width}}  {check.finding}")
        lines += [f"{'':<{width + 8}}-> {check.advice}"] if check.advice else []
    bad, warn = (sum(check.state == state for check in results) for state in ("bad", "warn"))
    return "\n".join([*lines, "", f"{len(results)} checks: {bad} bad, {warn} to look at"])


def exit_code(results: Iterable[Check]) -> int:
    """Return 0, or the exit code of a MachineError if anything is bad."""
    return MachineError.exit_code if any(check.state == "bad" for check in results) else 0


def _judge(name: str, finding: str, *problems: tuple[Any, State, str]) -> Check:
    """Return the check with the state and advice of the first problem that exists; "ok" if none does.

    Args:
        problems: (condition, state, advice) of each problem; it exists if the condition is true.
    """
    wrong = (Check(name, state, finding, advice) for exists, state, advice in problems if exists)
    return next(wrong, Check(name, "ok", finding))


# Installed packages


def pins() -> dict[str, str]:
    """Return the versions that zero works with, such as ">=5.5.4,<6", by package."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text())["project"]
        python, packages = table["requires-python"], table["dependencies"]
    else:
        metadata = importlib.metadata.metadata("functional-zero")
        python, packages = metadata["Requires-Python"], metadata.get_all("Requires-Dist") or []
    needed = [Requirement(f"python{python}"), *map(Requirement, packages)]
    return {
        requirement.name: ",".join(sorted(map(str, requirement.specifier), reverse=True))
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def _versions(config: Config, host: Host) -> Iterator[Check]:
    wrong, shown = [], []
    for package, pin in pins().items():
        version = platform.python_version() if package == "python" else host.version(package)
        if not version or not within(version, pin):
            wrong.append(f"{package} {version or 'is missing'} ({pin})")
        if package in ("python", "torch", "hydra-core", "wandb"):
            shown.append(f"{package} {version or '-'}")
    advice = f"install what it needs: {install()}"
    yield _judge("versions", ", ".join(wrong or shown), (wrong, "bad", advice))


def within(version: str, pin: str) -> bool:
    """Return whether a version satisfies a pin such as ">=2.11". A vendor's build 2.11.0a0+git counts as 2.11.0."""
    # the version of a Python that was built from git ends in +
    return SpecifierSet(pin).contains(Version(version.rstrip("+")).base_version)


# Memory


def _memory(config: Config, host: Host) -> Iterator[Check]:
    total, free = host.memory()
    finding = f"{size_text(total)}, {size_text(free)} free"
    limit, used = min(_group_limits(host), default=(total, 0))
    if limit < total:
        finding += f", container limit {size_text(limit)}, {size_text(used)} of it in use"
        free = min(free, max(limit - used, 0))
    advice = "end other programs, raise the container's limit, or move state to a disk: offload=nvme"
    yield _judge("memory", finding, (free < GiB, "bad", advice), (free < 4 * GiB, "warn", advice))


def _group_limits(host: Host) -> Iterator[tuple[int, int]]:
    """Yield (limit, use) in bytes of each memory cgroup of this process that has a limit."""
    for folder, *files in memory_groups(host.root):
        with contextlib.suppress(OSError, ValueError):  # the group is absent, or its limit is "max"
            limit, used = (int((folder / name).read_text()) for name in files)
            yield limit, used


def _shared_memory(config: Config, host: Host) -> Iterator[Check]:
    total, free = host.space("/dev/shm")
    advice = "start the container with --shm-size=8g or --ipc=host, because several GPUs exchange data through it"
    finding = size_text(total) if total < GiB else f"{size_text(total)}, {size_text(free)} free"
    yield _judge("/dev/shm", finding, (total < GiB, "warn", advice))


# Processors


def _cpu(config: Config, host: Host) -> Iterator[Check]:
    info = host.text("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    flags = set(" ".join(re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.MULTILINE)[:1]).split())
    known = [name for name in VECTORS if name in flags]
    cores, allowed = host.cores(), _quota(host)
    name = model[1] if model else platform.machine()
    yield Check("CPU", "ok", f"{name}, {cores} cores, {' '.join(known) or 'no vector units known'}")
    if allowed < cores - 0.5:
        advice = f"set launch.threads={max(1, int(allowed))} divided by the ranks, because further threads only wait"
        yield Check("CPU quota", "warn", f"the container may use {allowed:g} of {cores} cores", advice)
    compute = config.precision.compute
    if compute in HALF_UNITS and not _smi(host) and not HALF_UNITS[compute] & flags:
        advice = "set precision=fp32, which is faster here but takes twice the memory"
        yield Check("CPU and dtype", "warn", f"no unit for {compute}: it is emulated", advice)


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


def _gpus(config: Config, host: Host) -> Iterator[Check]:
    gpus, usable = _smi(host), host.torch_gpus()
    ranks = config.launch.ranks
    if not gpus and not usable:
        lost = host.text("/proc/driver/nvidia/version")
        finding = "a driver, but no GPU answers" if lost else "none, the CPU computes"
        yield _judge("GPUs", finding, (lost, "bad", "see nvidia-smi, and start a container with --gpus all"))
        return
    if not usable:
        advice = f"install a torch that was built for driver {gpus[0].driver}, or unset CUDA_VISIBLE_DEVICES"
        yield Check("GPUs", "bad", f"{len(gpus)}, and torch can use none", advice)
        return
    models = sorted({f"{gpu.name} {size_text(gpu.total_bytes)}" for gpu in gpus})
    driver = f", driver {gpus[0].driver}" if gpus else ""
    yield Check("GPUs", "ok", f"{usable} for torch: {', '.join(models) or 'not seen by nvidia-smi'}{driver}")
    if ranks != "auto" and ranks > usable:
        yield Check("GPUs and ranks", "bad", f"launch.ranks={ranks} of {usable} GPUs", f"set launch.ranks={usable}")
    taken = [str(number) for number, gpu in enumerate(gpus) if gpu.free_bytes < 0.9 * gpu.total_bytes]
    if taken:
        yield Check("GPU memory", "warn", f"in use on GPU {', '.join(taken)}", "end the programs that nvidia-smi lists")
    if config.precision.compute == "bf16" and any(gpu.capability < 8 for gpu in gpus):
        yield Check("GPU and dtype", "warn", "bf16 is emulated before compute capability 8.0", "set precision=fp16")


# Disks


def _disk(config: Config, host: Host) -> Iterator[Check]:
    for folder in folders_of(config.offload.paths):
        yield from _disk_of(config, host, folder.absolute())


def _disk_of(config: Config, host: Host, folder: Path) -> Iterator[Check]:
    wanted = bool({"nvme", "auto"} & {config.offload.optimizer, config.offload.param, config.offload.grad})
    state: State = "bad" if wanted or config.offload.path else "warn"
    if not folder.is_dir() or not takes_files(folder):
        why = "is not writable" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        yield Check("offload.path", state, f"{folder} {why}", "set offload.path to a folder on a fast local disk")
        return
    file_system, free = _file_system(host, folder)
    yield _judge(
        "offload.path",
        f"{folder}: {file_system}, {size_text(free)} free",
        (
            NETWORK.fullmatch(file_system),
            "warn",
            "set offload.path to a local disk, because a network file system is slow",
        ),
        (file_system in MEMORY, "warn", "set offload=cpu, which is faster, because this is memory, not a disk"),
        (
            file_system == "overlay",
            "warn",
            "mount a volume, and set offload.path to it, because this is the container's own layer",
        ),
    )
    yield _rate(config, folder, free, state)


def _file_system(host: Host, folder: Path) -> tuple[str, int]:
    """Return the type and the free bytes of the file system at `folder`."""
    return mount_of(host.text("/proc/self/mountinfo"), str(folder.resolve())), host.space(str(folder))[1]


def _rate(config: Config, folder: Path, free_bytes: int, state: State) -> Check:
    if free_bytes < GiB:
        advice = f"{size_text(free_bytes)} free is too little to offload anything"
        return Check("disk rate", "warn", "not measured", advice)
    try:
        threads, rate = _probed(folder)
    except StoreError as error:
        return Check("disk rate", state, str(error), "look into the system's log with dmesg")
    gbps, folders = rate / 1e9, len(config.offload.paths)
    finding = f"{gbps:.2f} GB/s read beside {gbps:.2f} GB/s written, by {threads} threads"
    slow = "use a local NVMe, or offload=cpu, because offload=nvme would wait for this disk"
    few = f"set offload.threads={threads * folders}, because more threads are faster here"
    return _judge(
        "disk rate",
        finding,
        (gbps < 0.25, "warn", slow),
        ((config.offload.threads or THREADS * folders) < threads * folders, "warn", few),
    )


def _probed(folder: Path) -> tuple[int, float]:
    """Return the number of threads, doubled until the rate grows by less than a tenth, and the rate in bytes/s."""
    threads, rate = THREADS, probe(folder, threads=THREADS)
    while rate and threads < MOST_THREADS and (more := probe(folder, threads=2 * threads)) > 1.1 * rate:
        threads, rate = 2 * threads, more
    return threads, rate


def _checkpoints(config: Config, host: Host) -> Iterator[Check]:
    """Check checkpoint.dir, or if it is not set the current folder, in which runs make their folders."""
    folder = Path(config.checkpoint.dir or ".").absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    file_system, free = _file_system(host, existing)
    if not takes_files(existing):
        yield Check("checkpoints", "bad", f"{folder} is not writable", "set checkpoint.dir to a folder of this user")
        return
    yield _judge(
        "checkpoints",
        f"{folder}: {file_system}, {size_text(free)} free",
        (file_system in MEMORY, "warn", "set checkpoint.dir to a disk, because a restart of the machine clears memory"),
        (NETWORK.fullmatch(file_system), "warn", "set checkpoint.async=true, because saves wait for the network"),
        (free < 2 * GiB, "warn", "make room, or set checkpoint.dir, because a save takes 12 bytes per parameter"),
    )


def _wandb(config: Config, host: Host) -> Iterator[Check]:
    settings = config.tracker if isinstance(config.tracker, Wandb) else Wandb()
    unused = "" if settings is config.tracker else " (tracker=wandb is not set)"
    mode, key = mode_of(settings), "a key is set" if has_key() else "no key"
    unmet = settings.mode == "online" and mode != "online"
    finding = f"{key}, so runs are {mode}{unused}" if unmet else f"{key}, runs are {mode}{unused}"
    yield _judge("W&B", finding, (unmet, "warn", "run `wandb login`, or export WANDB_API_KEY"))
