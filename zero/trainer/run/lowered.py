"""Start a run of several ranks again on lower tiers, after a step has run out of the GPU's memory.

A rank cannot go back alone. So the rank that fails writes the next move to a file in the run's folder and raises an
error after which the launcher, or torchrun, starts the ranks again. They load the last checkpoint and make the moves.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zero.core.sizes import size_text
from zero.engine.lower import lower_plans
from zero.engine.move import move_to
from zero.engine.plan import Plan
from zero.engine.retry import is_out_of_memory
from zero.engine.state import State
from zero.errors import MachineError
from zero.platform.run_files import publish
from zero.tracker import Tracker

LOWERED = "lowered.json"
"""The file in the run's folder with the texts of the moves that starts have needed so far, in their order."""


class StartAgainLower(MachineError):
    """A step of several ranks has run out of memory; the next start makes one more move."""

    exit_code = 1  # not final: ranks are started again


@contextmanager
def lower_at_next_start(plan: Plan, folder: Path, max_restarts: int) -> Iterator[None]:
    """Write the next move to the run's folder if a step of several ranks runs out of memory in the block.

    Args:
        plan: the first plan of this start, before the moves of the file.
        max_restarts: how often the launcher starts ranks again.

    Raises:
        StartAgainLower: in place of the error, if there is a further move.
    """
    made = read_moves(folder)
    try:
        yield
    except Exception as error:
        if plan.world.whole.size == 1 or not is_out_of_memory(error):
            raise
        following = next(iter(lower_plans(_lowered(plan, made))), None)
        if following is None:
            raise
        publish(folder / LOWERED, json.dumps([*made, following[0]]))  # all ranks that fail write the same
        again = "The next start" if max_restarts else "launch.max_restarts=1 starts the ranks again and"
        taken = size_text(plan.world.compute.peak_bytes())
        raise StartAgainLower(f"the GPU ran out of memory at {taken}. {again} moves to {following[0]}.") from error


def make_moves(state: State, folder: Path, tracker: Tracker) -> State:
    """Return the state after the moves that earlier starts of the run have needed. Collective."""
    world = state.plan.world
    for text in json.loads(world.share(json.dumps(read_moves(folder)))):
        lower = dict(lower_plans(state.plan)).get(text)
        if not bool(world.exchange(torch.tensor([lower is not None], device="cpu")).all()) or lower is None:
            continue  # the run was started again with settings that need less already
        state = move_to(state, lower)
        tracker.note(f"moved to {text}, because an earlier start ran out of memory")
    return state


def read_moves(folder: Path) -> list[str]:
    """Return the texts of the moves that starts of the run have needed so far."""
    path = folder / LOWERED
    return [str(text) for text in json.loads(path.read_text())] if path.is_file() else []


def _lowered(plan: Plan, texts: list[str]) -> Plan:
    for text in texts:
        plan = dict(lower_plans(plan)).get(text, plan)
    return plan
