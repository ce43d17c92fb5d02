"""What travels beside compute on a GPU: where, and that whoever uses it waits for it, however late it is."""

import inspect
import sys
import textwrap

import pytest
import torch
from late import LateGpu, late_gpus
from small import KiB, Setting, slice_of, small_batch, small_loss, wide
from torch import Tensor, nn

import zero
from zero.full import digest, full_state_dict
from zero.gradient import PagedGradients
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
    started: set[str | None] = set()
    gather = zero.World.gather

    def watched(world: zero.World, shard_S: Tensor, full_P: Tensor, *, what: str = ""):
        if what.startswith("the gradient of"):
            assert isinstance(world.compute, LateGpu)
            started.add(None if world.compute.stream is None else world.compute.stream.name)
        return gather(world, shard_S, full_P, what=what)

    monkeypatch.setattr(zero.World, "gather", watched)
    with late_gpus("reduce"):
        run_ranks(2, looped, "none", 0, accumulate)
    assert started == {"reduce"}
