"""A step of an engine whose microbatches can be run again: a step that runs out of memory is made again.

An integration that owns the loop hands over each microbatch as a function, and the step's end as another one. Where the
script owns the loop, as with `zero.initialize`, nobody could run its forwards again.
"""

from collections.abc import Callable
from typing import TypeVar

from zero.engine.retry import Attempts, Retry, advised, can_go_back
from zero.engine.state import State
from zero.errors import if_it_fails
from zero.user_loop.engine import Engine

MicrobatchResult = TypeVar("MicrobatchResult")


class StepMadeAgain:
    """The present step of an engine, on one rank with a GPU; elsewhere an error of memory gets advice.

    Args:
        abandoned: called when the engine has abandoned the step, before its microbatches run again.
    """

    def __init__(self, engine: Engine, abandoned: Callable[[], None] = lambda: None) -> None:
        self._engine, self._abandoned, self._retry = engine, abandoned, Retry()
        self._attempts: Attempts | None = None
        self._parts = list[Callable[[], object]]()

    def run(self, microbatch: Callable[[], MicrobatchResult]) -> MicrobatchResult:
        """Return the result of `microbatch`, which runs a forward and a backward.

        It may be called several times, each time with the random generators and the buffers of the first call.

        Raises:
            MachineError: the step does not fit, and nothing can move.
        """
        if not can_go_back(self._engine.plan):
            with advised(self._engine.plan):
                return microbatch()
        if self._attempts is None or self._attempts.state is not self._engine.state:  # else the step was interrupted
            self._attempts, self._parts = Attempts(self._retry, self._engine.state), []
        result: list[MicrobatchResult] = []
        self._parts.append(lambda: result.append(microbatch()))
        with if_it_fails(self._forget):
            self._attempts.run(self._attempt())
        return result[-1]

    def end(self, end: Callable[[], MicrobatchResult]) -> MicrobatchResult:
        """Return the result of `end`, which updates the parameters, after or with the last microbatch."""
        result = self.run(end)
        self._forget()
        return result

    def _attempt(self) -> Callable[[State], None]:
        """Return a function that runs the last part, and each further time all parts of the step."""
        first = len(self._parts) - 1

        def attempt(state: State) -> None:
            nonlocal first
            begin, first = first, 0
            if state is not self._engine.state:
                self._engine.follow(state)
            with if_it_fails(self._abandon):
                for part in self._parts[begin:]:
                    part()

        return attempt

    def _abandon(self) -> None:
        self._engine.abandon()
        self._abandoned()

    def _forget(self) -> None:
        self._attempts, self._parts = None, []
