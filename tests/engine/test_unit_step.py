"""A unit's gradient takes each path through the table of phases, and no other, with the gradients of plain torch."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest

import zero
from tests.engine.test_reduce_order import ALL, plain, row, same, start
from zero.engine import unit_step
from zero.engine.unit_step import Phase, UnitStep
from zero.testing import run_ranks

CLOSED, EMPTY, FILLING, READY = Phase
PATHS = {
    "unused": (CLOSED, EMPTY, CLOSED),
    "forward without backward": (CLOSED, EMPTY, READY, CLOSED),
    "used": (CLOSED, EMPTY, FILLING, READY, CLOSED),
    "unused in the last microbatch": (CLOSED, EMPTY, FILLING, CLOSED),
}
"""How a unit is used in a step -> the phases of its gradient."""
OTHERS = [number for number in ALL if number != 1]
UNIT = "layers.1"


def walk(usage: str) -> list[tuple[Phase, ...]]:
    """Train a step on two ranks and compare with plain torch; return the phases of the unit on each rank."""
    last = usage == "unused in the last microbatch"
    passes = {"used": [[ALL]], "unused in the last microbatch": [[ALL], [OTHERS]]}.get(usage, [[OTHERS]])
    walked: dict[UnitStep, list[Phase]] = {}
    go = UnitStep.go

    def recorded(step: UnitStep, phase: Phase) -> None:
        walked.setdefault(step, [step.phase]).append(phase)
        go(step, phase)

    def rank_main(world: zero.World) -> tuple[tuple[Phase, ...], dict]:
        state = start(world, len(passes), stage=1 if last else 2)
        step = zero.Step(state)
        for micro, paths in enumerate(passes):
            step.microbatch()
            if usage == "forward without backward":
                state.model(row(world.rank, 0, micro), [1])
            for path in paths:
                step.backward(state.model(row(world.rank, 0, micro), path))
        record = next(unit for unit in state.runtime.units if unit.spec.name == UNIT).step
        state, _ = step.finish()
        return tuple(walked[record]), zero.full_state_dict(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitStep, "go", recorded)
        results = run_ranks(2, rank_main)
    same([values for _, values in results], plain([[passes]] * 2, len(passes)))
    return [phases for phases, _ in results]


@pytest.mark.parametrize("usage", PATHS)
def test_a_unit_takes_each_path_through_the_table(usage):
    assert walk(usage) == [PATHS[usage]] * 2


def test_the_paths_use_every_change_of_the_table():
    assert _changes(PATHS.values()) == _legal()


@pytest.mark.parametrize(
    "change", sorted(product(Phase, Phase), key=str), ids=lambda change: "-".join(phase.name for phase in change)
)
def test_a_change_that_is_added_to_the_table_or_taken_from_it_is_found(change, monkeypatch):
    before, after = change
    table = {phase: dict(following) for phase, following in unit_step.NEXT_PHASES.items()}
    if table[before].pop(after, None) is None:
        table[before][after] = "added"
    monkeypatch.setattr(unit_step, "NEXT_PHASES", table)
    if change in _changes(PATHS.values()):
        usage = next(usage for usage, path in PATHS.items() if change in _changes([path]))
        with pytest.raises(AssertionError, match="cannot go from"):
            walk(usage)
    else:
        assert _changes(PATHS.values()) != _legal()


def _changes(paths: Sequence[Sequence[Phase]]) -> set[tuple[Phase, Phase]]:
    return {change for path in paths for change in pairwise(path)}


def _legal() -> set[tuple[Phase, Phase]]:
    return {(before, after) for before, following in unit_step.NEXT_PHASES.items() for after in following}
