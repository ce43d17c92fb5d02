"""Who touched which bytes, and what orders the touches: a race detector for streams and threads.

An agent does one thing after the other: a stream of a device, or a thread of the host. Each counts what it does, and
knows how far the others had come when it last heard of them; it hears of them through events, launches and waits. Two
touches of the same bytes, at least one of which writes, race if the later agent has not heard of the earlier touch:
some other execution has them the other way round.

Source: Fidge 1988, "Timestamps in Message-Passing Systems That Preserve the Partial Ordering"; Flanagan and Freund
2009, "FastTrack", section 3, with ranges of bytes in place of variables.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Known = dict[int, int]
"""By number of an agent: how much of what it did is known to be over."""


class RaceError(AssertionError):
    """Two touches of the same memory that nothing orders, each with its agent and its place in the code."""


@dataclass(eq=False)
class Agent:
    """A stream or a thread: its number, a name for messages, what it knows, and how far its own work would have come.

    `time_s` is when it would be done with what it was given, on a clock on which work takes as long as a device would.
    """

    number: int
    name: str
    known: Known = field(default_factory=dict)
    time_s: float = 0.0

    def hear(self, known: Known, time_s: float = 0.0) -> None:
        """From here on it comes after all that."""
        for number, count in known.items():
            if count > self.known.get(number, 0):
                self.known[number] = count
        self.time_s = max(self.time_s, time_s)

    def tick(self) -> int:
        """One more thing that it does; its count."""
        count = self.known[self.number] = self.known.get(self.number, 0) + 1
        return count


class Touch(NamedTuple):
    """One agent at some bytes."""

    agent: Agent
    at: int
    what: str
    """The operation and its place in the code."""

    def is_known_to(self, known: Known) -> bool:
        return known.get(self.agent.number, 0) >= self.at

    def __str__(self) -> str:
        return f"{self.what} on {self.agent.name}"


class _Span(NamedTuple):
    """Bytes from `start` to the next span: who wrote them last, and who has read them since."""

    start: int
    written: Touch | None
    read: tuple[Touch, ...]


class History:
    """Of one piece of memory.

    Args:
        name: for messages.
        origin: number of the agent that may use the memory again once it is free, as allocators of GPUs do.
    """

    def __init__(self, name: str, origin: Agent) -> None:
        self.name, self.origin = name, origin
        self._spans = [_Span(0, None, ())]

    def touch(self, agent: Agent, start: int, stop: int, *, writes: bool, what: str) -> None:
        """`agent` reads or writes bytes [start, stop).

        Raises:
            RaceError: nothing orders that after an earlier touch.
        """
        if stop <= start:
            return
        touch = Touch(agent, agent.tick(), what)
        first, last = self._cut(start), self._cut(stop)
        for span in self._spans[first:last]:
            self._check(span, touch, "writes" if writes else "reads", is_write=writes)
        if writes:
            self._spans[first:last] = [_Span(start, touch, ())]
            return
        self._spans[first:last] = [_with_reader(span, touch) for span in self._spans[first:last]]

    def free(self, agent: Agent) -> None:
        """Nobody holds the memory any more, as `agent` goes on; whoever comes next gets it in the origin's order.

        Raises:
            RaceError: somebody may still be at it.
        """
        known = dict(self.origin.known)
        for number, count in agent.known.items():
            known[number] = max(count, known.get(number, 0))
        for span in self._spans:
            for touch in _touches(span):
                if touch.agent is not self.origin and not touch.is_known_to(known):
                    raise RaceError(f"{self.name} is freed by {agent.name} while {touch} may still be at it")

    def _check(self, span: _Span, touch: Touch, verb: str, *, is_write: bool) -> None:
        for before in _touches(span) if is_write else (span.written,):
            if before is not None and not before.is_known_to(touch.agent.known):
                did = "wrote" if before is span.written else "read"
                raise RaceError(
                    f"{touch} {verb} bytes from {span.start} of {self.name}, and nothing orders that after {before}, "
                    f"which {did} them"
                )

    def _cut(self, at: int) -> int:
        """The number of the span that begins at byte `at`, which may have to be cut for it."""
        number = bisect_right(self._spans, at, key=_start) - 1
        if self._spans[number].start == at:
            return number
        self._spans.insert(number + 1, self._spans[number]._replace(start=at))
        return number + 1


def _start(span: _Span) -> int:
    return span.start


def _touches(span: _Span) -> Iterator[Touch]:
    if span.written is not None:
        yield span.written
    yield from span.read


def _with_reader(span: _Span, touch: Touch) -> _Span:
    """The last read of each agent is enough: it comes after its earlier ones."""
    return span._replace(read=(*(one for one in span.read if one.agent is not touch.agent), touch))
