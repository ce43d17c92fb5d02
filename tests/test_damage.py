"""A damaged checkpoint never loads, a crafted one runs nothing, and a save that fails costs nothing but itself."""

from collections.abc import Callable
from pathlib import Path

import zero
from small import Setting, Small, slice_of, small_batch, small_loss
from zero.checkpoint import save
from zero.testing import run_ranks


def start_of(width: int = 13) -> Callable[[zero.World], zero.State]:
    """Makes states on every rank, of values that are in no checkpoint."""

    def start(world: zero.World) -> zero.State:
        return Setting(seed=7).start(world, lambda: Small(width=width))[0]

    return start


def made(folder: Path, width: int = 13) -> None:
    """Two checkpoints of one run on two ranks, with files of the same sizes."""

    def run(world: zero.World) -> None:
        state, step = Setting().start(world, lambda: Small(width=width))
        for number in range(20):
            state, _ = step(state, slice_of(small_batch(number, 12), world, 1))
            if state.step in (10, 20):
                save(state, folder / "kept")

    run_ranks(2, run)
