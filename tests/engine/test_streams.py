"""The laws on a simulated GPU whose streams are checked: nothing races, and no order of execution changes a bit.

That the checks find what they are for is shown by taking every wait of the library away, one at a time.
"""

import ast
import hashlib
import itertools
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import zero
from tests.common.small import deterministic
from tests.simulation import RaceError, simulated_gpu
from tests.simulation.instrumented_gpu import InstrumentedGpu, WaitSite
from tests.simulation.races import Agent, History
from tests.simulation.simulated_time import RATES
from tests.simulation.streams import Streams
from zero.checkpoint import Saving, load, open_checkpoint, save
from zero.deepspeed.zero import safe_get_full_grad
from zero.engine.gather.fetch import Later
from zero.engine.memory import saved_tensors
from zero.engine.whole.read import digest
from zero.platform.handle import Handle
from zero.sequence import SequenceParallel, SharedRows, attention, open_group
from zero.testing import run_processes, run_ranks
from zero.tracker.meter import Meter

ROOT = Path(__file__).resolve().parents[2]
WIDTH, ROWS, STEPS = 32, 2, 3
ORDERS = ("late", "random")
RANKS = (1, 2)


# -- the detector, against reachability --------------------------------------------------------------------------------


class Act(NamedTuple):
    """Something that an agent does: touch bytes, leave a mark, or go on after one."""

    agent: int
    what: str
    first: int = 0
    stop: int = 0
    mark: int = 0


def acts() -> st.SearchStrategy[list[Act]]:
    touch = st.tuples(st.integers(0, 2), st.sampled_from(("read", "write")), st.integers(0, 7), st.integers(1, 4)).map(
        lambda drawn: Act(drawn[0], drawn[1], drawn[2], drawn[2] + drawn[3])
    )
    order = st.builds(Act, st.integers(0, 2), st.sampled_from(("mark", "after")), mark=st.integers(0, 2))
    return st.lists(touch | order, max_size=14)


def is_racy(told: list[Act]) -> bool:
    """Two touches of a byte, one of which writes, without a path from the first to the second."""
    before: list[set[int]] = []  # of each act, all that come before it in every execution
    last: dict[int, int] = {}
    marked: dict[int, int] = {}
    for number, act in enumerate(told):
        sources = [last[act.agent]] if act.agent in last else []
        if act.what == "after" and act.mark in marked:
            sources.append(marked[act.mark])
        before.append({predecessor for source in sources for predecessor in (source, *before[source])})
        last[act.agent] = number
        if act.what == "mark":
            marked[act.mark] = number
    touches = [(number, act) for number, act in enumerate(told) if act.what in ("read", "write")]
    return any(
        "write" in (access.what, other.what)
        and access.first < other.stop
        and other.first < access.stop
        and i not in before[j]
        for (i, access), (j, other) in itertools.combinations(touches, 2)
    )


@settings(max_examples=400, deadline=None)
@given(acts())
def test_a_race_is_what_no_order_of_marks_and_waits_rules_out(told):
    agents = [Agent(number, f"stream {number}") for number in range(3)]
    history, marks = History("memory", agents[0]), {}
    raised = False
    try:
        for act in told:
            agent = agents[act.agent]
            if act.what == "mark":
                marks[act.mark] = agent.now()
            elif act.what == "after" and act.mark in marks:
                agent.join(marks[act.mark])
            elif act.what in ("read", "write"):
                history.access(agent, act.first, act.stop, writes=act.what == "write", what=act.what)
    except RaceError:
        raised = True
    assert raised == is_racy(told)


def test_memory_is_freed_without_the_lock_of_the_device_that_it_is_of():
    """Ranks hand memory over: each may free some of the other's while it holds its own lock."""
    device, memory = Streams("program", 0), [torch.zeros(4)]
    device.allocated(memory)
    freeing = threading.Thread(target=memory.clear, daemon=True)
    with device.lock:
        freeing.start()
        freeing.join(5.0)
        assert not freeing.is_alive()


# -- what is run -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_way_to_multiply():
    """oneDNN takes other kernels where memory is aligned otherwise, and their bits are others."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Loop(nn.Sequential):
    """Blocks that are run over twice, so that all of their gradients are open at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Skipping(nn.Sequential):
    """Blocks of which some are left out."""

    left_out: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self):
            if number not in self.left_out:
                x = block(x)
        return x


class Bare(nn.Sequential):
    """Blocks of matrices only, so that no other parameter's gradient is the last."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__(*blocks)
        for block in blocks:
            block.norm = nn.Identity()
            block.up.bias = block.down.bias = None


SKIPS = ((3,), (2,), (3,), (2, 3), (), (3,), (0,))
"""Blocks that each step leaves out: heads in turn, the last ones, none, the last after all were used, the first."""


def stack(count: int = 3, kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(*(Block() for _ in range(count)))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def rows(number: int, world: zero.World, dtype: torch.dtype, count: int = ROWS) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * number + world.rank)
    return torch.randn(count, WIDTH, generator=draw).to(dtype)


def start(
    world: zero.World,
    path: Path,
    *,
    preset: str = "none",
    stage: int = 3,
    compute: str = "device",
    tiers: dict[str, str] | None = None,
    blocks: int = 3,
    kind: type[nn.Sequential] = nn.Sequential,
    coded: bool = False,
    **given,
):
    with world.exclusive():
        model = stack(blocks, kind)
    if coded:
        given["precision"] = zero.Precision("bf16", frozen="nf4")
        for block in model.children():
            block.up.weight.requires_grad_(False)  # type: ignore[union-attr]
    given.setdefault("precision", "bf16")
    given.setdefault("optimizer", zero.adamw(1e-2, clip=0.5))
    offload = zero.Offload(preset, path=str(path), page_bytes=4096, compute=compute, **(tiers or {}))
    plan = zero.Plan(model, world=world, stage=zero.Stage(stage), offload=offload, units=["Block"], **given)
    return zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss)


def closed(state: zero.State) -> str:
    """Close the state's store; return the digest that it had."""
    told = digest(state)
    state.runtime.store.close()
    return told


def train(world: zero.World, path: Path, *, accumulate: int = 1, count: int = ROWS, **given) -> str:
    state, step = start(world, path, accumulate=accumulate, **given)
    dtype = state.plan.precision.compute
    for number in range(STEPS):
        state, _ = step(state, [rows(accumulate * number + k, world, dtype, count) for k in range(accumulate)])
    if state.plan.update == "serial":
        assert world.compute.is_idle, "serial leaves nothing under way"
    return closed(state)


def train_and_skip(world: zero.World, path: Path, *, accumulate: int = 1, count: int = ROWS, **given) -> str:
    """Units are skipped in some steps; where ranks may part, the last rank leaves out others than the rest."""
    state, step = start(world, path, accumulate=accumulate, blocks=4, kind=Skipping, **given)
    dtype = state.plan.precision.compute
    parts = state.plan.facts.resident and world.rank > 0 and world.rank == world.size - 1
    for number in range(len(SKIPS)):
        state.model.left_out = SKIPS[number - 2 if parts else number]
        state, _ = step(state, [rows(accumulate * number + k, world, dtype, count) for k in range(accumulate)])
    return closed(state)


def train_skip_and_read(world: zero.World, path: Path, **given) -> str:
    """Gradients are read in the middle of a step that skips units which it has requested ahead and not gathered."""
    state, _ = start(world, path, blocks=9, kind=Skipping, **given)
    for number in range(STEPS):
        state.model.left_out = tuple(range(1, 9)) if number == 1 else SKIPS[number]
        under_way = zero.Step(state)
        under_way.microbatch()
        under_way.backward(loss(state.model, rows(number, world, torch.bfloat16)))
        zero.get_full(state, "0.up.weight", "grad")
        state, _ = under_way.finish()
    return closed(state)


def train_in_another_order(world: zero.World, path: Path, **given) -> str:
    """The second microbatch of a step begins with the gradient that the first one ended with."""
    state, _ = start(world, path, accumulate=2, blocks=4, kind=Skipping, **given)
    for number in range(STEPS):
        under_way = zero.Step(state)
        for part, left_out in enumerate(((), (1, 2, 3))):
            state.model.left_out = left_out
            under_way.microbatch()
            under_way.backward(loss(state.model, rows(2 * number + part, world, torch.bfloat16)))
        state, _ = under_way.finish()
    return closed(state)


def train_and_save(world: zero.World, path: Path, **given) -> str:
    """Two steps, a checkpoint, one more; and that one again from the checkpoint."""
    state, step = start(world, path, **given)
    for number in range(2):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
    folder = save(state, path / f"saved {given} {world.size}")
    state, _ = step(state, [rows(2, world, torch.bfloat16)])
    state = load(state, open_checkpoint(world, folder))  # at once: an update is under way
    state, _ = step(state, [rows(2, world, torch.bfloat16)])
    return closed(state)


def train_while_saving(world: zero.World, path: Path, *, edit: bool = False, **given) -> str:
    """Saves that training does not wait for hold the state of their step; returns the digests of their files, too."""
    with world.exclusive():
        torch.manual_seed(0)
    state, step = start(world, path, **given)
    savings = []
    for number in range(STEPS):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
        if edit:
            with zero.gathered(state, ["2.up.bias"], modify=True) as full:
                savings.append(Saving(state, path / f"behind {given} {world.size}", behind=True))
                full["2.up.bias"].add_(0.25)
        else:
            savings.append(Saving(state, path / f"behind {given} {world.size}", behind=True))
    told = closed(state)
    hashes = [hashlib.sha256() for _ in savings]
    for saving, checksum in zip(savings, hashes, strict=True):
        for file in sorted(saving.finish().glob("*.safetensors")):
            checksum.update(file.read_bytes())
    return " ".join([told, *(checksum.hexdigest() for checksum in hashes)])


def train_and_edit(world: zero.World, path: Path, **given) -> str:
    """Parameters are read and changed between steps, and a step is given up in the middle."""
    state, step = start(world, path, **given)
    for number in range(STEPS):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
        with zero.gathered(state, ["0.norm.weight", "2.up.bias"], modify=0) as full:
            if world.rank == 0:
                full["0.norm.weight"].mul_(1.5)
                full["2.up.bias"].add_(0.25)
        given_up = zero.Step(state)
        given_up.microbatch()
        given_up.backward(loss(state.model, rows(9, world, torch.bfloat16)))
        given_up.abandon()
    return closed(state)


def train_in_slices(world: zero.World, path: Path, **given) -> str:
    """All ranks share rows: attention is between their slices, before the blocks and after them."""
    state, _ = start(world, path, **given)
    parallel = SequenceParallel(open_group(world, world.size))

    def attended(x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, len(x), 4, -1).transpose(1, 2)
        return attention(q, q, q, SharedRows(parallel.group)).transpose(1, 2).reshape_as(x)

    def loss_in_slices(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return parallel.loss(attended(model(attended(x))).float().square().sum(), torch.ones(len(x)))

    step = zero.make_step(state.plan, loss_in_slices)
    for number in range(STEPS):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
    return closed(state)


def train_and_forget(world: zero.World, path: Path, **given) -> str:
    """A step's gradients are dropped as they are on their way, and the step goes on."""
    state, _ = start(world, path, accumulate=3, **given)
    for number in range(STEPS):
        under_way = zero.Step(state)
        for part in range(4):
            under_way.microbatch()
            under_way.backward(loss(state.model, rows(4 * number + part, world, torch.bfloat16)))
            if part in (1, 2):
                under_way.forget()
        state, _ = under_way.finish()
    return closed(state)


def train_and_leave(world: zero.World, path: Path, **given) -> str:
    """A step is begun and never ended, and another one begun."""
    state, step = start(world, path, **given)
    for number in range(STEPS):
        left = zero.Step(state)
        left.microbatch()
        left.backward(loss(state.model, rows(9, world, torch.bfloat16)))
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
    return closed(state)


def train_and_hold(world: zero.World, path: Path, **given) -> str:
    """More gradients are open at once than there are buffers for."""
    state, step = start(world, path, **given)
    for number in range(STEPS):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
        parts = state.runtime
        parts.settle()
        for unit in parts.units:
            parts.gradients.open(unit, fresh=True, held=True).zero_()
        for unit in parts.units:
            parts.gradients.park(unit)
        parts.gradients.reset()
    told = digest(state)
    assert parts.gradients.overflowed
    state.runtime.store.close()
    return told


def train_with_more_losses(world: zero.World, path: Path, **given) -> str:
    """A forward and a backward more in each step: what was complete in the last one is not yet in this one."""
    state, _ = start(world, path, **given)
    for number in range(STEPS):
        under_way = zero.Step(state)
        under_way.microbatch()
        for part in range(number + 1):
            under_way.backward(loss(state.model, rows(3 * number + part, world, torch.bfloat16)))
        state, _ = under_way.finish()
    return closed(state)


def train_and_look_at_one(world: zero.World, path: Path, **given) -> str:
    """One parameter is read after a step, which requests the units after it ahead, and then all state."""
    state, step = start(world, path, blocks=4, **given)
    forward, told = zero.make_forward(state.plan, loss), ""
    for number in range(STEPS):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
        if number == 0:  # so that the order of units without backward is known
            forward(state, rows(9, world, torch.bfloat16))
            forward(state, rows(9, world, torch.bfloat16))
        with torch.no_grad():
            told = f"{float(state.model[1].up.weight.float().norm())} {digest(state)}"
    closed(state)
    return told


def train_and_stream(world: zero.World, path: Path, **given) -> str:
    """Patches of a step leave, and make the weights of the step before it those of now."""
    state, step = start(world, path, **given)
    weights = dict(zero.stream_weights(state, keep=True))
    for number in range(STEPS):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
        for name, indices, values, _ in zero.stream_weights(state, changed_since=number):
            weights[name].view(-1)[indices.long()] = values
    told = " ".join(str(float(tensor.float().sum())) for tensor in weights.values())
    return f"{told} {closed(state)}"


def train_twice(world: zero.World, path: Path, **given) -> str:
    """Every step is made twice."""
    state, _ = start(world, path, **given)
    step = zero.make_step(state.plan, loss, replay=1)
    for number in range(STEPS):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
    return closed(state)


def train_and_move(world: zero.World, path: Path, *, moves: list[dict[str, Any]], **given) -> str:
    """The state moves after each step, while updates and gathers of the step are under way."""
    state, step = start(world, path, **given)
    for number in range(2 * STEPS):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
        state = zero.move(state, **moves[number % len(moves)])
    return closed(state)


def train_interrupted(world: zero.World, path: Path, **given) -> str:
    """A gather breaks off after its copies were enqueued, and the step is made again."""
    state, step = start(world, path, **given)
    residency, dtype = state.runtime.residency, state.plan.precision.compute
    fetch = residency.gathers._fetch
    for number in range(STEPS):
        calls = itertools.count()

        def breaks_off(*args, calls=calls):
            handles = fetch(*args)
            if next(calls) == 1:
                raise InterruptedError
            return handles

        residency.gathers._fetch = breaks_off
        try:  # where there is nothing to gather nothing breaks off
            state, _ = step(state, [rows(number, world, dtype)])
        except InterruptedError:
            residency.gathers._fetch = fetch
            state, _ = step(state, [rows(number, world, dtype)])
    return closed(state)


def train_and_look_again(world: zero.World, path: Path, **given) -> str:
    """A forward after a step breaks off when its first unit is requested, and is made again."""
    state, step = start(world, path, **given)
    residency, forward = state.runtime.residency, zero.make_forward(state.plan, loss)
    fetch = residency.gathers._fetch

    def breaks_off(*_):
        raise InterruptedError

    for number in range(STEPS):
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
        residency.gathers._fetch = breaks_off
        with pytest.raises(InterruptedError):
            forward(state, rows(9, world, torch.bfloat16))
        residency.gathers._fetch = fetch
        forward(state, rows(9, world, torch.bfloat16))
    return closed(state)


def train_own_loop(world: zero.World, path: Path, stage: int = 3, **offload) -> str:
    """zero.initialize, gradients read in the middle of the step, an evaluation between steps; a module with buffers."""
    with world.exclusive():
        model = stack()
    model.append(nn.BatchNorm1d(WIDTH))
    config = {
        "train_batch_size": 2 * ROWS * world.size,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **offload},
    }
    engine, *_ = zero.initialize(model=model, config=config, world=world)
    for number in range(2 * STEPS):
        engine.backward(loss(engine, rows(number, world, torch.float32)))
        safe_get_full_grad(engine.module[1].up.weight)
        engine.step()
        with torch.no_grad():
            mean = loss(engine, rows(9, world, torch.float32)).double()
        world.all_reduce(mean, what="losses").wait()
    told = f"{digest(engine.state)} {mean.item()} {world.share(str(world.rank))}"
    engine.destroy()
    return told


def scenario(run: Callable[..., str] = train, **given) -> partial[str]:
    return partial(run, **given)


MUON = zero.muon(1e-2, clip=0.5, momentum=0.5)

SCENARIOS: dict[str, partial[str]] = {
    **{f"stage {stage}": scenario(stage=stage) for stage in range(4)},
    **{f"stage {stage}, two microbatches": scenario(stage=stage, accumulate=2) for stage in range(4)},
    **{f"{preset}": scenario(preset=preset) for preset in ("cpu", "nvme", "infinity")},
    "infinity, gradients on the device": scenario(preset="infinity", tiers={"grad": "none"}),
    "infinity, gradients on the device, units skipped and read": scenario(
        train_skip_and_read, preset="infinity", tiers={"grad": "none"}, prefetch=12
    ),
    "cpu at stage 1, another order": scenario(train_in_another_order, preset="cpu", stage=1),
    **{f"{preset}, two microbatches": scenario(preset=preset, accumulate=2) for preset in ("cpu", "infinity")},
    **{
        f"{preset} at stage {stage}": scenario(preset=preset, stage=stage, accumulate=2)
        for preset, stage in (("cpu", 0), ("cpu", 1), ("nvme", 1), ("nvme", 2))
    },
    "in slices": scenario(train_in_slices),
    "cpu, state on a disk": scenario(preset="cpu", tiers={"optimizer": "nvme"}),
    "cpu, updated by the host": scenario(preset="cpu", compute="host"),
    **{f"{preset}, half updated by the host": scenario(preset=preset, compute=0.5) for preset in ("cpu", "infinity")},
    "serial": scenario(preset="nvme", update="serial"),
    "fp32": scenario(preset="infinity", precision="fp32"),
    "whole master, updated by the host": scenario(
        preset="cpu", compute="host", precision=zero.Precision("bf16", master="whole")
    ),
    "moments in 8 bits": scenario(preset="nvme", optimizer=zero.with_moments(zero.adamw(1e-2, clip=0.5), "8bit")),
    "moments in bf16, on the host": scenario(preset="cpu", optimizer=zero.with_moments(zero.adamw(1e-2, clip=0.5))),
    "whole master": scenario(preset="nvme", precision=zero.Precision("bf16", master="whole")),
    **{f"muon at stage {stage}": scenario(stage=stage, optimizer=MUON) for stage in (0, 1, 3)},
    **{f"muon, {preset}": scenario(preset=preset, optimizer=MUON) for preset in ("cpu", "nvme", "infinity")},
    "muon, updated by the host": scenario(preset="cpu", compute="host", optimizer=MUON),
    "muon, matrices only, updated by the host": scenario(preset="cpu", compute="host", optimizer=MUON, kind=Bare),
    "muon, one looked at": scenario(train_and_look_at_one, optimizer=MUON, kind=Bare),
    "muon, interrupted": scenario(train_interrupted, preset="cpu", optimizer=MUON),
    "codes": scenario(coded=True, accumulate=2),
    "codes at stage 0": scenario(coded=True, stage=0),
    **{f"codes, {preset}": scenario(coded=True, preset=preset) for preset in ("cpu", "infinity")},
    "codes, saved, infinity": scenario(train_and_save, coded=True, preset="infinity"),
    "activations on the host": scenario(activations="offload", count=64),
    "recomputed": scenario(activations="remat", preset="cpu"),
    "saved, nvme": scenario(train_and_save, preset="nvme"),
    "saved, cpu": scenario(train_and_save, preset="cpu"),
    "saved at stage 1": scenario(train_and_save, stage=1),
    **{f"saved behind, {preset}": scenario(train_while_saving, preset=preset) for preset in ("cpu", "infinity")},
    "saved behind at stage 1": scenario(train_while_saving, stage=1),
    "saved behind, whole master": scenario(
        train_while_saving, preset="nvme", precision=zero.Precision("bf16", master="whole")
    ),
    "saved behind an edit": scenario(train_while_saving, edit=True),
    "streamed": scenario(train_and_stream),
    "streamed at stage 1": scenario(train_and_stream, stage=1),
    **{f"made twice, {preset}": scenario(train_twice, preset=preset) for preset in ("cpu", "infinity")},
    "edited at stage 1": scenario(train_and_edit, stage=1),
    "edited": scenario(train_and_edit, preset="infinity"),
    "edited at stage 0": scenario(train_and_edit, stage=0),
    "forgotten": scenario(train_and_forget, stage=0),
    "forgotten at stage 2": scenario(train_and_forget, stage=2),
    "forgotten, of many": scenario(train_and_forget, stage=1, blocks=9),
    "forgotten, of many, cpu": scenario(train_and_forget, preset="cpu", blocks=9),
    "left, of many": scenario(train_and_leave, preset="cpu", blocks=9),
    "held": scenario(train_and_hold, preset="cpu", blocks=5),
    "looped": scenario(preset="cpu", stage=1, accumulate=2, blocks=5, kind=Loop),
    "forgotten, infinity": scenario(train_and_forget, preset="infinity"),
    "more and more losses": scenario(train_with_more_losses, stage=0),
    "moved through the tiers": scenario(train_and_move, moves=[{"offload": "infinity"}, {"offload": "cpu"}]),
    "moved from host to disk": scenario(
        train_and_move, moves=[{"offload": "nvme"}, {"offload": "none"}, {"offload": "nvme"}, {"stage": 1}]
    ),
    "moved from the host and back": scenario(train_and_move, moves=[{"offload": "cpu"}, {"offload": "none"}]),
    "moved from disk to disk": scenario(
        train_and_move, moves=[{"offload_path": "/tmp"}, {"offload_path": "."}], preset="nvme"
    ),
    "two nodes": scenario(gather="node", reduce="node"),
    "two nodes, a copy on each, infinity": scenario(shard="node", preset="infinity"),
    "two nodes, cpu, two microbatches": scenario(gather="node", preset="cpu", accumulate=2),
    "two nodes, codes, cpu": scenario(coded=True, gather="node", preset="cpu"),
    "two nodes, forgotten, a copy on each": scenario(train_and_forget, shard="node"),
    "two nodes, edited, cpu": scenario(train_and_edit, gather="node", preset="cpu"),
    "two nodes, interrupted, cpu": scenario(train_interrupted, gather="node", preset="cpu"),
    "two nodes, saved, infinity": scenario(train_and_save, gather="node", preset="infinity"),
    "two nodes, sums in bf16": scenario(reduce="node", precision=zero.Precision("bf16", reduce="bf16")),
    "sums by the backend": scenario(reduce="native"),
    "sums by the backend, cpu, two microbatches": scenario(reduce="native", preset="cpu", accumulate=2, stage=1),
    "interrupted": scenario(train_interrupted),
    "interrupted, cpu": scenario(train_interrupted, preset="cpu"),
    "interrupted, infinity": scenario(train_interrupted, preset="infinity"),
    "a forward interrupted, cpu": scenario(train_and_look_again, preset="cpu"),
    "a loop of one's own": scenario(train_own_loop),
    "a loop of one's own at stage 1": scenario(train_own_loop, stage=1, offload_optimizer={"device": "cpu"}),
}


SKIPPING = (
    *("stage 0", "stage 1, two microbatches", "stage 2, two microbatches", "stage 3", "cpu"),
    *("infinity, two microbatches", "nvme at stage 1", "two nodes"),
)
SCENARIOS |= {f"{name}, units skipped": partial(train_and_skip, **SCENARIOS[name].keywords) for name in SKIPPING}


@pytest.fixture(autouse=True)
def small_activations(monkeypatch):
    """Everything of a kilobyte goes to the host, where activations do."""
    monkeypatch.setattr(saved_tensors, "LEAST_BYTES", 1 << 10)


def result(name: str, path: Path) -> str:
    """Train on two ranks, on two nodes of two each, or alone, as the name says."""
    nodes = 2 if name.startswith("two nodes") else 1
    size = 1 if name.endswith(", alone") else 2
    with deterministic() if name.startswith("made twice") else nullcontext():
        return " ".join(run_ranks(size * nodes, SCENARIOS[name.removesuffix(", alone")], path, nodes=nodes))


def expected(name: str, path: Path) -> str:
    """On a CPU, whose update is not the GPU's where the host updates, and otherwise is."""
    (path / "plain").mkdir()
    with simulated_gpu():
        return result(name, path / "plain")


# -- laws --------------------------------------------------------------------------------------------------------------

ALONE = (
    *("stage 1", "stage 3, two microbatches", "cpu", "infinity, two microbatches", "cpu at stage 0", "nvme at stage 1"),
    *("whole master, updated by the host", "moments in 8 bits", "recomputed", "saved, nvme"),
    *("codes, cpu", "codes at stage 0"),
    *("edited", "forgotten, of many", "left, of many", "looped", "more and more losses", "interrupted, infinity"),
)
"""Scenarios that one rank runs, in place of two."""


@pytest.mark.slow(keep=41, always=["two nodes, forgotten, a copy on each"])
@pytest.mark.parametrize(
    ("order", "name"),
    [(ORDERS[number % 2], f"{name}, alone" if name in ALONE else name) for number, name in enumerate(SCENARIOS)],
)
def test_nothing_races_and_no_order_of_execution_changes_a_bit(order, name, tmp_path):
    wanted = expected(name, tmp_path)
    with simulated_gpu(races=True, order=order, seed=1) as simulation:
        assert result(name, tmp_path) == wanted
    made = {(CALLS.get((site.file, site.line)), site.name) for site in simulation.sites}
    here = {(call, kind) for call, kind in made if call is not None and not _is_another(call)}
    unproven = [f"{call}: {kind}" for call, kind in here if kind not in NEEDED.get(str(call), ())]
    assert not unproven, "waits that no test takes away"


# -- what the host waits for -------------------------------------------------------------------------------------------


def waits_of_a_step(world: zero.World, path: Path, **given) -> tuple[int, int]:
    """(of the thread that trains, of the store's threads), in a step that follows others."""
    state, step = start(world, path, **given)
    counts = world.compute.streams.counts
    for number in range(STEPS):
        before = counts.copy()
        state, _ = step(state, [rows(number, world, torch.bfloat16)])
    state.runtime.store.drain()
    step_counts = counts - before
    state.runtime.store.close()
    return step_counts["waits of the host"], step_counts["waits of the store's threads"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("given", [*({"stage": stage} for stage in range(4)), {"preset": "cpu"}], ids=str)
def test_in_a_step_the_host_waits_once_for_the_device(given, ranks, tmp_path):
    """For its numbers; and nobody waits for the copies of what is in host memory."""
    with simulated_gpu(races=True):
        assert {*run_ranks(ranks, partial(waits_of_a_step, **given), tmp_path)} == {(1, 0)}


def leads(world: zero.World, path: Path, **given) -> list[tuple[float, float]]:
    """Seconds by which the device ends after the host: when a step has returned, and when its loss was read."""
    state, step = start(world, path, **given)
    streams, seconds = world.compute.streams, []

    def lead() -> float:
        return streams.seconds(streams.main.agent.moment) - streams.seconds(streams.host.moment)

    for number in range(STEPS):
        state, metrics = step(state, [rows(number, world, state.plan.precision.compute)])
        seconds.append((lead(), metrics.loss and lead()))
    state.runtime.store.close()
    return seconds


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("given", [{"stage": 1}, {"precision": "fp16"}, {"preset": "cpu", "stage": 2}], ids=str)
def test_a_step_that_the_device_decides_returns_before_the_device_has(given, ranks, tmp_path):
    """The host reads the numbers when it is asked for them; without kernels it waits in each step."""
    slow = RATES._replace(device_bytes_per_s=1e6)
    with simulated_gpu(races=True, fused=True, rates=slow):
        for seconds in run_ranks(ranks, partial(leads, **given), tmp_path):
            assert all(returned > 0.001 and read < returned / 2 for returned, read in seconds)
    with simulated_gpu(races=True, rates=slow):
        for seconds in run_ranks(ranks, partial(leads, **given), tmp_path):
            assert all(returned < 0.001 for returned, _ in seconds)


def leads_of_a_run(world: zero.World, path: Path) -> list[float]:
    """Seconds by which the device ends after the host, when a step has been counted as in a run without a row."""
    state, step = start(world, path, stage=1)
    streams, seconds, store = world.compute.streams, [], state.runtime.store
    meter = Meter(world, state.plan, tokens_per_step=8, traffic=lambda: store.traffic)
    for number in range(STEPS):
        state, metrics = step(state, [rows(number, world, state.plan.precision.compute)])
        meter.count(metrics)
        assert metrics.rank_flags == (0.0,) * world.size
        assert (metrics.lr > 0, metrics.loss_scale, meter.results.skipped_in_a_row) == (True, 1.0, 0)
        seconds.append(streams.seconds(streams.main.agent.moment) - streams.seconds(streams.host.moment))
    assert meter.results.loss == metrics.loss
    store.close()
    return seconds


@pytest.mark.parametrize("ranks", RANKS)
def test_a_counted_step_is_not_waited_for(ranks, tmp_path):
    """The host knows the results that a run reads in every step, and reads the rest a step later."""
    with simulated_gpu(races=True, fused=True, rates=RATES._replace(device_bytes_per_s=1e6)):
        for seconds in run_ranks(ranks, leads_of_a_run, tmp_path):
            assert all(lead > 0.001 for lead in seconds)


@pytest.mark.parametrize("preset", ["nvme", "infinity"])
def test_what_goes_to_a_disk_is_waited_for_by_the_threads_that_write_it(preset, tmp_path):
    with simulated_gpu(races=True):
        [(training, beside)] = run_ranks(1, partial(waits_of_a_step, preset=preset), tmp_path)
    assert training == 1
    assert beside > 0


# -- every wait is needed, and its absence is found --------------------------------------------------------------------


class Call(NamedTuple):
    """A call in the library that may be a wait for the device."""

    file: str
    function: str
    callee: str
    """As the code has it, such as "self.ready.wait"."""

    def __str__(self) -> str:
        return f"{self.file.removeprefix('zero/')}:{self.function} {self.callee}"


OTHERS = {
    "zero/platform/cuda.py": "the door itself",
    "zero/platform/arena.py": "`test_a_store_that_closes_waits_for_what_is_on_its_way` has the one that is there",
    "zero/platform/tape.py": "passes waits on",
    "zero/distributed/transport.py:Transport.arrived": "the caller's wait: numbers of a step that the device decides",
    "zero/distributed/failure.py": "waits for a process",
    "zero/trainer/launch/ranks.py": "waits for a process",
    "zero/trainer/run/evaluate.py": "numbers of a step: `World.all_reduce`, whose wait is in the list",
    "zero/tracker/interval.py": "the same",
    "zero/tracker/track.py": "the same",
    "zero/distributed/process_group.py:ProcessGroup.open_part": "before NCCL splits a communicator",
    "zero/distributed/traffic.py:CollectiveCounter.timed": "passes waits on",
    "zero/distributed/transport.py:Processes._exchange": "between hosts, for what is in their memory",
    "zero/distributed/routes/copies.py:_Sums.start.add_nodes": "passes waits on",
    "zero/distributed/routes/node.py:SumsByNode.start.wait": "after an error: "
    "`test_a_sum_by_node_whose_second_row_does_not_start_ends_its_first_before_its_flats_are_used_again` has it",
    "zero/engine/backward/reduce.py:Reductions._complete_oldest": "`World.reduce_scatter` waits",
    **dict.fromkeys(
        (
            f"zero/distributed/agreement.py:Hosts.{name}"
            for name in ("exchange", "agree", "barrier", "gather_texts", "share")
        ),
        "between hosts, for what is in their memory",
    ),
    **dict.fromkeys(
        (
            "zero/trainer/run/saver.py",
            "zero/trainer/run/loop.py",
            "zero/checkpoint/save.py:Saving._finish",
            "zero/checkpoint/save.py:save",
            "zero/formats/imports.py",
        ),
        "the end of a file",
    ),
    "zero/checkpoint/save.py:Saving._await_copies": "`Runtime.await_copies`, which is in the list, calls it",
    "zero/store/executor.py:Executor._copy": "an inner store's, which does its work when it is asked",
    "zero/trainer/planning/probes.py": "a probe's time is taken when all is done",
    "zero/trainer/planning/timed.py": "a probe's time is taken when all is done",
    "zero/engine/move.py:_Move._move_units": "writes behind the work of slots: moved states have the same bits",
    "zero/engine/park.py:_Parked.send": "before another program uses the memory",
    "zero/engine/park.py:_Parked._move_pages": "`UnitMove.wait`, whose wait is in the list",
    "zero/engine/step.py:Step._reduce": "the reducer, whose waits are in the list",
    "zero/user_loop/engine.py": "a step, whose waits are in the list",
    "zero/store/prefetch.py:PrefetchStore.drain": "passes waits on",
    "zero/sequence.py:SequenceParallel.loss": "`World.all_reduce`, whose wait is in the list",
    "zero/engine/step.py:_drain": "`test_reads_that_an_interrupt_lost_have_ended_before_the_step_is_made_again` has it",
}
"""Files, or functions, with calls that are named like waits, and why they are none of the list."""

NEEDED: dict[str, dict[str, str]] = {
    "checkpoint/pieces.py:_arrived copied.finish": {"finish": "saved at stage 1"},
    "checkpoint/pieces.py:_arrived ticket.wait": {"ticket": "saved, nvme"},
    "user_loop/shard.py:_broadcast_buffers world.broadcast().wait": {"collective": "a loop of one's own"},
    "user_loop/shard.py:_values_of_rank_0.fill world.broadcast().wait": {"collective": "a loop of one's own"},
    "distributed/routes/parts.py:Operation.go_on handle.wait": {"collective": "two nodes"},
    "distributed/routes/parts.py:Operation.wait handle.wait": {"collective": "two nodes"},
    "distributed/world.py:World.all_reduce.add arrival.wait": {"collective": "a loop of one's own"},
    "distributed/world.py:World.reduce_scatter.add arrival.wait": {"collective": "stage 0"},
    "engine/unit_move.py:UnitMove._copy ticket.wait": {"ticket": "moved from disk to disk"},
    "engine/unit_move.py:UnitMove.wait ticket.wait": {"ticket": "moved from host to disk"},
    "engine/unit_move.py:gather_values runtime.routes.gather().wait": {"collective": "moved from host to disk"},
    "engine/gather/fetch.py:_expanding.start handle.wait": {
        "collective": "codes",
        "ticket": "codes, infinity, alone",
    },
    "engine/gather/fetch.py:Later.wait handle.wait": {"collective": "cpu, state on a disk"},
    "engine/gather/fetch.py:Later.wait self._ready.wait": {"wait": "cpu, state on a disk, alone"},
    "engine/gather/fetch.py:lending.fetch.copy_and_gather ticket.wait": {"ticket": "cpu, state on a disk"},
    "engine/gather/fetch.py:reading.read.gather ticket.wait": {"ticket": "infinity"},
    "engine/whole/flat_writer.py:_to_pages.keep store.write().wait": {"ticket": "whole master"},
    "engine/whole/edit.py:_from_rank world.broadcast().wait": {"collective": "edited at stage 0"},
    "engine/full_flat.py:summed_gradient runtime.gradients.left().wait": {"wait": "a loop of one's own at stage 1"},
    "engine/full_flat.py:gather_flat runtime.routes.gather().wait": {"collective": "stage 1"},
    "engine/full_flat.py:updated_range load_page().wait": {"ticket": "nvme"},
    "engine/update/gradient.py:PagedGradients._await_coming self._coming[-1].wait": {
        "ticket": "infinity, two microbatches"
    },
    "engine/update/gradient.py:PagedGradients._bring_back loaded.wait": {"wait": "a loop of one's own at stage 1"},
    "engine/update/gradient.py:PagedGradients._bring_back self._device.aside": {
        "wait": "a loop of one's own at stage 1, alone",
    },
    "engine/update/gradient.py:PagedGradients._bring_back self._records[unit].left.wait": {
        "wait": "cpu at stage 1, another order"
    },
    "engine/update/gradient.py:PagedGradients._finish_oldest ticket.wait": {"ticket": "infinity"},
    "engine/memory/scratch.py:ScratchPool.drop_extra scratch.free.finish": {"finish": "held"},
    "engine/update/gradient.py:PagedGradients.open buffer.free.wait": {"wait": "cpu"},
    "engine/update/gradient.py:PagedGradients.park self._device.aside": {"aside": "cpu"},
    "engine/memory/pool.py:Buffer.land self.arrivals[-1].wait": {
        "ticket": "infinity, alone",
        "collective": "stage 1",
    },
    "engine/memory/pool.py:Buffer.land self.ready.wait": {"wait": "stage 1, alone"},
    "engine/backward/reduce.py:Reductions._complete_gather handle.wait": {"collective": "stage 0"},
    "engine/backward/reduce.py:Reductions.settle self._done.wait": {"wait": "stage 0"},
    "engine/backward/reduce.py:Reductions.take flat.free.wait": {"wait": "stage 0"},
    "engine/backward/reduce.py:Reductions.drop handle.wait": {"collective": "forgotten"},
    "engine/backward/reduce.py:Reductions.drop self._done.wait": {"wait": "forgotten, of many"},
    "engine/replay.py:Replay._copy self._store.read().wait": {"ticket": "made twice, infinity"},
    "engine/replay.py:Replay._sums self._device.join": {"join": "made twice, cpu"},
    "engine/replay.py:Replay.watched self._device.join": {"join": "made twice, cpu"},
    "engine/gather/gathers.py:Gathers.start self._device.aside": {"aside": "stage 1"},
    "engine/runtime.py:Runtime.await_copies self.copying[-1].wait": {"ticket": "saved behind at stage 1"},
    "engine/runtime.py:Runtime.finish_step self.store.drain": {"drain": "serial"},
    "engine/runtime.py:Runtime.make_updates self.plan.world.compute.join": {"join": "saved, cpu"},
    "engine/memory/saved_tensors.py:OnHost._fetch home.left.wait": {"wait": "activations on the host"},
    "engine/memory/saved_tensors.py:OnHost._fetch self._device.aside": {"aside": "activations on the host"},
    "engine/memory/saved_tensors.py:OnHost._let_go event.wait": {"wait": "activations on the host"},
    "engine/memory/saved_tensors.py:OnHost._send self._device.aside": {"aside": "activations on the host"},
    "engine/memory/saved_tensors.py:OnHost.find home.ready.wait": {"wait": "activations on the host"},
    "engine/update/staging.py:Staging._complete ready.wait": {"wait": "cpu"},
    "engine/update/staging.py:Staging._complete self._device.aside": {"wait": "cpu"},
    "engine/update/staging.py:Staging._read self._device.aside": {"wait": "cpu"},
    "engine/update/staging.py:Staging._send before.wait": {"wait": "cpu"},
    "engine/update/staging.py:Staging._send self._device.aside": {"aside": "cpu"},
    "engine/update/staging.py:Staging.opened self._complete().wait": {"wait": "cpu"},
    "engine/step.py:Step.abandon self._plan.world.compute.join": {"join": "interrupted"},
    "sequence.py:_exchanged handle.wait": {"collective": "in slices"},
    "engine/totals.py:exchange_totals handle.wait": {"collective": "stage 1"},
    "engine/whole/streaming.py:_all runtime.routes.gather().wait": {"collective": "streamed"},
    "engine/memory/transfer.py:_through_slot.work device.paging": {"wait": "nvme", "paging": "nvme"},
    "engine/unit_state.py:UnitState.await_grad_readers self.grad_readers[-1].wait": {
        "wait": "stage 1, two microbatches, units skipped",
        "ticket": "infinity, gradients on the device, units skipped and read",
    },
    "engine/update/update.py:Updater._update_in_thread self._device.paging": {
        "wait": "nvme",
        "finish": "cpu, updated by the host",
        "paging": "nvme",
    },
    "engine/update/orthogonalize.py:Orthogonalizer.run self._world.reshard().wait": {"collective": "muon at stage 1"},
    "engine/update/update.py:Updater._launch_staged self._device.aside": {"aside": "muon, cpu"},
    "engine/update/orthogonalize.py:MatrixPasses.run self._read.wait": {"wait": "muon, one looked at"},
    "engine/update/orthogonalize.py:MatrixPasses.run ticket.wait": {"ticket": "muon, nvme"},
    "engine/update/orthogonalize.py:MatrixPasses.run unit.grad_ready.wait": {
        "wait": "muon, matrices only, updated by the host"
    },
    "engine/update/update.py:Updater._launch_pass unit.updated.wait": {"wait": "muon, cpu"},
    "engine/update/update.py:Updater._update_on_streams unit.updated.wait": {"wait": "cpu at stage 1"},
    "engine/update/update.py:Updater.apply_deferred ticket.wait": {"ticket": "nvme at stage 1"},
    "engine/update/update.py:Updater.schedule_update self._device.aside": {"aside": "cpu"},
    "engine/update/update.py:Updater.schedule_update self._gradients.left().wait": {"wait": "cpu"},
}
"""By call, each kind of wait that it makes, with a scenario that misses it."""


def calls() -> dict[tuple[str, int], Call]:
    """All calls in the library that may be waits, by file and line."""
    call_sites: dict[tuple[str, int], Call] = {}
    for path in sorted((ROOT / "zero").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if not file.startswith("zero/testing/"):
            _add_calls(call_sites, ast.parse(path.read_text()), file, ())
    return call_sites


def _add_calls(call_sites: dict[tuple[str, int], Call], node: ast.AST, file: str, scope: tuple[str, ...]) -> None:
    for child in ast.iter_child_nodes(node):
        inner = (*scope, child.name) if isinstance(child, ast.ClassDef | ast.FunctionDef) else scope
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            name, bare = child.func.attr, not child.args and not child.keywords
            passed = any(
                keyword.arg == "after" and ast.unparse(keyword.value) == "PASSED" for keyword in child.keywords
            )
            if (name in ("wait", "finish", "join", "drain") and bare) or (name in ("aside", "paging") and not passed):
                line = child.func.end_lineno or child.lineno
                callee = re.sub(r"\(.*\)", "()", ast.unparse(child.func), flags=re.DOTALL)
                call_sites[file, line] = Call(file, ".".join(scope), callee)
        _add_calls(call_sites, child, file, inner)


CALLS = calls()


def _is_another(call: Call) -> bool:
    return any(f"{call.file}:{call.function}".startswith(other) for other in OTHERS)


MISSED = "nothing orders that after|may still be using it|nothing under way"


@pytest.mark.parametrize("call", sorted(call for call in {*CALLS.values()} if not _is_another(call)), ids=str)
def test_a_wait_that_is_taken_away_is_found(call, tmp_path):
    """By the detector: it knows of nothing that is in order by chance."""
    for kind, name in NEEDED[str(call)].items():
        for number, line in enumerate(line for (_, line), other in CALLS.items() if other == call):
            site = WaitSite(kind, call.file, line)
            path = tmp_path / f"{kind} {number}"
            path.mkdir()
            with (
                pytest.raises((zero.errors.ZeroError, AssertionError), match=MISSED),
                simulated_gpu(races=True, without=site) as simulation,
            ):
                result(name, path)
            assert site in simulation.sites, f"{name} does not come to it"


def write_later(world: zero.World, *, is_requested: bool) -> None:
    """Use a buffer on the compute stream, request a gather into it, and start the expansion that writes it."""
    full = world.compute.zeros(64, torch.float32)
    full.sum()

    def expand() -> list[Handle]:
        full.fill_(1.0)
        return []

    if is_requested:  # as `Gathers.start` does
        with world.compute.aside("gather"):
            pass
    later = Later(world.compute, expand)
    later.start()
    later.wait()


@pytest.mark.parametrize("is_requested", [True, False])
def test_the_request_of_a_gather_orders_its_later_parts_behind_the_last_use_of_the_buffer(is_requested):
    """A `Later` waits for no compute itself."""
    with simulated_gpu(races=True), nullcontext() if is_requested else pytest.raises(AssertionError, match=MISSED):
        run_ranks(1, partial(write_later, is_requested=is_requested))


def test_each_reason_why_a_call_is_no_wait_is_still_needed():
    for other in OTHERS:
        assert any(f"{call.file}:{call.function}".startswith(other) for call in CALLS.values()), other


@pytest.mark.parametrize("waits", [True, False])
def test_a_store_that_closes_waits_for_what_is_on_its_way(waits, tmp_path, monkeypatch):
    """Copies that were launched go on when the threads that launched them have ended."""
    if not waits:
        monkeypatch.setattr(InstrumentedGpu, "join", lambda gpu: None)
    with simulated_gpu(races=True) as seen:
        run_ranks(1, step_and_close, tmp_path)
    assert bool(seen.counts["unpinned in use"]) != waits


def step_and_close(world: zero.World, path: Path) -> None:
    state, step = start(world, path, preset="cpu")
    state, _ = step(state, [rows(0, world, torch.bfloat16)])
    state.runtime.store.drain()
    state.runtime.store.close()


# -- processes ---------------------------------------------------------------------------------------------------------


def trained_in_a_process(world: zero.World, path: str, given: dict[str, object]) -> tuple[str, dict[str, int]]:
    told = train(world, Path(path), **given)
    return told, dict(world.compute.streams.counts)


@pytest.mark.parametrize("given", [{"stage": 0}, {"preset": "infinity"}], ids=str)
def test_ranks_that_are_processes_have_the_same_device_and_bits(given, tmp_path):
    """Gloo moves the bytes; what is asked of it begins and is waited for on streams all the same."""
    with simulated_gpu():
        wanted = run_ranks(2, partial(train, **given), tmp_path)
    with simulated_gpu(races=True, order="late"):
        results = run_processes(2, trained_in_a_process, str(tmp_path), given)
    assert [told for told, _ in results] == wanted
    assert all(counts["launches"] > 100 for _, counts in results)
