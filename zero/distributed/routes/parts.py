"""Operations of several parts, which run one after the other, and the order in which a rank starts the parts.

The second part of an operation starts when the first has ended. On a GPU no host waits between parts: the second part
of a gather follows on its stream, the later parts of a sum on the stream of reductions. On a CPU the second part starts
when the operation is waited for, after the second parts of all earlier operations, so ranks that wait in different
orders still start parts in the same order. A rank that does not wait for an operation must not hold up others that do,
so it calls `advance` before it waits for anything else. `advance` waits only for first parts, which every rank is sure
to start.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zero.platform.handle import Handle


class Queue:
    """Running operations of several parts. Their next parts start in the order in which the operations began.

    The third part of an operation starts before the second part of the next one, so a rank has started all parts that
    others need for an operation before it waits for anything else.
    """

    def __init__(self) -> None:
        self._waiting: deque[Operation] = deque()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def add(
        self, first: Sequence[Handle], then: Callable[[], Sequence[Handle]], *, is_sum: bool, at_once: bool = False
    ) -> Handle:
        operation = Operation(first, then, is_sum, self)
        if at_once:
            operation.go_on()
        else:
            self._waiting.append(operation)
        return operation

    def add_third(self, second: Handle, then: Callable[[], Sequence[Handle]]) -> Handle:
        """Add a third part to the operation whose second part is being started."""
        operation = Operation([second], then, True, self, is_third=True)
        self._waiting.insert(1, operation)  # the second part is still at the front
        return operation

    def advance(self, *, sums: bool, through: bool) -> None:
        """Start second parts, and the third parts that come before them in the queue.

        Args:
            sums: also start the second parts of sums, and of operations after a sum.
            through: also start the remaining third parts, which have to wait for second ones.
        """
        while self._waiting and (sums or not self._waiting[0].is_sum):
            if self._waiting[0].is_third and len(self._waiting) == 1 and not through:
                return
            self.advance_to(self._waiting[0])

    def advance_to(self, last: "Operation") -> None:
        """Start the next part of `last`, and of all operations that began earlier."""
        operation = None
        while operation is not last:
            operation = self._waiting[0]
            operation.go_on()
            self._waiting.popleft()


@dataclass(eq=False)
class Operation:
    handles: Sequence[Handle]
    then: Callable[[], Sequence[Handle]] | None
    is_sum: bool
    queue: Queue
    is_third: bool = False

    def go_on(self) -> None:
        """Wait for the current part, then start the next one."""
        for handle in self.handles:
            handle.wait()
        if self.then is not None:
            self.handles, self.then = self.then(), None

    def wait(self) -> None:
        if self.then is not None:
            self.queue.advance_to(self)
        for handle in self.handles:
            handle.wait()
