#!/usr/bin/env python3
"""Measure a save: its rate compared with a plain copy on the same disk, its memory, and its time for hashing.

    benchmarks/checkpoint.py --path /mnt/nvme              the 340M GPT, offload=nvme
    benchmarks/checkpoint.py --path /mnt/nvme --layers 2   a quick run
    benchmarks/checkpoint.py --beside --offload none       steps with and without an asynchronous save, as a JSON line

A save reads every page of the state, hashes it and writes it. The copy is `cp` of a file of the same size that is not
in the page cache, and fsync. Each round makes a save, a save without hashes and a copy; medians are compared. Peaks are
the process's resident memory according to the kernel, before and after the first save.

With `--beside`, each round makes steps without a save, then starts an asynchronous save and makes steps until it is
written. Pairs are medians of steps without and beside a save. `step_cpu_s` is the CPU time of the training thread,
which other programs on the machine hardly change. `stop_s` is the delay until the end of the first step after the
save's start; `call_s` is the part of it in the call.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import zero  # noqa: E402 - first: where nothing is installed it says what to type


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=".", help="folder on the disk to measure; needs 40 bytes per parameter")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--offload", default="nvme")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", action="store_true", help="measure training beside asynchronous saves")
    parser.add_argument("--saves", help="folder of those saves, such as one on another disk; default: --path")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each of the 2 rows of a step")
    return parser.parse_args()


def seconds(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--reflink=never", source, target], check=True)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def drop_from_cache(path: Path) -> None:
    """Drop the file from the page cache, because the state was not in it before the save either."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def unhashed():
    """Make saves in the block without hashes, to measure hashing. Such checkpoints cannot be loaded."""
    from zero.checkpoint.files import shard
    from zero.checkpoint.format import hashes

    real = shard.hash_block
    shard.hash_block = lambda block: hashes.FileHash(
        len(block), bytes(hashes.DIGEST_BYTES), bytes(hashes.CRC_BYTES * -(-len(block) // hashes.SPAN_BYTES))
    )
    try:
        yield
    finally:
        shard.hash_block = real


def beside(state: "zero.State", step: "zero.StepFunction", rows: object, root: Path, rounds: int) -> dict[str, object]:
    """Measure steps beside asynchronous saves; returns medians over all rounds."""
    from zero.checkpoint import Saving

    plain, first, later, call, whole = [], [], [], [], []
    for _ in range(rounds):

        def timed() -> tuple[float, float]:
            """Make a step; returns its seconds and the CPU seconds of this thread."""
            nonlocal state
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            state, _ = step(state, [rows])
            return time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s

        plain += [timed() for _ in range(6)]
        begin_s = time.perf_counter()
        saving = Saving(state, root, behind=True)
        call.append(time.perf_counter() - begin_s)
        first.append(timed()[0])
        while not saving.is_written:
            duration = timed()
            if not saving.is_written:
                later.append(duration)
        whole.append(time.perf_counter() - begin_s)
        saving.finish()
        state, _ = step(state, [rows])  # the first one after a save is not measured
    (plain_s, plain_cpu_s), (later_s, later_cpu_s) = (
        [statistics.median(part) for part in zip(*(steps or [(math.nan, math.nan)]), strict=True)]
        for steps in (plain, later)
    )
    return {
        "steps": [len(plain), len(later)],
        "step_s": [round(plain_s, 4), round(later_s, 4)],
        "ratio": round(later_s / plain_s, 3),
        "step_cpu_s": [round(plain_cpu_s, 4), round(later_cpu_s, 4)],
        "cpu_ratio": round(later_cpu_s / plain_cpu_s, 3),
        "stop_s": round(statistics.median(a + b for a, b in zip(call, first, strict=True)) - plain_s, 4),
        "call_s": round(statistics.median(call), 4),
        "save_s": round(statistics.median(whole), 3),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    options = arguments()
    import torch

    from zero.platform.host_memory import host_peak_bytes
    from zero.trainer.models import GPT, GPTConfig, loss

    torch.set_num_threads(options.threads)
    sizes = GPTConfig(width=options.width, layers=options.layers, heads=12, seq=options.tokens, vocab=256, mlp="gelu")
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=options.path) as top:
        world = zero.open_world()
        with zero.empty():
            model = GPT(sizes)
        plan = zero.Plan(
            model,
            optimizer=zero.adamw(1e-4, clip=1.0),
            world=world,
            precision="bf16",
            offload=zero.Offload(options.offload, path=options.path),
        )
        rows = torch.randint(0, 256, (2, options.tokens + 1))
        with contextlib.closing(zero.open_store(plan)) as store:
            state, step = zero.init(plan, store), zero.make_step(plan, loss)
            for _ in range(3):
                state, _ = step(state, [rows])
            if options.beside:
                saves = tempfile.mkdtemp(prefix="bench_checkpoint_", dir=options.saves or top)
                try:
                    figures = beside(state, step, rows, Path(saves, "root"), options.rounds)
                finally:
                    shutil.rmtree(saves)
                settings = {"offload": options.offload, "threads": options.threads, "parameters": plan.numel}
                print(json.dumps(settings | figures))
                return 0
            training = host_peak_bytes()
            path = zero.save(state, Path(top, "first"))
            peak = host_peak_bytes()
            source = path / "rank-00000-of-00001.safetensors"
            nbytes = source.stat().st_size
            times: dict[str, list[float]] = {"save": [], "save without hashes": [], "copy": []}
            for number in range(options.rounds):
                drop_from_cache(source)
                times["save"].append(seconds(lambda: zero.save(state, Path(top, "a"))))
                with unhashed():
                    times["save without hashes"].append(seconds(lambda: zero.save(state, Path(top, "b"))))
                times["copy"].append(seconds(lambda: copy(source, Path(top, "copy"))))
                Path(top, "copy").unlink()
                print(
                    f"round {number + 1}: "
                    + ", ".join(f"{what} {durations[-1]:.2f} s" for what, durations in times.items())
                )
            middle = {what: statistics.median(durations) for what, durations in times.items()}
    print(f"\n{plan.numel / 1e6:,.0f} M parameters, offload={options.offload}, {nbytes / 1e9:.2f} GB\n")
    print("| | median s | GB/s |\n|---|---:|---:|")
    for what, median_s in middle.items():
        print(f"| {what} | {median_s:.2f} | {nbytes / median_s / 1e9:.2f} |")
    ratio, share = middle["copy"] / middle["save"], 1 - middle["save without hashes"] / middle["save"]
    print("\n| figure | reached | goal | |\n|---|---:|---:|---|")
    print(f"| rate of a save / rate of a copy | {ratio:.2f} | 0.8 | {'reached' if ratio >= 0.8 else 'missed'} |")
    more = (peak - training) / 2**20
    print(
        f"| memory of a save above training's peak | {more:,.0f} MiB | 256 | {'reached' if more <= 256 else 'missed'} |"
    )
    print(f"| hashing, as a share of a save | {share:.2f} | | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
