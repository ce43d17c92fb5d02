"""Transfers beside compute on a GPU: their streams, and that every use waits for its transfer, however late it is."""

import functools
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.common.small import KiB, Setting, slice_of, small_batch, small_loss, wide
from tests.simulation import simulated_gpu
from tests.simulation.instrumented_gpu import InstrumentedGpu
from tests.simulation.simulated_gpu import Simulation
from tests.simulation.simulated_time import RATES
from zero.distributed.routes import GatherRequest
from zero.engine.whole.measured import measured
from zero.engine.whole.read import digest, full_state_dict
from zero.platform.timeline import Span, Timeline
from zero.store.workers import WorkerPool
from zero.testing import run_ranks

HOST = Setting(precision="bf16", offload=(("preset", "cpu"),), page_bytes=4 * KiB)


def aside(name: str) -> str:
    """Return the simulation's name of a side stream."""
    return f"the stream {name!r}"


def watched(simulation: Simulation) -> list[InstrumentedGpu]:
    return [gpu for gpu in simulation.gpus if isinstance(gpu, InstrumentedGpu)]


def current(world: zero.World) -> str:
    """The stream on which this thread launches."""
    assert isinstance(world.compute, InstrumentedGpu)
    return world.compute.streams.current.agent.name


def trained(world: zero.World, setting: Setting, steps: int = 3) -> tuple[str, list[object]]:
    """Also what `zero.Step` shows of gradients between backward and the end of a step."""
    plan = setting.plan(world, wide)
    store = zero.open_store(plan)
    state, step = zero.init(plan, store), zero.make_step(plan, small_loss)
    told: list[object] = []
    for number in range(steps):
        batches = slice_of(small_batch(number, 6 * world.size * setting.accumulate), world, setting.accumulate)
        if number == 1:
            under_way = zero.Step(state)
            for batch in batches:
                under_way.microbatch()
                loss, _ = small_loss(state.model, batch)
                under_way.backward(loss)
            told += [(name, value.sum().item()) for name, value in full_state_dict(state, "grad").items()]
            state, metrics = under_way.finish()
        else:
            state, metrics = step(state, batches)
        told.append(metrics.grad_norm)
    told_of_state = digest(state), told
    store.close()
    return told_of_state


CASES = [
    (1, 3, 3, "serial", "nvme", 4, "host"),
    (1, 0, 3, "lazy", "cpu", 4, "device"),
    (2, 3, 2, "serial", "none", 8, "device"),
    (2, 1, 3, "lazy", "cpu", 4, "host"),
]


@pytest.mark.parametrize(("size", "stage", "accumulate", "update", "optimizer", "page_kib", "compute"), CASES)
def test_what_travels_late_gives_the_same_bits(size, stage, accumulate, update, optimizer, page_kib, compute):
    """With tied weights, a block that is used twice, parts that are frozen, and gradients that are read."""
    setting = HOST.but(stage=stage, accumulate=accumulate, update=update, page_bytes=page_kib * KiB)
    with simulated_gpu():
        expected = run_ranks(size, trained, setting.but(offload=()))
    offload = (("preset", "cpu"), ("optimizer", optimizer), ("compute", compute))
    with simulated_gpu(races=True, order="late") as simulation:
        assert run_ranks(size, trained, setting.but(offload=offload)) == expected
    assert all(aside("gradients out") in {copy.stream for copy in gpu.copies} for gpu in watched(simulation))


def borrowed() -> list[float]:
    """Return the gradients of three units that take two buffers in turns."""
    with zero.empty():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    world = zero.open_world(device="cpu")
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world, accumulate=2, offload="cpu", units=["Linear"])
    store = zero.open_store(plan)
    parts = zero.init(plan, store).runtime
    gradients = []
    for unit, value in [*zip(parts.units, (1.0, 2.0, 3.0), strict=True), (parts.units[2], 4.0)]:
        gradients.append(parts.gradients.open(unit, fresh=value < 4)[-1].item())
        parts.gradients.open(unit, fresh=False).fill_(value)
        parts.gradients.park(unit)
    for unit in (*parts.units, *parts.units):
        gradients += [parts.gradients.open(unit, fresh=False)[-1].item()]
        parts.gradients.park(unit)
    store.close()
    return gradients


def test_three_gradients_in_two_buffers_are_what_was_written():
    with simulated_gpu(races=True, order="late"):
        assert borrowed()[3:] == [3.0, 1.0, 2.0, 4.0, 1.0, 2.0, 4.0]


TIERS = [
    *(
        {"preset": preset, "compute": compute}
        for preset in ("cpu", "nvme", "infinity")
        for compute in ("device", "host")
    ),
    {"optimizer": "cpu", "compute": "host"},
    {"optimizer": "none", "grad": "cpu", "param": "cpu", "compute": "host"},
    {"optimizer": "auto", "param": "cpu", "compute": "host"},
]


@pytest.mark.parametrize("optimizer", [zero.adamw(1e-2, clip=0.5), zero.muon(1e-2, clip=0.5)], ids=["adamw", "muon"])
@pytest.mark.parametrize("tiers", TIERS, ids=lambda tiers: " ".join(tiers.values()))
def test_every_copy_of_a_step_is_to_or_from_pinned_memory(tiers, optimizer, tmp_path):
    """And the bits are those of the same run without a GPU, whose update is the host's."""

    def step_twice(world: zero.World) -> str:
        with world.exclusive(), zero.empty():
            model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
        plan = zero.Plan(
            model, optimizer=optimizer, world=world, precision="bf16", units=["Linear"],
            offload=zero.Offload(path=str(tmp_path), page_bytes=8 * KiB, **tiers),
        )  # fmt: skip
        state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, mean_square)
        if isinstance(world.compute, InstrumentedGpu):
            assert measured(state).get("host", {}).get("arena", 0) == plan.arena_bytes
            world.compute.copies.clear()
        for _ in range(2):
            state, _ = step(state, [ones()])
        digests = digest(state)
        state.close()
        return digests

    with simulated_gpu(races=True, order="late") as simulation:
        digests = run_ranks(2, step_twice)
    copies = [copy for gpu in watched(simulation) for copy in gpu.copies]
    assert copies
    assert all(copy.pinned for copy in copies)
    if tiers["compute"] == "host" and optimizer.matrix_rule is None:
        assert digests == run_ranks(2, step_twice)


# -- parameters in host memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
def test_parameters_in_host_memory_give_the_same_bits_on_two_ranks(optimizer):
    """In fp32 an update writes what gathers read; bf16 is among the cases above."""
    setting = HOST.but(accumulate=2, precision="fp32", offload=())
    with simulated_gpu():
        expected = run_ranks(2, trained, setting)
    with simulated_gpu(races=True, order="random"):
        offload = (("preset", "cpu"), ("optimizer", optimizer))
        assert run_ranks(2, trained, setting.but(offload=offload)) == expected


def start(
    world: zero.World, preset: str, *, layers: int = 4, page_bytes: int = 8 * KiB, tiers=(), **settings
) -> zero.State:
    """A stack of layers of many pages."""
    with world.exclusive(), zero.empty():
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(layers)))
    offload = zero.Offload(preset, page_bytes=page_bytes, ahead=1024 * KiB, **dict(tiers))
    plan = zero.Plan(
        model, optimizer=zero.adamw(1e-2), world=world, precision="bf16", offload=offload, units=["Linear"],
        **settings,
    )  # fmt: skip
    assert plan.facts.params_on_host == (preset == "cpu")
    return zero.init(plan, zero.open_store(plan))


def ones(rows: int = 1) -> Tensor:
    return torch.ones(rows, 128, dtype=torch.bfloat16)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


@pytest.mark.parametrize(("page_bytes", "copies"), [(4 * KiB, 17), (8 * KiB, 1), (64 * KiB, 1)])
def test_a_unit_is_one_copy_and_no_page_is_asked_of_the_schedule(page_bytes, copies, monkeypatch):
    """Its pages lie back to back where each is whole blocks of 4 KiB."""
    with simulated_gpu(order="late") as simulation:
        state = start(zero.open_world(device="cpu"), "cpu", page_bytes=page_bytes)
        state, _ = zero.make_step(state.plan, mean_square)(state, [ones()])
        state.runtime.finish_step()
        [gpu], asked = watched(simulation), []
        monkeypatch.setattr(WorkerPool, "do_here", lambda *_: asked.append(_))
        gpu.copies.clear()
        zero.make_forward(state.plan, mean_square)(state, ones())
        assert [copy.stream for copy in gpu.copies] == [aside("gather")] * copies * 4
        assert sum(copy.nbytes for copy in gpu.copies) == sum(2 * unit.trainable.P for unit in state.plan.units)
        assert not asked


def gathers_and_forwards(world: zero.World, tiers: tuple[tuple[str, str], ...]) -> list[list[str]]:
    """Return the order of gathers and forwards: of a forward with pending updates, then of a second evaluation."""
    state = start(world, "cpu", tiers=tiers)
    told: list[str] = []
    routes = state.runtime.routes
    start_gather = routes._start_gather

    def watched(gather: GatherRequest):
        assert current(world) == aside("gather")
        told.append(f"gather {gather.what}")
        return start_gather(gather)

    routes._start_gather = watched
    for number, layer in enumerate(state.model):
        layer.register_forward_pre_hook(lambda *_, number=number: told.append(f"forward {number}"))
    state, _ = zero.make_step(state.plan, mean_square)(state, [ones()])

    def through(model: nn.Module, x: Tensor) -> None:
        for number, layer in enumerate(model):
            x = layer(x)
            told.append(f"end {number}")

    forward, orders = zero.make_forward(state.plan, through), []
    under_way = zero.Step(state)
    under_way.microbatch()
    for run in (partial(through, state.model), partial(forward, state), partial(forward, state)):
        told.clear()
        run(ones())
        orders.append([event for event in told if event.split()[0] in ("gather", "forward", "end")])
    under_way.abandon()
    return orders[::2]


ON_A_DISK = (("optimizer", "nvme"),)


@pytest.mark.parametrize("tiers", [(), ON_A_DISK])
def test_ranks_gather_ahead_also_after_an_update(tiers):
    """At once where no thread of the store has a part in the update; else when the unit before is launched."""
    with simulated_gpu(order="late"):
        for first, second in run_ranks(2, gathers_and_forwards, tiers):
            for before, unit in pairwise(range(4)):
                assert first.index(f"gather {unit}") < first.index(f"end {before}")
                assert (first.index(f"gather {unit}") < first.index(f"forward {before}")) is (not tiers)
            assert [event for event in first if "gather" in event] == [f"gather {unit}" for unit in range(4)]
            assert second.index("gather 1") < second.index("forward 0")
            assert second.index("gather 3") < second.index("forward 2")
            assert sorted(second) == sorted(first)


# -- what the timeline of a step shows ---------------------------------------------------------------------------------

LAYERS = 6
UNITS = [str(number) for number in range(LAYERS)]


def recorded(world: zero.World, preset: str, microbatches: int) -> Timeline:
    """A step of microbatches of so many rows that a layer computes for longer than it travels."""
    state = start(world, preset, layers=LAYERS, accumulate=microbatches)
    step = zero.make_step(state.plan, mean_square)
    state, _ = step(state, [ones(256)] * microbatches)
    state.runtime.store.drain()
    with zero.record(state) as timeline:
        state, _ = step(state, [ones(256)] * microbatches)
    state.runtime.store.close()
    return timeline


@functools.cache
def record(size: int, preset: str, microbatches: int = 2, rates=RATES) -> list[Timeline]:
    """On the clock of the simulation, on which streams run beside one another."""
    with simulated_gpu(order="late", rates=rates):
        return run_ranks(size, recorded, preset, microbatches)


def last(timeline: Timeline, name: str) -> Span:
    """In the last microbatch, whose gathers wait for no update."""
    return [span for span in timeline.spans if span.name == name][-1]


def is_within(begin_s: float, span: Span) -> bool:
    return span.begin_s <= begin_s < span.end_s


def test_gradients_travel_beside_what_computes():
    """Both ways: out after the backward of their unit, in before that of the next microbatch; the second in fp32."""
    [timeline] = record(1, "cpu", microbatches=3)
    seen = Counter(span.name for span in timeline.spans)
    row_seconds = timeline.hidden()
    for unit in UNITS:
        assert (seen[f"page out {unit}"], seen[f"page in {unit}"]) == (3, 2)
    for row in ("page out", "page in"):
        assert row_seconds[row].busy_s > 0.1 * timeline.step_s
        assert row_seconds[row].exposed_s < 0.02 * row_seconds[row].busy_s, row
    for before, unit in pairwise(UNITS[1:]):  # that of unit 0 leaves after the last backward
        left, computed = last(timeline, f"page out {unit}"), last(timeline, f"backward {before}")
        assert is_within(left.begin_s, computed)
        assert left.end_s < computed.end_s


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_in_host_memory_arrive_beside_the_unit_before(size):
    """In forward and in backward; but for the first two, which lie where the pass before has left them."""
    for timeline in record(size, "cpu"):
        for before, unit in [*pairwise(UNITS[1:]), *pairwise(reversed(UNITS[:-1]))]:
            what = "forward" if before < unit else "backward"
            computed, used = last(timeline, f"{what} {before}"), last(timeline, f"{what} {unit}")
            began = [span.begin_s for span in timeline.spans if span.name == f"gather {unit}"]
            assert any(is_within(begin_s, computed) for begin_s in began), (what, unit)
            assert used.begin_s == computed.end_s, f"{what} {unit} had to wait"


@pytest.mark.parametrize(("preset", "limit"), [("none", 0.015), ("cpu", 0.04)])
def test_ranks_gather_beside_compute_also_after_an_update(preset, limit):
    """In a step of one microbatch each gather in forward follows an update. Nothing can hide the first one, whose copy
    may wait for a copy of pages, which takes the link for as long as the pages of a whole unit here."""
    for timeline in record(2, preset, 1):
        assert timeline.hidden()["gather"].exposed_s < limit * timeline.step_s


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_out_of_host_memory_takes_little_longer_than_one_on_the_device(size):
    """Transfers take a good part of the step; all but the first gathers and the last gradient are hidden."""
    for plain, offloaded in zip(record(size, "none"), record(size, "cpu"), strict=True):
        row_seconds = offloaded.hidden()
        travelled_s = sum(row_seconds[row].busy_s for row in ("gather", "page in", "page out"))
        assert travelled_s > 0.3 * plain.step_s
        assert offloaded.step_s < 1.1 * plain.step_s


def test_the_timeline_of_a_slow_link_says_what_compute_waits_for():
    """The compute row takes as long as without offload, and the rest of the step is exposed."""
    [plain] = record(1, "none")
    [timeline] = record(1, "cpu", rates=RATES._replace(link_bytes_per_s=RATES.link_bytes_per_s / 10))
    row_seconds, before = timeline.hidden(), plain.hidden()
    assert timeline.step_s > 1.5 * plain.step_s
    compute_s = before["compute"].busy_s - before["update"].hidden_s  # during which the update's kernels interrupt it
    assert row_seconds["compute"].busy_s == pytest.approx(compute_s, rel=0.01)
    for row in ("gather", "page in"):
        assert row_seconds[row].exposed_s > 0.1 * row_seconds[row].busy_s, row
    assert row_seconds["page out"].exposed_s > 0, "a buffer of the first microbatch, which leaves in bf16"


# -- reductions --------------------------------------------------------------------------------------------------------


class Looped(nn.Module):
    """Layers of one size, run over twice: all of their gradients are open at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = x + torch.tanh(layer(x))
        return x


def looped(world: zero.World, offload: str, stage: int = 3, accumulate: int = 1) -> str:
    with world.exclusive(), zero.empty():
        model = Looped()
    plan = zero.Plan(
        model, optimizer=zero.adamw(1e-2), world=world, stage=stage, accumulate=accumulate, offload=offload,
        units=["Linear"],
    )  # fmt: skip
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, lambda model, x: model(x).square().mean())
    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        state, _ = step(state, [torch.randn(2, 64, generator=draw) for _ in range(accumulate)])
    return digest(state)


@pytest.mark.parametrize(("size", "stage", "accumulate"), [(1, 3, 1), (1, 3, 2), (2, 1, 2), (2, 3, 1)])
def test_a_gradient_that_makes_room_takes_along_what_was_to_be_written_to_it(size, stage, accumulate):
    """On a GPU small gradients are written some at a time; by then their place was another unit's."""
    with simulated_gpu():
        expected = run_ranks(size, looped, "none", stage, accumulate)
    with simulated_gpu(order="late"):
        assert run_ranks(size, looped, "cpu", stage, accumulate) == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_sum_is_sent_to_the_others_by_the_stream_that_made_it(accumulate, monkeypatch):
    """A collective sends the values that its buffer has when the stream that starts it reaches it."""
    started: set[str] = set()
    gather = zero.World.gather

    def watched(world: zero.World, shard_S: Tensor, full_P: Tensor, *, what: str = ""):
        if what.startswith("the gradient of"):
            started.add(current(world))
        return gather(world, shard_S, full_P, what=what)

    monkeypatch.setattr(zero.World, "gather", watched)
    with simulated_gpu(order="late"):
        run_ranks(2, looped, "none", 0, accumulate)
    assert started == {aside("reduce")}
