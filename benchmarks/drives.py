#!/usr/bin/env python
"""Measure the rate of one rank's store on several drives made of memory. Prints a JSON line for each number of threads.

    benchmarks/drives.py --drives 4 --read-gbps 0.35 --write-gbps 0.15 --threads 4,8,16,32
    benchmarks/drives.py --drives 4 --read-gbps 0 --write-gbps 0 --threads 1,2,4,16    # no doors

Each drive is a file in memory behind doors (`tests.faults.disks.Drive`) that let a set rate through, and half of it for
a single thread. A group has `--kinds` pages, spread over the drives as the pages of a run. Measured: groups
that are only read, only written, and modified (read, then written). `share` is the part of the drives' rates that was
reached, for `modify` of the slower direction's.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.faults.disks import Drive  # noqa: E402
from zero.platform.device import work_alone  # noqa: E402
from zero.platform.host_memory import aligned_zeros  # noqa: E402
from zero.store import PageGroup, NvmeStore, Page, PrefetchStore, Tiers, spread  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drives", type=int, default=4)
    parser.add_argument("--read-gbps", type=float, default=0.35, help="of a drive; 0: no doors")
    parser.add_argument("--write-gbps", type=float, default=0.15)
    parser.add_argument("--threads", default="4,8,16,32")
    parser.add_argument("--page-mib", type=int, default=4)
    parser.add_argument("--kinds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--no-verify", action="store_true", help="without CRC-32")
    return parser.parse_args()


def rates(options: argparse.Namespace, threads: int) -> dict[str, float]:
    """Return bytes per second, in each direction, of reading, writing and modifying all pages."""
    page_bytes, kinds = options.page_mib * 2**20, [f"kind {number}" for number in range(options.kinds)]
    groups = [PageGroup(0, number, tuple(Page(0, kind, number) for kind in kinds)) for number in range(options.groups)]
    sizes = {page: page_bytes for group in groups for page in group.pages}
    where = spread(sizes, [1.0] * options.drives)
    doors = [1e9 * rate or math.inf for rate in (options.read_gbps, options.write_gbps)]
    drives = [NvmeStore(".", files=Drive(*doors), verify=not options.no_verify) for _ in range(options.drives)]
    slots = [aligned_zeros(len(kinds) * page_bytes, torch.uint8, torch.device("cpu")) for _ in range(threads + 2)]
    for slot in slots:
        slot.fill_(1)  # takes its memory before the measurement
    tiers = Tiers({str(number): drive for number, drive in enumerate(drives)}, where.__getitem__)
    store = PrefetchStore(tiers, slots, threads=threads, read_ahead=2, prepare=work_alone)

    def rate(change: Callable[[PageGroup], PageGroup]) -> float:
        begin_s = time.perf_counter()
        for number, group in enumerate(groups):
            store.modify(change(group), lambda tensors: None, (number,))
        store.drain()
        return sum(sizes.values()) / (time.perf_counter() - begin_s)

    for page, nbytes in sizes.items():
        store.allocate(page, nbytes // 4, torch.float32)
    try:
        rate(lambda group: group._replace(pages=(), out=group.pages))  # files in memory take it when first written
        return {
            "write": rate(lambda group: group._replace(pages=(), out=group.pages)),
            "read": rate(lambda group: group._replace(pages=(), beside=group.pages)),
            "modify": rate(lambda group: group),
        }
    finally:
        store.close()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    limits = {"read": options.read_gbps, "write": options.write_gbps}
    limits["modify"] = min(limits.values())
    for threads in map(int, options.threads.split(",")):
        row = {"threads": threads}
        for name, rate in rates(options, threads).items():
            row |= {f"{name}_gbps": round(rate / 1e9, 3)}
            if limits["modify"]:
                row |= {f"{name}_share": round(rate / 1e9 / options.drives / limits[name], 3)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
