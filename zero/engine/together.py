"""Let all ranks succeed or fail together in work that is not collective."""

from collections.abc import Callable
from typing import TypeVar

from zero.distributed.world import World
from zero.errors import MachineError, with_class

Returned = TypeVar("Returned")


def on_all_ranks(world: World, work: Callable[[], Returned]) -> Returned:
    """Return the result of `work` if it has succeeded on all ranks. Collective, but `work` is not.

    Raises:
        Exception: this rank's, on a rank whose `work` has failed.
        MachineError: on the others, with the error of the first rank that has failed.
    """
    failure: BaseException | None = None
    try:
        result = work()
    except BaseException as error:
        failure = error
    texts = world.gather_texts("" if failure is None else with_class(failure), "errors of a move")
    if failure is not None:
        raise failure
    if (rank := next((rank for rank, text in enumerate(texts) if text), None)) is not None:
        raise MachineError(f"rank {rank}: {texts[rank]}")
    return result
