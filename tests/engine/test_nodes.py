"""Several nodes: ways by node change where bytes travel, and the declared order of a sum; never anything else."""

import itertools
import os
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.common.small import Setting, small_batch, small_loss, train_small
from tests.engine.test_oracle import LR, momentum_sgd, norm, run
from tests.engine.test_reduce_order import model, paths_of, plain, row, same, trained
from tests.engine.test_stages import placements
from tests.simulation import simulated_gpu
from zero.core.fused import GROUP_NUMBERS
from zero.core.layout import Layout
from zero.core.placement import Room
from zero.core.sizes import round_up
from zero.engine.plan.traffic import traffic
from zero.engine.whole.measured import measured
from zero.engine.whole.read import digest, full_state_dict
from zero.errors import ConfigError, PlanError, WorldError
from zero.testing import run_processes, run_ranks
from zero.trainer.models import GPT, GPTConfig, loss

KiB = 1024
OFFLOADS = {
    "none": (),
    "nvme": (("optimizer", "nvme"),),
    "infinity": (("optimizer", "nvme"), ("param", "nvme"), ("grad", "nvme")),
}
OFFLOADED_PARAMS = {  # of a GPU
    "cpu": (("optimizer", "cpu"), ("param", "cpu"), ("grad", "cpu")),
    "parameters alone": (("param", "cpu"),),
    "infinity": OFFLOADS["infinity"],
}


def offloaded(setting: Setting, number: int) -> Setting:
    """Some of the settings have their state elsewhere."""
    name = ("none", "nvme", "infinity")[number % 3 if setting.stage == 3 else number % 2]
    return setting.but(offload=OFFLOADS[name])


PLACES = [(4, 2, "fp32"), (6, 3, "bf16")]


@pytest.mark.parametrize(("size", "nodes", "precision"), PLACES)
def test_parameters_by_node_change_no_bit(size, nodes, precision):
    first, *others = (setting.but(precision=precision, clip=0.5) for setting in placements())
    expected = run_ranks(size, train_small, first, nodes=nodes)
    for number, other in enumerate(others[::4] if size == 4 else others[2::5]):
        other = offloaded(other, number).but(between=("node", "exact"))
        assert run_ranks(size, train_small, other, nodes=nodes) == expected, other


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("offload", "accumulate", "activations"),
    [
        ("cpu", 1, "keep"),
        ("cpu", 3, "remat"),
        ("parameters alone", 3, "offload"),
        ("infinity", 3, "keep"),
        ("infinity", 1, "offload"),
    ],
)
def test_secondary_shards_of_offloaded_parameters_change_no_bit(offload, accumulate, activations):
    """Of a GPU, whose parameters leave it; the model has frozen ones, in units of their own and beside others."""
    size, nodes = ((4, 2), (6, 3), (6, 2))[("keep", "remat", "offload").index(activations)]
    setting = Setting(precision="bf16", clip=0.5, accumulate=accumulate, activations=activations, prefetch=accumulate)
    setting = setting.but(offload=OFFLOADED_PARAMS[offload])
    with simulated_gpu():
        told = [
            run_ranks(size, train_small, setting.but(between=(way, "exact")), nodes=nodes) for way in ("world", "node")
        ]
    assert told[0] == told[1]


@pytest.mark.parametrize(("size", "nodes", "precision"), PLACES)
def test_sums_by_node_have_one_law_for_every_placement(size, nodes, precision):
    first, *others = (setting.but(precision=precision, clip=0.5) for setting in placements())
    expected = run_ranks(size, train_small, first.but(between=("world", "node")), nodes=nodes)
    for number, other in enumerate(others[1::4] if size == 4 else others[2::5]):
        other = offloaded(other, number).but(between=(("node", "world")[number % 2], "node"))
        assert run_ranks(size, train_small, other, nodes=nodes) == expected, other
    if precision == "fp32":
        assert run_ranks(size, train_small, first, nodes=nodes) != expected, "it is an order of its own"


@pytest.mark.parametrize(("size", "nodes", "precision"), PLACES)
def test_a_copy_on_each_node_has_the_law_of_sums_by_node(size, nodes, precision):
    first, *others = (setting.but(precision=precision) for setting in placements())
    expected = run_ranks(size, train_small, first.but(between=("world", "node")), nodes=nodes)
    for number, other in enumerate((first, *(others[::4] if size == 4 else others[2::5]))):
        other = offloaded(other, number).but(shard="node")
        told = run_ranks(size, train_small, other, nodes=nodes)
        assert [state_digest for state_digest, _ in told] == [state_digest for state_digest, _ in expected], other
        for (_, metrics), (_, wanted) in zip(told, expected, strict=True):  # norms are added up in other pieces
            assert [step_metrics.loss for step_metrics in metrics] == [step_metrics.loss for step_metrics in wanted]
            assert [step_metrics.grad_norm for step_metrics in metrics] == pytest.approx(
                [step_metrics.grad_norm for step_metrics in wanted], rel=1e-6
            )


class UsedTwice(nn.Module):
    """Layers of two sizes, which padding makes equal or not, in an order that uses some of them again."""

    def __init__(self, width: int, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=number % 2 == 1) for number in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        return x


def used_twice(world, width, order, **how):
    with world.exclusive(), torch.random.fork_rng():
        torch.manual_seed(0)
        made = UsedTwice(width, order)
    plan = zero.Plan(made, optimizer=zero.adamw(1e-2), world=world, units=["Linear"], **how)
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, lambda model, x: model(x).square().mean())
    for number in range(3):
        x = torch.randn(4 * world.size, width, generator=torch.Generator().manual_seed(number))
        state, _ = step(state, [x.chunk(world.size)[world.rank]])
    return digest(state)


@pytest.mark.parametrize(
    ("order", "width"), [((0, 1, 2, 3, 4) * 2, 9), ((4, 1, 2, 3, 0, 4), 13), ((0, 1, 2, 3, 4, 3, 2, 1, 0), 13)]
)
def test_units_that_are_used_twice_have_the_law_of_sums_by_node_too(order, width):
    """The split of their gradients does not depend on the sizes of shards."""
    digests = {
        digest
        for stage in (0, 3)
        for how in ({"reduce": "node"}, {"shard": "node"})
        for digest in run_ranks(4, partial(used_twice, stage=stage, **how), width, order, nodes=2)
    }
    assert len(digests) == 1


def test_copies_on_nodes_have_one_law_with_clipping():
    settings = [setting.but(clip=0.5, shard="node") for setting in placements()]
    first, *others = settings[::5]
    expected = run_ranks(4, train_small, first, nodes=2)
    for number, other in enumerate(others):
        assert run_ranks(4, train_small, offloaded(other, number), nodes=2) == expected, other


@pytest.mark.parametrize(("accumulate", "between"), [(2, ("node", "exact")), (3, ("node", "node"))])
def test_accumulation_is_bitwise_within_the_pairs(accumulate, between):
    """As on one node: 0 and 1 add microbatches before ranks, 2 and 3 after."""
    setting = Setting(accumulate=accumulate, clip=0.5)
    plain = ("world", between[1])
    for pair in ((0, 1), (2, 3)):
        told = [
            run_ranks(4, train_small, setting.but(stage=stage, between=way), nodes=2)
            for stage in pair
            for way in (plain, between)
        ]
        assert all(result == told[0] for result in told[1:])


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 2), (1, 1), (2, 2), (3, 1)])
def test_where_nothing_rounds_an_order_of_sums_is_no_other(stage, accumulate):
    """The exact oracle: integers, so by node and straight give the same digest."""
    setting = Setting(
        stage=stage, accumulate=accumulate, optimizer=momentum_sgd, lr=LR, weight_decay=0.0, clip=norm() / 2
    )
    others = setting.but(between=("node", "node")), setting.but(shard="node")
    assert len({run_ranks(4, run, other, nodes=2)[0][0] for other in (setting, *others)}) == 1


def test_a_gradient_is_added_in_the_declared_order():
    """One parameter, one step of SGD, by hand."""

    class Rough(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w * x).sum()

    rows = [torch.tensor([1e8, 1.0, 3e-3]), torch.tensor([1.0, 1e8, 7.0]), torch.tensor([-1e8, 3.0, 1e5])]
    rows += [torch.tensor([1.0, -1e8, 1e-3])]

    def train(world: zero.World, reduce: str) -> torch.Tensor:
        with world.exclusive():
            model = Rough()
        plan = zero.Plan(model, optimizer=zero.sgd(1.0, weight_decay=0.0), world=world, reduce=reduce)
        state = zero.init(plan, zero.open_store(plan), weights={"w": torch.zeros(3)})
        step = zero.make_step(plan, lambda model, x: model(x))
        state, _ = step(state, [rows[world.rank]])
        return full_state_dict(state)["w"]

    by_node = -((rows[0] + rows[1]) + (rows[2] + rows[3])) / 4
    by_rank = -(((rows[0] + rows[1]) + rows[2]) + rows[3]) / 4
    assert not torch.equal(by_node, by_rank)
    assert all(torch.equal(weight, by_node) for weight in run_ranks(4, train, "node", nodes=2))
    assert all(torch.equal(w, by_rank) for w in run_ranks(4, train, "exact", nodes=2))


def trained_on_nodes(world: zero.World, setting: Setting) -> tuple[str, list[zero.Metrics]]:
    world.local_size = 2
    return train_small(world, setting)


def test_processes_do_what_threads_do():
    for stage, offload in ((1, "none"), (3, "none"), (3, "infinity")):
        setting = Setting(stage=stage, clip=0.5, between=("node", "node"), accumulate=2, offload=OFFLOADS[offload])
        assert run_processes(4, trained_on_nodes, setting) == run_ranks(4, train_small, setting, nodes=2)


# -- ranks on paths of their own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "microbatches", "between"),
    [
        (1, 1, {"gather": "node"}),
        (0, 2, {"gather": "world", "reduce": "node"}),
        (0, 2, {"gather": "node", "reduce": "node"}),
        (2, 2, {"gather": "node", "reduce": "node"}),
        (1, 1, {"shard": "node"}),
    ],
    ids=str,
)
def test_ranks_on_different_paths_wait_for_no_rank_that_is_elsewhere(stage, microbatches, between):
    """Half of a gather or a sum that one rank needs is started by others, which may not use the unit."""

    def rank_main(world: zero.World, programs):
        return trained(world, programs[world.rank], microbatches, stage=stage, **between)

    drawn = {"steps": 4, "microbatches": microbatches, "alike": 0.0, "uneven": True}
    programs = [paths_of(0, rank, **drawn) for rank in range(4)]
    same(run_ranks(4, rank_main, programs, nodes=2), plain(programs, microbatches))


def refused(world: zero.World, path_of: list[list[int]]) -> tuple[str, float]:
    world.local_size, begin_s = 2, time.monotonic()
    with pytest.raises(WorldError) as refusal:
        trained(world, [[[path_of[world.rank]]]], 1, gather="node", reduce="node")
    return str(refusal.value), time.monotonic() - begin_s


@pytest.mark.parametrize("odd", [[1], [2, 3]])
def test_other_layers_where_parameters_are_sharded_are_refused_within_seconds_between_nodes_too(odd):
    """Long before the deadline of 120 s."""
    for said, after_s in run_processes(4, refused, [[0, 1, 3] if rank in odd else [0, 1, 2] for rank in range(4)]):
        assert "the ranks run different operations: " in said
        assert "gather of layers.3" in said
        assert after_s < 60


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_that_computes_alone_is_waited_for_between_nodes(stage):
    def rank_main(world: zero.World, gather: str) -> str:
        made = model()
        plan = zero.Plan(made, optimizer=zero.adamw(0.1), world=world, stage=stage, units=[nn.Linear], gather=gather)  # type: ignore[arg-type]
        state = zero.init(plan, zero.open_store(plan), seed=3)
        for number in range(3):
            step = zero.Step(state)
            step.microbatch()
            step.backward(state.model(row(world.rank, number), [0, 1, 2, 3, 4]))
            state, _ = step.finish()
            if world.rank == 1:
                with torch.no_grad():
                    state.model(row(number), [2, 4])
            full_state_dict(state)
        return digest(state)

    told = [run_ranks(4, rank_main, gather, nodes=2) for gather in ("world", "node")]
    assert len({*told[0], *told[1]}) == 1


# -- what is held, and what travels ------------------------------------------------------------------------------------


def held(world: zero.World, setting: Setting) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    state, step = setting.start(world)
    for number in range(2):
        state, _ = step(state, [small_batch(number, 6)] * setting.accumulate)
    return state.plan.bytes, measured(state)


@pytest.mark.parametrize(
    ("stage", "offload", "between"),
    [
        (1, "nvme", ("node", "node")),
        (3, "none", ("node", "exact")),
        (3, "nvme", ("world", "node")),
        (3, "infinity", ("node", "node")),
    ],
)
def test_the_plan_counts_secondary_shards_and_sums_of_nodes(stage, offload, between):
    setting = Setting(stage=stage, precision="bf16", between=between, offload=OFFLOADS[offload])
    for told, allocated in run_ranks(4, held, setting, nodes=2):
        kinds = Counter(told["device"])
        assert +kinds == allocated["device"]
        assert bool(kinds["node sums"]) is (between[1] == "node")
        kept = {tier: kinds["secondary shards"] for tier, kinds in told.items() if kinds.get("secondary shards")}
        assert kept == {
            tier: kinds["secondary shards"] for tier, kinds in allocated.items() if "secondary shards" in kinds
        }
        tiers = ["host" if offload == "infinity" else "device"] if between[0] == "node" and stage == 3 else []
        assert [*kept] == tiers


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("gather", ["auto", "node", "world"])
@pytest.mark.parametrize("offload", OFFLOADED_PARAMS)
def test_the_plan_counts_what_a_gpu_keeps_in_host_memory(offload, gather):
    """Of whole blocks, as all that is there; on a disk parameters have none unless it is asked for."""
    setting = Setting(precision="bf16", between=(gather, "exact"), offload=OFFLOADED_PARAMS[offload])
    with simulated_gpu():
        for told, allocated in run_ranks(6, held, setting, nodes=3):
            assert +Counter(told["device"]) == allocated["device"]
            kept = [kinds.get("secondary shards", 0) for kinds in (told["host"], allocated.get("host", {}))]
            if gather == "world" or (gather == "auto" and offload == "infinity"):
                assert kept == [0, 0]
            else:  # two of three shards, 2 bytes each, of 2 flats of 4 units at most
                assert 0 <= kept[0] - kept[1] < 8 * 4 * KiB
                assert kept[1] == 2 * 2 * sum(layout.S for layout in layouts_of(setting))


@pytest.mark.parametrize(("stage", "offload"), [(0, "nvme"), (1, "none"), (3, "infinity")])
def test_the_plan_counts_a_copy_on_each_node(stage, offload):
    setting = Setting(stage=stage, precision="bf16", shard="node", offload=OFFLOADS[offload])
    one_node = [told for told, _ in run_ranks(2, held, setting)]
    for rank, (told, allocated) in enumerate(run_ranks(4, held, setting, nodes=2)):
        kinds = Counter(told["device"])
        assert +kinds == allocated["device"]
        assert kinds.pop("node sums")
        assert kinds == Counter(one_node[rank % 2]["device"])


def layouts_of(setting: Setting) -> list[Layout]:
    def layouts(world: zero.World) -> list[Layout]:
        return [layout for unit in setting.plan(world).units for layout in unit.layouts]

    return run_ranks(6, layouts)[0]


def planned_with(world: zero.World, gather: str, host: int) -> tuple[int, int]:
    """Return the host memory of a plan with parameters there, and the part of it for secondary shards."""
    with world.exclusive(), zero.empty():
        model = Wide()
    offload = zero.Offload("cpu", ahead=0)  # as many slots in any room
    how = {"precision": "bf16", "offload": offload, "gather": gather, "room": Room(2**40, host)}
    told = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, **how).bytes["host"]  # type: ignore[arg-type]
    return sum(told.values()), told.get("secondary shards", 0)


def test_host_memory_that_secondary_shards_do_not_fit_in_goes_without():
    """By itself; where they were asked for, the refusal says what to type."""
    with simulated_gpu():
        [(most, kept), *_] = run_ranks(4, planned_with, "node", 2**40, nodes=2)
        assert kept == 4 * round_up(2 * 256 * 257 // 4)
        assert {*run_ranks(4, planned_with, "auto", most, nodes=2)} == {(most, kept)}
        assert {*run_ranks(4, planned_with, "auto", most - 1, nodes=2)} == {(most - kept, 0)}
        with pytest.raises(ConfigError, match=r"^host memory has .* free: .* [Ss]et zero.gather=auto"):
            run_ranks(4, planned_with, "node", most - 1, nodes=2)


@pytest.mark.parametrize("gather", ["auto", "node"])
def test_a_plan_keeps_no_secondary_shards_that_it_found_no_room_for(gather):
    """If parameters may move to the host or stay, the bytes after the move are counted."""

    def planned(world: zero.World, room: int) -> int:
        with world.exclusive(), zero.empty():
            model = Wide()
        offload = zero.Offload("auto", compute="host")  # so that what leaves the device needs no slots there
        how = {"precision": "bf16", "offload": offload, "gather": gather, "room": Room(room, 2**30, 2**40)}
        plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, **how)  # type: ignore[arg-type]
        assert plan.placement.param == "device"
        return sum(plan.bytes["device"].values())

    with simulated_gpu():
        most = max(run_ranks(4, planned, 2**40, nodes=2))
        for room in range(most - 200 * KiB, most, 20 * KiB):
            assert all(taken <= room for taken in run_ranks(4, planned, room, nodes=2))


def test_on_one_node_nothing_is_held_and_no_way_is_another():
    setting = Setting(clip=0.5)
    told = [run_ranks(2, held, setting.but(between=between)) for between in (("world", "exact"), ("node", "node"))]
    assert told[0] == told[1]
    expected = run_ranks(2, train_small, setting)
    assert run_ranks(2, train_small, setting.but(between=("node", "node"))) == expected


class Wide(nn.Module):
    def __init__(self, layers: int = 4, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def wire_bytes_of_a_step(world: zero.World, how: dict[str, object]) -> float:
    """For each parameter, over all ranks, of the third step."""
    with world.exclusive(), zero.empty():
        model = Wide()
    how = {"gather": "world", "reduce": "exact", "offload": "none", **how}
    how["offload"] = zero.Offload(str(how["offload"]), path=tempfile.gettempdir())
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, **how)  # type: ignore[arg-type]
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, lambda model, x: model(x).square().mean())
    before = 0
    for number in range(3):
        before = world.traffic.wire_bytes
        state, _ = step(state, [torch.full((2, 256), float(number))] * plan.accumulate)
    return (world.traffic.wire_bytes - before) * world.size / plan.numel


@pytest.mark.parametrize(
    ("how", "expected"),
    [  # fp32, two nodes of two: a straight gather or sum brings each parameter across twice, 8 bytes; by node once.
        # Of four layers the two that were used last are still gathered.
        ({"stage": 3}, 8 + 4 + 8),
        ({"stage": 3, "gather": "node"}, 4 + 8),
        ({"stage": 3, "gather": "node", "reduce": "node"}, 4 + 4),
        ({"stage": 3, "gather": "node", "reduce": "native"}, 4 + 6),  # around a ring: 3 of 4 chunks at 2 of 4 ranks
        ({"stage": 3, "accumulate": 2}, 8 + 4 + 8 + 4 + 4 + 8),
        ({"stage": 3, "accumulate": 2, "gather": "node", "reduce": "node"}, 4 + 4 + 4),
        ({"stage": 3, "gather": "node", "offload": "infinity"}, 4 + 8),
        ({"stage": 3, "accumulate": 2, "gather": "node", "offload": "infinity"}, 4 + 8 + 8),
        ({"stage": 3, "gather": "auto", "offload": "infinity"}, 4 + 2 + 8),
        ({"stage": 3, "shard": "node"}, 4 + 4),
        ({"stage": 3, "accumulate": 2, "shard": "node"}, 4 + 4 + 4 + 4),
        ({"stage": 1}, 8 + 8),
        ({"stage": 1, "gather": "node", "reduce": "node"}, 4 + 4),
    ],
)
def test_what_crosses_the_wires(how, expected):
    for told in run_ranks(4, wire_bytes_of_a_step, how, nodes=2):
        assert told == pytest.approx(expected, rel=0.02)


def planned_and_counted(world: zero.World, how: dict[str, Any]) -> list[tuple[float, float]]:
    """Of the third step, what this rank gets from others, and of that from other nodes; of a model of many layers."""
    layers = 6
    with world.exclusive(), zero.empty():
        model = Wide(layers=layers, width=64)
    for number in range(layers * how.pop("frozen", 0)):  # in two of three layers something, in one everything
        model.layers[number].weight.requires_grad_(number % 3 == 0)
        model.layers[number].bias.requires_grad_(number % 3 < 2)
    offload = zero.Offload(str(how.get("offload", "none")), path=tempfile.gettempdir())
    how = {"optimizer": zero.adamw(1e-3), **how, "offload": offload}
    plan = zero.Plan(model, world=world, **how)
    x = torch.ones(2, 64, dtype=plan.precision.compute)
    return of_the_third_step(plan, lambda model, x: model(x).square().mean(), x)


def of_the_third_step(plan: zero.Plan, loss_fn: Any, batch: torch.Tensor) -> list[tuple[float, int]]:
    """Planned and counted, what this rank gets from others, and of that from other nodes."""
    state = zero.init(plan, zero.open_store(plan))
    step, world = zero.make_step(plan, loss_fn), plan.world
    before = world.traffic
    for _ in range(3):
        before = world.traffic
        state, _ = step(state, [batch] * plan.accumulate)
    told, after = traffic(plan).of_step(plan.accumulate), world.traffic
    moved = after.gather_bytes + after.reduce_bytes - before.gather_bytes - before.reduce_bytes
    return [(told.link, moved), (told.wire, after.wire_bytes - before.wire_bytes)]


END_BYTES = 512
"""Bytes that six ranks exchange at the end of a step."""

NF4 = zero.Precision("bf16", frozen="nf4")

BETWEEN = [
    {"gather": "world", "reduce": "exact"},
    {"gather": "node", "reduce": "native"},
    {"gather": "node"},
    {"shard": "node"},
    {"gather": "node", "reduce": "node", "precision": "bf16"},
    {"shard": "node", "precision": zero.Precision("bf16", reduce="bf16")},
]


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize(
    ("stage", "accumulate", "between"),
    [
        *(
            (stage, accumulate, between)
            for number, (stage, accumulate) in enumerate(((0, 1), (1, 2), (2, 2), (3, 2)))
            for between in BETWEEN[number % 2 :: 2]
        ),
        (3, 2, {"gather": "node", "offload": "infinity"}),
        (3, 2, {"gather": "auto", "offload": "infinity"}),
        (3, 2, {"gather": "world", "keep": ["layers.1", "layers.4"]}),
        (3, 1, {"gather": "node", "keep": ["*"]}),
        *((stage, 1, {"gather": "world", "optimizer": zero.muon(1e-3)}) for stage in (1, 3)),
        (3, 2, {"shard": "node", "optimizer": zero.muon(1e-3)}),
        (3, 1, {"gather": "node", "frozen": True}),
        (3, 2, {"gather": "node", "frozen": True, "offload": "infinity"}),
        *((stage, 2, {"gather": "node", "frozen": True, "precision": NF4}) for stage in range(4)),
        (3, 1, {"shard": "node", "frozen": True, "precision": NF4, "offload": "infinity"}),
    ],
)
def test_a_plan_knows_what_crosses_the_wires(stage, accumulate, between):
    """Six ranks on three nodes."""
    how = {"stage": stage, "accumulate": accumulate, **between}
    for of_rank in run_ranks(6, lambda world: planned_and_counted(world, {**how}), nodes=3):
        for planned, counted in of_rank:
            assert 0 <= counted - planned <= END_BYTES


def planned_and_received(world: zero.World, tied: bool, how: dict[str, Any]) -> tuple[float, int]:
    """Of the third step of a GPT at stage 3, what this rank gets from others."""
    with world.exclusive(), zero.empty():
        model = GPT(GPTConfig(vocab=64, width=32, layers=4, heads=2, seq=16, tied=tied))
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), stage=zero.Stage(3), world=world, **how)
    return of_the_third_step(plan, loss, torch.zeros(2, 17, dtype=torch.long))[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bucket", [0, "auto"])
@pytest.mark.parametrize(("prefetch", "accumulate"), [(0, 1), (1, 1), (1, 2), (2, 2), (3, 1)])
def test_a_plan_knows_how_often_units_are_gathered(tied, bucket, prefetch, accumulate):
    """A tied head gathers the embedding at the end of each forward, which costs another unit its buffer."""
    how = {"bucket": bucket, "prefetch": prefetch, "accumulate": accumulate}
    for planned, received in run_ranks(2, planned_and_received, tied, how):
        assert 0 <= received - planned <= END_BYTES / 6


def copied(world: zero.World, accumulate: int, gather: str) -> tuple[float, int, int]:
    """Planned and counted, between host and device in the third step, with parameters alone on the host; and the bytes
    of a unit's shard.
    """
    with world.exclusive(), zero.empty():
        model = Wide(layers=6, width=64)
    how = {"precision": "bf16", "offload": zero.Offload(param="cpu"), "gather": gather, "accumulate": accumulate}
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, prefetch=0, **how)  # type: ignore[arg-type]
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, lambda model, x: model(x).float().square().mean())
    before, copies = 0, world.compute.copies  # type: ignore[attr-defined]
    for _ in range(3):
        before = len(copies)
        state, _ = step(state, [torch.ones(2, 64, dtype=torch.bfloat16)] * accumulate)
        state.runtime.store.drain()
    table_bytes = 4 * GROUP_NUMBERS * len(plan.optimizer.groups)  # the numbers of a step, which no plan counts
    counted = sum(copy.nbytes for copy in copies[before:]) - table_bytes
    return traffic(plan).of_step(accumulate).by_medium["copy"], counted, 2 * plan.units[0].trainable.S


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plan_knows_what_a_gpu_copies_for_its_secondary_shards(accumulate):
    """Out once, and in before each further gather within the node."""
    with simulated_gpu(races=True):
        plain, by_node = (run_ranks(4, copied, accumulate, way, nodes=2) for way in ("world", "node"))
    for (planned, counted, shard), (more_planned, more_counted, _) in zip(plain, by_node, strict=True):
        assert counted == planned
        assert more_counted == more_planned
        turns = 2 * accumulate - 1  # at each of which a unit is still gathered
        assert more_planned - planned == (2 * accumulate * 6 - turns) * shard


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"gather": "node"}, 4 + 8),
        ({"accumulate": 2, "gather": "node", "reduce": "node"}, 4 + 4 + 4),
        ({"accumulate": 2, "gather": "auto"}, 4 + 8 + 8),
        ({"gather": "world"}, 8 + 4 + 8),
    ],
)
def test_what_crosses_the_wires_where_a_gpu_has_its_parameters_in_host_memory(how, expected):
    """As much as where they stay."""
    with simulated_gpu():
        for told in run_ranks(4, wire_bytes_of_a_step, {"offload": "cpu", **how}, nodes=2):
            assert told == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("offload", ["none", "cpu", "infinity"])
def test_after_a_restored_checkpoint_and_an_edit_secondary_shards_are_made_again(offload, tmp_path):
    def edited(world: zero.World, between: tuple[str, str]) -> tuple[str, str]:
        setting = Setting(between=between, offload=OFFLOADED_PARAMS.get(offload, ()))
        state, step = setting.start(world)
        state, _ = step(state, [small_batch(0, 6)])
        path = zero.save(state, tmp_path / between[0])
        for name in ("blocks.0.linear.weight", "blocks.2.linear.weight"):  # the second one is frozen
            zero.set_full(state, name, torch.full((13, 13), 0.25))
        state, _ = step(state, [small_batch(1, 6)])
        after = digest(state)
        plan = setting.plan(world)
        again = zero.load(zero.init(plan, zero.open_store(plan)), zero.open_checkpoint(world, path))
        again, _ = zero.make_step(plan, small_loss)(again, [small_batch(1, 6)])
        return after, digest(again)

    with simulated_gpu():
        told = [run_ranks(4, edited, between, nodes=2) for between in (("world", "exact"), ("node", "exact"))]
    assert told[0] == told[1]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("gpu", "offload", "call"),
    [
        (False, "none", 4),
        (False, "infinity", 1),
        (True, "none", 2),
        (True, "cpu", 4),
        (True, "infinity", 1),
    ],
)
def test_a_step_that_breaks_off_leaves_no_secondary_shard_that_holds_something_else(gpu, offload, call):
    """Right after a gather was asked for, so that nobody waits for it; then the step is made again."""

    def broken_off(world: zero.World, between: tuple[str, str]) -> tuple[str, int]:
        setting = Setting(between=between, offload=OFFLOADED_PARAMS.get(offload, ()), prefetch=2, accumulate=2)
        state, step = setting.start(world)
        residency = state.runtime.residency
        fetch, broken = residency.gathers._fetch, 0
        for number in range(3):
            batches = [small_batch(2 * number, 6), small_batch(2 * number + 1, 6)]
            calls = itertools.count()

            def breaks_off(*args, calls=calls):
                handles = fetch(*args)
                if next(calls) == call:
                    raise InterruptedError
                return handles

            residency.gathers._fetch = breaks_off
            try:
                state, _ = step(state, batches)
            except InterruptedError:
                residency.gathers._fetch, broken = fetch, broken + 1
                state, _ = step(state, batches)
            residency.gathers._fetch = fetch
        return digest(state), broken

    with simulated_gpu() if gpu else nullcontext():
        told = [run_ranks(4, broken_off, (way, "exact"), nodes=2) for way in ("world", "node")]
    assert told[0] == told[1]
    assert all(broken for _, broken in told[0])


def test_a_gather_that_never_began_leaves_no_secondary_shard():
    """The gather fills a buffer beyond the pool, which an exception frees before anybody has waited."""

    def left_out(world: zero.World, gather: str) -> list[torch.Tensor]:
        state, _ = Setting(between=(gather, "exact"), offload=OFFLOADS["infinity"]).start(world)
        residency, units = state.runtime.residency, state.runtime.units
        assert residency.pool is not None
        for buffer in residency.pool.buffers:
            buffer.pins += 1
        for unit in units:
            residency._request(unit)
            residency.gathers.buffer(unit).pins += 1
        assert residency.pool.overflowed == len(units)
        residency.reset()
        return [residency.materialise(unit).clone() for unit in units for _ in range(2)]

    for told, wanted in zip(*(run_ranks(4, left_out, way, nodes=2) for way in ("node", "world")), strict=True):
        assert all(torch.equal(tensor, other) for tensor, other in zip(told, wanted, strict=True))


WAYS = {
    "world": Setting(clip=0.5),
    "node": Setting(clip=0.5, between=("node", "node")),
    "copies": Setting(clip=0.5, shard="node"),
    "copies, nvme": Setting(clip=0.5, shard="node", offload=OFFLOADS["infinity"]),
    "copies at stage 1": Setting(clip=0.5, shard="node", stage=1, precision="bf16"),
}


@pytest.mark.parametrize(
    ("out_of", "into"),
    [
        ("world", "copies, nvme"),
        ("node", "world"),
        ("copies", "world"),
        ("copies, nvme", "copies"),
        ("copies at stage 1", "world"),
        ("copies at stage 1", "copies"),
    ],
)
def test_a_checkpoint_goes_from_any_way_to_any(out_of, into, tmp_path):
    """The digest is the same after a load, on one node too; each byte is in one file."""

    def saved(world: zero.World) -> tuple[str, str]:
        state, step = WAYS[out_of].start(world)
        state, _ = step(state, [small_batch(0, 6)])
        path = zero.save(state, tmp_path)
        return digest(state), str(path)

    def loaded(world: zero.World, path: str) -> str:
        plan = WAYS[into].but(precision=WAYS[out_of].precision).plan(world)
        state = zero.load(zero.init(plan, zero.open_store(plan), seed=1), zero.open_checkpoint(world, path))
        return digest(state)

    told = run_ranks(4, saved, nodes=2)
    digests = {state_digest for state_digest, _ in told}
    path = told[0][1]
    assert {*run_ranks(4, loaded, path, nodes=2)} == digests
    assert {*run_ranks(2, loaded, path)} == digests
    sizes = [file.stat().st_size for file in Path(path).glob("rank-*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 2 * min(sizes)


def test_one_rank_on_each_node_shares_with_nobody():
    def plan(world: zero.World) -> None:
        Setting(shard="node").plan(world)

    with pytest.raises(
        PlanError, match=r"zero.shard=node shards nothing, because each node has one rank. Set zero.sta"
    ):
        run_ranks(2, plan, nodes=2)


def test_ranks_that_are_not_as_many_on_each_node_are_refused():
    def plan(world: zero.World) -> None:
        world.local_size = 4
        Setting(between=("node", "exact")).plan(world)

    with pytest.raises(PlanError, match=r"6 ranks are not 4 consecutive ranks on each node\. Start"):
        run_ranks(6, plan)


def planned_on(world: zero.World, places: list[tuple[int, int]]) -> tuple[bool, bool, str]:
    """Another world in the same processes, whose ranks were started in these (ranks of a node, number there)."""
    ranks, number = places[world.rank]
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": str(number)}
    with zero.open_world(30.0, device="cpu") as placed:
        plan = Setting(between=("auto", "exact")).plan(placed)
        zero.init(plan, zero.open_store(plan))
        with pytest.raises(PlanError) if not placed.nodes_alike else nullcontext():
            Setting(between=("node", "exact")).plan(placed)
        return placed.nodes_alike, plan.facts.gather_route.by_node, plan.facts.gather


@pytest.mark.parametrize(
    ("places", "by_node"),
    [
        ([(2, 0), (2, 1), (2, 0), (2, 1)], True),
        ([(2, 0), (2, 0), (2, 1), (2, 1)], False),  # dealt out in turn
        ([(3, 0), (3, 1), (3, 2), (1, 0)], False),
    ],
)
def test_ranks_know_alike_whether_nodes_are_alike(places, by_node):
    """From what each one's launcher told it; where they are not, the default is as if there were no nodes."""
    told = run_processes(4, planned_on, places)
    assert told == [(by_node, by_node, "node" if by_node else "world")] * 4
