"""Make a step again that ran out of the device's memory: the same step, to the last bit, on lower tiers.

A step returns a new state, and the old one stays valid until then. So the step is abandoned, generators and buffers are
restored, and the step is made once more with an empty cache of torch's allocator, because the memory may only have been
in pieces. If that fails too, the state moves down (`zero.engine.lower`), one move at a time, until the step fits.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch

from zero.core.sizes import size_text
from zero.engine.beginning import Beginning
from zero.engine.lower import Seconds, device_bytes, halved, lower_plans
from zero.engine.move import move_to
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.errors import MachineError, StoreError, one_line

log = logging.getLogger("zero")

SIGNS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "out of memory")
"""Parts of the messages of RuntimeErrors of CUDA's libraries, NCCL and pinned memory when memory is short."""

Outcome = TypeVar("Outcome")


class Retry:
    """The answer to steps that run out of memory, the same for all steps of a run.

    Args:
        note: called with a line when a step is made again.
        seconds: predicts the seconds of a step of a plan, to choose the cheapest move; None: a fixed order.
        micro: rows of a microbatch that may be halved when nothing else can move, because they were chosen here; 0:
            none. The microbatches must be tensors then.

    Attributes:
        again: the number of steps that were made again because memory was in pieces.
        moves: texts of the moves that were needed.
    """

    def __init__(
        self, note: Callable[[str], None] = log.warning, seconds: Seconds | None = None, micro: int = 0
    ) -> None:
        self._note, self._seconds, self._micro = note, seconds, micro
        self.again, self.moves = 0, list[str]()

    def step(self, state: State, attempt: Callable[[State], Outcome]) -> Outcome:
        """Return the result of `attempt`, which makes one step from a state and abandons it if it raises.

        On a CPU, and on one of several ranks, there is one attempt, and an error of memory gets advice.

        Raises:
            MachineError: the step does not fit, and nothing can move.
        """
        if not can_go_back(state.plan):
            with advised(state.plan):
                return attempt(state)
        return Attempts(self, state).run(attempt)

    def emptied(self, state: State, shortage: str) -> None:
        """Say that a step is made again on the same tiers."""
        self.again += 1
        self._note(f"step {state.tried + 1}: {shortage}. Made again with an empty cache.")

    def lowered(self, state: State, shortage: str) -> State:
        """Return the state after the next move that lowers the device's peak."""
        step = f"step {state.tried + 1}: {shortage}"
        for text, plan in self._moves(state.plan):
            before = state.plan
            try:
                state = move_to(state, plan)
            except Exception as error:
                if state.spent_ or not (isinstance(error, MachineError) or is_out_of_memory(error)):
                    raise
                continue
            self.moves.append(text)
            self._micro = self._micro * before.accumulate // plan.accumulate
            self._note(f"{step}. Moved to {text}{self._costs(before, plan)}. The step is made again.")
            return state
        raise MachineError(f"{step}, and nothing of the state can move. Use a smaller batch.micro.")

    def _moves(self, plan: Plan) -> Iterator[tuple[str, Plan]]:
        yield from lower_plans(plan, self._seconds)
        if self._micro and self._micro % 2 == 0:
            yield halved(plan, self._micro)

    def _costs(self, before: Plan, after: Plan) -> str:
        """Return what a move saves, and what it costs."""
        saved = device_bytes(before) - device_bytes(after)
        texts = [f", which holds {size_text(saved)} less"] if saved > 0 else []
        if self._seconds is not None:
            texts.append(
                f". A step is predicted to take {self._seconds(after) / self._seconds(before):.2f} times as long"
            )
        return "".join(texts)


class Attempts:
    """The attempts at one step.

    Args:
        state: the state before the step.

    Attributes:
        state: the state that the next attempt begins with: the same one, or that one moved.
    """

    def __init__(self, retry: Retry, state: State) -> None:
        self.state = self._first = state
        self._retry, self._emptied = retry, False
        self._beginning: Beginning | None = None

    def run(self, attempt: Callable[[State], Outcome]) -> Outcome:
        """Return the result of `attempt`, which is called again after each shortage of memory.

        Raises:
            MachineError: the step does not fit, and nothing can move.
        """
        try:
            while True:
                try:
                    self._beginning = self._beginning or Beginning(self.state.model)
                    return attempt(self.state)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    _check_whole(self.state, error)
                    shortage = one_line(error)[:200].rstrip(".")
                self._recover(shortage)  # here, where the error and the tensors of its traceback are freed
        except BaseException:
            if self.state is not self._first and not self.state.spent_:
                self._first.spent_.clear()  # it has the memory and the counts of the moved state
            raise

    def _recover(self, shortage: str) -> None:
        """Restore the beginning of the step with more memory free."""
        gc.collect()
        self.state.plan.world.compute.give_back_memory(cached=True)
        if self._beginning is not None:
            self._beginning.restore()
        if self._emptied:
            self.state = self._retry.lowered(self.state, shortage)
        else:
            self._emptied = True
            self._retry.emptied(self.state, shortage)


def can_go_back(plan: Plan) -> bool:
    """Return whether this rank can make a step again: it is alone, and computes on a GPU."""
    return plan.world.whole.size == 1 and not plan.beside.groups and not plan.facts.device_is_host


def in_pieces(microbatches: Sequence[Any], count: int) -> Sequence[Any]:
    """Return the rows of the microbatches in `count` of them: halved until there are as many."""
    while len(microbatches) < count:
        microbatches = [half for batch in microbatches for half in batch.chunk(2)]
    return microbatches


@contextmanager
def advised(plan: Plan) -> Iterator[None]:
    """Add a note to an error of memory of the block, where a step cannot be made again."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            ways = " or ".join(text for text, _ in islice(lower_plans(plan), 2)) or "a smaller batch.micro"
            error.add_note(f"Start again from the last checkpoint with {ways}.")
        raise


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


def _check_whole(state: State, error: Exception) -> None:
    """Raise MachineError unless the failed step has left the state as it was: no update was begun and not ended."""
    interrupted = state.spent_ or any(unit.interrupted for unit in state.runtime.units)
    if interrupted or any(isinstance(cause, StoreError) for cause in _causes(error)):
        raise MachineError(
            f"{one_line(error)[:200]}. An update was interrupted half-way, so the step cannot be made again. Start "
            "again from the last checkpoint with offload.optimizer=cpu."
        ) from error
