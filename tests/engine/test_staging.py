"""Pages of host memory that a GPU updates: parts without a slot, interrupts, and pages that were written otherwise."""

from functools import partial
from typing import Any

import pytest

import zero
from tests.common.small import KiB, Setting, slice_of, small_batch, small_loss, train_small, wide
from tests.simulation import simulated_gpu
from zero.core.placement import DoesNotFit
from zero.engine.unit_state import UnitState
from zero.engine.update.pieces import Pieces
from zero.engine.update.update import Updater
from zero.engine.whole.read import digest, full_state_dict
from zero.errors import StaleStateError
from zero.testing import run_ranks

PLAIN = Setting(precision="bf16", clip=0.5, page_bytes=4 * KiB)


@pytest.mark.parametrize("preset", ["cpu", "nvme"])
def test_an_optimizer_without_state_leaves_nothing_on_the_disk(preset):
    """In fp32 its pages are parameters and gradients, which are in host memory with either preset."""
    setting = PLAIN.but(precision="fp32", optimizer=partial(zero.sgd, momentum=0.0), weight_decay=0.0)
    with simulated_gpu():
        expected = run_ranks(1, train_small, setting)
        assert run_ranks(1, train_small, setting.but(offload=(("preset", preset),))) == expected


def interrupted(world: zero.World, setting: Setting, interrupt: bool) -> tuple[dict[str, float], bool]:
    """Train; in the third step, a unit's update breaks off once, between its staged parts and those on the device."""
    plan = setting.plan(world, wide)
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, small_loss)
    mixed = [unit for unit in state.runtime.units if {part.on_device for part in unit.parts} == {True, False}]
    broken: list[UnitState] = []
    launch = Updater._launch_staged

    def breaking(updater: Updater, unit: UnitState, *how: Any) -> None:
        launch(updater, unit, *how)
        if number == 2 and unit in mixed and not broken:
            broken.append(unit)
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if interrupt:
            patch.setattr(Updater, "launch_ahead", lambda _: None)
            patch.setattr(Updater, "_launch_staged", breaking)
        for number in range(4):
            while True:
                try:
                    state, _ = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
                    break
                except KeyboardInterrupt:
                    continue
    kinds = ("param", *plan.optimizer.moments)  # and no buffers, which count forwards
    told = {
        f"{kind} {name}": value.sum().item() for kind in kinds for name, value in full_state_dict(state, kind).items()
    }
    state.runtime.store.close()
    return told, bool(broken)


def test_an_update_that_breaks_off_is_made_once():
    """Of units with some pages on the device and others in host memory, after Ctrl-C between the two."""
    with simulated_gpu():
        [(expected, _)] = run_ranks(1, interrupted, PLAIN, False)
        for budget in range(200 * KiB, 900 * KiB, 25 * KiB):
            setting = PLAIN.but(offload=(("preset", "auto"), ("device_budget", budget)))  # type: ignore[arg-type]
            try:
                [(sums, broken)] = run_ranks(1, interrupted, setting, True)
            except DoesNotFit:
                continue  # too small for the buffers
            assert sums == expected
            if broken:
                return
    pytest.fail("no budget splits a unit")


def broken_off(world: zero.World, call: int) -> dict[str, float] | None:
    """Train; in the third step, the update of the part number `call` breaks off, and the step is made again.

    Return None if the state cannot be used afterwards.
    """
    plan = PLAIN.but(offload=(("preset", "cpu"),)).plan(world, wide)
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, small_loss)
    update, calls = Pieces.update, 0

    def breaking(*args: Any) -> None:
        nonlocal calls
        calls += number == 2
        if number == 2 and calls == call:
            raise KeyboardInterrupt
        update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pieces, "update", breaking)
        for number in range(4):
            batches = slice_of(small_batch(number, 6 * world.size), world, 1)
            try:
                state, _ = step(state, batches)
            except KeyboardInterrupt:
                try:
                    state, _ = step(state, batches)
                except StaleStateError:
                    return None
    told = {name: value.sum().item() for name, value in full_state_dict(state, "param").items()}
    state.runtime.store.close()
    return told


def test_a_launch_that_broke_off_is_not_made_again():
    """Parts before it would be updated twice."""
    with simulated_gpu():
        [expected] = run_ranks(1, broken_off, 0)
        ends = [run_ranks(1, broken_off, call)[0] for call in range(1, 40)]
    assert all(end in (None, expected) for end in ends)
    assert None in ends


def edited(world: zero.World, setting: Setting) -> dict[str, float]:
    """Between steps, a parameter and a moment of the first unit are changed, whose pages have been read ahead."""
    state, step = setting.start(world, wide)
    for number in range(4):
        state, _ = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        for kind in ("param", "mu"):
            name, value = next(iter(full_state_dict(state, kind).items()))
            zero.set_full(state, name, value + 1.0, kind)
    told = {
        f"{kind} {name}": value.sum().item()
        for kind in ("param", "mu")
        for name, value in full_state_dict(state, kind).items()
    }
    state.runtime.store.close()
    return told


def test_pages_that_are_written_between_steps_are_copied_again():
    with simulated_gpu():
        expected = run_ranks(1, edited, PLAIN)
        assert run_ranks(1, edited, PLAIN.but(offload=(("preset", "cpu"),))) == expected


@pytest.mark.parametrize("ahead", [0, 64 * 1024 * KiB])
def test_what_has_a_slot_of_its_own_is_not_copied_in_again(ahead):
    """A slot has the values that were copied back from it. Gradients come in, and parameters for their gathers."""

    def counted(world: zero.World) -> tuple[str, int, int]:
        setting = PLAIN.but(offload=(("preset", "none"), ("optimizer", "cpu")), ahead=ahead, page_bytes=8 * KiB)
        state, step = setting.start(world, wide)
        for number in range(3):
            before = world.compute.copied.nbytes
            state, _ = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
            state.runtime.settle()
        moved = world.compute.copied.nbytes - before
        told = digest(state), moved, sum(spec.nbytes for spec in state.plan.pages.store_pages().values())
        state.runtime.store.close()
        return told

    with simulated_gpu():
        [(state_digest, moved, nbytes)] = run_ranks(1, counted)
        [(expected, _)] = run_ranks(1, train_small, PLAIN.but(offload=()), 3, wide)
    assert state_digest == expected
    assert moved == (2 * nbytes if ahead == 0 else nbytes)
