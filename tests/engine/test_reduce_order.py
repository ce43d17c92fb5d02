"""Ranks that take paths of their own through a model: what they learn is what plain torch learns from all of them.

Weights, inputs and rates are small whole numbers and halves, and the loss is linear in what each layer returns. So no
sum needs more bits than fp32 has, the order of addition is of no account, and what is found has to be torch's bit for
bit. As in DDP, a layer that a rank did not use has a zero gradient there.
"""

import os
import random
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.conftest import one_of
from zero.engine.full import digest
from zero.engine.reduce_order import REMEMBERED_STEPS, Turns
from zero.errors import WorldError
from zero.testing import run_processes, run_ranks

WIDTH, LR, MOMENTUM = 4, 0.5, 0.5
SIZES = (WIDTH, WIDTH, 2 * WIDTH, WIDTH, WIDTH, 2 * WIDTH)
"""Of the layers' outputs: units of two sizes, more than there are flats for."""

Path = Sequence[int]
"""Layers in the order of their calls, some left out, some called again."""

Program = Sequence[Sequence[Sequence[Path]]]
"""What one rank does: steps of microbatches of backward passes."""


class Parting(nn.Module):
    """The sum of what the layers on a path return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, size) for size in SIZES)

    def forward(self, x: Tensor, path: Path) -> Tensor:
        return torch.stack([self.layers[number](x).sum() for number in path]).sum()


def model() -> Parting:
    made, draw = Parting(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=draw))
    return made


def row(*place: int) -> Tensor:
    """(1, WIDTH) of small whole numbers, others for each rank, step and microbatch."""
    draw = torch.Generator().manual_seed(sum(number * 100**at for at, number in enumerate(place)))
    return torch.randint(-2, 3, (1, WIDTH), generator=draw).float()


def paths_of(seed: int, rank: int, *, steps: int, microbatches: int, alike: float) -> Program:
    """Drawn anew for each rank, but for a share of the passes that are `alike`."""
    shared, own = random.Random(f"{seed}"), random.Random(f"{seed} {rank}")

    def path(least: int = 0) -> Path:
        for draw in (shared, own):
            found = [n for n in range(len(SIZES)) if draw.random() < 0.6]
            draw.shuffle(found) if draw.random() < 0.3 else None
            found = found * 2 if draw.random() < 0.2 else found
            if draw is shared:
                together = found, draw.random() < alike
        return (together[0] if together[1] else found) or [0] * least

    def passes(micro: int) -> Sequence[Path]:  # a step in which nobody has a gradient is refused
        return [path(least=rank == micro == 0) for _ in range(own.choice([1, 1, 1, 2]))]

    return [[passes(micro) for micro in range(microbatches)] for _ in range(steps)]


def plain(programs: Sequence[Program], microbatches: int) -> dict[str, Tensor]:
    """One process, all ranks' passes, torch's SGD on the mean over ranks and microbatches."""
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=LR, momentum=MOMENTUM)
    for step in range(len(programs[0])):
        optimizer.zero_grad()
        for rank, program in enumerate(programs):
            for micro, passes in enumerate(program[step]):
                for path in filter(None, passes):
                    made(row(rank, step, micro), path).backward()
        for parameter in made.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = grad / (len(programs) * microbatches)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in made.named_parameters()}


def trained(world: zero.World, program: Program, microbatches: int, **settings) -> dict[str, Tensor]:
    values = {name: parameter.detach() for name, parameter in model().named_parameters()}
    plan = zero.Plan(
        model(), optimizer=zero.sgd(LR, momentum=MOMENTUM), world=world, accumulate=microbatches, units=[nn.Linear],
        **settings,
    )  # fmt: skip
    state = zero.init(plan, zero.open_store(plan), weights=values)
    for number, microbatched in enumerate(program):
        step = zero.Step(state)
        for micro, passes in enumerate(microbatched):
            step.microbatch()
            for path in filter(None, passes):
                step.backward(state.model(row(world.rank, number, micro), path))
        state, _ = step.finish()
    flats = sum(flat.flat_P.nbytes for several in state.runtime.reducer._free.values() for flat in several)
    assert flats == state.plan.bytes["device"]["gradient flats"]
    return zero.full_state_dict(state)


def same(found: Sequence[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    for one in found:
        assert one.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(one[name], wanted[name]), name


@pytest.fixture(params=["none", "nvme"])
def offload(request, tmp_path) -> zero.Offload:
    return zero.Offload(request.param, path=str(tmp_path), page_bytes=4096)


SEEDS = [int(seed) for seed in os.environ.get("ZERO_SEEDS", "").split()] or [0, *one_of((1, 2, 3), 0)]
"""The first always, and another one every day."""


@pytest.mark.by_turns(5)  # the day chooses one of three seeds as well
@pytest.mark.parametrize("alike", [0.0, 0.8])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", range(3))
def test_ranks_on_paths_of_their_own_learn_what_torch_learns_from_all(stage, ranks, microbatches, alike, offload):
    def rank_main(world: zero.World, programs):
        return trained(world, programs[world.rank], microbatches, stage=zero.Stage(stage), offload=offload)

    for seed in SEEDS:
        programs = [paths_of(seed, rank, steps=4, microbatches=microbatches, alike=alike) for rank in range(ranks)]
        print(f"seed {seed}")
        same(run_ranks(ranks, rank_main, programs), plain(programs, microbatches))


def _in_a_process(world: zero.World, programs: Sequence[Program], stage: int) -> dict[str, Tensor]:
    return trained(world, programs[world.rank], 2, stage=zero.Stage(stage))


@pytest.mark.parametrize("stage", [0, 2])
def test_processes_on_paths_of_their_own_learn_the_same(stage):
    programs = [paths_of(1, rank, steps=3, microbatches=2, alike=0.0) for rank in range(2)]
    same(run_processes(2, _in_a_process, programs, stage), plain(programs, 2))


def _refused(world: zero.World, path_of: Sequence[Path]) -> tuple[str, float]:
    begin_s = time.monotonic()
    with pytest.raises(WorldError) as refusal:
        trained(world, [[[path_of[world.rank]]]], 1, stage=zero.Stage(3))
    return str(refusal.value), time.monotonic() - begin_s


@pytest.mark.parametrize("path_of", [[[0, 1, 2], [0, 1, 3]], [[0, 1, 2, 3], [0]]], ids=str)
def test_processes_on_paths_of_their_own_are_refused_within_seconds_where_parameters_are_sharded(path_of):
    """Long before the deadline of 120 s, with what each rank was at."""
    for said, after_s in run_processes(2, _refused, path_of):
        assert "the ranks run different operations: " in said
        assert "layers." in said
        assert after_s < 60


def _one_more_forward(world: zero.World, odd: int) -> tuple[str, float]:
    """Where the others are at the step's end already, whose turns are told aside from the order of all else."""
    plan = zero.Plan(model(), optimizer=zero.sgd(LR), world=world, stage=zero.Stage(3), units=[nn.Linear])
    state = zero.init(plan, zero.open_store(plan), seed=3)
    begin_s = time.monotonic()
    step = zero.Step(state)
    step.microbatch()
    step.backward(state.model(row(1), range(len(SIZES))))  # every turn is taken in backward

    def end() -> None:
        if world.rank == odd:
            with torch.no_grad():
                state.model(row(1), [4])
        step.finish()

    with pytest.raises(WorldError) as refusal:
        end()
    return str(refusal.value), time.monotonic() - begin_s


@pytest.mark.parametrize("odd", [0, 1])
def test_processes_of_which_one_runs_another_forward_before_the_end_are_refused_within_seconds(odd):
    for said, after_s in run_processes(2, _one_more_forward, odd):
        assert "the ranks run different operations: " in said
        assert "exchange of turns" in said
        assert after_s < 60


class Choosing(nn.Module):
    """Each call uses one of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.either = nn.ParameterList(torch.full((WIDTH,), 1.0 + at) for at in range(2))

    def forward(self, x: Tensor, at: int) -> Tensor:
        return (x * self.either[at]).sum()


class Nested(nn.Module):
    """The sum of the outputs of several units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Choosing() for _ in range(5))

    def forward(self, x: Tensor, calls: Sequence[tuple[int, int]]) -> Tensor:
        total = x.new_zeros(())
        for number, at in calls:
            total = total + self.layers[number](x, at)
        return total


@pytest.mark.parametrize("stage", range(3))
def test_a_unit_whose_turn_comes_between_its_calls_sends_nothing_of_an_earlier_step(stage):
    """What the other call will deliver is no gradient yet: what lies in its place is the last step's."""
    once = [(number, at) for number in range(5) for at in range(2)]
    around = [(0, 0), *((number, 0) for number in (1, 2, 3, 4)), (0, 1)]

    def run(forward_backward) -> None:
        for number, passes in enumerate([[once], [once[2:], around]]):
            forward_backward(number, passes)

    plainly = Nested()
    optimizer = torch.optim.SGD(plainly.parameters(), lr=LR)

    def plain_step(number: int, passes) -> None:
        optimizer.zero_grad()
        for calls in passes:
            ((plainly(row(0, number), calls) + plainly(row(1, number), calls)) / 4).backward()
        optimizer.step()

    run(plain_step)

    def rank_main(world: zero.World) -> dict[str, Tensor]:
        plan = zero.Plan(
            Nested(), optimizer=zero.sgd(LR), world=world, stage=zero.Stage(stage), units=[Choosing], accumulate=2
        )
        state = zero.init(plan, zero.open_store(plan))

        def step(number: int, passes) -> None:
            nonlocal state
            under_way = zero.Step(state)
            under_way.microbatch()
            under_way.microbatch()
            for calls in passes:
                under_way.backward(state.model(row(world.rank, number), calls))
            state, _ = under_way.finish()

        run(step)
        return zero.full_state_dict(state)

    same(run_ranks(2, rank_main), dict(plainly.state_dict()))


@pytest.mark.parametrize("stage", range(3))
def test_gradients_are_forgotten_wherever_each_rank_is(stage):
    """zero_grad in the middle of a step: what has arrived by then is gone on every rank, whatever its path was."""
    path_of = [[3, 1, 0], [5]]
    kept = [[[[[0, 1]]]], [[[[1, 2]]]]]

    def rank_main(world: zero.World) -> dict[str, Tensor]:
        values = {name: parameter.detach() for name, parameter in model().named_parameters()}
        plan = zero.Plan(
            model(), optimizer=zero.sgd(LR, momentum=MOMENTUM), world=world, stage=zero.Stage(stage), units=[nn.Linear]
        )
        state = zero.init(plan, zero.open_store(plan), weights=values)
        step = zero.Step(state)
        step.microbatch()
        step.backward(state.model(row(world.rank, 9, 9), path_of[world.rank]))
        step.forget()
        step.backward(state.model(row(world.rank, 0, 0), kept[world.rank][0][0][0]))
        state, _ = step.finish()
        return zero.full_state_dict(state)

    same(run_ranks(2, rank_main), plain(kept, 1))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("between", ["read", "forget first", "forget later"])
def test_steps_in_which_ranks_meet_more_than_once_cost_no_further_reductions(between, stage, microbatches):
    """Gradients are read and more of them come; or zero_grad stands after the forward, as in many a loop."""

    def rank_main(world: zero.World) -> list[int]:
        plan = zero.Plan(
            model(), optimizer=zero.sgd(LR), world=world, stage=zero.Stage(stage), units=[nn.Linear],
            accumulate=microbatches,
        )  # fmt: skip
        state = zero.init(plan, zero.open_store(plan), seed=3)
        reduce_scatter, counts = world.reduce_scatter, []

        def counted(*args, **kwargs):
            counts[-1] += 1
            return reduce_scatter(*args, **kwargs)

        world.reduce_scatter = counted
        for _ in range(6):
            counts.append(0)
            step = zero.Step(state)
            for _ in range(microbatches):
                step.microbatch()
                loss = state.model(row(world.rank), range(len(SIZES)))
                if between == "forget first":
                    step.forget()
                step.backward(loss)
                if between == "forget later":
                    step.forget()
                elif between == "read":
                    zero.get_full(state, "layers.0.weight", "grad")
                step.backward(state.model(row(world.rank), range(len(SIZES))))
            state, _ = step.finish()
        return counts

    counts = run_ranks(2, rank_main)[0]
    assert len(set(counts[1:])) == 1
    sums = 2 * microbatches if stage >= 2 or between != "forget first" else 2
    assert counts[-1] <= sums * len(SIZES)


@pytest.mark.parametrize("stage", range(3))
def test_a_rank_that_computes_alone_between_steps_is_waited_for(stage):
    """One rank evaluates, and not the others: what it gathers early is what they gather later."""

    def rank_main(world: zero.World) -> str:
        plan = zero.Plan(model(), optimizer=zero.adamw(0.1), world=world, stage=zero.Stage(stage), units=[nn.Linear])
        state = zero.init(plan, zero.open_store(plan), seed=3)
        for number in range(3):
            if world.rank == 1:
                with torch.no_grad():
                    state.model(row(number), [2, 4])
            step = zero.Step(state)
            step.microbatch()
            step.backward(state.model(row(world.rank, number), [0, 1, 2, 3, 4]))
            state, _ = step.finish()
        return digest(state)

    assert len(set(run_ranks(2, rank_main))) == 1


# -- the turns by themselves -------------------------------------------------------------------------------------------


def end_step(*ranks: Turns, paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each rank's units are ready in the order of its path; returns the turns that each took without being told to."""
    took: list[list[int]] = []
    for turns, path in zip(ranks, paths, strict=True):
        turns.begin()
        took.append([])
        for unit in path:
            turns.ready(unit)
            while turns.is_due:
                took[-1].append(turns.take()[0])
    reports = torch.stack([
        turns.report(turns.needed(set(path) - set(own)), at_end=True)
        for turns, path, own in zip(ranks, paths, took, strict=True)
    ])  # fmt: skip
    for turns in ranks:
        assert turns.receive(reports)
    return took


def test_ranks_on_one_path_never_wait_for_a_turn_after_their_first_step():
    """In whatever order backward comes, once it was seen."""
    ranks = [Turns(range(6), 1) for _ in range(3)]
    path = [2, 5, 0, 1, 4, 3]
    assert end_step(*ranks, paths=[path] * 3) != [path] * 3
    assert end_step(*ranks, paths=[path] * 3) == [path] * 3


def test_turns_are_the_same_on_all_ranks_whatever_each_has_seen():
    draw = random.Random(0)
    ranks = [Turns(range(7), 1) for _ in range(3)]
    for _ in range(50):
        paths = [draw.sample(range(7), draw.randrange(8)) for _ in ranks]
        end_step(*ranks, paths=paths)
        for turns in ranks:
            turns.begin()
        assert len({tuple(turns.take()[0] for _ in range(14)) for turns in ranks}) == 1


def test_a_unit_that_nobody_uses_costs_a_reduction_for_some_steps_and_then_none():
    ranks = [Turns(range(4), 1) for _ in range(2)]
    end_step(*ranks, paths=[[3, 1, 2, 0]] * 2)
    needed = []
    for _ in range(REMEMBERED_STEPS + 1):
        end_step(*ranks, paths=[[3, 2, 0]] * 2)
        ranks[0].begin()
        needed.append(ranks[0].needed([3, 2, 0]))
    assert needed == [4] * (REMEMBERED_STEPS - 1) + [3, 3]
