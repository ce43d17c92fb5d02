"""Record a timeline: the engine and the store report their operations to a `Tape`.

A tape records moments, and converts them to seconds after the step, so that a recording never waits for a device while
a step runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from zero.errors import StaleStateError
from zero.platform.handle import Handle, Then
from zero.platform.timeline import EXPOSED, Mark, Span, Timeline, computing

if TYPE_CHECKING:  # it imports torch
    from zero.platform.device import Clock

STORE_ROWS = {"read": "page in", "work": "update", "write": "page out"}
"""Name of a store's operation -> its row."""


ALL_STORE_ROWS = ", ".join(STORE_ROWS.values())


class Tape:
    """The recorder to which a run reports its operations. Outside of `record` its methods record nothing.

    Args:
        clock: makes a clock for one recording.
        streams: whether the device has streams besides the compute stream.
    """

    def __init__(self, clock: "Callable[[], Clock]", *, rank: int, streams: bool) -> None:
        self._clock, self._rank, self._streams = clock, rank, streams
        self._recording: _Recording | None = None
        self._yields = False

    @contextmanager
    def record(self, *, profile: bool = False, yields: bool = False) -> Iterator[Timeline]:
        """Record the operations in the block: see `zero.record`.

        Args:
            profile: also name the operations in torch's profiler.
            yields: let another recording replace this one, whose timeline then stays empty.

        Raises:
            StaleStateError: another recording is running, which does not yield.
        """
        if self._recording is not None and not self._yields:
            raise StaleStateError("this run is being recorded already. End that recording first.")
        timeline = Timeline()
        recording = self._recording = _Recording(self._clock(), self._rank, profile)
        self._yields = yields
        try:
            yield timeline
        finally:
            if self._recording is recording:
                self._recording = None
                timeline.spans = Timeline(recording.end()).spans

    def doing(self, row: str, unit: str) -> AbstractContextManager[None]:
        """Record that the training thread itself does the work of `row` in the block."""
        return _NOTHING if (recording := self._recording) is None else recording.doing(row, unit)

    def standing(self, rows: str, unit: str = "") -> AbstractContextManager[None]:
        """Record that the training thread waits for `rows` in the block."""
        return _NOTHING if (recording := self._recording) is None else recording.standing(rows, unit)

    def stream_standing(self, rows: str, unit: str = "") -> AbstractContextManager[None]:
        """Record that the compute stream waits for `rows` on another stream, if the device has streams."""
        return self.standing(rows, unit) if self._streams else _NOTHING

    def streaming(self, row: str, unit: str) -> AbstractContextManager[None]:
        """Record that the current stream, a side stream, does the work of `row`, if the device has streams."""
        return recording.streaming(row, unit) if self._streams and (recording := self._recording) else _NOTHING

    def under_way(self, row: str, unit: str, start: Callable[[], Sequence[Handle]]) -> Sequence[Handle]:
        """Call `start`, which starts asynchronous operations, and record them; return the handles to wait for."""
        return start() if (recording := self._recording) is None else [recording.under_way(row, unit, start)]

    def forward(self, path: str, unit: str) -> AbstractContextManager[None]:
        """Record that a site's forward runs in the block, which may contain the forwards of inner sites."""
        return _NOTHING if (recording := self._recording) is None else recording.forward(path, unit)

    def passed(self, name: str, unit: str = "") -> None:
        """Record that the computation since the previous mark ends here; `name` and `unit` describe it."""
        if (recording := self._recording) is not None:
            recording.passed(f"{name} {unit}" if unit else name, unit)

    def of_store(self, units: Sequence[str]) -> Callable[..., AbstractContextManager[None]]:
        """Return the callback (a `Watch`) to which a store reports its operations; `units` has its units' names."""

        def watch(what: str, unit: int = -1, *part: object) -> AbstractContextManager[None]:
            if (recording := self._recording) is None:
                return _NOTHING
            if what == "wait":
                return recording.standing(ALL_STORE_ROWS, "")
            return recording.paging(STORE_ROWS[what], units[unit & INDEX_BITS], part)

        return watch


INDEX_BITS = (1 << 30) - 1
"""The bits of a unit's index in a page's key; a page that another one replaces has a further bit."""

_NOTHING = nullcontext()


class _Entry:
    """A span during a recording, whose begin and end are moments of the clock."""

    def __init__(self, row: str, name: str, unit: str, begin: Any) -> None:
        self.row, self.name, self.unit, self.begin = row, name, unit, begin
        self.end: Any = None  # None until the span has ended


class _Recording:
    """A recording in progress. Threads append to its lists without a lock, because `list.append` is atomic."""

    def __init__(self, clock: "Clock", rank: int, profile: bool) -> None:
        self.clock, self._rank, self._profile = clock, rank, profile
        self._entries: list[_Entry] = []
        self._marks: list[tuple[Any, str, str]] = []
        self._sites = [("", "")]  # (path, unit) of the sites whose forward is running, the innermost last

    @contextmanager
    def doing(self, row: str, unit: str) -> Iterator[None]:
        name = f"{row} {unit}"
        with self.standing(row, unit), self._during(row, name, unit, self.clock.here):
            yield

    @contextmanager
    def standing(self, rows: str, unit: str) -> Iterator[None]:
        with self._range(f"{rows} {unit}"), self._during(EXPOSED, rows, unit, self.clock.main):
            yield

    @contextmanager
    def paging(self, row: str, unit: str, part: Sequence[object]) -> Iterator[None]:
        name = " ".join(map(str, (row, unit, *part)))
        with self._range(name), self._during(row, name, unit, self.clock.host):
            yield

    def streaming(self, row: str, unit: str) -> AbstractContextManager[None]:
        return self._during(row, f"{row} {unit}", unit, self.clock.here)

    def under_way(self, row: str, unit: str, start: Callable[[], Sequence[Handle]]) -> Handle:
        """Start several operations, recorded as one span; return one handle that waits for all, the last one first."""
        entry = self._add(row, f"{row} {unit}", unit, self.clock.here())
        with self.standing(row, unit):
            handles = start()

        def wait() -> None:
            with self.standing(row, unit):
                for handle in reversed(handles):
                    handle.wait()
            entry.end = self.clock.here()

        return Then(wait)

    @contextmanager
    def forward(self, path: str, unit: str) -> Iterator[None]:
        self._pass_site()
        self._sites.append((path, unit))
        try:
            with self._range(f"forward {path}"):
                yield
        finally:
            self._pass_site()
            self._sites.pop()

    def _pass_site(self) -> None:
        path, unit = self._sites[-1]
        self.passed(f"forward {path}" if path else "forward", unit)

    def passed(self, name: str, unit: str) -> None:
        self._marks.append((self.clock.main(), name, unit))

    def end(self) -> list[Span]:
        """Return all spans of the recording; spans that have not ended end now."""
        step_s = self.clock.seconds(self.clock.main())
        spans = [span for entry in tuple(self._entries) if (span := self._span(entry, step_s)).begin_s < span.end_s]
        marks = [Mark(self.clock.seconds(at), name, unit) for at, name, unit in tuple(self._marks)]
        exposed = [(span.begin_s, span.end_s) for span in spans if span.row == EXPOSED]
        return [*spans, *computing(exposed, marks, step_s, self._rank)]

    def _span(self, entry: _Entry, step_s: float) -> Span:
        end = entry.end  # read once, because its thread may set it meanwhile
        begin_s, end_s = self.clock.seconds(entry.begin), step_s if end is None else self.clock.seconds(end)
        return Span(entry.row, entry.name, max(begin_s, 0.0), min(end_s, step_s), entry.unit, self._rank)

    @contextmanager
    def _during(self, row: str, name: str, unit: str, moment: Callable[[], Any]) -> Iterator[None]:
        entry = self._add(row, name, unit, moment())
        try:
            yield
        finally:
            entry.end = moment()

    def _add(self, row: str, name: str, unit: str, begin: Any) -> _Entry:
        entry = _Entry(row, name, unit, begin)
        self._entries.append(entry)
        return entry

    def _range(self, name: str) -> AbstractContextManager[Any]:
        if not self._profile:
            return _NOTHING
        from torch.profiler import record_function  # reading a timeline needs no torch

        return record_function(name)
