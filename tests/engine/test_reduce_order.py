"""Ranks on different paths through a model learn what plain torch learns from all, and start the same reductions.

Weights, inputs and rates are small whole numbers and halves, and the loss is linear in what each layer returns. So no
sum needs more bits than fp32 has, the order of addition does not matter, and the result must be torch's bit for bit.
As in DDP, a layer that a rank did not use has a zero gradient there.
"""

import os
import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import zero
from zero.engine.whole.read import digest
from zero.errors import WorldError
from zero.testing import run_processes, run_ranks

WIDTH, LR, MOMENTUM = 4, 0.5, 0.5
SIZES = (WIDTH, WIDTH, 2 * WIDTH, WIDTH, WIDTH, 2 * WIDTH)
"""Of the layers' outputs: units of two sizes, more than there are flats for."""
ALL = range(len(SIZES))
SEEDS = [int(seed) for seed in os.environ.get("ZERO_SEEDS", "0").split()]

Path = Sequence[int]
"""Layers in the order of their calls, some left out, some called again."""

Program = Sequence[Sequence[Sequence[Path]]]
"""Steps of microbatches of backward passes of one rank."""


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


def paths_of(seed: int, rank: int, *, steps: int, microbatches: int, alike: float, uneven: bool = False) -> Program:
    """Draw a program anew for each rank, but for a share of the passes that are `alike`."""
    shared, private = random.Random(f"{seed}"), random.Random(f"{seed} {rank}")

    def path(least: int = 0) -> Path:
        drawn = []
        for draw in (shared, private):
            layers = [n for n in ALL if draw.random() < 0.6]
            draw.shuffle(layers) if draw.random() < 0.3 else None
            drawn.append(layers * 2 if draw.random() < 0.2 else layers)
            if draw is shared:
                is_alike = draw.random() < alike
        return drawn[not is_alike] or [0] * least

    def passes(micro: int) -> Sequence[Path]:  # a step in which nobody has a gradient is rejected
        return [path(least=rank == micro == 0) for _ in range(private.choice([1, 1, 1, 2]))]

    def count() -> int:
        return private.choice([1, microbatches, microbatches + 1]) if uneven else microbatches

    return [[passes(micro) for micro in range(count())] for _ in range(steps)]


def plain(programs: Sequence[Program], microbatches: int) -> dict[str, Tensor]:
    """Train in one process with all ranks' passes, by torch's SGD on the mean over ranks and microbatches."""
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


def start(world: zero.World, microbatches: int = 1, **settings) -> zero.State:
    values = {name: parameter.detach() for name, parameter in model().named_parameters()}
    plan = zero.Plan(
        model(), optimizer=zero.sgd(LR, momentum=MOMENTUM), world=world, accumulate=microbatches, units=[nn.Linear],
        **settings,
    )  # fmt: skip
    return zero.init(plan, zero.open_store(plan), weights=values)


def trained(world: zero.World, program: Program, microbatches: int, **settings) -> dict[str, Tensor]:
    state = start(world, microbatches, **settings)
    for number, microbatched in enumerate(program):
        step = zero.Step(state)
        for micro, passes in enumerate(microbatched):
            step.microbatch()
            for path in filter(None, passes):
                step.backward(state.model(row(world.rank, number, micro), path))
        state, _ = step.finish()
    assert state.runtime.reducer.reductions.flats.free_bytes == state.plan.bytes["device"]["gradient flats"]
    return zero.full_state_dict(state)


def same(states: Sequence[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    for state in states:
        assert state.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(state[name], wanted[name]), name


PAIRWISE = [
    (0, 2, 1, 0.0, "none"),
    (0, 3, 2, 0.8, "nvme"),
    (1, 2, 2, 0.0, "nvme"),
    (1, 3, 1, 0.8, "none"),
    (2, 2, 1, 0.8, "nvme"),
    (2, 3, 2, 0.0, "none"),
]


@pytest.mark.parametrize(("stage", "ranks", "microbatches", "alike", "offload"), PAIRWISE)
@pytest.mark.parametrize("uneven", [False, True])
def test_ranks_on_different_paths_learn_what_torch_learns_from_all(
    stage, ranks, microbatches, alike, offload, uneven, tmp_path
):
    def rank_main(world: zero.World, programs):
        where = zero.Offload(offload, path=str(tmp_path), page_bytes=4096)
        return trained(world, programs[world.rank], microbatches, stage=zero.Stage(stage), offload=where)

    for seed in SEEDS:
        drawn = {"steps": 4, "microbatches": microbatches, "alike": alike, "uneven": uneven}
        programs = [paths_of(seed, rank, **drawn) for rank in range(ranks)]
        same(run_ranks(ranks, rank_main, programs), plain(programs, microbatches))


def _in_a_process(world: zero.World, programs: Sequence[Program], stage: int) -> dict[str, Tensor]:
    return trained(world, programs[world.rank], 2, stage=zero.Stage(stage))


def test_processes_on_different_paths_learn_the_same():
    programs = [paths_of(1, rank, steps=3, microbatches=2, alike=0.0, uneven=True) for rank in range(2)]
    same(run_processes(2, _in_a_process, programs, 2), plain(programs, 2))


# -- stage 3: ranks must call alike ------------------------------------------------------------------------------------


def _rejected(world: zero.World, path_of: Sequence[Path], odd: int | None) -> tuple[str, float]:
    """Run the rank's path; rank `odd` then runs another forward, where the others are at the step's end already."""
    state = start(world, stage=zero.Stage(3))
    begin_s = time.monotonic()

    def step() -> None:
        under_way = zero.Step(state)
        under_way.microbatch()
        under_way.backward(state.model(row(1), path_of[world.rank]))
        if world.rank == odd:
            with torch.no_grad():
                state.model(row(1), [4])
        under_way.finish()

    with pytest.raises(WorldError) as refusal:
        step()
    return str(refusal.value), time.monotonic() - begin_s


@pytest.mark.parametrize(("path_of", "odd"), [([[0, 1, 2, 3], [0]], None), ([ALL, ALL], 1)])
def test_processes_that_gather_different_units_are_rejected_within_seconds(path_of, odd):
    """Long before the deadline of 120 s, with what each rank was at."""
    for message, after_s in run_processes(2, _rejected, path_of, odd):
        assert "the ranks run different operations: " in message
        assert "layers." in message
        assert after_s < 60


# -- calls, reads and drops in the middle of a step --------------------------------------------------------------------


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
def test_a_unit_of_which_a_call_is_still_to_come_sends_nothing_of_an_earlier_step(stage):
    """Its other call will bring a gradient later in backward; until then the last step's lies in its place."""
    once = [(number, at) for number in range(5) for at in range(2)]
    around = [(0, 0), *((number, 0) for number in (1, 2, 3, 4)), (0, 1)]
    steps = [[once], [once[2:], around]]
    plainly = Nested()
    optimizer = torch.optim.SGD(plainly.parameters(), lr=LR)
    for number, passes in enumerate(steps):
        optimizer.zero_grad()
        for calls in passes:
            ((plainly(row(0, number), calls) + plainly(row(1, number), calls)) / 4).backward()
        optimizer.step()

    def rank_main(world: zero.World) -> dict[str, Tensor]:
        plan = zero.Plan(
            Nested(), optimizer=zero.sgd(LR), world=world, stage=zero.Stage(stage), units=[Choosing], accumulate=2
        )
        state = zero.init(plan, zero.open_store(plan))
        for number, passes in enumerate(steps):
            step = zero.Step(state)
            step.microbatch()
            step.microbatch()
            for calls in passes:
                step.backward(state.model(row(world.rank, number), calls))
            state, _ = step.finish()
        return zero.full_state_dict(state)

    same(run_ranks(2, rank_main), dict(plainly.state_dict()))


@pytest.mark.parametrize("stage", range(3))
def test_gradients_are_forgotten_wherever_each_rank_is(stage):
    """Gradients that have arrived when a step is dropped are gone on every rank, whatever its path was."""
    path_of = [[3, 1, 0], [5]]
    kept = [[[[[0, 1]]]], [[[[1, 2]]]]]

    def rank_main(world: zero.World) -> dict[str, Tensor]:
        state = start(world, stage=zero.Stage(stage))
        step = zero.Step(state)
        step.microbatch()
        step.backward(state.model(row(world.rank, 9, 9), path_of[world.rank]))
        step.forget()
        step.backward(state.model(row(world.rank, 0, 0), kept[world.rank][0][0][0]))
        state, _ = step.finish()
        return zero.full_state_dict(state)

    same(run_ranks(2, rank_main), plain(kept, 1))


@pytest.mark.parametrize("stage", range(3))
def test_gradients_are_read_wherever_each_rank_is(stage):
    """A read sees what has arrived on all ranks, and what comes later is added to it."""
    programs = [[[[[3, 1, 0]], [[2]]]], [[[[5]], [[5, 2], [1]]]]]

    def rank_main(world: zero.World) -> tuple[Tensor, dict[str, Tensor]]:
        state = start(world, 2, stage=zero.Stage(stage))
        step = zero.Step(state)
        for micro, passes in enumerate(programs[world.rank][0]):
            step.microbatch()
            for path in passes:
                step.backward(state.model(row(world.rank, 0, micro), path))
            if micro == 0:
                early = zero.get_full(state, "layers.3.weight", "grad")
        state, _ = step.finish()
        return early, zero.full_state_dict(state)

    for early, state in run_ranks(2, rank_main):
        assert torch.equal(early, row(0, 0, 0).expand_as(early) / 4)
        same([state], plain(programs, 2))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_that_computes_alone_between_steps_is_waited_for(stage):
    """One rank evaluates, and not the others: what it gathers early is what they gather later."""

    def rank_main(world: zero.World) -> str:
        state = start(world, stage=zero.Stage(stage))
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


# -- which reductions are started --------------------------------------------------------------------------------------

Body = Callable[[zero.State, zero.Step, int], None]


def started(world: zero.World, body: Body, stage: int, microbatches: int) -> tuple[list[list[str]], int]:
    """By step, the reductions that this rank starts; and how many exchanges of turns there were in the last step."""
    state = start(world, microbatches, stage=zero.Stage(stage))
    log, exchange = state.runtime.log, world.exchange
    steps: list[list[str]] = []
    exchanges = 0

    def note(operation: str) -> None:
        if operation.startswith("reduction"):
            steps[-1].append(operation)

    def counted(*args, **kwargs):
        nonlocal exchanges
        exchanges += 1
        return exchange(*args, **kwargs)

    log.note = note
    world.exchange = counted
    for _ in range(3):
        steps.append([])
        exchanges = 0
        step = zero.Step(state)
        for micro in range(microbatches):
            step.microbatch()
            body(state, step, micro)
        state, _ = step.finish()
    return steps, exchanges


def once(state: zero.State, step: zero.Step, micro: int) -> None:
    step.backward(state.model(row(1), ALL))


def left_out(state: zero.State, step: zero.Step, micro: int) -> None:
    rank = state.plan.world.rank
    step.backward(state.model(row(1), [(0, 3), (5, 1, 2)][rank]))


def twice(state: zero.State, step: zero.Step, micro: int) -> None:
    once(state, step, micro)
    once(state, step, micro)


def read_between(state: zero.State, step: zero.Step, micro: int) -> None:
    once(state, step, micro)
    zero.get_full(state, "layers.0.weight", "grad")


def forget_first(state: zero.State, step: zero.Step, micro: int) -> None:
    """As in many a loop: zero_grad stands after the forward."""
    loss = state.model(row(1), ALL)
    if micro == 0:
        step.forget()
    step.backward(loss)


def forget_later(state: zero.State, step: zero.Step, micro: int) -> None:
    once(state, step, micro)
    step.forget()
    once(state, step, micro)


@pytest.mark.parametrize(("stage", "microbatches"), [(0, 3), (1, 1), (2, 3)])
@pytest.mark.parametrize(
    ("body", "further", "exchanges"),
    [(once, 0, 0), (left_out, 0, 0), (twice, 1, 0), (read_between, 0, 1), (forget_first, 0, 1)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_step_has_the_planned_rounds_without_a_message_and_one_more_where_it_needs_one(
    body, further, exchanges, microbatches, stage
):
    steps, *others = run_ranks(2, started, body, stage, microbatches)
    assert all(rank == steps for rank in others), "all ranks start the same reductions in the same order"
    adds_up_first = stage < 2 and microbatches > 1
    rounds = 1 if adds_up_first else microbatches
    if body is read_between:  # each read of a step is an exchange, and where its round was taken a further round
        exchanges, further = microbatches, microbatches - rounds
    assert [len(names) for names in steps[0]] == [len(SIZES) * (rounds + further)] * 3
    assert steps[1] == exchanges


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_dropped_after_backward_is_reduced_and_the_step_begins_again(stage):
    steps, *others = run_ranks(2, started, forget_later, stage, 1)
    assert all(rank == steps for rank in others)
    assert [len(names) for names in steps[0]] == [2 * len(SIZES)] * 3


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_units_are_reduced_in_the_order_in_which_they_are_ready_once_it_was_seen(stage):
    """And then no unit waits for another, so that the flats that are planned are enough."""
    path = [2, 5, 0, 1, 4, 3]

    def shuffled(state: zero.State, step: zero.Step, micro: int) -> None:
        device = state.runtime.reducer.reductions._device
        made: list[int] = []
        zeros = device.zeros
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "zeros", lambda numel, dtype: made.append(numel) or zeros(numel, dtype))
            step.backward(state.model(row(1), path))
        extra_flats.append(len(made))

    def rank_main(world: zero.World) -> list[list[str]]:
        return started(world, shuffled, stage, 1)[0]

    extra_flats: list[int] = []
    first, *later = run_ranks(2, rank_main)[0]
    seen = later[0]
    assert first == [f"reduction of layers.{number}" for number in reversed(ALL)]
    assert sorted(seen) == sorted(first) != seen
    assert later == [seen] * 2
    assert extra_flats[-2:] == [0, 0]


@pytest.mark.parametrize("stage", [0, 2])
def test_the_order_stays_where_ranks_saw_different_ones(stage):
    first, *later = run_ranks(2, started, left_out, stage, 1)[0][0]
    assert later == [first] * 2
