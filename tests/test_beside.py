"""What travels beside compute on a GPU: where, and that whoever uses it waits for it, however late it is."""

import inspect
import sys
import textwrap
from collections import Counter

import pytest
import torch
from late import LateGpu, late_gpus
from small import KiB, Setting, slice_of, small_batch, small_loss, wide
from torch import Tensor, nn

import zero
from zero.fetch import _Later
from zero.full import digest, full_state_dict
from zero.gradient import PagedGradients
from zero.store.crew import Crew
from zero.testing import run_ranks, simulated_gpu
from zero.update import Updater

GRADIENTS = ("gradients out", "gradients in")
HOST = Setting(precision="bf16", offload=(("preset", "cpu"),), page_bytes=4 * KiB)


def trained(world: zero.World, setting: Setting, steps: int = 3) -> tuple[str, list[object]]:
    """Also what `zero.Step` shows of gradients between backward and the end of a step."""
    plan = setting.plan(world, wide)
    store = zero.open_store(plan)
    state, step = zero.init(plan, store), zero.make_step(plan, small_loss)
    told: list[object] = []
    for number in range(steps):
        batches = slice_of(small_batch(number, 6 * world.size * setting.accumulate), world, setting.accumulate)
        if number == 1 and setting.update == "lazy":
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
    found = digest(state), told
    store.close()
    return found


CASES = [
    (1, 3, 1, "lazy"),
    (1, 3, 3, "serial"),
    (1, 0, 3, "lazy"),
    (2, 3, 3, "lazy"),
    (2, 1, 3, "lazy"),
    (2, 0, 1, "eager"),
]


@pytest.mark.parametrize("compute", ["device", "host"])
@pytest.mark.parametrize(("size", "stage", "accumulate", "update"), CASES)
def test_gradients_that_leave_late_give_the_same_bits(size, stage, accumulate, update, compute):
    setting = HOST.but(stage=stage, accumulate=accumulate, update=update)
    with simulated_gpu():
        expected = run_ranks(size, trained, setting.but(offload=()))
    with late_gpus(*GRADIENTS) as gpus:
        assert run_ranks(size, trained, setting.but(offload=(("preset", "cpu"), ("compute", compute)))) == expected
    assert all("gradients out" in {stream for stream, _ in gpu.copies} for gpu in gpus)


def bits(setting: Setting) -> str:
    with late_gpus(*GRADIENTS):
        return f"{run_ranks(1, trained, setting)} {run_ranks(2, trained, setting)} {borrowed()}"


def borrowed() -> list[float]:
    """What is in gradients of three units that take two buffers in turns."""
    with zero.empty():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    world = zero.World.from_env(device="cpu")
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world, accumulate=2, offload="cpu", units=["Linear"])
    store = zero.open_store(plan)
    parts = zero.init(plan, store).machinery
    found = []
    for unit, value in [*zip(parts.units, (1.0, 2.0, 3.0), strict=True), (parts.units[2], 4.0)]:
        found.append(parts.gradients.open(unit, fresh=value < 4)[-1].item())
        parts.gradients.open(unit, fresh=False).fill_(value)
        parts.gradients.park(unit)
    for unit in (*parts.units, *parts.units):
        found += [parts.gradients.open(unit, fresh=False)[-1].item()]
        parts.gradients.park(unit)
    store.close()
    return found


def test_three_gradients_in_two_buffers_are_what_was_written():
    with late_gpus(*GRADIENTS):
        assert borrowed()[3:] == [3.0, 1.0, 2.0, 4.0, 1.0, 2.0, 4.0]


WAITS = {
    "of the update for its gradient": (Updater, "owe", "self._gradients.left(unit).wait()"),
    "of what comes in for its last way out": (PagedGradients, "_bring_back", "self.left(unit).wait()"),
    "of what comes in for its buffer": (PagedGradients, "_bring_back", ", after=buffer.free"),
    "of what is added to what came in": (PagedGradients, "_bring_back", "here.wait()"),
    "of what arrives for its buffer": (PagedGradients, "open", "buffer.free.wait()"),
    "of who looks at a gradient": (zero.full, "_gradient", "state.machinery.gradients.left(unit).wait()"),
}


@pytest.mark.parametrize("which", WAITS)
def test_each_wait_for_a_gradient_is_needed(which, monkeypatch):
    """Without it the bits are others; so each is there, and is looked at."""
    setting = HOST.but(stage=3, accumulate=3)
    expected = bits(setting)
    rewrite(monkeypatch, *WAITS[which])
    assert bits(setting) != expected


def rewrite(patch: pytest.MonkeyPatch, owner: object, name: str, without: str) -> None:
    """Take a wait out of a function's code."""
    function = getattr(owner, name)
    code = textwrap.dedent(inspect.getsource(function))
    assert code.count(without) == 1
    instead = ", after=Event()" if without.startswith(",") else "pass"
    scope = dict(vars(sys.modules[function.__module__]))
    exec(code.replace(without, instead), scope)
    patch.setattr(owner, name, scope[name])


# -- parameters in host memory -----------------------------------------------------------------------------------------

ASIDE = ("gather", *GRADIENTS)


@pytest.mark.parametrize("update", ["lazy", "serial", "eager"])
@pytest.mark.parametrize("page_bytes", [4 * KiB, 8 * KiB])
@pytest.mark.parametrize("optimizer", ["cpu", "nvme", "none"])
def test_parameters_that_arrive_late_give_the_same_bits(optimizer, page_bytes, update):
    setting = HOST.but(page_bytes=page_bytes, update=update, accumulate=2)
    with simulated_gpu():
        expected = run_ranks(1, trained, setting.but(offload=()))
    with late_gpus(*ASIDE):
        offload = (("preset", "cpu"), ("optimizer", optimizer))
        assert run_ranks(1, trained, setting.but(offload=offload)) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["cpu", "nvme", "none"])
def test_parameters_in_host_memory_give_the_same_bits_on_two_ranks(optimizer, precision):
    setting = HOST.but(accumulate=2, precision=precision, offload=())
    with simulated_gpu():
        expected = run_ranks(2, trained, setting)
        offload = (("preset", "cpu"), ("optimizer", optimizer))
        assert run_ranks(2, trained, setting.but(offload=offload)) == expected


def in_host_memory(world: zero.World, page_bytes: int = 8 * KiB, **settings) -> tuple[zero.State, list[torch.Tensor]]:
    """A stack of layers of many pages whose parameters are lent, and a batch of one row."""
    with world.exclusive(), zero.empty():
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    offload = zero.Offload("cpu", page_bytes=page_bytes)
    plan = zero.Plan(
        model, optimizer=zero.adamw(1e-2), world=world, precision="bf16", offload=offload, units=["Linear"],
        **settings,
    )  # fmt: skip
    assert plan.params_lent
    return zero.init(plan, zero.open_store(plan)), [torch.ones(1, 128, dtype=torch.bfloat16)]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


@pytest.mark.parametrize(("page_bytes", "copies"), [(4 * KiB, 17), (8 * KiB, 1), (64 * KiB, 1)])
def test_a_unit_is_one_copy_and_no_page_is_asked_of_the_schedule(page_bytes, copies, monkeypatch):
    """Its pages lie back to back where each is whole blocks of 4 KiB."""
    with late_gpus() as gpus:
        state, rows = in_host_memory(zero.World.from_env(device="cpu"), page_bytes)
        state, _ = zero.make_step(state.plan, mean_square)(state, rows)
        state.machinery.store.settle()
        [gpu], asked = gpus, []
        monkeypatch.setattr(Crew, "do_here", lambda *_: asked.append(_))
        gpu.copies.clear()
        zero.make_forward(state.plan, mean_square)(state, *rows)
        assert [stream for stream, _ in gpu.copies] == ["gather"] * copies * 4
        assert sum(nbytes for _, nbytes in gpu.copies) == sum(2 * unit.trainable.P for unit in state.plan.units)
        assert not asked


def gathers_and_forwards(world: zero.World) -> list[list[str]]:
    """What starts in two forwards after a step, in order: the first one finds updates that wait."""
    state, rows = in_host_memory(world)
    told: list[str] = []
    gather = world.gather

    def watched(shard_S: Tensor, full_P: Tensor, *, what: str = ""):
        assert isinstance(world.compute, LateGpu)
        told.append(f"{world.compute.current} {what}")
        return gather(shard_S, full_P, what=what)

    world.gather = watched  # type: ignore[method-assign]
    for number, layer in enumerate(state.model):
        layer.register_forward_pre_hook(lambda *_, number=number: told.append(f"forward {number}"))
    state, _ = zero.make_step(state.plan, mean_square)(state, rows)
    forward = zero.make_forward(state.plan, mean_square)
    found = []
    for _ in range(2):
        told.clear()
        forward(state, *rows)
        found.append([one for one in told if one.split()[0] in ("gather", "forward")])
    return found


def test_ranks_gather_ahead_where_no_update_is_under_way():
    """On a stream of its own either way; in the first forward when the update has run."""
    with late_gpus():
        for first, second in run_ranks(2, gathers_and_forwards):
            started = [f"{what} {number}" for number in range(4) for what in ("gather", "forward")]
            assert first == started
            assert second.index("gather 1") < second.index("forward 0")
            assert second.index("gather 3") < second.index("forward 2")
            assert sorted(second) == sorted(started)


def test_gradients_and_gathers_beside_compute_are_in_the_timeline():
    with late_gpus():
        state, rows = in_host_memory(zero.World.from_env(device="cpu"), accumulate=2)
        step = zero.make_step(state.plan, mean_square)
        state, _ = step(state, rows * 2)
        with zero.record(state) as timeline:
            step(state, rows * 2)
    units = [unit.name for unit in state.machinery_.plan.units]
    for row, times in (("page out", 2), ("page in", 1), ("gather", 1)):
        seen = Counter(span.unit for span in timeline.spans if span.name == f"{row} {span.unit}")
        assert all(seen[unit] >= times for unit in units), (row, seen)


def test_what_starts_later_is_waited_for(monkeypatch):
    setting = HOST.but(accumulate=2)
    with late_gpus(*ASIDE):
        expected = run_ranks(1, trained, setting)
        rewrite(monkeypatch, _Later, "wait", "self._ready.wait()")
        assert run_ranks(1, trained, setting) != expected


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
        assert run_ranks(size, looped, "cpu", stage, accumulate) == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_sum_is_sent_to_the_others_by_the_stream_that_made_it(accumulate, monkeypatch):
    """What a collective sends is what is there when the stream that starts it comes to it."""
    started: set[str] = set()
    gather = zero.World.gather

    def watched(world: zero.World, shard_S: Tensor, full_P: Tensor, *, what: str = ""):
        if what.startswith("the gradient of"):
            assert isinstance(world.compute, LateGpu)
            started.add(world.compute.current)
        return gather(world, shard_S, full_P, what=what)

    monkeypatch.setattr(zero.World, "gather", watched)
    with late_gpus():
        run_ranks(2, looped, "none", 0, accumulate)
    assert started == {"reduce"}
