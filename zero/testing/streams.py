"""Streams, events and threads of a GPU that is none: what orders what, what runs when, and how long it would take.

Two things are done with everything that is launched. `races` is told which bytes it touches, in an order that holds for
every execution. And it is executed: at once, in the order of the program; or, on side streams, as late as an event that
somebody waits for allows, or at a random moment before. What it will write is poison until then, so whoever reads too
early computes nonsense, and whoever overwrites what is still to be read spoils the result.

Time is made up: every operation takes as long as its bytes or its arithmetic need, streams run beside one another, and
the host takes a little for each launch. What overlaps does so by the order of events alone, on any machine.

Rates are a GPU's divided by a thousand, and of arithmetic by a hundred thousand: the tensors of a test are that much
smaller, and have that many fewer rows, than those that keep a GPU busy for longer than their launches keep the host.
"""

import itertools
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.testing.operators import Place, place_of
from zero.testing.races import Agent, History, Known, RaceError

LAUNCH_S = 5e-6
"""What a launch takes of the host."""
DEVICE_BYTES_PER_S, LINK_BYTES_PER_S, HOST_BYTES_PER_S, NETWORK_BYTES_PER_S = 1e9, 5e7, 5e6, 1e8
"""Of the GPU's own memory, of the way between it and the host, of what the host does, and of collectives."""
FLOPS_PER_S = 5e9
"""Of products of matrices."""

_NUMBERS = itertools.count()

HELD_S = 5.0
"""The longest that a thread of the store is held back: who waits for it in another way would wait for ever."""

ORDERS = ("program", "late", "random")


class Marker:
    """A point of a stream: everything that was launched there before."""

    def __init__(self) -> None:
        self.known: Known = {}
        self.time_s = 0.0
        self.stream: Stream | None = None
        self.count = 0


class Handed:
    """What threads know as they hand over to one another, by what they hand over."""

    def __init__(self, streams: "Streams") -> None:
        self._streams = streams
        self._said: dict[Any, tuple[Known, float]] = {}

    def say(self, what: Any) -> None:
        with self._streams.lock:
            host = self._streams.host
            self._said[what] = dict(host.known), host.time_s

    def hear(self, what: Any) -> None:
        with self._streams.lock:
            if what in self._said:
                self._streams.host.hear(*self._said[what])

    def hear_all(self, owner: int) -> None:
        """Of what begins with `owner`."""
        for what in [one for one in self._said if one[0] == owner]:
            self.hear(what)

    def between(self, keys: Sequence[Any], run: Callable[[], None]) -> None:
        """Run it after whoever had these before, and before whoever has them next."""
        for key in keys:
            self.hear(key)
        try:
            run()
        finally:
            for key in keys:
                self.say(key)


class Gate:
    """Holds the store's threads back until somebody waits for one of them: so late are they in the worst case.

    Args:
        is_held: it does; otherwise everybody passes.
    """

    def __init__(self, *, is_held: bool) -> None:
        self.is_held = is_held
        self._changed = threading.Condition()
        self._waiting = 0

    def pass_through(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.is_held or self._waiting, HELD_S)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Somebody waits."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1


class _Launched(NamedTuple):
    """Something that has not run: what does it, and what it will write."""

    run: Callable[[], object]
    written: Sequence[Tensor]


class Stream:
    """One queue of the device."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.queue: list[_Launched] = []
        self.done = 0  # of what was launched, how much has run

    @property
    def launched(self) -> int:
        return self.done + len(self.queue)


class _OfThread(threading.local):
    """What a thread is at: its agent and its current stream, by number of the device.

    It is quiet while the simulation itself works; `beside` are threads of the store.
    """

    def __init__(self) -> None:
        self.agents: dict[int, Agent] = {}
        self.streams: dict[int, Stream] = {}
        self.quiet = self.asynchronous = self.beside = False
        self.gpu: Any = None
        self.watching: Any = None


thread = _OfThread()


@contextmanager
def quietly() -> Iterator[None]:
    """What this thread does with tensors in here is the simulation's own."""
    before, thread.quiet = thread.quiet, True
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():  # which counts no version of a tensor
            yield
    finally:
        thread.quiet = before


class Streams:
    """Of one device.

    Args:
        order: of `ORDERS`: when what was launched on side streams runs.
        seed: of random moments.

    Attributes:
        counts: launches, waits of the host, bytes each way.
        found: races that were seen where nobody could be told.
    """

    def __init__(self, order: str, seed: int) -> None:
        self.lock = threading.RLock()
        self._number = next(_NUMBERS)
        self.counts: Counter[str] = Counter()
        self.found: list[RaceError] = []
        self._order, self._draw = order, random.Random(seed)
        self._everybody: list[Agent] = []
        self._histories: dict[int, History] = {}
        self._streams: dict[str, Stream] = {}
        self._poisoned: list[tuple[Tensor, Tensor]] = []  # where, and what was there before
        self.main = self.stream("the compute stream")
        self._network: list[Stream] = []

    # -- who -----------------------------------------------------------------------------------------------------------

    def agent(self, name: str) -> Agent:
        with self.lock:
            self._everybody.append(Agent(len(self._everybody), name))
            return self._everybody[-1]

    def stream(self, name: str) -> Stream:
        with self.lock:
            if name not in self._streams:
                self._streams[name] = Stream(self.agent(name))
            return self._streams[name]

    def collective(self) -> Stream:
        """A stream for one collective: how libraries order them among themselves is not relied on."""
        self._network.append(self.stream(f"collective {len(self._network)}"))
        return self._network[-1]

    @property
    def host(self) -> Agent:
        """The thread that asks."""
        if self._number not in thread.agents:
            thread.agents[self._number] = self.agent(f"the host's thread {threading.current_thread().name!r}")
        return thread.agents[self._number]

    @property
    def current(self) -> Stream:
        return thread.streams.get(self._number, self.main)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Launch there."""
        before = self.current
        thread.streams[self._number] = stream
        try:
            yield
        finally:
            thread.streams[self._number] = before

    # -- what orders what ----------------------------------------------------------------------------------------------

    def record(self, marker: Marker) -> None:
        with self.lock:
            stream, agent = self.current, self.current.agent
            agent.hear(self.host.known, self.host.time_s)
            marker.known, marker.time_s = dict(agent.known), agent.time_s
            marker.stream, marker.count = stream, stream.launched

    def hold_back(self, marker: Marker) -> None:
        """The current stream goes on after `marker`; the host does not wait."""
        with self.lock:
            stream = self.current
            stream.agent.hear(self.host.known, self.host.time_s)
            stream.agent.hear(marker.known, marker.time_s)
            other, count = marker.stream, marker.count
            if other is None or other is stream:
                return
            if self._is_late(stream):
                stream.queue.append(_Launched(lambda: self._run(other, count), ()))
            else:
                self.run(other, count)

    def await_(self, marker: Marker) -> None:
        """The host goes on after `marker`."""
        with self.lock:
            self._count_wait()
            self.host.hear(marker.known, marker.time_s)
            if marker.stream is not None:
                self.run(marker.stream, marker.count)

    def await_stream(self, stream: Stream) -> None:
        with self.lock:
            self._count_wait()
            self._await_stream(stream)

    def await_all(self) -> None:
        with self.lock:
            self._count_wait()
            for stream in [*self._streams.values()]:
                self._await_stream(stream)

    def _await_stream(self, stream: Stream) -> None:
        self.host.hear(stream.agent.known, stream.agent.time_s)
        self.run(stream, stream.launched)

    def _count_wait(self) -> None:
        self.counts["waits of the store's threads" if thread.beside else "waits of the host"] += 1

    @property
    def is_quiet(self) -> bool:
        """The thread that asks knows that everything is over."""
        with self.lock:
            return all(self.host.known.get(one.number, 0) >= one.known.get(one.number, 0) for one in self._everybody)

    # -- what is done --------------------------------------------------------------------------------------------------

    def touch(self, agent: Agent, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:
        """Note what `agent` is at.

        Raises:
            RaceError: nothing orders it after somebody else's touch.
        """
        with self.lock:
            if self.found:
                raise self.found[0]
            for tensors, is_write in ((reads, False), (writes, True)):
                for place in filter(None, map(place_of, tensors)):
                    history = self._history(place, agent)
                    history.touch(agent, place.start, place.stop, writes=is_write, what=what)

    def allocated(self, tensors: Sequence[Tensor]) -> None:
        """The current stream made them, out of what was freed in its order: others must not be at them before it is.

        When they are freed, what it does next may get their memory.
        """
        with self.lock:
            agent = self.current.agent
            agent.hear(self.host.known, self.host.time_s)
            for place in filter(None, map(place_of, tensors)):
                if place.storage not in self._histories:
                    self._history(place, agent).touch(
                        agent, place.start, place.stop, writes=True, what="its allocation"
                    )

    def launch(self, run: Callable[[], object], written: Sequence[Tensor]) -> None:
        """Run it when its stream gets there."""
        with self.lock:
            stream = self.current
            if self._is_late(stream):
                one = _Launched(run, [tensor.data for tensor in written])
                stream.queue.append(one)
                self._poison(one)
                self._maybe_run()
                return
            self.run(stream, stream.launched)
            stream.done += 1
            self._maybe_run()
        with quietly():
            run()

    def is_late(self) -> bool:
        """What is launched now runs later."""
        return self._is_late(self.current)

    def run(self, stream: Stream, until: int) -> None:
        """Have `stream` get as far as its launch number `until`, and what that waits for."""
        with self.lock:
            if until <= stream.done:
                return
            with quietly():
                for tensor, before in reversed(self._poisoned):
                    tensor.copy_(before)
                self._poisoned.clear()
                self._run(stream, until)
                for one in [one for each in self._streams.values() for one in each.queue]:
                    self._poison(one)

    def takes(self, agent: Agent, seconds: float, *, launched: bool = True) -> None:
        """Work of so many seconds."""
        with self.lock:
            if launched:
                self.host.time_s += LAUNCH_S
                agent.hear(self.host.known, self.host.time_s)
            agent.time_s += seconds

    # -- the simulation's own ------------------------------------------------------------------------------------------

    def _is_late(self, stream: Stream) -> bool:
        return self._order != "program" and stream is not self.main

    def _maybe_run(self) -> None:
        """At random moments some stream gets one further."""
        if self._order == "random" and self._draw.random() < 0.3:
            waiting = [one for one in self._streams.values() if one.queue and one not in self._network]
            if waiting:
                stream = self._draw.choice(waiting)
                self.run(stream, stream.done + 1)

    def _run(self, stream: Stream, until: int) -> None:
        while stream.done < until:
            one = stream.queue.pop(0)
            stream.done += 1
            with quietly():
                one.run()

    def _poison(self, one: _Launched) -> None:
        with quietly():
            for tensor in one.written:
                self._poisoned.append((tensor, tensor.clone()))
                poison(tensor)

    def _history(self, place: Place, agent: Agent) -> History:
        history = self._histories.get(place.storage)
        if history is None:
            what = f"a tensor of {tuple(place.tensor.shape)} {place.tensor.dtype}, or what shares its memory"
            history = self._histories[place.storage] = History(what, agent)
            storage = place.tensor.untyped_storage()
            weakref.finalize(storage, self._freed, place.storage, history).atexit = False
        return history

    def _freed(self, storage: int, history: History) -> None:
        """Without the lock: two ranks may each free, at work under their own, the last of what the other one made."""
        if self._histories.get(storage) is history:
            del self._histories[storage]
        if self._number not in thread.agents:
            return  # a thread that has no part in this, when it is all over
        try:
            history.free(self.host)
        except RaceError as error:  # nobody can be told here: the next touch raises it
            self.found.append(error)


def poison(tensor: Tensor) -> None:
    """Bytes that are NaN in every format of floating point, and no number that anybody meant in others."""
    if tensor.is_contiguous():
        tensor.reshape(-1).view(torch.uint8).fill_(0xFF)
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
