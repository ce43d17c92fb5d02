"""Part 6: several GPUs: bandwidth, correctness, speed, and the errors of all ranks when one of them fails.

Each task starts a process for each rank. It hosts the ranks' key-value store, so that the store survives any rank.
"""

import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_parts.devices import Gpu
from gpu_parts.laws import Case, against_torch, be_deterministic, bounded, compare_digests, curve
from gpu_parts.machine import best_s
from gpu_parts.run import DONE, END_S, Budget, Emit, Row, die_with_parent, run_and_exit, status_of
from gpu_parts.sizes import Model, Sizes
from gpu_parts.speed import measure_speed
from gpu_parts.training import Offloading, running, tokens_of_rank
from zero.trainer.models import GPTConfig

TIMEOUT_S = 120.0
"""The longest wait of a rank for another one."""

FAILURE_TIMEOUT_S = 40.0
"""The same where a rank fails. `zero.distributed.stalled` compares operations after 20 s of waiting for a device."""

REPORT_S = 2.0
"""Seconds before the limit of a task at which its ranks are ended, so that their ends are still recorded."""

Work = Callable[..., None]
"""A function that runs on every rank. Its arguments are the rank's GPU, further ones, `emit` and the budget."""


class Ranks:
    """The ranks of part 6.

    Args:
        gpu: the class of their devices.
        count: number of ranks.
        start: how their processes start, "fork" or "spawn".
    """

    def __init__(self, gpu: type[Gpu], count: int, start: str) -> None:
        self._gpu, self.count, self._start = gpu, count, start

    def run(self, work: Work, *arguments: Any, emit: Emit, budget: Budget) -> None:
        """Run `work` on every rank and emit the rows of rank 0.

        Raises:
            RuntimeError: a rank did not end well.
        """
        ends = self.ends(work, *arguments, emit=emit, budget=budget, timeout_s=TIMEOUT_S)
        failed = [f"rank {rank} {end}" for rank, (end, _) in enumerate(ends) if end != DONE]
        if failed:
            raise RuntimeError("; ".join(failed))

    def ends(
        self, work: Work, *arguments: Any, emit: Emit, budget: Budget, timeout_s: float
    ) -> list[tuple[str, float]]:
        """Run `work` as `run` does. Return how each rank ended, and after how many seconds."""
        faulthandler.cancel_dump_traceback_later()  # a forked process would wait for its thread; ranks have their own
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context: Any = multiprocessing.get_context(self._start)
        begin_s, limit_s = time.monotonic(), budget.left_s - REPORT_S
        processes, pipes = [], {}
        for rank in range(self.count):
            environment = _environment(rank, self.count, store.port)
            run = partial(_on_rank, environment, self._gpu, timeout_s, work, arguments)
            pipe, child_end = context.Pipe(duplex=False)
            processes.append(context.Process(target=_child, args=(run, child_end, limit_s)))
            processes[-1].start()
            child_end.close()
            pipes[pipe] = rank
        rows: list[list[Row]] = [[] for _ in processes]
        ends = [(f"cut after {limit_s:.0f} s", limit_s) for _ in processes]
        try:
            for pipe in _ready(pipes, begin_s + limit_s):
                rank = pipes[pipe]
                try:
                    rows[rank].append(json.loads(pipe.recv_bytes()))
                    if rank == 0 and rows[0][-1]["kind"] != "failed":
                        emit(rows[0][-1])
                except (EOFError, OSError):
                    del pipes[pipe]
                    processes[rank].join(END_S)
                    ends[rank] = status_of(processes[rank].exitcode, rows[rank]), time.monotonic() - begin_s
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(END_S)  # the next ranks need its GPU
        return ends


def _ready(pipes: dict[Connection, int], end_s: float) -> Iterator[Connection]:
    """Yield pipes that can be read, until there are none or the time is over."""
    while pipes:
        ready = multiprocessing.connection.wait(list(pipes), max(0.0, end_s - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            yield pipe


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    texts = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return texts | {name: str(number) for name, number in numbers.items()}


def _child(run: Callable[[Emit, Budget], None], pipe: Connection, limit_s: float) -> None:
    die_with_parent()
    run_and_exit(run, pipe, limit_s)


def _on_rank(
    environment: dict[str, str],
    gpu_class: type[Gpu],
    timeout_s: float,
    work: Work,
    arguments: tuple[Any, ...],
    emit: Emit,
    budget: Budget,
) -> None:
    os.environ.update(environment)
    gpu = gpu_class(timeout_s)
    with gpu.world:
        work(gpu, *arguments, emit, budget)


# -- bandwidth ---------------------------------------------------------------------------------------------------------


def measure_bandwidth(ranks: Ranks, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    """Emit the bus bandwidth of each collective and size."""
    ranks.run(_bandwidth, sizes, emit=emit, budget=budget)


def _bandwidth(gpu: Gpu, sizes: Sizes, emit: Emit, budget: Budget) -> None:
    world = gpu.world
    for nbytes in sizes.collective_bytes:
        for what, run in _collectives(gpu, nbytes):
            world.barrier(what)
            seconds = best_s(gpu, run)
            rate = nbytes * (world.size - 1) / world.size / seconds / 1e9
            emit({"kind": "collective", "what": what, "ranks": world.size, "bytes": nbytes, "s": seconds, "rate": rate})
        gpu.free_cached()


def _collectives(gpu: Gpu, nbytes: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield collectives of tensors of `nbytes` bytes on each rank."""
    world = gpu.world

    def flat(dtype: torch.dtype, share: int = 1) -> torch.Tensor:
        numel = nbytes // dtype.itemsize // world.size * world.size
        return torch.ones(numel // share, dtype=dtype, device=gpu.device)

    full, received, own = flat(torch.bfloat16), flat(torch.bfloat16), flat(torch.bfloat16, world.size)
    full_fp32, own_fp32 = flat(torch.float32), flat(torch.float32, world.size)
    total, total_fp32 = own.float(), own_fp32.clone()
    yield "gather, bf16", lambda: world.gather(own, full).wait()
    yield "exact sum of bf16", lambda: world.reduce_scatter(full, received, total).wait()
    yield "native sum of bf16", lambda: world.reduce_scatter(full, own, total, native=True).wait()
    yield "native sum of fp32", lambda: world.reduce_scatter(full_fp32, own_fp32, total_fp32, native=True).wait()


# -- laws --------------------------------------------------------------------------------------------------------------


def check_ranks(ranks: Ranks, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    """Compare stages and tiers bit by bit, training with plain torch in one process, and native with exact sums."""
    ranks.run(_check, sizes, disk, emit=emit, budget=budget)


def _check(gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    be_deterministic(gpu, sizes, disk, emit)
    exact, native = (partial(curve, gpu, sizes, disk, reduce=reduce) for reduce in ("exact", "native"))
    for precision in sizes.precisions:
        emit(against_torch(gpu, sizes, disk, precision))
        emit(bounded("exact sums", precision, gpu, sizes, partial(native, precision), partial(exact, precision)))
        compare_digests(_cases(gpu.world.size), precision, gpu, sizes, disk, emit)


def _cases(count: int) -> Iterator[Case]:
    for reduce in ("exact", "native"):
        family = f"{count} ranks, {reduce} sums"
        yield Case(family, "stage 3", {"reduce": reduce})
        for stage in (3, 2, 1, 0):
            for preset in ("none", "cpu"):
                settings = {"stage": stage, "reduce": reduce, "offloading": Offloading(preset)}
                yield Case(family, f"stage {stage}, {preset}", settings)


# -- speed -------------------------------------------------------------------------------------------------------------


def measure_ranks(model: Model, ranks: Ranks, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    """Measure each system in turn, as part 3 does on one rank."""
    ranks.run(_measure, model, sizes, disk, emit=emit, budget=budget)


def _measure(gpu: Gpu, model: Model, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    model = replace(model, name=f"{model.name} on {gpu.world.size} GPUs")
    measure_speed(model, None, gpu, sizes, disk, emit, budget)


# -- failures ----------------------------------------------------------------------------------------------------------


def check_failures(ranks: Ranks, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    """Emit how each rank ended after the last one was killed, and after it ran other collectives."""
    last = ranks.count - 1
    for case, work in ((f"rank {last} is killed", _lose_last), (f"rank {last} skips a collective", _skip_one)):
        ends = ranks.ends(work, sizes, disk, emit=emit, budget=budget, timeout_s=FAILURE_TIMEOUT_S)
        for rank, (end, seconds) in enumerate(ends):
            emit({"kind": "failure", "case": case, "rank": rank, "end": end, "s": seconds})


def _lose_last(gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    config, world = GPTConfig(**sizes.laws), gpu.world
    with running(config, gpu, sizes, disk) as run:
        for number in range(3):
            if number == 1 and world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(tokens_of_rank(config, sizes.law_rows, gpu, number))


def _skip_one(gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    world = gpu.world
    own, full = torch.zeros(4, device=gpu.device), torch.zeros(4 * world.size, device=gpu.device)
    for name in ("unit 0", "unit 1")[world.rank == world.size - 1 :]:
        world.gather(own, full, what=name).wait()
    world.on_host(full)
    byte, bytes_of_all = (world.compute.host.zeros(numel, torch.uint8) for numel in (1, world.size))
    world.gather(byte, bytes_of_all, what="the end").wait()
