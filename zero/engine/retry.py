"""Make a step again that ran out of the device's memory: the same step, to the last bit, on lower tiers.

A step returns a new state, and the old one stays valid until then. So the step is abandoned, generators and buffers are
restored, and the step is made once more with an empty cache of torch's allocator, because the memory may only have been
in pieces. If that fails too, the state moves down (`zero.engine.lower`), one move at a time, until the step fits.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zero.core.sizes import size_text
from zero.engine.beginning import Beginning
from zero.engine.lower import device_bytes, lower_plans
from zero.engine.metrics import Metrics
from zero.engine.move import move_to
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.errors import MachineError, StoreError, one_line

log = logging.getLogger("zero")

SIGNS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "out of memory")
"""Parts of the messages of RuntimeErrors of CUDA's libraries, NCCL and pinned memory when memory is short."""


class Retry:
    """Make steps, and on one rank with a GPU make a step again that ran out of memory.

    Args:
        note: called with a line when a step is made again.

    Attributes:
        again: the number of steps that were made again because memory was in pieces.
        moves: texts of the moves that were needed.
    """

    def __init__(self, note: Callable[[str], None] = log.warning) -> None:
        self._note, self.again, self.moves = note, 0, list[str]()

    def step(self, state: State, attempt: Callable[[State], tuple[State, Metrics]]) -> tuple[State, Metrics]:
        """Return the result of `attempt`, which makes one step from a state and abandons it if it raises.

        Raises:
            MachineError: the step does not fit, and nothing can move.
        """
        if state.plan.world.whole.size > 1 or state.plan.beside.groups or state.plan.facts.device_is_host:
            with advised(state.plan):
                return attempt(state)
        beginning: Beginning | None = None

        def begin_and_attempt(state: State) -> tuple[State, Metrics]:
            nonlocal beginning
            beginning = beginning or Beginning(state.model)
            return attempt(state)

        emptied, first = False, state
        while True:
            try:
                shortage, result = _try(state, begin_and_attempt)
            except BaseException:
                if state is not first and not state.spent_:
                    first.spent_.clear()  # it has the memory and the counts of the moved state
                raise
            if result is not None:
                return result
            gc.collect()
            state.plan.world.compute.give_back_memory(cached=True)
            if beginning is not None:
                beginning.restore()
            if emptied:
                try:
                    state = self._lowered(state, shortage)
                except BaseException:
                    if state is not first and not state.spent_:
                        first.spent_.clear()
                    raise
            else:
                self.again, emptied = self.again + 1, True
                self._note(f"step {state.tried + 1}: {shortage}. Made again with an empty cache.")

    def _lowered(self, state: State, shortage: str) -> State:
        """Return the state after the next move that lowers the device's peak."""
        number, before = state.tried + 1, device_bytes(state.plan)
        for text, plan in lower_plans(state.plan):
            try:
                state = move_to(state, plan)
            except MachineError:
                if state.spent_:
                    raise
                continue
            except Exception as error:
                if not is_out_of_memory(error) or state.spent_:
                    raise
                continue
            self.moves.append(text)
            after = device_bytes(plan)
            saved = f", which holds {size_text(before - after)} less" if after < before else ""
            self._note(f"step {number}: {shortage}. Moved to {text}{saved}. The step is made again.")
            return state
        raise MachineError(f"step {number}: {shortage}, and nothing of the state can move. Use a smaller batch.micro.")


@contextmanager
def advised(plan: Plan) -> Iterator[None]:
    """Add a note to an error of memory of the block, because one of several ranks cannot make a step again alone."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            ways = " or ".join([text for text, _ in lower_plans(plan)][:2]) or "a smaller batch.micro"
            error.add_note(f"Start again from the last checkpoint with {ways}.")
        raise


def _try(state: State, attempt: Callable[[State], tuple[State, Metrics]]) -> tuple[str, tuple[State, Metrics] | None]:
    """Return ("", result of `attempt`), or the text of a shortage of memory and None.

    The error and its traceback, which refers to tensors of the step, are freed on return.
    """
    try:
        return "", attempt(state)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if not _is_whole(state) or any(isinstance(cause, StoreError) for cause in _causes(error)):
            raise MachineError(
                f"{one_line(error)[:200]}. An update was interrupted half-way, so the step cannot be made again. Start "
                "again from the last checkpoint with offload.optimizer=cpu."
            ) from error
        return one_line(error)[:200].rstrip("."), None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, says that a memory of the device or pinned memory is full."""
    return any(
        isinstance(cause, torch.OutOfMemoryError)
        or (isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in SIGNS))
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_whole(state: State) -> bool:
    """Return whether the failed step has left the state as it was: no update was begun and not ended."""
    return not state.spent_ and not any(unit.interrupted for unit in state.runtime.units)
