#!/usr/bin/env python
"""Show what one rank of many sends, computes and holds: a rank whose collectives end at once, and plans on paper.

    benchmarks/many_ranks.py                            64 and 1,024 ranks; about a minute on one core
    benchmarks/many_ranks.py --ranks 1024 --units 1000

The rank trains a model of small linear layers at stage 3, with all ranks on one node. Each collective gives it its own
data in place of the other ranks', so that the host does all its work and no other process is needed. Then the buffers
of larger models are planned for GPUs, and the manifest of a save is written in memory.
"""

import argparse
import statistics
import time
from collections import Counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

import zero
from zero.checkpoint.contents import flats
from zero.checkpoint.format.texts import FORMAT, to_text
from zero.checkpoint.format.manifest import File, Manifest
from zero.core.placement import NO_LIMIT
from zero.core.sizes import GiB, MiB
from zero.distributed.transport import Transport
from zero.distributed.world import World
from zero.engine.meta import RecordedOperation
from zero.engine.plan.traffic import traffic
from zero.platform.handle import Done, Handle
from zero.trainer.planning import PaperWorld

NODE_RANKS = 8
WARM, STEPS = 2, 5
"""Steps before the measured ones, and measured steps."""


class Lone(Transport):
    """Rank 0 of any number of ranks. Collectives end at once; the other ranks' data are copies of its own.

    Attributes:
        counts: collectives started, by kind.
        seconds: the time in them, without waits.
    """

    def __init__(self, size: int) -> None:
        super().__init__(0, size, device="cpu", timeout_s=1.0)
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    def _copy(self, kind: str, into: Tensor, source: Tensor) -> Handle:
        begin_s = time.perf_counter()
        self.counts[kind] += 1
        into.copy_(source)
        self.seconds += time.perf_counter() - begin_s
        return Done()

    def gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        kind = "exchanges" if aside else "gathers"
        return self._copy(kind, full_P.view(self.size, -1), shard_S.clone().expand(self.size, -1))

    def all_to_all(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return self._copy("reductions", recv_P.view(self.size, -1), full_P.view(self.size, -1)[0].expand(self.size, -1))

    def reshard(self, source: Tensor, into: Tensor, *cuts_and_op: Any) -> Handle:
        return self._copy("reductions", into, into)

    def reduce_scatter(self, full_P: Tensor, recv_S: Tensor, op: str) -> Handle:
        return self._copy("reductions", recv_S, full_P.view(self.size, -1)[0])

    def broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        return self._copy("broadcasts", flat, flat)


class Measured(NamedTuple):
    """The work of one rank.

    Attributes:
        start: collectives of the start, by kind.
        end: collectives at the end of a step, without reductions and gathers of units.
        step_ms: host time of a step, without collectives, of which `bookkeeping_ms` outside of forward and backward.
    """

    start: dict[str, int]
    end: dict[str, int]
    step_ms: float
    bookkeeping_ms: float


def measure(ranks: int, units: int) -> Measured:
    """Train a model of `units` small layers on one rank of `ranks`."""
    lone = Lone(ranks)
    world = World(lone)

    def seconds() -> float:
        return lone.seconds + world.traffic.wait_s  # reductions are added up in waits

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(units)))
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, stage=3)
    state = zero.init(plan, zero.open_store(plan))
    start, x = dict(lone.counts), torch.ones(1, 8)
    times, ends = [], []
    for _ in range(WARM + STEPS):
        begin_s, quiet_s = time.perf_counter(), seconds()
        step = zero.Step(state)
        step.microbatch()
        before_s, before_quiet_s = time.perf_counter(), seconds()
        step.backward(state.model(x).mean())
        after_s, after_quiet_s = time.perf_counter(), seconds()
        before = Counter(lone.counts)
        state, _ = step.finish()
        end_s, end_quiet_s = time.perf_counter(), seconds()
        ends.append(dict(lone.counts - before))
        whole_s = end_s - begin_s - (end_quiet_s - quiet_s)
        times.append((whole_s, whole_s - (after_s - before_s) + (after_quiet_s - before_quiet_s)))
    step_s, bookkeeping_s = (statistics.median(column) for column in zip(*times[WARM:], strict=True))
    return Measured(start, ends[-1], 1e3 * step_s, 1e3 * bookkeeping_s)


class Decoder(nn.Module):
    """A decoder of the Llama family, on meta: only its shapes count."""

    def __init__(self, width: int, layers: int, hidden: int, kv: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden, kv) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, kv: int) -> None:
        super().__init__()
        sizes = {"q": width, "k": kv, "v": kv, "o": width, "gate": hidden, "up": hidden}
        self.linears = nn.ModuleDict({name: nn.Linear(width, size, bias=False) for name, size in sizes.items()})
        self.down = nn.Linear(hidden, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


DECODERS = {
    "8B": (4096, 32, 14336, 1024, 128256),
    "70B": (8192, 80, 28672, 1024, 128256),
    "405B": (16384, 126, 53248, 1024, 128256),
}
"""Model -> width, layers, hidden width, width of keys and values, vocabulary."""


def planned(model: nn.Module, ranks: int, dtype: str, device: Any = "cuda", reduce: Any = "auto") -> zero.Plan:
    """Return the plan of a run at stage 3, with gradients sent in `dtype`."""
    world = PaperWorld(ranks, local_size=min(ranks, NODE_RANKS), device=device)
    precision: Any = zero.Precision(dtype, reduce=dtype)  # type: ignore[arg-type]
    optimizer = zero.adamw(1e-4)
    return zero.Plan(
        model, optimizer=optimizer, world=world, stage=3, bucket=0, precision=precision, reduce=reduce, room=NO_LIMIT
    )


def decoder(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(*DECODERS[name])


def pyramid() -> nn.Module:
    """Return a model of 40 units of 40 sizes, 355 MiB of fp32 in all."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(1024, 111 * number, bias=False) for number in range(1, 41)))


def buffers_bytes(plan: zero.Plan) -> tuple[int, int]:
    """Return the bytes of gathered units and of gradient flats."""
    device = plan.bytes["device"]
    return device["gathered units"], device["gradient flats"]


class Started(NamedTuple):
    """The first values of one rank: elements drawn, elements that the rank keeps, and the seconds for both."""

    drawn: int
    kept: int
    seconds: float


def started(model: nn.Module, ranks: int) -> Started:
    """Initialize one rank of `ranks` at stage 3, without an optimizer's moments; count the elements that it draws."""
    drawn, run = 0, RecordedOperation.run

    def counted(operation: RecordedOperation, values: dict[int, Tensor]) -> None:
        nonlocal drawn
        drawn += sum({id(value): value.numel() for value in values.values()}.values())  # an alias is the same tensor
        run(operation, values)

    world, optimizer = World(Lone(ranks)), zero.sgd(0.1)
    plan = zero.Plan(model, optimizer=optimizer, world=world, stage=3, precision="bf16", room=NO_LIMIT)
    store, begin_s = zero.open_store(plan), time.perf_counter()
    with patch.object(RecordedOperation, "run", counted):
        zero.init(plan, store)
    seconds = time.perf_counter() - begin_s
    store.close()
    return Started(drawn, sum(unit.trainable.S for unit in plan.units), seconds)


def manifest_bytes(plan: zero.Plan) -> int:
    """Return the size of the manifest of a save."""
    size = plan.world.size
    files = (File(2**40, "0" * 64),) * size
    return len(to_text(Manifest(FORMAT, 10**9, size, flats(plan, {}), files, True, {"given": {}})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,1024", help="numbers of ranks, separated by commas")
    parser.add_argument("--units", default="100,1000", help="numbers of units, separated by commas")
    parser.add_argument("--start", default="8B", choices=DECODERS, help="the model whose first values are made")
    parser.add_argument("--start-ranks", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for ranks in map(int, options.ranks.split(",")):
        for units in map(int, options.units.split(",")):
            measured = measure(ranks, units)
            print(
                f"{units} units, {ranks} ranks: start {measured.start}, end of a step {measured.end}, host "
                f"{measured.step_ms:.1f} ms a step, {measured.bookkeeping_ms:.1f} ms beside forward and backward"
            )
    for name, ranks in (("8B", 8), ("70B", 128), ("405B", 1024)):
        plan, native = (planned(decoder(name), ranks, "bf16", reduce=reduce) for reduce in ("auto", "native"))
        gathered, flat = (nbytes / GiB for nbytes in buffers_bytes(plan))
        print(
            f"{name}, bf16, stage 3, {ranks} ranks: gathered {gathered:.2f} GiB, flats {flat:.2f} GiB, native "
            f"{buffers_bytes(native)[1] / GiB:.2f} GiB, manifest {manifest_bytes(plan) / 2**20:.2f} MiB, over wires "
            f"{traffic(plan).of_step(1).wire / 1e9:.0f} GB a step"
        )
    start = started(decoder(options.start), options.start_ranks)
    print(
        f"{options.start}, {options.start_ranks} ranks: a rank draws {start.drawn:,} first values and keeps "
        f"{start.kept:,}, in {start.seconds:.1f} s"
    )
    sizes = [buffers_bytes(planned(pyramid(), 8, "fp32", "cpu", reduce)) for reduce in ("exact", "native")]
    print(
        f"40 units of 40 sizes, fp32, stage 3, 8 ranks: gathered {sizes[0][0] / MiB:.1f} MiB, flats "
        f"{sizes[0][1] / MiB:.1f} MiB, native {sizes[1][1] / MiB:.1f} MiB"
    )


if __name__ == "__main__":
    main()
