"""A step that is made twice changes no bit, and finds each bit that flips in it, with unit and rank."""

import random
from functools import partial
from threading import Lock

import pytest
import torch
from torch import nn

import zero
from tests.common.small import KiB, Setting, adamw_in_8bit, deterministic, slice_of, small_batch, small_loss
from tests.simulation import simulated_gpu
from tests.simulation.simulated_gpu import count_launches
from zero.engine.checksums import Checksums, checksum
from zero.engine.whole.read import digest
from zero.errors import ConfigError, MachineError, StaleStateError
from zero.platform.files import memory_of
from zero.store import Page, PageKind
from zero.testing import run_processes, run_ranks

EVERYWHERE = [
    Setting(stage=stage, precision=precision, offload=(("preset", preset),), page_bytes=4 * KiB, clip=0.5)
    for stage, precision, preset in [
        (0, "bf16", "none"),
        (0, "fp32", "nvme"),
        (1, "fp16", "cpu"),
        (2, "bf16", "none"),
        (3, "bf16", "none"),
        (3, "bf16", "cpu"),
        (3, "fp32", "infinity"),
    ]
]
EVERYWHERE += [
    EVERYWHERE[4].but(accumulate=2, activations="remat", optimizer=adamw_in_8bit),
    EVERYWHERE[5].but(accumulate=2, optimizer=zero.lion),
    EVERYWHERE[5].but(optimizer=zero.muon, lr=0.02),
    EVERYWHERE[6].but(precision="bf16", frozen="int8", update="serial"),
    EVERYWHERE[5].but(frozen="int8"),
]
NODES = EVERYWHERE[4].but(between=("node", "node"))


def batch_for(world, number, setting):
    return slice_of(small_batch(number, 6 * world.size * setting.accumulate), world, setting.accumulate)


def train(world, setting, replay, steps=3):
    """The digest of the state, with the buffers of the model, and the metrics of each step."""
    state, _ = setting.start(world)
    step, every = zero.make_step(state.plan, small_loss, replay=replay), []
    for number in range(steps):
        state, metrics = step(state, batch_for(world, number, setting))
        every.append(metrics)
    told = digest(state), every
    state.runtime.store.close()
    return told


@pytest.mark.slow(keep=14)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("setting", EVERYWHERE)
def test_a_step_made_twice_changes_no_bit(setting, size):
    assert run_ranks(size, train, setting, 1) == run_ranks(size, train, setting, 0)


def test_a_copy_on_each_node_is_replayed():
    setting = EVERYWHERE[4].but(shard="node")
    assert run_ranks(4, train, setting, 2, nodes=2) == run_ranks(4, train, setting, 0, nodes=2)


class Adapted(nn.Module):
    """A frozen layer beside one that trains."""

    def __init__(self, width, out):
        super().__init__()
        self.base, self.up = nn.Linear(width, out), nn.Linear(width, out)
        self.base.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(x))


def train_adapted(world, setting):
    """Return the number of steps that were made twice; the buffers of all units have gaps at other places."""
    plan = setting.plan(world, lambda: nn.Sequential(*(Adapted(a, b) for a, b in ((9, 13), (13, 7), (7, 21), (21, 5)))))
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, lambda model, x: model(x.to(plan.precision.compute)).float().square().mean(), replay=1)
    for number in range(3):
        state, _ = step(state, slice_of(torch.rand(8, 9, generator=torch.Generator().manual_seed(number)), world, 1))
    return state.step


@pytest.mark.parametrize(("size", "frozen", "prefetch", "precision"), [(2, "int8", 0, "bf16"), (1, "nf4", 1, "bf16")])
def test_memory_that_no_gather_writes_is_not_compared(size, frozen, prefetch, precision):
    setting = Setting(frozen=frozen, prefetch=prefetch, precision=precision)
    assert run_ranks(size, train_adapted, setting) == [3] * size


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("setting", [EVERYWHERE[3], EVERYWHERE[4], EVERYWHERE[5], EVERYWHERE[6]])
def test_no_wait_is_missing_on_a_gpu(setting):
    expected = run_ranks(2, train, setting, 0)
    with simulated_gpu(races=True, order="late"), deterministic():
        assert run_ranks(2, train, setting, 1) == expected


def with_dropout(world, replay):
    """Train in processes with dropout and a generator that the loss draws from; return the digest and the next draw."""
    with zero.empty():
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    plan = zero.Plan(model, optimizer=zero.adamw(lr=0.1), stage=3, units=["Linear"], world=world)
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, lambda model, rows: (model(rows) * torch.rand(8)).square().mean(), replay=replay)
    torch.manual_seed(world.rank)
    for _ in range(3):
        state, _ = step(state, [torch.ones(4, 8)])
    return digest(state), torch.rand(1).item()


def test_processes_draw_the_same_random_numbers_again():
    assert run_processes(2, with_dropout, 1) == run_processes(2, with_dropout, 0)


class Drawing(nn.Module):
    """A module whose forward draws from Python's generator, writes into a buffer and replaces another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.ones(()), persistent=False)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x):
        self.calls += 1
        self.mean = self.mean.lerp(x.detach().mean(0), 0.5)
        return self.linear(x * self.calls + self.mean) * random.random()


def train_drawing(world, replay):
    """Train in processes; return the digest, the buffers and the next draw."""
    with zero.empty():
        model = Drawing()
    plan = zero.Plan(model, optimizer=zero.adamw(lr=0.1), stage=3, units=["Linear"], world=world)
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, lambda model, rows: model(rows).square().mean(), replay=replay)
    random.seed(world.rank)
    for _ in range(3):
        state, _ = step(state, [torch.ones(4, 8)])
    return digest(state), model.calls.item(), model.mean.tolist(), random.random()


def test_buffers_and_the_generator_of_python_begin_again():
    assert run_processes(2, train_drawing, 1) == run_processes(2, train_drawing, 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_more_than_single_bits_changes_a_checksum():
    rows = torch.randn(4, 1 << 16)
    flipped, exchanged = rows.clone(), rows[[0, 2, 1, 3]]
    flipped[0, 5], flipped[3, 5] = -rows[0, 5], -rows[3, 5]
    assert len({int(checksum(tensor)) for tensor in (rows, flipped, exchanged)}) == 3
    short = torch.arange(7, dtype=torch.uint8)
    assert len({int(checksum(short ^ (1 << bit) * (torch.arange(7) == i))) for i in range(7) for bit in range(8)}) == 56
    values = torch.randn(3, dtype=torch.complex64)
    assert int(checksum(values.conj())) == int(checksum(values.conj().resolve_conj()))
    assert int(checksum(values.conj().imag)) == int(checksum(-values.imag))
    assert not checksum(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_a_checksum_on_a_gpu_takes_few_launches():
    rows = torch.arange(2**22, dtype=torch.int32)  # 16 MiB
    with simulated_gpu():
        on_gpu = Checksums(zero.open_world().compute)
        assert count_launches(lambda: on_gpu.of(rows)).total() <= 24
        assert int(on_gpu.of(rows)) != int(on_gpu.of(rows ^ (torch.arange(2**22) == 2**22 - 5)))


def replayed_steps(world, replay):
    state, _ = EVERYWHERE[4].start(world)
    numbers = []

    def loss(model, batch):
        numbers.append(state.tried + 1)
        return small_loss(model, batch)

    step = zero.make_step(state.plan, loss, replay=replay)
    for number in range(7):
        state, _ = step(state, batch_for(world, number, EVERYWHERE[4]))
    return numbers


def test_steps_with_a_multiple_of_the_number_are_made_twice():
    assert run_ranks(2, replayed_steps, 3) == [[1, 2, 3, 3, 4, 5, 6, 6, 7]] * 2
    assert run_ranks(1, replayed_steps, 0) == [[1, 2, 3, 4, 5, 6, 7]]


def all_but_one_draw(world, ranks):
    """The loss of all ranks but the first depends on more than its arguments."""
    state, _ = EVERYWHERE[4].start(world)
    factors = iter([1.0, 1.0 + world.rank])
    step = zero.make_step(state.plan, lambda model, batch: small_loss(model, batch)[0] * next(factors), replay=1)
    with pytest.raises(MachineError, match=f"step 1, {ranks}, head, gradient of this rank: other bits"):
        step(state, batch_for(world, 0, EVERYWHERE[4]))


@pytest.mark.parametrize(("size", "ranks"), [(2, "rank 1"), (3, "ranks 1, 2")])
def test_all_ranks_whose_loss_depends_on_more_are_listed(size, ranks):
    run_ranks(size, all_but_one_draw, ranks)


def test_settings_of_no_use_are_rejected():
    plan = EVERYWHERE[4].plan(zero.open_world())
    with pytest.raises(ConfigError, match=r"replay=-1: must be the number of steps"):
        zero.make_step(plan, small_loss, replay=-1)
    with pytest.raises(ConfigError, match=r"replay='5': must be the number of steps"):
        zero.make_step(plan, small_loss, replay="5")  # type: ignore[arg-type]
    with simulated_gpu():
        run_ranks(1, rejected_on_a_gpu)
        with deterministic(warn_only=True):
            run_ranks(1, rejected_on_a_gpu)


def rejected_on_a_gpu(world):
    plan = EVERYWHERE[4].plan(world)
    with pytest.raises(ConfigError, match=r"^replay=5: a GPU may compute other bits each time\. Set"):
        zero.make_step(plan, small_loss, replay=5)


# -- flipped bits ------------------------------------------------------------------------------------------------------


def flip(memory, draw):
    """Flip a random bit of a tensor's memory, of which torch does not know."""
    octets = memory_of(memory.detach())
    octets[draw.randrange(len(octets))] ^= 1 << draw.randrange(8)


class Flipper:
    """Flips a bit of this rank's memory at one of the events of a step that is made twice.

    Attributes:
        events: the number of events since the state was summed.
        unit: the name of the unit whose bit was flipped.
    """

    def __init__(self, runtime, draw):
        self.runtime, self.draw = runtime, draw
        self.expect(-1)
        begin = runtime.checksums.begin

        def begun():
            self.events = max(self.events, 0)
            begin()

        runtime.checksums.begin = begun

    def expect(self, moment):
        """Flip a bit at event number `moment` of the next step."""
        self.moment, self.events, self.unit = moment, -(10**6), ""

    def happen(self, unit, memory):
        if self.events == self.moment:
            self.unit = unit.spec.name
            flip(memory(), self.draw)
        self.events += 1

    def before(self, owner, name, memory):
        """Make each call of a method an event, before which a bit of `memory(unit, *arguments)` may flip."""
        method = getattr(owner, name)

        def called(unit, *arguments, **keywords):
            self.happen(unit, lambda: memory(unit, *arguments))
            return method(unit, *arguments, **keywords)

        setattr(owner, name, called)

    def after(self, owner, name, memory):
        """Make each call of a method an event, after which a bit of `memory(unit, result)` may flip."""
        method = getattr(owner, name)

        def called(unit, *arguments, **keywords):
            result = method(unit, *arguments, **keywords)
            self.happen(unit, lambda: memory(unit, result))
            return result

        setattr(owner, name, called)


def in_gathered_buffers(flipper):
    """A buffer has arrived."""
    flipper.after(flipper.runtime.residency.gathers, "arrive", lambda unit, buffer: buffer.flat)


def in_sent_gradients(flipper):
    """This rank's gradient is complete."""
    flipper.before(flipper.runtime.reducer.reductions, "start", lambda unit, sent: sent.flat)


def in_summed_gradients(flipper):
    """The sum over ranks is complete, on the device or just before it is written to pages."""
    flipper.before(
        flipper.runtime.reducer.reductions, "_measure", lambda unit: unit.own_grad_S(flipper.runtime.plan.rank)
    )


def in_own_sums(flipper):
    """This rank's part of the sum is complete, and not yet gathered by the others."""
    flipper.before(
        flipper.runtime.reducer.reductions, "publish", lambda unit: unit.own_grad_S(flipper.runtime.plan.rank)
    )


def in_buffers(flipper):
    """A unit has been reduced: a bit of a buffer of the model flips, which comes after its last use in the run."""
    stays = flipper.runtime.plan.model.blocks[0].norm.running_var
    flipper.after(flipper.runtime.reducer.reductions, "_finalise", lambda unit, _: stays)


def in_slots(flipper):
    """A page was updated in a slot of host memory, and is not yet written to its disk."""
    update, lock = flipper.runtime.updater._update_in_thread, Lock()

    def updated(unit, hyper, part, after, tensors):
        update(unit, hyper, part, after, tensors)
        pages = [page for group in part.groups for page in group.all]
        written = [tensor for page, tensor in zip(pages, tensors, strict=True) if "grad" not in page.kind]
        with lock:
            flipper.happen(unit, lambda: flipper.draw.choice([tensor for tensor in written if tensor.numel()]))

    flipper.runtime.updater._update_in_thread = updated


def in_waiting_gradients(flipper):
    """The norm is computed: the gradient of a unit flips where it waits for its update, on the device or in a page."""
    runtime, decide = flipper.runtime, flipper.runtime.updater.numbers.decide

    def decided(hyper):
        for unit in runtime.units:
            if unit.spec.trainable.slots:
                page = Page(unit.index, PageKind.GRAD, 0)
                memory = runtime.store.in_place(page) if unit.grad is None else unit.grad
                flipper.happen(unit, partial(lambda memory: memory, memory))
        return decide(hyper)

    runtime.updater.numbers.decide = decided


def in_pages(flipper):
    """A unit has arrived, or was updated: a bit of its state in memory flips."""
    state = partial(state_in_memory, flipper)
    flipper.after(flipper.runtime.residency.gathers, "arrive", lambda unit, _: state(unit))
    flipper.after(flipper.runtime.updater, "apply_deferred", lambda unit, _: state(unit))


def in_pages_during_updates(flipper):
    """A unit was updated: a bit of the state of any unit flips, also of frozen parameters."""
    units, apply = flipper.runtime.units, flipper.runtime.updater.apply_deferred

    def applied(unit):
        apply(unit)
        other = flipper.draw.choice(units)
        flipper.happen(other, partial(state_in_memory, flipper, other))

    flipper.runtime.updater.apply_deferred = applied


UNHELD = PageKind.GRAD, PageKind.FIRST_GRAD, PageKind.SECONDARY


def state_in_memory(flipper, unit):
    """A page in memory of a unit, or its shard of some parameters."""
    store, pages = flipper.runtime.store, flipper.runtime.plan.pages.store_pages()
    kept = [page for page in pages if page.unit == unit.index and page.kind not in UNHELD]
    memories = [store.in_place(page) for page in kept] + [*unit.shards]
    return flipper.draw.choice([memory for memory in memories if memory is not None and memory.numel()])


def flipped(world, setting, inject, number, rank):
    """Make a step in which one bit flips on `rank`; return (the unit whose bit it is, the message of the error).

    Flip `number` is at a moment of its own among those of a step without a flip.
    """
    draw = random.Random(number)
    state, _ = setting.start(world)

    def loss(model, batch):
        with torch.no_grad():
            for _ in range(world.rank if setting.stage < 3 else 0):  # so that ranks have records of other lengths
                model.embed(batch[:, 0])
        return small_loss(model, batch)

    step = zero.make_step(state.plan, loss, replay=1)
    flipper = Flipper(state.runtime, draw)
    inject(flipper)
    state, _ = step(state, batch_for(world, 0, setting))
    flipper.expect(draw.randrange(flipper.events) if world.rank == rank else -1)
    with pytest.raises(MachineError) as raised:
        step(state, batch_for(world, 1, setting))
    with pytest.raises(StaleStateError):
        zero.full_state_dict(state)  # nothing of it can be saved
    return flipper.unit, str(raised.value)


@pytest.mark.parametrize(
    ("inject", "places"),
    [
        (in_gathered_buffers, [0, 3, 4, 5, 6, 7, 9, 10, 11]),
        (in_sent_gradients, [0, 3, 4, 5, 6, 7, 9]),
        (in_summed_gradients, [0, 3, 4, 5, 6, 7, 9]),
        (in_own_sums, [0, 3]),
        (in_waiting_gradients, [0, 3, 4, 5, 7, 9]),
        (in_pages, [0, 3, 4, 5, 7, 9, 11]),
        (in_pages_during_updates, [0, 3, 4, 5, 7, 9, 11]),
        (in_slots, [1, 6, 10]),
    ],
)
def test_each_flipped_bit_is_found(inject, places):
    """The message names the unit and the rank of the bit, on every rank."""
    for number, place in enumerate(places):
        find_a_flip(2, EVERYWHERE[place], inject, number)


@pytest.mark.parametrize("inject", [in_gathered_buffers, in_sent_gradients, in_summed_gradients, in_pages])
def test_flipped_bits_are_found_on_two_nodes(inject):
    for number in range(2):
        find_a_flip(4, NODES, inject, number)


def find_a_flip(size, setting, inject, number):
    rank = number % 3 % 2
    told = run_ranks(size, flipped, setting, inject, number, rank, nodes=size // 2)
    unit, message = told[rank]
    assert message.startswith(f"debug.replay: step 2, rank {rank}, {unit}, "), (number, unit)
    assert {message} == {other for _, other in told}


def test_a_flipped_bit_of_a_buffer_is_found():
    for number in range(6):
        (_, message), _ = run_ranks(2, flipped, EVERYWHERE[4], in_buffers, number, 0)
        assert "step 2, rank 0, blocks.0.norm.running_var, buffer: other bits" in message


def flip_between(world, setting):
    """A bit of a frozen parameter flips in a step that is not made twice; an edit changes it before."""
    state, _ = setting.start(world)
    step = zero.make_step(state.plan, small_loss, replay=2)
    for number in range(3):
        state, _ = step(state, batch_for(world, number, setting))
    zero.set_full(state, "blocks.0.linear.bias", torch.ones(13))
    for number in range(3, 5):
        state, _ = step(state, batch_for(world, number, setting))
    if world.rank == 1:
        frozen = next(
            unit.shards[1] for unit in state.runtime.units if unit.shards[1] is not None and unit.shards[1].numel()
        )
        flip(frozen, random.Random(0))
    with pytest.raises(MachineError, match=r"step 6, rank 1, .*, (frozen parameters|codes): bits changed while"):
        step(state, batch_for(world, 5, setting))


def test_a_bit_of_a_frozen_parameter_that_flips_between_two_replays_is_found():
    run_ranks(2, flip_between, EVERYWHERE[4])
