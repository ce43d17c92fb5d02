"""Is this machine ready for this run: what was found, whether that is good, and what to do where it is not.

`checks` looks at one thing after another and never raises for what it finds. Everything it reads comes through a
`Host`, so a test can describe any machine: a folder in place of `/`, answers in place of commands. Nothing is changed;
a unlinked file of at most 256 MiB is written to measure the disk, for up to three seconds.
"""

import contextlib
import importlib.metadata
import itertools
import os
import platform
import re
import resource
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from zero.core.sizes import GiB, size_text
from zero.errors import MachineError, StoreError, if_it_fails
from zero.platform.device import memory_groups
from zero.platform.files import Files, named, open_and_unlink, open_nameless
from zero.platform.installed import install
from zero.platform.run_files import MEMORY, folders_of, mount_of, takes_files
from zero.store.nvme import probe
from zero.tracker.settings import Wandb
from zero.tracker.wandb import has_key, mode_of
from zero.trainer.config import Config

State = Literal["ok", "warn", "bad"]

NETWORK = re.compile(r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|ceph|glusterfs|beegfs|afs|9p|virtiofs|fuse\..*|pvfs2")
VECTORS = (
    *("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"),
    *("asimd", "asimdhp", "sve", "bf16"),
)
HALF_UNITS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""Flags of x86 and ARM; and those of a unit that multiplies a half type."""


class Check(NamedTuple):
    """The result of one check."""

    name: str
    state: State
    finding: str
    advice: str = ""
    """What to do about it; empty where the state is "ok"."""


class Host:
    """The machine that is checked; everything that is read of it is read here.

    Args:
        root: in place of `/` for /proc, /sys and the mounts.
        environ: in place of the environment.
    """

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> None:
        self.root, self.environ = root, environ
        self.files = Files()

    def text(self, path: str) -> str:
        """A file's text; empty if there is none or it is not readable."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """The entries of a folder."""
        folder = self.root / path.lstrip("/")
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def memory(self) -> tuple[int, int]:
        """(total, available) bytes of host memory."""
        found = psutil.virtual_memory()
        return found.total, found.available

    def paged_out(self) -> tuple[int, int]:
        """(total, free) bytes of swap."""
        found = psutil.swap_memory()
        return found.total, found.free

    def limit(self, which: int) -> int:
        """The soft limit that `resource` knows by this number; `resource.RLIM_INFINITY` for none."""
        return resource.getrlimit(which)[0]

    def space(self, folder: str) -> tuple[int, int]:
        """(total, free) bytes of the file system at `folder`; zeros if there is none."""
        try:
            return shutil.disk_usage(folder)[::2]
        except OSError:
            return 0, 0

    def output(self, *command: str) -> str:
        """What a command prints; empty if there is no such command or it fails."""
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return ""

    def cores(self) -> int:
        """Cores that this process may run on."""
        return len(os.sched_getaffinity(0)) if "sched_getaffinity" in vars(os) else os.cpu_count() or 1

    def version(self, package: str) -> str:
        """Of an installed package; empty if it is not installed."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def torch_gpus(self) -> int:
        """How many GPUs torch can use."""
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def checks(config: Config, host: Host | None = None) -> Iterator[Check]:
    """Check everything that a run with these settings depends on; each result comes as soon as it is known."""
    host = host or Host()
    all_checks: tuple[Callable[[Config, Host], Iterator[Check]], ...] = (
        _versions, _memory, _paged_out, _shared_memory, _limits, _malloc, _cpu, _numa, _gpus, _disk, _checkpoints,
        _wandb,
    )  # fmt: skip
    return itertools.chain.from_iterable(check(config, host) for check in all_checks)


def report(results: Iterable[Check]) -> str:
    """One line for each check, its advice below it, and a sum."""
    results = list(results)
    width = max((len(check.name) for check in results), default=0)
    lines = []
    for check in results:
        lines.append(f"{check.state:<4}  {check.name:<{width}}  {check.finding}")
        lines += [f"{'':<{width + 8}}-> {check.advice}"] if check.advice else []
    bad, warn = (sum(check.state == state for check in results) for state in ("bad", "warn"))
    return "\n".join([*lines, "", f"{len(results)} checks: {bad} bad, {warn} to look at"])


def exit_code(results: Iterable[Check]) -> int:
    """0, or that of an error of the machine if anything is bad."""
    return MachineError.exit_code if any(check.state == "bad" for check in results) else 0


def _judge(name: str, finding: str, *problems: tuple[Any, State, str]) -> Check:
    """The check as the first problem has it that exists, "ok" if none does.

    Args:
        problems: whether it exists, the state then, and the advice.
    """
    wrong = (Check(name, state, finding, advice) for exists, state, advice in problems if exists)
    return next(wrong, Check(name, "ok", finding))


# What is installed


def pins() -> dict[str, str]:
    """Package to the versions that zero works with: ">=5.5.4,<6"."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text())["project"]
        python, packages = table["requires-python"], table["dependencies"]
    else:
        metadata = importlib.metadata.metadata("functional-zero")
        python, packages = metadata["Requires-Python"], metadata.get_all("Requires-Dist") or []
    needed = [Requirement(f"python{python}"), *map(Requirement, packages)]
    return {
        one.name: ",".join(sorted(map(str, one.specifier), reverse=True))
        for one in needed
        if one.marker is None or one.marker.evaluate({"extra": ""})
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
    """Whether a version is inside a pin such as ">=2.11". Vendors' 2.11.0a0+git and 2.11.0.post1 are 2.11.0."""
    return SpecifierSet(pin).contains(Version(version.rstrip("+")).base_version)  # a Python built from git ends in +


def _malloc(config: Config, host: Host) -> Iterator[Check]:
    preloaded = re.findall(r"jemalloc|tcmalloc|mimalloc", host.environ.get("LD_PRELOAD", ""))
    own = [name for name in host.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    if preloaded:
        advice = "launch.malloc has no effect on it; unset LD_PRELOAD"
        yield Check("malloc", "warn", f"{preloaded[0]} is preloaded", advice)
    elif platform.libc_ver()[0] != "glibc":
        yield Check("malloc", "warn", "not glibc's", "launch.malloc has no effect; steps may be slower")
    elif own:
        yield Check("malloc", "warn", f"set by {', '.join(own)}", "these win over launch.malloc; unset them")
    elif config.launch.malloc == "default":
        yield Check("malloc", "warn", "launch.malloc=default", "launch.malloc=raised makes most steps faster")
    else:
        yield Check("malloc", "ok", f"glibc {platform.libc_ver()[1]}, launch.malloc={config.launch.malloc}")


# Memory


def _memory(config: Config, host: Host) -> Iterator[Check]:
    total, free = host.memory()
    finding = f"{size_text(total)}, {size_text(free)} free"
    limit, used = min(_group_limits(host), default=(total, 0))
    if limit < total:
        finding += f"; this container may take {size_text(limit)} and has {size_text(used)}"
        free = min(free, max(limit - used, 0))
    advice = "end other programs, raise the container's limit, or move state to a disk: offload=nvme"
    yield _judge("memory", finding, (free < GiB, "bad", advice), (free < 4 * GiB, "warn", advice))


def _group_limits(host: Host) -> Iterator[tuple[int, int]]:
    """(limit, use) in bytes of each memory group around this process that has a limit."""
    for folder, *files in memory_groups(host.root):
        with contextlib.suppress(OSError, ValueError):  # no such group, or its limit is "max"
            limit, used = (int((folder / name).read_text()) for name in files)
            yield limit, used


def _paged_out(config: Config, host: Host) -> Iterator[Check]:
    total, free = host.paged_out()
    used = total - free
    finding = f"{size_text(total)}, {size_text(free)} free" if total else "none"
    if is_short := used > total // 10:
        finding = f"{size_text(used)} of {size_text(total)} in use"
    yield _judge("swap", finding, (is_short, "warn", "memory is short already; see memory"))


def _shared_memory(config: Config, host: Host) -> Iterator[Check]:
    total, free = host.space("/dev/shm")
    advice = "several GPUs exchange through it; start the container with --shm-size=8g or --ipc=host"
    finding = size_text(total) if total < GiB else f"{size_text(total)}, {size_text(free)} free"
    yield _judge("/dev/shm", finding, (total < GiB, "warn", advice))


def _limits(config: Config, host: Host) -> Iterator[Check]:
    locked, files = host.limit(resource.RLIMIT_MEMLOCK), host.limit(resource.RLIMIT_NOFILE)
    finding = "unlimited" if locked == resource.RLIM_INFINITY else size_text(locked)
    pins_memory = bool(_smi(host)) and config.offload.pin
    is_short = pins_memory and locked != resource.RLIM_INFINITY and locked < 8 * GiB
    advice = "pinned buffers may be refused: ulimit -l unlimited, or offload.pin=false"
    finding += "" if pins_memory else "; only GPUs need it"
    yield _judge("locked memory", finding, (is_short, "warn", advice))
    unlimited = files == resource.RLIM_INFINITY
    finding, advice = "unlimited" if unlimited else f"{files}", "ulimit -n 4096"
    few = not unlimited and files < 1024
    yield _judge("open files", finding, (few and files < 128, "bad", advice), (few, "warn", advice))


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
        advice = f"set launch.threads={max(1, int(allowed))} divided by the ranks: more threads than that wait"
        yield Check("CPU quota", "warn", f"the container may use {allowed:g} of {cores} cores", advice)
    compute = config.precision.compute
    if compute in HALF_UNITS and not _smi(host) and not HALF_UNITS[compute] & flags:
        advice = "precision=fp32 is faster here; a half type still halves memory"
        yield Check("CPU and dtype", "warn", f"no unit for {compute}: it is emulated", advice)


def _quota(host: Host) -> float:
    """Cores that the container may use."""
    in_version_1 = (host.text(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    texts = host.text("/sys/fs/cgroup/cpu.max"), " ".join(in_version_1)
    found = next(filter(None, (re.match(r"(\d+) (\d+)", text) for text in texts)), None)
    return int(found[1]) / int(found[2]) if found else float("inf")


def _numa(config: Config, host: Host) -> Iterator[Check]:
    nodes = [name for name in host.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    if len(nodes) < 2:
        yield Check("NUMA", "ok", "one node")
        return
    bound = re.search(r"^Mems_allowed_list:\s*(\d+)$", host.text("/proc/self/status"), re.MULTILINE)
    advice = "bind a run that computes on the CPU: numactl --cpunodebind=0 --membind=0 python train.py ..."
    finding = f"{len(nodes)} nodes, {f'bound to {bound[1]}' if bound else 'not bound to one'}"
    yield _judge("NUMA", finding, (not bound, "warn", advice))


class _Gpu(NamedTuple):
    name: str
    total_bytes: int
    free_bytes: int
    driver: str
    capability: float


def _smi(host: Host) -> list[_Gpu]:
    fields = "name,memory.total,memory.free,driver_version,compute_cap"
    printed = host.output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    found = (re.fullmatch(r"(.+), (\d+), (\d+), ([\d.]+), ([\d.]+)", line.strip()) for line in printed.splitlines())
    return [_Gpu(g[1], int(g[2]) * 2**20, int(g[3]) * 2**20, g[4], float(g[5])) for g in found if g]


def _gpus(config: Config, host: Host) -> Iterator[Check]:
    gpus, usable = _smi(host), host.torch_gpus()
    ranks = config.launch.ranks
    if not gpus and not usable:
        lost = host.text("/proc/driver/nvidia/version")
        finding = "a driver, but no GPU answers" if lost else "none; the CPU computes"
        yield _judge("GPUs", finding, (lost, "bad", "see nvidia-smi; in a container: --gpus all"))
        return
    if not usable:
        advice = f"the driver is {gpus[0].driver}; install a torch that was built for it, or unset CUDA_VISIBLE_DEVICES"
        yield Check("GPUs", "bad", f"{len(gpus)}, and torch can use none", advice)
        return
    kinds = sorted({f"{gpu.name} {size_text(gpu.total_bytes)}" for gpu in gpus})
    driver = f", driver {gpus[0].driver}" if gpus else ""
    yield Check("GPUs", "ok", f"{usable} for torch: {', '.join(kinds) or 'not seen by nvidia-smi'}{driver}")
    if ranks != "auto" and ranks > usable:
        yield Check("GPUs and ranks", "bad", f"launch.ranks={ranks} of {usable} GPUs", f"set launch.ranks={usable}")
    taken = [str(number) for number, gpu in enumerate(gpus) if gpu.free_bytes < 0.9 * gpu.total_bytes]
    if taken:
        yield Check("GPU memory", "warn", f"in use on GPU {', '.join(taken)}", "see nvidia-smi; end what runs there")
    if config.precision.compute == "bf16" and any(gpu.capability < 8 for gpu in gpus):
        yield Check("GPU and dtype", "warn", "bf16 is emulated before compute capability 8.0", "set precision=fp16")
    if len(gpus) > 1:
        yield _links(host.output("nvidia-smi", "topo", "-m"), len(gpus))


def _links(printed: str, gpus: int) -> Check:
    """The ways between pairs of GPUs: NV# is NVLink, PIX to PHB is PCIe, SYS crosses sockets."""
    rows = [line.split() for line in printed.splitlines() if re.match(r"\s*GPU\d", line)]
    links = [
        row[1 + other] for number, row in enumerate(rows[-gpus:]) for other in range(number) if len(row) > other + 1
    ]
    kinds = {kind: links.count(kind) for kind in sorted(set(links))}
    finding = ", ".join(f"{kind} x {count}" for kind, count in kinds.items()) or "not known"
    advice = "some pairs meet across sockets: zero.stage=1 or 2 sends less than 3"
    return _judge("GPU links", finding, ("SYS" in kinds, "warn", advice))


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
    kind, free = _file_system(host, folder)
    yield _judge(
        "offload.path",
        f"{folder}: {kind}, {size_text(free)} free",
        (NETWORK.fullmatch(kind), "warn", "a network file system: slow, and shared; set offload.path to a local disk"),
        (kind in MEMORY, "warn", "this is memory, not a disk: offload=cpu does the same without a detour"),
        (kind == "overlay", "warn", "a container's own layer: mount a volume, and set offload.path to it"),
    )
    yield from _calls(folder, host)
    yield _rate(folder, free, host, state)


def _file_system(host: Host, folder: Path) -> tuple[str, int]:
    """Its type and free bytes."""
    return mount_of(host.text("/proc/self/mountinfo"), str(folder.resolve())), host.space(str(folder))[1]


def _calls(folder: Path, host: Host) -> Iterator[Check]:
    """What the file system supports of what a store uses, tried on a file of one block."""
    for name, attempt, without in (
        ("nameless files", open_nameless, "a file with a name is used, and unlinked at once"),
        ("direct I/O", _direct, "pages go through the page cache: state comes back as memory, and reads are slower"),
        ("reserving", _reserved, "a disk that fills up is noticed in the middle of a run"),
    ):
        try:
            host.files.close(attempt(folder, host.files))
            yield Check(name, "ok", "works")
        except OSError as error:
            yield Check(name, "warn", named(error), without)


def _direct(folder: Path, files: Files) -> int:
    fd = open_and_unlink(folder, files)
    with if_it_fails(partial(files.close, fd)):
        files.direct(fd, True)
    return fd


def _reserved(folder: Path, files: Files) -> int:
    fd = open_and_unlink(folder, files)
    with if_it_fails(partial(files.close, fd)):
        files.fallocate(fd, 0, 4096)
    return fd


def _rate(folder: Path, free_bytes: int, host: Host, state: State) -> Check:
    if free_bytes < GiB:
        advice = f"{size_text(free_bytes)} free is too little to offload anything"
        return Check("disk rate", "warn", "not measured", advice)
    try:
        speed = probe(folder, limit_s=3.0, files=host.files)
    except StoreError as error:
        return Check("disk rate", state, str(error), "look into the system's log: dmesg")
    finding = f"{speed.read_gbps:.2f} GB/s read beside {speed.write_gbps:.2f} GB/s written"
    advice = "offload=nvme will wait for this disk; use a local NVMe, or offload=cpu"
    return _judge("disk rate", finding, (speed.read_gbps < 0.25, "warn", advice))


def _checkpoints(config: Config, host: Host) -> Iterator[Check]:
    """Where runs save: their own folder, or one for all."""
    folder = Path(config.checkpoint.dir or ".").expanduser().absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    kind, free = _file_system(host, there)
    if not takes_files(there):
        yield Check("checkpoints", "bad", f"{folder} is not writable", "set checkpoint.dir to a folder of this user")
        return
    yield _judge(
        "checkpoints",
        f"{folder}: {kind}, {size_text(free)} free",
        (kind in MEMORY, "warn", "this is memory: gone with the machine; set checkpoint.dir to a disk"),
        (NETWORK.fullmatch(kind), "warn", "saves are as slow as the network; checkpoint.async=true hides that"),
        (free < 2 * GiB, "warn", "12 bytes per parameter are saved; make room, or set checkpoint.dir"),
    )


def _wandb(config: Config, host: Host) -> Iterator[Check]:
    settings = config.tracker if isinstance(config.tracker, Wandb) else Wandb()
    unused = "" if settings is config.tracker else "; not in use: tracker=wandb"
    mode, key = mode_of(settings), "a key is set" if has_key() else "no key"
    refused = settings.mode == "online" and mode != "online"
    finding = f"{key}, so runs are {mode}{unused}" if refused else f"{key}; runs are {mode}{unused}"
    yield _judge("W&B", finding, (refused, "warn", "run `wandb login`, or export WANDB_API_KEY"))
