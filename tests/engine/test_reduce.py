"""Gradients that arrive late, in parts, or only sometimes: no stage loses or double-counts one."""

import functools
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.simulation import simulated_gpu
from zero.engine.backward import BackwardPass
from zero.engine.whole.read import digest, full_state_dict
from zero.errors import ConfigError, HandshakeError, StaleStateError
from zero.platform.handle import Handle
from zero.testing import run_ranks

WIDTH = 8


class Stack(nn.Module):
    """Layers of one size; a batch says how often the stack is run over and which layers are left out."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, loops: int, skip: frozenset[int]) -> Tensor:
        for _ in range(loops):
            for number, layer in enumerate(self.layers):
                if number not in skip:
                    x = x + torch.tanh(layer(x))
        return x


def square(model: nn.Module, batch: tuple[Tensor, int, frozenset[int]]) -> Tensor:
    return model(*batch).square().mean()


def batch_of(step: int, rank: int, micro: int, *, loops: int = 1, skip: tuple[int, ...] = ()):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(4, WIDTH, generator=generator), loops, frozenset(skip)


def start(world: zero.World, optimizer=None, **settings):
    with world.exclusive(), zero.empty():
        model = Stack()
    plan = zero.Plan(model, optimizer=optimizer or zero.adamw(1e-2), world=world, **settings)
    return zero.init(plan, zero.open_store(plan), seed=3), zero.make_step(plan, square)


def plain(world_size: int, batches, *, steps: int, clip: float) -> dict[str, Tensor]:
    """The same training in one process with torch's optimizer; unused parameters have zero gradients."""
    state = run_ranks(1, lambda world: full_state_dict(start(world)[0]))[0]
    model = Stack()
    model.load_state_dict(state)
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=False)
        for rank in range(world_size):
            several = batches(step, rank)
            for batch in several:
                (square(model, batch) / (world_size * len(several))).backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize(
    ("size", "stage", "update"),
    [(1, 0, "lazy"), (1, 3, "serial"), (2, 0, "serial"), (2, 1, "lazy"), (2, 2, "lazy"), (2, 3, "lazy")],
)
def test_a_unit_of_an_earlier_microbatch_counts(size, stage, update):
    """Layer 2 runs in the first microbatch only: its gradient is reduced, is in the norm and is applied."""

    def batches(step: int, rank: int):
        return [batch_of(step, rank, 0), batch_of(step, rank, 1, skip=(2,))]

    def rank_main(world: zero.World):
        state, step = start(world, zero.adamw(1e-2, clip=0.05), stage=zero.Stage(stage), update=update, accumulate=2)
        for number in range(3):
            state, _ = step(state, batches(number, world.rank))
        return full_state_dict(state)

    expected = plain(size, batches, steps=3, clip=0.05)
    for parameters in run_ranks(size, rank_main):
        for name, tensor in parameters.items():
            # the order of addition differs from torch's; Adam's first steps divide by small roots
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2)])
def test_a_nan_of_an_earlier_microbatch_is_skipped(size, stage):
    def rank_main(world: zero.World):
        state, step = start(world, stage=zero.Stage(stage), accumulate=2)
        before = full_state_dict(state)
        bad, _, _ = batch_of(0, world.rank, 0)
        only_layer_2 = (bad * torch.nan, 1, frozenset({0, 1, 3, 4}))
        state, metrics = step(state, [only_layer_2, batch_of(0, world.rank, 1, skip=(2,))])
        after = full_state_dict(state)
        return metrics.skipped, metrics.nonfinite_unit, all(torch.equal(before[name], after[name]) for name in before)

    assert run_ranks(size, rank_main) == [(True, "layers.2", True)] * size


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_lazy_is_serial_with_accumulation(accumulate):
    """Reductions of an early microbatch may complete during a later one; they are not final for that."""

    def rank_main(world: zero.World, stage: int, update: str) -> str:
        state, step = start(world, stage=zero.Stage(stage), update=update, accumulate=accumulate)
        for number in range(3):
            state, _ = step(state, [batch_of(number, world.rank, micro) for micro in range(accumulate)])
        return digest(state)

    for size, stage in ((1, accumulate), (2, 0), (2, accumulate)):
        assert run_ranks(size, rank_main, stage, "lazy") == run_ranks(size, rank_main, stage, "serial")


class Sums(nn.Module):
    """Layers whose gradients are the row that they get."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 1, bias=False) for _ in range(3))

    def forward(self, row: Tensor) -> Tensor:
        return torch.stack([layer(row).sum() for layer in self.layers]).sum()


def rows_of(step: int, rank: int, count: int) -> Tensor:
    """Rows that are exact in bf16 and whose sum is exact in fp32, but not in bf16."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return 1 + torch.randint(0, 128, (count, 1, WIDTH), generator=generator) / 128


def far_beyond_the_plan(world: zero.World, **settings) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Parameters before and after two steps of 64 and 1 microbatches for a plan of 1."""
    with world.exclusive(), zero.empty():
        model = Sums()
    settings = {"precision": "bf16", "offload": zero.Offload()} | settings
    plan = zero.Plan(model, optimizer=zero.sgd(1.0), world=world, **settings)
    state, made = zero.init(plan, zero.open_store(plan), seed=3), []
    for number, count in enumerate((64, 1)):
        step, before = zero.Step(state), full_state_dict(state)
        for row in rows_of(number, world.rank, count):
            step.microbatch()
            step.backward(state.model(row.to(world.device, torch.bfloat16)).float())
        state, _ = step.finish()
        made.append((before, full_state_dict(state)))
    return made


ON_GPU = zero.Offload(preset="cpu", compute="device")


@pytest.mark.parametrize(
    ("size", "stage", "settings"),
    [
        *((size, stage, {}) for size, stage in [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]),
        (2, 2, {"precision": zero.Precision("bf16", reduce="bf16")}),
        (2, 3, {"reduce": "native"}),
        (1, 0, {"offload": ON_GPU}),
        (1, 3, {"offload": zero.Offload(preset="infinity")}),
        (2, 3, {"offload": ON_GPU}),
    ],
)
def test_microbatches_beyond_the_plan_are_added_in_fp32(size, stage, settings):
    """In bf16 the sum of 64 would be off by a hundredth. One rank offloads its gradients in bf16, rounded once."""
    offloaded = "offload" in settings
    with simulated_gpu() if offloaded else nullcontext():
        steps = run_ranks(size, functools.partial(far_beyond_the_plan, stage=zero.Stage(stage), **settings))[0]
    for number, (before, after) in enumerate(steps):
        count = 1 if number else 64
        mean = torch.stack([rows_of(number, rank, count) for rank in range(size)]).sum((0, 1)) / size
        mean = mean.bfloat16().float() if offloaded and size == 1 else mean
        for name, value in after.items():
            assert torch.equal(value, before[name] - mean), (number, name)


@pytest.mark.parametrize(("loops", "update"), [(2, "serial"), (3, "lazy")])
def test_a_stack_that_is_looped_over_needs_no_more_memory(loops, update):
    """Every unit's calls are spread over the whole backward, and still no pool grows."""

    def rank_main(world: zero.World, stage: int):
        state, step = start(world, stage=zero.Stage(stage), update=update)
        for number in range(3):
            state, _ = step(state, [batch_of(number, world.rank, 0, loops=loops)])
        parts, planned = state.runtime, state.plan.bytes["device"]
        assert parts.reducer.reductions.flats.free_bytes == planned["gradient flats"]
        if parts.residency.pool is not None:
            assert parts.residency.pool.overflowed == 0
            assert parts.residency.pool.allocated_bytes == planned["gathered units"]
        return digest(state)

    digests = {state_digest for stage in range(4) for state_digest in run_ranks(2, rank_main, stage)}
    assert len(digests) == 1


def test_an_interrupted_update_is_never_taken_for_a_state(monkeypatch):
    """Ctrl-C in the middle of a page: whoever comes next is told, at every later use."""
    state, step = start(zero.open_world())
    state, _ = step(state, [batch_of(0, 0, 0)])

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state.runtime.updater._pieces, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(state, [batch_of(1, 0, 0)])
    with pytest.raises(StaleStateError, match="interrupted"):
        step(state, [batch_of(1, 0, 0)])
    with pytest.raises(StaleStateError, match="interrupted"):
        full_state_dict(state)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_that_fails_where_a_reduction_starts_can_be_made_again(stage):
    """The reduction's buffers are not lost: later steps would wait for them for ever."""

    def out_of_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError

    def rank_main(world: zero.World, failures: int) -> str:
        state, step = start(world, stage=stage)
        state, _ = step(state, [batch_of(0, world.rank, 0)])
        for _ in range(failures):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(state.runtime.routes, "reduce_scatter", out_of_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    step(state, [batch_of(1, world.rank, 0)])
        state, _ = step(state, [batch_of(1, world.rank, 0)])
        return digest(state)

    assert len({state_digest for failures in (0, 3) for state_digest in run_ranks(2, rank_main, failures)}) == 1


def test_a_sum_by_node_whose_second_row_does_not_start_ends_its_first_before_its_flats_are_used_again():
    """Else what the first row receives would come into a flat that belongs to another reduction by then."""

    def rank_main(world: zero.World, failures: int) -> tuple[str, int]:
        state, step = start(world, stage=3, reduce="node")
        state, _ = step(state, [batch_of(0, world.rank, 0)])
        within, waited = state.runtime.routes._start_sum.__self__._within, []
        whole = within.reduce_scatter

        class First(NamedTuple):
            handle: Handle

            def wait(self) -> None:
                waited.append(self)
                self.handle.wait()

        for _ in range(failures):
            started: list[Handle] = []

            def reduce_scatter(*given, started=started, **keys):
                if started:
                    raise torch.OutOfMemoryError
                started.append(First(whole(*given, **keys)))
                return started[0]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(within, "reduce_scatter", reduce_scatter)
                with pytest.raises(torch.OutOfMemoryError):
                    step(state, [batch_of(1, world.rank, 0)])
        state, _ = step(state, [batch_of(1, world.rank, 0)])
        return digest(state), len(waited)

    plain, failed = (run_ranks(4, rank_main, failures, nodes=2) for failures in (0, 3))
    assert {waits for _, waits in failed} == {3}
    assert len({state_digest for state_digest, _ in plain + failed}) == 1


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_arrives_and_is_never_settled_is_not_left_out(monkeypatch, stage):
    state, step = start(zero.open_world(), stage=stage)
    monkeypatch.setattr(BackwardPass, "_close", lambda self, unit: unit.step.calls.clear())
    with pytest.raises(AssertionError, match="have arrived and were never reduced"):
        step(state, [batch_of(0, 0, 0)])


def test_evaluation_leaves_every_module_in_its_mode():
    state, _ = start(zero.open_world())
    state.model.layers[1].eval()
    modes = [module.training for module in state.model.modules()]
    zero.make_forward(state.plan, lambda model: model.training)(state)
    assert [module.training for module in state.model.modules()] == modes


def test_a_state_belongs_to_its_plan():
    (state, _), (_, other) = start(zero.open_world()), start(zero.open_world())
    with pytest.raises(ConfigError, match="another Plan"):
        other(state, [batch_of(0, 0, 0)])


def test_ranks_that_make_other_first_values_are_refused():
    def rank_main(world: zero.World) -> None:
        with world.exclusive(), zero.empty():
            model = Stack()
        plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world)
        zero.init(plan, zero.open_store(plan), weights=lambda name, tensor: tensor.fill_(1.0 + world.rank))

    with pytest.raises(HandshakeError, match="first values"):
        run_ranks(2, rank_main)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_value_that_differs_between_ranks_that_keep_it_is_refused(stage):
    def fill(name: str, tensor: torch.Tensor, rank: int) -> None:
        tensor.fill_(1.0).view(-1)[-1] = (
            rank if tensor.numel() > 64 else 1
        )  # behind the elements that all ranks compare

    def rank_main(world: zero.World) -> None:
        with world.exclusive(), zero.empty():
            model = nn.Linear(16, 16)
        plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world, stage=stage)
        zero.init(plan, zero.open_store(plan), weights=functools.partial(fill, rank=world.rank))

    with pytest.raises(HandshakeError, match="those of rank 0 and rank 1"):
        run_ranks(2, rank_main)


def test_a_model_that_was_built_whole_keeps_its_values():
    """Finetuning must not begin with noise."""
    model = Stack()
    world = zero.open_world()
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world, stage=3, precision="fp32", units=[nn.Linear])
    state_dict = full_state_dict(zero.init(plan, zero.open_store(plan), seed=5))
    assert all(torch.equal(state_dict[name], parameter) for name, parameter in model.named_parameters())


def test_units_are_a_list_of_classes_or_names():
    with pytest.raises(ConfigError, match=r"\['Linear'\]"):
        zero.Plan(Stack(), optimizer=zero.adamw(1e-2), world=zero.open_world(), units="Linear")
