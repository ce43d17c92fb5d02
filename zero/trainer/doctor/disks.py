"""Checks of the disks for offloaded state and for checkpoints."""

import re
from collections.abc import Iterator
from pathlib import Path

from zero.core.sizes import GiB, size_text
from zero.engine.plan import THREADS
from zero.errors import StoreError
from zero.platform.run_files import MEMORY, folders_of, mount_of, takes_files
from zero.store.nvme import probe
from zero.trainer.config import Config
from zero.trainer.doctor.host import Diagnosis, Host, Verdict, judge

MOST_THREADS = 64
"""Limit of the threads with which a disk is measured."""

NETWORK = re.compile(r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|ceph|glusterfs|beegfs|afs|9p|virtiofs|fuse\..*|pvfs2")


def disk(config: Config, host: Host) -> Iterator[Diagnosis]:
    for folder in folders_of(config.offload.paths):
        yield from _disk_of(config, host, folder.absolute())


def _disk_of(config: Config, host: Host, folder: Path) -> Iterator[Diagnosis]:
    wanted = bool({"nvme", "auto"} & {config.offload.optimizer, config.offload.param, config.offload.grad})
    state: Verdict = "bad" if wanted or config.offload.path else "warn"
    if not folder.is_dir() or not takes_files(folder):
        why = "is not writable" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        yield Diagnosis("offload.path", state, f"{folder} {why}", "set offload.path to a folder on a fast local disk")
        return
    file_system, free = _file_system(host, folder)
    yield judge(
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


def _rate(config: Config, folder: Path, free_bytes: int, state: Verdict) -> Diagnosis:
    if free_bytes < GiB:
        advice = f"{size_text(free_bytes)} free is too little to offload anything"
        return Diagnosis("disk rate", "warn", "not measured", advice)
    try:
        threads, rate = _probed(folder)
    except StoreError as error:
        return Diagnosis("disk rate", state, str(error), "look into the system's log with dmesg")
    gbps, folders = rate / 1e9, len(config.offload.paths)
    finding = f"{gbps:.2f} GB/s read beside {gbps:.2f} GB/s written, by {threads} threads"
    slow = "use a local NVMe, or offload=cpu, because offload=nvme would wait for this disk"
    few = f"set offload.threads={threads * folders}, because more threads are faster here"
    return judge(
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


def checkpoints(config: Config, host: Host) -> Iterator[Diagnosis]:
    """Check checkpoint.dir, or if it is not set the current folder, in which runs make their folders."""
    folder = Path(config.checkpoint.dir or ".").absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    file_system, free = _file_system(host, existing)
    if not takes_files(existing):
        yield Diagnosis(
            "checkpoints", "bad", f"{folder} is not writable", "set checkpoint.dir to a folder of this user"
        )
        return
    yield judge(
        "checkpoints",
        f"{folder}: {file_system}, {size_text(free)} free",
        (file_system in MEMORY, "warn", "set checkpoint.dir to a disk, because a restart of the machine clears memory"),
        (NETWORK.fullmatch(file_system), "warn", "set checkpoint.async=true, because saves wait for the network"),
        (free < 2 * GiB, "warn", "make room, or set checkpoint.dir, because a save takes 12 bytes per parameter"),
    )
