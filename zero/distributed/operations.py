"""The operations that one rank has started, and the error that the rank raises after the first failed operation."""

import re
from collections import Counter, deque
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from zero.distributed.failure import LastWord, Note, Notes, explain_failure
from zero.errors import WorldError

_LOST = re.compile(r"\.cc:\d+\].*([Cc]onnection (closed|reset)|[Tt]imed out)", re.DOTALL)
"""Errors of gloo, with a line of its source, that end a collective of the script because of another rank."""

RECENT_OPS = 64
"""Number of latest operations that a rank remembers, to find the first operation that differs between ranks."""


class Operations:
    """The record of one rank's operations, and its reports of failures to the other ranks.

    Args:
        notes: the notes of all ranks.
        hosts: the machine of each rank.
        timeout_s: the seconds in which an operation, and the search for the cause of its failure, must end.

    Attributes:
        failure: the error of the first operation that failed; None: none has.
        has_failed: whether an operation, or this rank's own code, has failed.
    """

    def __init__(self, notes: Notes, rank: int, size: int, hosts: Sequence[str], timeout_s: float) -> None:
        self._notes, self._rank, self._size, self._hosts, self._timeout_s = notes, rank, size, hosts, timeout_s
        self._place = ""
        self._numbers = Counter[str]()  # order -> number of operations started in it
        self._started: deque[tuple[int, str]] = deque(maxlen=RECENT_OPS)
        self.failure: WorldError | None = None
        self.has_failed = False
        self._last_word = LastWord(notes)

    def begin(self, order: str, tag: int, signature: str) -> int:
        """Record the start of an operation and return its number in `order`, which has `tag`."""
        self._numbers[order] += 1
        if not order.endswith(" aside"):  # operations of parts get larger numbers than those of the whole world
            self._started.append((self._numbers[order] + (tag << 32 if order else 0), signature))
        return self._numbers[order]

    def number(self, order: str) -> int:
        """Return the number of the latest operation of an order."""
        return self._numbers[order]

    def counted(self) -> Counter[str]:
        """Return order -> number of operations started in it. May be called in any thread."""
        return self._numbers.copy()

    def started(self) -> dict[int, str]:
        """Return number -> signature of the latest operations. May be called in any thread."""
        return dict(self._started.copy())  # an atomic copy: the training thread appends meanwhile

    def at(self, place: str) -> None:
        """Record the phase that this rank is in, for the errors of ranks that wait for it."""
        self._place = place
        if Notes.board is not None:
            Notes.board.set_place(self._rank, place)

    def failed(self, error: BaseException, op: str, peer: int | None) -> WorldError:
        """Return the error that names the cause of this rank's first failure, after `error` has ended an operation."""
        if self.failure is None:
            self.failure = self._explain(error, f"{op} ({self._place})" if self._place else op, peer)
        return self.failure

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank leaves because of `error`."""
        self.has_failed = True
        self._notes.post(Note.of_raise(error))

    def fail_beside(self, error: BaseException) -> None:
        """Do as `fail`, but if a collective of torch has lost another rank, note on `error` the rank that failed."""
        lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _LOST.search(str(error)))
        if lost:
            error.add_note(str(self._explain(error, "a collective of torch", None)))
        else:
            self.fail(error)

    def close(self) -> None:
        """Stop waiting for the end of the process."""
        self._last_word.cancel()

    def _explain(self, error: BaseException, op: str, peer: int | None) -> WorldError:
        """Post a note about `error`, and derive the cause from the other ranks' notes."""
        self.has_failed = True
        mine = Note.of_wait(error, op, self.started(), peer)
        self._notes.post(mine)
        notes = self._notes.read()
        return explain_failure(self._rank, self._size, mine, notes, self._timeout_s, Notes.board, self._hosts)


def signature_of(op: str, whole: Tensor) -> str:
    """Return a description of an operation, which must be the same on every rank."""
    return f"{op}, {whole.numel()} elements of {whole.dtype}"
