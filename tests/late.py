"""A simulated GPU whose copies beside compute are made as late as an event allows: who does not wait reads what was.

Streams are those of `Device.aside` that are named late; whatever else is launched happens at once, in program order.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from torch import Tensor

from zero.device import Device, Event, GiB
from zero.testing.simulated import SimulatedGpu


class Stream:
    """What is still to be done, in order; nothing where it is not `late`."""

    def __init__(self, name: str, *, late: bool) -> None:
        self.name, self.given, self._late = name, 0, late
        self._tasks: list[Callable[[], object]] = []
        self._lock = threading.RLock()

    def give(self, task: Callable[[], object]) -> None:
        with self._lock:
            self._tasks.append(task)
            self.given += 1
            if not self._late:
                self.run(self.given)

    def run(self, until: int) -> None:
        with self._lock:
            while self._tasks and self.given - len(self._tasks) < until:
                self._tasks.pop(0)()


class LateEvent(Event):
    def __init__(self, gpu: "LateGpu") -> None:
        self._gpu, self._stream, self._count = gpu, None, 0

    def record(self) -> None:
        self._stream = self._gpu.stream
        self._count = 0 if self._stream is None else self._stream.given

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.run(self._count)

    def wait(self) -> None:
        if self._gpu.stream is None:
            self.finish()
        else:
            self._gpu.stream.give(self.finish)


class LateGpu(SimulatedGpu):
    """
    Args:
        late: names of streams.

    Attributes:
        copies: (name of the stream, bytes) of each copy that `copy` was asked for.
    """

    def __init__(self, late: Collection[str]) -> None:
        super().__init__(64 * GiB)
        self._late, self._current = late, threading.local()
        self._streams: dict[str, Stream] = {}
        self.copies: list[tuple[str, int]] = []

    @property
    def stream(self) -> Stream | None:
        return getattr(self._current, "stream", None)

    @property
    def current(self) -> str:
        """The name of the current stream."""
        return "compute" if self.stream is None else self.stream.name

    @contextmanager
    def aside(self, name: str, *, after: Event | None = None) -> Iterator[Event]:
        before, event = self.stream, LateEvent(self)
        first = self.mark() if after is None else after
        self._current.stream = self._streams.setdefault(name, Stream(name, late=name in self._late))
        first.wait()
        try:
            yield event
            event.record()
        finally:
            self._current.stream = before

    def mark(self) -> Event:
        event = LateEvent(self)
        event.record()
        return event

    def join(self) -> None:
        for stream in self._streams.values():
            stream.run(stream.given)

    @contextmanager
    def paging(self, name: str, after: Event, *, now: bool = False) -> Iterator[None]:
        after.finish()
        before, self._current.stream = self.stream, Stream(name, late=False)
        try:
            yield
        finally:
            self._current.stream = before

    def copy(self, into: Tensor, source: Tensor) -> None:
        self.copies.append((self.current, into.nbytes))
        if self.stream is None:
            into.copy_(source)
        else:
            self.stream.give(lambda: into.copy_(source))


@contextmanager
def late_gpus(*late: str) -> Iterator[list[LateGpu]]:
    """Worlds that are made in the block have one; yields those that were made."""
    made: list[LateGpu] = []

    def make() -> Device:
        made.append(LateGpu(late))
        return made[-1]

    before, Device.stand_in = Device.stand_in, make
    try:
        yield made
    finally:
        Device.stand_in = before
