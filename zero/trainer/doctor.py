"""Is this machine ready for this run: what is there, whether that is well, and what to do where it is not.

`checks` looks at one thing after another and never raises for what it finds. Everything it reads comes through a
`Host`, so a test can put any machine there: a folder in place of `/`, answers in place of commands. Nothing is changed;
a nameless file of at most 256 MiB is written to measure the disk, for up to three seconds.
"""

import contextlib
import errno
import importlib.metadata
import itertools
import os
import platform
import re
import resource
import secrets
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from zero.errors import MachineError, StoreError
from zero.platform.files import DIRECT, NAMELESS, Files, named, sized
from zero.store.nvme import probe
from zero.trainer.config import Config, Wandb
from zero.trainer.tracker.wandb import has_key, mode_of

GiB = 2**30

State = Literal["ok", "warn", "bad"]

NETWORK = re.compile(r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|ceph|glusterfs|beegfs|afs|9p|virtiofs|fuse\..*|pvfs2")
VECTORS = (
    *("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"),
    *("asimd", "asimdhp", "sve", "bf16"),
)
HALF_UNITS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""Flags of x86 and ARM; and those of a unit that multiplies a half type."""

MEMORY = ("tmpfs", "ramfs")
UNLIMITED = 2**62
"""Bytes from which a limit is none; the first version of cgroups writes 2^63 rounded to pages."""


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str
    state: State
    seen: str
    advice: str = ""
    """How to make it well; empty where it is."""


class Host:
    """The doors of the doctor.

    Args:
        root: in place of `/` for /proc, /sys and the mounts.
        environ: in place of the environment.
    """

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> None:
        self.root, self.environ = root, environ
        self.files = Files()

    def text(self, path: str) -> str:
        """A file's text; empty where there is none, or nobody may read it."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """What lies in a folder."""
        folder = self.root / path.lstrip("/")
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def limit(self, which: int) -> int:
        """The soft limit that `resource` knows by this number; `resource.RLIM_INFINITY` for none."""
        return resource.getrlimit(which)[0]

    def space(self, folder: str) -> tuple[int, int]:
        """(all, free) bytes of the file system at `folder`; zeros where there is none."""
        try:
            return shutil.disk_usage(folder)[::2]
        except OSError:
            return 0, 0

    def output(self, *command: str) -> str:
        """What a command prints; empty where there is no such command, or it fails."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout

    def cores(self) -> int:
        """On which this process may run."""
        return len(os.sched_getaffinity(0)) if "sched_getaffinity" in vars(os) else os.cpu_count() or 1

    def version(self, package: str) -> str:
        """Of an installed package; empty where it is not."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def torch_gpus(self) -> int:
        """How many GPUs torch can use."""
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def checks(config: Config, host: Host | None = None) -> Iterator[Check]:
    """Look at everything that a run with these settings depends on, and say it as soon as it is known."""
    host = host or Host()
    looks: tuple[Callable[[Config, Host], Iterator[Check]], ...] = (
        _versions, _memory, _paged_out, _shared_memory, _limits, _malloc, _cpu, _numa, _gpus, _disk, _checkpoints,
        _wandb,
    )  # fmt: skip
    return itertools.chain.from_iterable(look(config, host) for look in looks)


def report(found: Iterable[Check]) -> str:
    """One line for each, advice below it, and a sum."""
    found = list(found)
    width = max((len(check.name) for check in found), default=0)
    lines = [line for check in found for line in told(check, width)]
    bad, warn = (sum(check.state == state for check in found) for state in ("bad", "warn"))
    return "\n".join([*lines, "", f"{len(found)} checks: {bad} bad, {warn} to look at"])


def told(check: Check, width: int = 16) -> list[str]:
    """The lines of one check, names filled up to `width`."""
    line = f"{check.state:<4}  {check.name:<{width}}  {check.seen}"
    return [line, f"{'':<{width + 8}}-> {check.advice}"] if check.advice else [line]


def exit_code(found: Iterable[Check]) -> int:
    """0, or that of an error of the machine if anything is bad."""
    return MachineError.exit_code if any(check.state == "bad" for check in found) else 0


# What is installed


def pins() -> dict[str, str]:
    """Package to the versions that zero was tested with: ">=2.11,<2.14"."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text())["project"]
        wanted = [f"python{table['requires-python']}", *table["dependencies"]]
    else:
        told = importlib.metadata.metadata("functional-zero")
        wanted = [f"python{told['Requires-Python']}", *(told.get_all("Requires-Dist") or [])]
    found = (re.match(r"([\w-]+)\s*\(?([<>=!~,.\d ]*)\)?([^;]*)(;.*extra)?", text) for text in wanted)
    return {one[1]: one[2].replace(" ", "") for one in found if one and not one[4]}


def _versions(config: Config, host: Host) -> Iterator[Check]:
    wrong, seen = [], []
    for package, pin in pins().items():
        version = platform.python_version() if package == "python" else host.version(package)
        if not version or not within(version, pin):
            wrong.append(f"{package} {version or 'is missing'} ({pin})")
        if package in ("python", "torch", "hydra-core", "wandb"):
            seen.append(f"{package} {version or '-'}")
    if wrong:
        yield Check("versions", "bad", ", ".join(wrong), "install what pyproject.toml asks for: pip install -e .")
    else:
        yield Check("versions", "ok", ", ".join(seen))


def within(version: str, pin: str) -> bool:
    """Whether a version is inside a pin such as ">=2.11,<2.14". What follows the numbers does not count."""
    have = _numbers(version)
    for bound in filter(None, pin.split(",")):
        sign, limit = re.match(r"([<>=!]+)(.*)", bound).groups()  # type: ignore[union-attr]
        want = _numbers(limit)
        if (sign == ">=" and have < want) or (sign == "<" and have >= want) or (sign == "==" and have != want):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]  # type: ignore[index]
    return tuple(numbers + [0] * (4 - len(numbers)))


def _malloc(config: Config, host: Host) -> Iterator[Check]:
    preloaded = re.findall(r"jemalloc|tcmalloc|mimalloc", host.environ.get("LD_PRELOAD", ""))
    own = [name for name in host.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    if preloaded:
        yield Check(
            "malloc", "warn", f"{preloaded[0]} is preloaded", "launch.malloc has no effect on it; unset LD_PRELOAD"
        )
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
    info = _kilobytes(host.text("/proc/meminfo"))
    total, free = info.get("MemTotal", 0), info.get("MemAvailable", 0)
    limit, used = _cgroup(host)
    if not total:
        yield Check("memory", "warn", "not known: there is no /proc/meminfo", "see that a run has room: mode=plan")
        return
    seen = f"{sized(total)}, {sized(free)} free"
    if limit < min(total, UNLIMITED):
        seen += f"; this container may take {sized(limit)} and has {sized(used)}"
        free = min(free, max(limit - used, 0))
    advice = "end other programs, raise the container's limit, or let state sleep elsewhere: offload=nvme"
    state: State = "bad" if free < GiB else "warn" if free < 4 * GiB else "ok"
    yield Check("memory", state, seen, "" if state == "ok" else advice)


def _kilobytes(text: str) -> dict[str, int]:
    """Name to bytes, of lines such as "MemTotal:  24683668 kB"."""
    return {name: int(count) * 1024 for name, count in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _cgroup(host: Host) -> tuple[int, int]:
    """(limit, use) in bytes of the tightest memory group around this process."""
    found = [(UNLIMITED, 0)]
    for line in host.text("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and "memory" not in names.split(","):
            continue
        root, limit, used = ("/sys/fs/cgroup", "memory.max", "memory.current")
        if names:
            root, limit, used = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        for folder in (Path(path), *Path(path).parents):
            limits = [host.text(f"{root}/{str(folder).lstrip('/')}/{name}").strip() for name in (limit, used)]
            if all(text.isdecimal() for text in limits):
                found.append((int(limits[0]), int(limits[1])))
    return min(found)


def _paged_out(config: Config, host: Host) -> Iterator[Check]:
    info = _kilobytes(host.text("/proc/meminfo"))
    total, free = info.get("SwapTotal", 0), info.get("SwapFree", 0)
    used = total - free
    if not total:
        yield Check("swap", "ok", "none")
    elif used > total // 10:
        yield Check("swap", "warn", f"{sized(used)} of {sized(total)} in use", "memory is short already; see memory")
    else:
        yield Check("swap", "ok", f"{sized(total)}, {sized(free)} free")


def _shared_memory(config: Config, host: Host) -> Iterator[Check]:
    total, free = host.space("/dev/shm")
    if total >= GiB:
        yield Check("/dev/shm", "ok", f"{sized(total)}, {sized(free)} free")
    else:
        advice = "several GPUs exchange through it; start the container with --shm-size=8g or --ipc=host"
        yield Check("/dev/shm", "warn", sized(total), advice)


def _limits(config: Config, host: Host) -> Iterator[Check]:
    locked, files = host.limit(resource.RLIMIT_MEMLOCK), host.limit(resource.RLIMIT_NOFILE)
    seen = "unlimited" if locked == resource.RLIM_INFINITY else sized(locked)
    needs = bool(_smi(host)) and config.offload.pin
    if needs and locked != resource.RLIM_INFINITY and locked < 8 * GiB:
        yield Check(
            "locked memory", "warn", seen, "pinned buffers may be refused: ulimit -l unlimited, or offload.pin=false"
        )
    else:
        yield Check("locked memory", "ok", seen if needs else f"{seen}; only GPUs need it")
    state: State = "ok" if files == resource.RLIM_INFINITY or files >= 1024 else "bad" if files < 128 else "warn"
    seen = "unlimited" if files == resource.RLIM_INFINITY else f"{files}"
    yield Check("open files", state, seen, "" if state == "ok" else "ulimit -n 4096")


# Processors


def _cpu(config: Config, host: Host) -> Iterator[Check]:
    info = host.text("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    flags = set(" ".join(re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.MULTILINE)[:1]).split())
    known = [name for name in VECTORS if name in flags]
    cores, allowed = host.cores(), _quota(host)
    seen = f"{model[1] if model else platform.machine()}, {cores} cores, {' '.join(known) or 'no vector units known'}"
    yield Check("CPU", "ok", seen)
    if allowed < cores - 0.5:
        advice = f"set launch.threads={max(1, int(allowed))} divided by the ranks: more threads than that wait"
        yield Check("CPU quota", "warn", f"the container may use {allowed:g} of {cores} cores", advice)
    compute = config.precision.compute
    if compute in HALF_UNITS and not _smi(host) and not HALF_UNITS[compute] & flags:
        advice = "precision=fp32 is faster here; a half type still halves memory"
        yield Check("CPU and dtype", "warn", f"no unit for {compute}: it is emulated", advice)


def _quota(host: Host) -> float:
    """Cores that the container may use."""
    found = re.match(r"(\d+) (\d+)", host.text("/sys/fs/cgroup/cpu.max"))
    quota = host.text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
    period = host.text("/sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    if found:
        return int(found[1]) / int(found[2])
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else float("inf")


def _numa(config: Config, host: Host) -> Iterator[Check]:
    nodes = [name for name in host.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    if len(nodes) < 2:
        yield Check("NUMA", "ok", "one node")
        return
    bound = re.search(r"^Mems_allowed_list:\s*(\d+)$", host.text("/proc/self/status"), re.MULTILINE)
    if bound:
        yield Check("NUMA", "ok", f"{len(nodes)} nodes, bound to {bound[1]}")
    else:
        advice = "bind a run that computes on the CPU: numactl --cpunodebind=0 --membind=0 python train.py ..."
        yield Check("NUMA", "warn", f"{len(nodes)} nodes, not bound to one", advice)


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
        if host.text("/proc/driver/nvidia/version"):
            yield Check("GPUs", "bad", "a driver, but no GPU answers", "see nvidia-smi; in a container: --gpus all")
        else:
            yield Check("GPUs", "ok", "none; the CPU computes")
        return
    if not usable:
        advice = f"the driver is {gpus[0].driver}; install a torch that was built for it, or unset CUDA_VISIBLE_DEVICES"
        yield Check("GPUs", "bad", f"{len(gpus)}, and torch can use none", advice)
        return
    kinds = sorted({f"{gpu.name} {sized(gpu.total_bytes)}" for gpu in gpus})
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
    seen = ", ".join(f"{kind} x {count}" for kind, count in kinds.items()) or "not known"
    if "SYS" in kinds:
        return Check("GPU links", "warn", seen, "some pairs meet across sockets: zero.stage=1 or 2 sends less than 3")
    return Check("GPU links", "ok", seen)


# Disks


def mount_of(mountinfo: str, path: str) -> str:
    """The type of the file system that holds `path`, from the text of /proc/self/mountinfo."""
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), fields[4])
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= best:
            best, kind = len(point), right.split()[0]
    return kind


def _disk(config: Config, host: Host) -> Iterator[Check]:
    folder = Path(config.offload.path or ".").expanduser().absolute()
    wanted = bool({"nvme", "auto"} & {config.offload.optimizer, config.offload.param, config.offload.grad})
    state: State = "bad" if wanted or config.offload.path else "warn"
    name = "offload.path"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is not a folder" if folder.exists() else "does not exist"
        why = "is not writable" if folder.is_dir() else why
        yield Check(name, state, f"{folder} {why}", "set offload.path to a folder on a fast local disk")
        return
    kind = mount_of(host.text("/proc/self/mountinfo"), str(folder.resolve()))
    _, free = host.space(str(folder))
    yield _file_system(name, folder, kind, sized(free))
    yield from _calls(folder, host)
    yield _rate(folder, free, host, state)


def _file_system(name: str, folder: Path, kind: str, free: str) -> Check:
    seen = f"{folder}: {kind}, {free} free"
    if NETWORK.fullmatch(kind):
        return Check(name, "warn", seen, "a network file system: slow, and shared; set offload.path to a local disk")
    if kind in MEMORY:
        return Check(name, "warn", seen, "this is memory, not a disk: offload=cpu does the same without a detour")
    if kind == "overlay":
        return Check(name, "warn", seen, "a container's own layer: mount a volume, and set offload.path to it")
    return Check(name, "ok", seen)


def _calls(folder: Path, host: Host) -> Iterator[Check]:
    """What the file system can do that a store makes use of, tried on a file of one block."""
    tried = {
        "nameless files": lambda: _nameless(folder, host.files),
        "direct I/O": lambda: _named(folder, host.files, DIRECT, reserve=False),
        "reserving": lambda: _named(folder, host.files, 0, reserve=True),
    }
    without = {
        "nameless files": "a file with a name is used, and unlinked at once",
        "direct I/O": "pages go through the page cache: state comes back as memory, and reads are slower",
        "reserving": "a disk that fills up is noticed in the middle of a run",
    }
    for name, attempt in tried.items():
        try:
            attempt()
            yield Check(name, "ok", "works")
        except OSError as error:
            yield Check(name, "warn", named(error), without[name])


def _nameless(folder: Path, files: Files) -> None:
    if not NAMELESS:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    files.close(files.open(folder, os.O_RDWR | NAMELESS))


def _named(folder: Path, files: Files, flags: int, *, reserve: bool) -> None:
    path = folder / f".zero-{secrets.token_hex(16)}"
    try:
        fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags)
        try:
            if reserve:
                files.fallocate(fd, 0, 4096)
        finally:
            files.close(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it may be there even where O_DIRECT was refused
            files.unlink(path)


def _rate(folder: Path, free_bytes: int, host: Host, state: State) -> Check:
    if free_bytes < GiB:
        return Check("disk rate", "warn", "not measured", f"{sized(free_bytes)} free is too little to offload anything")
    try:
        speed = probe(folder, limit_s=3.0, files=host.files)
    except StoreError as error:
        return Check("disk rate", state, str(error), "look into the system's log: dmesg")
    seen = f"{speed.read_gbps:.2f} GB/s read beside {speed.write_gbps:.2f} GB/s written"
    if speed.read_gbps < 0.25:
        return Check(
            "disk rate", "warn", seen, "offload=nvme will wait for this disk; use a local NVMe, or offload=cpu"
        )
    return Check("disk rate", "ok", seen)


def _checkpoints(config: Config, host: Host) -> Iterator[Check]:
    """Where runs save: their own folder, or one for all."""
    folder = Path(config.checkpoint.dir or ".").expanduser().absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    kind = mount_of(host.text("/proc/self/mountinfo"), str(there.resolve()))
    _, free = host.space(str(there))
    seen = f"{folder}: {kind}, {sized(free)} free"
    if not os.access(there, os.W_OK | os.X_OK):
        yield Check("checkpoints", "bad", f"{folder} is not writable", "set checkpoint.dir to a folder of this user")
    elif kind in MEMORY:
        yield Check("checkpoints", "warn", seen, "this is memory: gone with the machine; set checkpoint.dir to a disk")
    elif NETWORK.fullmatch(kind):
        yield Check("checkpoints", "warn", seen, "saves are as slow as the network; checkpoint.async=true hides that")
    elif free < 2 * GiB:
        yield Check("checkpoints", "warn", seen, "12 bytes per parameter are saved; make room, or set checkpoint.dir")
    else:
        yield Check("checkpoints", "ok", seen)


def _wandb(config: Config, host: Host) -> Iterator[Check]:
    settings = config.tracker if isinstance(config.tracker, Wandb) else Wandb()
    asked = "" if settings is config.tracker else "; not asked for: tracker=wandb"
    mode, key = mode_of(settings), "a key is there" if has_key() else "no key"
    if settings.mode == "online" and mode != "online":
        yield Check("W&B", "warn", f"{key}, so runs are {mode}{asked}", "run `wandb login`, or export WANDB_API_KEY")
    else:
        yield Check("W&B", "ok", f"{key}; runs are {mode}{asked}")
