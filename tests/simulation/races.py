"""A race detector for streams and threads, with vector clocks and ranges of bytes.

An agent is a stream of a device or a thread of the host; it runs one operation after the other. Its vector clock has,
for every agent, the number of operations that happen before the agent's next one. Events, launches and waits pass
clocks from one agent to another. Two accesses to the same bytes race if at least one of them is a write and neither
happens before the other, because another execution may then run them in the opposite order.

Source: Fidge 1988, "Timestamps in Message-Passing Systems That Preserve the Partial Ordering"; Flanagan and Freund
2009, "FastTrack", section 3, with ranges of bytes instead of variables.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.simulation.simulated_time import START, Moment, latest

VectorClock = dict[int, int]
"""Number of an agent -> number of its operations that happen before this point; 0 if the agent is missing."""


class RaceError(AssertionError):
    """A race: two accesses to the same memory, at least one of them a write, without synchronization between them.

    Raised by `simulated_gpu(races=True)`. The message names both accesses: operation, stream or thread, line of code.
    """


class Past(NamedTuple):
    """All operations of all agents that happen before one point of an agent.

    Attributes:
        agent, epoch: the agent's number, and its own count of operations at that point.
        clock: the agent's vector clock at that point.
        moment: that point in simulated time.
    """

    agent: int
    epoch: int
    clock: VectorClock
    moment: Moment


@dataclass(eq=False)
class Agent:
    """A stream or a thread, which runs one operation after the other.

    Attributes:
        number: the agent's index in vector clocks.
        name: the agent's name in messages.
        clock: vector clock of the operations that happen before the agent's next one.
        moment: the moment at which all the agent's work so far is finished in simulated time.
        worked: the agent's own count of operations at its last access.
    """

    number: int
    name: str
    clock: VectorClock = field(default_factory=dict)
    moment: Moment = START
    worked: int = 0
    _past: Past | None = None

    def now(self) -> Past:
        """Return the past of the agent's next operation: all operations that happen before it."""
        if self._past is None:
            count = self._tick()
            self._past = Past(self.number, count, dict(self.clock), self.moment)
        return self._past._replace(moment=self.moment)

    def knows(self, past: Past) -> bool:
        """Return whether all of `past` happens before the agent's next operation."""
        return self.clock.get(past.agent, 0) >= past.epoch

    def join(self, past: Past) -> None:
        """Order all of `past` before this agent's next operation, which then begins at `past.moment` or later."""
        self.moment = latest(self.moment, past.moment)
        if self.knows(past):
            return
        self._past = None
        for number, count in past.clock.items():
            if count > self.clock.get(number, 0):
                self.clock[number] = count

    def work(self) -> int:
        """Count one more access of this agent and return its count of operations."""
        self._past = None
        self.worked = self._tick()
        return self.worked

    def _tick(self) -> int:
        count = self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return count


class Access(NamedTuple):
    """A read or write of a range of bytes by one agent."""

    agent: Agent
    epoch: int
    """The agent's own count of operations at the access."""
    what: str
    """The operation and its line of code, for messages."""

    def happens_before(self, clock: VectorClock) -> bool:
        """Return whether the access happens before the point with this vector clock."""
        return clock.get(self.agent.number, 0) >= self.epoch

    def __str__(self) -> str:
        return f"{self.what} on {self.agent.name}"


class _Span(NamedTuple):
    """The bytes from `start` to the start of the next span, with their last write and all reads since then."""

    start: int
    written: Access | None
    reads: tuple[Access, ...]


class History:
    """The accesses to one storage with which a later access may race.

    Args:
        name: name of the storage in messages.
        owner: the agent that allocated the storage. As with torch's caching allocator for GPUs, freed memory may be
            reused by later work of this agent, without further synchronization.
    """

    def __init__(self, name: str, owner: Agent) -> None:
        self.name, self.owner = name, owner
        self._spans = [_Span(0, None, ())]

    def access(self, agent: Agent, start: int, stop: int, *, writes: bool, what: str) -> None:
        """Record a read or write of bytes [start, stop) by `agent`.

        Raises:
            RaceError: the access races with an earlier one.
        """
        if stop <= start:
            return
        access = Access(agent, agent.work(), what)
        first, last = self._cut(start), self._cut(stop)
        for span in self._spans[first:last]:
            self._check(span, access, writes=writes)
        if writes:
            self._spans[first:last] = [_Span(start, access, ())]
            return
        self._spans[first:last] = [_with_reader(span, access) for span in self._spans[first:last]]

    def forget(self, start: int, stop: int, clock: VectorClock) -> None:
        """Delete the records of accesses to bytes [start, stop) that happen before `clock`."""
        first, last = self._cut(start), self._cut(stop)
        for number in range(first, last):
            span = self._spans[number]
            written = None if span.written is None or span.written.happens_before(clock) else span.written
            reads = tuple(read for read in span.reads if not read.happens_before(clock))
            self._spans[number] = _Span(span.start, written, reads)

    def free(self, agent: Agent) -> None:
        """Check that `agent` may free the storage, whose memory later work of the owner may then reuse.

        Raises:
            RaceError: an access by an agent other than the owner may still be running.
        """
        for span in self._spans:
            for access in _accesses(span):
                is_over = access.happens_before(agent.clock) or access.happens_before(self.owner.clock)
                if access.agent is not self.owner and not is_over:
                    raise RaceError(f"{self.name} is freed by {agent.name} while {access} may still be using it")

    def _check(self, span: _Span, access: Access, *, writes: bool) -> None:
        for before in _accesses(span) if writes else (span.written,):
            if before is not None and not before.happens_before(access.agent.clock):
                verb = "writes" if writes else "reads"
                did = "wrote" if before is span.written else "read"
                raise RaceError(
                    f"{access} {verb} bytes from {span.start} of {self.name}, and nothing orders that after {before}, "
                    f"which {did} them"
                )

    def _cut(self, at: int) -> int:
        """Return the index of the span that begins at byte `at`; if there is none, split the span that has `at`."""
        number = bisect_right(self._spans, at, key=lambda span: span.start) - 1
        if self._spans[number].start == at:
            return number
        self._spans.insert(number + 1, self._spans[number]._replace(start=at))
        return number + 1


def _accesses(span: _Span) -> Iterator[Access]:
    if span.written is not None:
        yield span.written
    yield from span.reads


def _with_reader(span: _Span, access: Access) -> _Span:
    """Return the span with one more read. Only each agent's last read is kept, because it follows its earlier reads."""
    return span._replace(reads=(*(read for read in span.reads if read.agent is not access.agent), access))
