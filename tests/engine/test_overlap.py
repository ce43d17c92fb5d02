"""Transfers and updates overlap with compute: an engine that did all in a row would give the same bits."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.simulation import simulated_gpu
from zero.engine.meta import RecordedOperation
from zero.engine.whole.read import digest
from zero.testing import run_ranks

WIDTH, LAYERS = 16, 5


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Watched:
    """A handle that says when it is waited for."""

    def __init__(self, handle, events: list[str], name: str) -> None:
        self._handle, self._events, self._name = handle, events, name

    def wait(self) -> None:
        self._events.append(f"wait {self._name}")
        self._handle.wait()


def watch(world: zero.World, events: list[str]) -> None:
    """Note every gather and reduction, when it starts and when it is waited for."""
    gather, reduce_scatter = world.gather, world.reduce_scatter

    def watched_gather(shard_S, full_P, *, what=""):
        events.append(f"gather {what}")
        return Watched(gather(shard_S, full_P, what=what), events, f"gather {what}")

    def watched_reduce(full_P, recv_P, sum_S, *, accumulate=False, what=""):
        events.append(f"reduce {what}")
        handle = reduce_scatter(full_P, recv_P, sum_S, accumulate=accumulate, what=what)
        return Watched(handle, events, f"reduce {what}")

    world.gather, world.reduce_scatter = watched_gather, watched_reduce


def events_of(steps: int, **settings) -> list[str]:
    """The last of `steps` steps of rank 0, with the forward and backward of each layer."""

    def rank_main(world: zero.World) -> list[str]:
        with world.exclusive(), zero.empty():
            model = Stack()
        plan = zero.Plan(model, optimizer=zero.adamw(1e-3, clip=1.0), world=world, **settings)
        state = zero.init(plan, zero.open_store(plan))
        events: list[str] = []
        watch(world, events)
        for number, unit in enumerate(state.model.layers):
            unit.register_forward_pre_hook(lambda *_, n=number: events.append(f"forward {n}"))
            unit.register_full_backward_hook(lambda *_, n=number: events.append(f"backward {n}"))
        apply = state.runtime.updater.apply_deferred
        applied = lambda unit: (events.append(f"update {unit.spec.name}"), apply(unit))  # noqa: E731
        state.runtime.residency.gathers._apply = applied
        step = zero.make_step(plan, lambda model, x: model(x).square().mean())
        for _ in range(steps):
            events.clear()
            state, _ = step(state, [torch.ones(2, WIDTH, requires_grad=True)])
        return events

    return run_ranks(2, rank_main)[0]


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_gather_starts_before_the_unit_ahead_of_it_computes(prefetch):
    events = events_of(3, prefetch=prefetch)
    for number in range(1, LAYERS):
        before = events.index(f"forward {max(0, number - prefetch)}")
        assert events.index(f"gather layers.{number}") < before
        assert events.index(f"wait gather layers.{number}") > events.index(f"forward {number - 1}")


def test_without_prefetch_nothing_is_gathered_ahead():
    events = events_of(3, prefetch=0)
    for number in range(1, LAYERS):
        assert events.index(f"gather layers.{number}") > events.index(f"forward {number - 1}")


def test_backward_gathers_ahead_too():
    """Layers 4 and 3 are still there when backward begins; layer 2 comes while 3 computes, so before 4 is reduced."""
    events = events_of(3, prefetch=1)
    backward = events[events.index(f"forward {LAYERS - 1}") :]
    assert "gather layers.4" not in backward
    assert backward.index("gather layers.2") < backward.index("reduce the gradient of layers.3")
    assert backward.index("wait gather layers.2") > backward.index("reduce the gradient of layers.3")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_reduction_is_under_way_while_the_next_unit_goes_backward(stage):
    events = events_of(2, stage=zero.Stage(stage))
    for number in range(2, LAYERS):
        waited = events.index(f"wait reduce the gradient of layers.{number}")
        assert waited > events.index(f"reduce the gradient of layers.{number - 1}")


@pytest.mark.parametrize("stage", range(4))
def test_an_update_waits_for_its_unit(stage):
    """With clipping on, unit n is updated in the next forward, just before unit n - 1 computes."""
    events = events_of(3, stage=zero.Stage(stage))
    for number in range(1, LAYERS):
        update = events.index(f"update layers.{number}")
        assert update < events.index(f"forward {number - 1}")
        assert number == 1 or update > events.index(f"forward {number - 2}")


@pytest.mark.parametrize("update", ["lazy", "serial"])
def test_what_waits_after_a_step(update):
    def rank_main(world: zero.World) -> set[bool]:
        with world.exclusive(), zero.empty():
            model = Stack()
        plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, update=update)
        state, _ = zero.make_step(plan, lambda model, x: model(x).square().mean())(
            zero.init(plan, zero.open_store(plan)), [torch.ones(2, WIDTH)]
        )
        return {unit.deferred is not None for unit in state.runtime.units}

    assert run_ranks(2, rank_main)[0] == {update == "lazy"}


def test_recorded_first_values_are_made_one_parameter_at_a_time(monkeypatch):
    real: list[int] = []
    run = RecordedOperation.run

    def counted(operation: RecordedOperation, values: dict[int, Tensor]) -> Any:
        memories = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values.values()}
        real.append(sum(memories.values()))
        return run(operation, values)

    with zero.empty():
        model = Stack()
    monkeypatch.setattr(RecordedOperation, "run", counted)
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=zero.open_world())
    zero.init(plan, zero.open_store(plan))
    assert len(real) >= 2 * LAYERS
    assert set(real) == {4 * WIDTH * WIDTH, 4 * WIDTH}


def test_nothing_is_ever_whole_at_stage_3(monkeypatch):
    """While `init` runs, one owner at a time has real parameters; afterwards a rank holds its shards."""
    real: list[int] = []

    def counted(module: nn.Linear) -> None:
        nn.init.orthogonal_(module.weight)  # reads values, so the method runs on whole tensors
        nn.init.zeros_(module.bias)
        everywhere = [thing for thing in gc.get_objects() if type(thing) is nn.Parameter]
        with torch._C.DisableTorchFunctionSubclass():  # another rank may make placeholders of them meanwhile
            real.append(sum(parameter.numel() for parameter in everywhere if not parameter.is_meta))

    with torch.device("meta"):
        models = [Stack() for _ in range(4)]
    monkeypatch.setattr(nn.Linear, "reset_parameters", counted)
    before = sum(
        parameter.numel() for parameter in gc.get_objects() if type(parameter) is nn.Parameter and not parameter.is_meta
    )

    def rank_main(world: zero.World) -> int:
        plan = zero.Plan(models[world.rank], optimizer=zero.adamw(1e-3), world=world)
        state = zero.init(plan, zero.open_store(plan))
        return sum(unit.shard_S.untyped_storage().nbytes() for unit in state.runtime.units)

    shards = run_ranks(4, rank_main)
    assert sum(numel > before for numel in real) == 4 * LAYERS  # the method is tried on tensors without values first
    assert max(real) - before == WIDTH * WIDTH + WIDTH
    assert max(shards) < 4 * sum(parameter.numel() for parameter in models[0].parameters()) / 2


class Branch(nn.Module):
    """A unit with a large parameter, whose values are not used everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor, unused: bool) -> Tensor:
        return x if unused else torch.tanh(self.linear(x))


class Branching(nn.Module):
    """Blocks of which rank 1 does not use the values of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branch() for _ in range(5))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, (rank, number) == (1, 3))
        return x


@pytest.mark.parametrize("preset", ["cpu", "infinity"])
def test_ranks_with_other_branches_gather_in_one_order(preset):
    def rank_main(world: zero.World, prefetch: int) -> str:
        with world.exclusive(), zero.empty():
            model = Branching()
        offload = zero.Offload(preset, page_bytes=64 << 10)
        plan = zero.Plan(
            model,
            optimizer=zero.adamw(1e-3, clip=1.0),
            world=world,
            offload=offload,
            units=["Branch"],
            prefetch=prefetch,
        )
        state = zero.init(plan, zero.open_store(plan))
        step = zero.make_step(plan, lambda model, x: model(x, world.rank).square().mean())
        for _ in range(3):
            state, _ = step(state, [torch.ones(4, 256)])
        return digest(state)

    expected = run_ranks(2, rank_main, 0)
    for prefetch in (1, 2, 3):  # on a CPU, where gathers and sums have one order
        assert run_ranks(2, rank_main, prefetch) == expected


def test_reading_all_parameters_keeps_no_gathered_memory():
    def rank_main(world: zero.World) -> list[int]:
        with world.exclusive(), zero.empty():
            model = Branching()
        plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, offload="infinity", units=["Branch"])
        state = zero.init(plan, zero.open_store(plan))
        step = zero.make_step(plan, lambda model, x: model(x, 0).square().mean())
        state, _ = step(state, [torch.ones(4, 256)])
        zero.full_state_dict(state)
        pool = state.runtime.residency.pool
        assert pool is not None
        return [pool.renewed, len(state.runtime.residency.gathers._unstarted)]

    with simulated_gpu():
        assert run_ranks(2, rank_main) == [[0, 0]] * 2
