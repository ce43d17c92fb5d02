"""Simulated time: operations with durations, and resources that serve one operation at a time.

An operation is recorded with the moments after which it may begin. It gets a begin and an end only when a clock is
read. Threads record operations in an order that depends on the machine, while a resource serves them in the order in
which they are ready in simulated time. So copies of several streams share the bandwidth of a link, kernels share the
device, and the order in which the host's threads happened to run changes no time.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple


class Rates(NamedTuple):
    """Rates of a simulated GPU.

    The defaults are those of a GPU divided by 1,000, and by 100,000 for FLOPs, because a test's tensors are smaller by
    such factors than tensors whose kernels take a GPU longer than their launches take the host.
    """

    flops_per_s: float = 5e9
    """Matrix products."""
    device_bytes_per_s: float = 1e9
    """The GPU's memory: bytes that other kernels read and write."""
    link_bytes_per_s: float = 5e7
    """Copies between GPU and host, in each direction."""
    network_bytes_per_s: float = 1e8
    """Collectives."""
    host_bytes_per_s: float = 5e6
    """Bytes that operators on one thread of the host read and write, in its cache."""
    cores: int = 0
    """Cores that the store's threads share, whichever of the machine's threads happens to run their work; 0: each
    thread has a core, and works in the order in which it ran here."""
    memory_bytes_per_s: float = inf
    """Host memory: bytes that copies, files and operators on all threads read and write."""
    disk_bytes_per_s: float = 5e6
    """File I/O, in each direction."""
    launch_s: float = 5e-6
    """Seconds that one launch takes the host."""


RATES = Rates()

CORES = "cores"
"""The resource of operators that the store's threads call, if these share cores."""


class Moment:
    """The end of an operation, or the latest of several moments.

    Attributes:
        after: moments before the operation; empty once `end_s` is known.
        seconds: duration of the operation while nothing interrupts it.
        resource: name of the resource that the operation occupies; empty: none.
        urgent: whether the operation interrupts others on its resource.
        work: number of the work of which it is a part; cores serve earlier work first.
        end_s: simulated time in seconds; None until it is known.
    """

    __slots__ = ("after", "end_s", "number", "resource", "seconds", "urgent", "work")
    _numbers = itertools.count()

    def __init__(
        self,
        after: "tuple[Moment, ...]" = (),
        seconds: float = 0.0,
        resource: str = "",
        *,
        urgent: bool = False,
        work: int = 0,
    ) -> None:
        self.after, self.seconds, self.resource, self.urgent, self.work = after, seconds, resource, urgent, work
        self.end_s: float | None = None if after else seconds
        self.number = next(Moment._numbers)

    @property
    def unknown(self) -> "list[Moment]":
        return [moment for moment in self.after if moment.end_s is None]

    @property
    def ready_s(self) -> float:
        """Return the time at which the operation may begin; the times of `after` are known."""
        return max((moment.end_s or 0.0 for moment in self.after), default=0.0)


START = Moment()


def latest(first: Moment, second: Moment) -> Moment:
    """Return the later of two moments."""
    if first is second or second is START:
        return first
    if first.end_s is not None and second.end_s is not None:
        return first if first.end_s >= second.end_s else second
    return second if first is START else Moment((first, second))


class SimulatedTime:
    """The operations of one simulated device and of the threads that use it."""

    def __init__(self, cores: int = 0) -> None:
        self._recorded: list[Moment] = []
        self._resources = defaultdict[str, _Resource](_Resource)
        self._cores = self._resources[CORES] = _Cores(cores)

    def operation(
        self, after: Moment, seconds: float, resource: str = "", *, urgent: bool = False, work: int = 0
    ) -> Moment:
        """Record an operation that begins at `after` or later; return its end.

        Args:
            seconds: duration of the operation.
            resource: name of the resource that the operation occupies; empty: none.
            urgent: interrupt operations on the resource that are not urgent.
            work: see `Moment`.
        """
        if not seconds:
            return after
        self._recorded.append(Moment((after,), seconds, resource, urgent=urgent, work=work))
        return self._recorded[-1]

    def seconds(self, moment: Moment) -> float:
        """Return the time of `moment`, in seconds. All recorded operations are given a begin and an end."""
        if moment.end_s is None:
            recorded, self._recorded = self._recorded, []
            self._run(_unknown_before([*recorded, moment]))
        assert moment.end_s is not None
        return moment.end_s

    def _run(self, moments: Iterable[Moment]) -> None:
        """Give each moment its end, by events in the order of their time: an operation is ready, or it ends."""
        followers = defaultdict[Moment, list[Moment]](list)
        waits: dict[Moment, int] = {}
        for moment in moments:
            waits[moment] = len(moment.unknown)
            for before in moment.unknown:
                followers[before].append(moment)
        ends: dict[Moment, float] = {}  # of operations that are being served
        events = [(moment.ready_s, moment.number, moment) for moment, count in waits.items() if not count]
        heapify(events)
        while events:
            now_s, _, moment = heappop(events)
            if moment not in ends:
                served = self._resources[moment.resource].begin(now_s, moment, ends)
            elif ends[moment] > now_s:
                served = moment  # it was interrupted
            else:
                moment.end_s, moment.after = now_s, ()
                served = self._resources[moment.resource].end(now_s, moment, ends)
                for follower in followers[moment]:
                    waits[follower] -= 1
                    if not waits[follower]:
                        heappush(events, (now_s, follower.number, follower))
            if served is not None:
                heappush(events, (ends[served], served.number, served))
            if not events or events[0][0] > now_s:
                for served in self._cores.serve(now_s, ends):
                    heappush(events, (ends[served], served.number, served))


class _Resource:
    """A resource, which serves operations in the order of the times at which they are ready.

    An urgent operation waits for urgent ones only, and the operation that it interrupts ends later by its duration. So
    do thread blocks of a GPU's stream of high priority, which get the next free multiprocessor.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Moment]] = []
        self._running: Moment | None = None
        self._free_s = self._free_of_urgent_s = 0.0

    def begin(self, now_s: float, moment: Moment, ends: dict[Moment, float]) -> Moment | None:
        """Serve an operation that is ready, and set its end in `ends`; return None if it has to wait."""
        if not moment.resource:
            ends[moment] = now_s + moment.seconds
        elif moment.urgent:
            ends[moment] = self._free_of_urgent_s = max(now_s, self._free_of_urgent_s) + moment.seconds
            if self._running is not None:
                ends[self._running] += moment.seconds
        elif self._running is not None:
            heappush(self._queue, (now_s, moment.number, moment))
            return None
        else:
            self._running = moment
            ends[moment] = max(now_s, self._free_s, self._free_of_urgent_s) + moment.seconds
        return moment

    def end(self, now_s: float, moment: Moment, ends: dict[Moment, float]) -> Moment | None:
        """End an operation; return the next one that is served now, if there is one."""
        if moment is not self._running:
            return None
        self._running, self._free_s = None, now_s
        return self.begin(now_s, heappop(self._queue)[-1], ends) if self._queue else None


class _Cores(_Resource):
    """Cores that serve as many operations at a time as there are of them, those of the earliest work first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._free, self._waiting = count, list[tuple[int, int, Moment]]()

    def begin(self, now_s: float, moment: Moment, ends: dict[Moment, float]) -> None:
        heappush(self._waiting, (moment.work, moment.number, moment))

    def end(self, now_s: float, moment: Moment, ends: dict[Moment, float]) -> None:
        self._free += 1

    def serve(self, now_s: float, ends: dict[Moment, float]) -> Iterator[Moment]:
        """Begin operations of those that are ready now, when all of these are known."""
        while self._free and self._waiting:
            moment = heappop(self._waiting)[-1]
            self._free, ends[moment] = self._free - 1, now_s + moment.seconds
            yield moment


def _unknown_before(moments: Iterable[Moment]) -> set[Moment]:
    """Return `moments` and all moments before them, except those whose times are known."""
    unknown: set[Moment] = set()
    stack = [moment for moment in moments if moment.end_s is None]
    while stack:
        moment = stack.pop()
        if moment not in unknown:
            unknown.add(moment)
            stack += moment.unknown
    return unknown
