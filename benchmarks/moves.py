"""Move a state between host memory and a disk, beside the rate of the disk's store alone.

    python benchmarks/moves.py --path /mnt/nvme

Rounds alternate: the store writes and reads the same number of bytes from and to memory of the same size, then the
state moves there and back.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import zero
from zero.core.sizes import MiB
from zero.platform.host_memory import aligned_zeros
from zero.store import NvmeStore, Page, PrefetchStore

PAGE_BYTES = 16 * MiB


def seconds(run: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


def alone(path: str, nbytes: int) -> tuple[float, float]:
    """Return the seconds in which a store writes and reads `nbytes`."""
    numel, pages = PAGE_BYTES // 4, [Page(0, "mu", number) for number in range(nbytes // PAGE_BYTES)]
    with contextlib.closing(PrefetchStore(NvmeStore(path, capacity_bytes=nbytes), threads=4)) as store:
        store.allocate_all(dict.fromkeys(pages, (numel, torch.float32)))
        sources = [torch.ones(numel) for _ in pages]

        def write() -> None:
            for page, source in zip(pages, sources, strict=True):
                store.write(page, source)
            store.drain()

        def read() -> None:
            into = [aligned_zeros(numel, torch.float32, torch.device("cpu")) for _ in pages]
            for page, memory in zip(pages, into, strict=True):
                store.read(page, memory)
            store.drain()

        written_s = seconds(write)
        sources.clear()
        return written_s, seconds(read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=".", help="a folder on the disk")
    parser.add_argument("--layers", type=int, default=32, help="layers of 4 Mi parameters, 32 MiB of moments each")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(options.layers)))
    offload = zero.Offload("cpu", path=options.path, page_bytes=PAGE_BYTES)
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=zero.open_world(), offload=offload)
    state = zero.init(plan, zero.open_store(plan))
    nbytes = sum(spec.nbytes for page, spec in plan.pages.store_pages().items() if plan.pages.is_updated(page))
    shares = []

    def move(preset: str) -> None:
        nonlocal state
        state = zero.move(state, offload=preset)

    for _ in range(options.rounds):
        times = *alone(options.path, nbytes), seconds(lambda: move("nvme")), seconds(lambda: move("cpu"))
        write, read, down, up = (nbytes / each / 1e9 for each in times)
        shares.append((down / write, up / read))
        print(f"store alone {write:.2f} and {read:.2f} GB/s, moves {down:.2f} and {up:.2f} GB/s")
    down, up = (statistics.median(each) for each in zip(*shares, strict=True))
    print(f"median share of the store's rate, {nbytes / 1e9:.2f} GB: to the disk {down:.2f}, back {up:.2f}")
    state.close()


if __name__ == "__main__":
    main()
