"""Streams, events and threads of a simulated GPU: their order, the execution of launches, and simulated time.

Two things happen to every launch. Its accesses go to the race detector (`races`), in an order that some execution has.
And it is executed: at once, in program order; or, on side streams, as late as the events that are waited for allow,
or at a random moment before that. Until it runs, the memory that it will write holds poison. So code that reads too
early computes NaN, and code that overwrites too early spoils the result.

Time is simulated. An operation takes as long as its bytes or its arithmetic need, streams run in parallel, and each
launch costs the host a few microseconds. What overlaps depends only on the order of events, on any machine.

Rates are a GPU's divided by 1,000, and by 100,000 for arithmetic: a test's tensors are that much smaller, and have that
many fewer rows, than tensors that keep a GPU busy for longer than their launches keep the host.
"""

import itertools
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from zero.testing.operators import ByteRange, byte_range
from zero.testing.races import Agent, History, Past, RaceError

LAUNCH_S = 5e-6
"""Seconds of the host for one launch."""
DEVICE_BYTES_PER_S, LINK_BYTES_PER_S, HOST_BYTES_PER_S, NETWORK_BYTES_PER_S = 1e9, 5e7, 5e6, 1e8
"""Bandwidth of the GPU's memory, between GPU and host, of work on the host, and of collectives."""
FLOPS_PER_S = 5e9
"""Rate of matrix products."""

_DEVICE_NUMBERS = itertools.count()


class Marker:
    """A point of a stream: everything that was launched there before it.

    Attributes:
        host: the past of the thread that has set it. For a thread that does not know that past it may not be set yet,
            and a stream does not wait for an event that is not.
    """

    def __init__(self) -> None:
        self.past: Past | None = None
        self.host: Past | None = None
        self.stream: Stream | None = None
        self.count = 0


Key = tuple[Hashable, ...]


class Handoffs:
    """The pasts that threads hand to one another, by key: a ticket, a page, a slot."""

    def __init__(self, streams: "Streams") -> None:
        self._streams = streams
        self._released: dict[Key, list[Past]] = {}

    def release(self, key: Key) -> None:
        """Order the work of this thread so far before everything after the next `acquire(key)`."""
        with self._streams.lock:
            host = self._streams.host
            others = [past for past in self._released.get(key, ()) if not host.knows(past)]
            self._released[key] = [*others, host.now()]

    def acquire(self, key: Key) -> None:
        """Order every `release(key)` so far before the next work of this thread."""
        with self._streams.lock:
            for past in self._released.get(key, ()):
                self._streams.host.join(past)

    def acquire_all(self, owner: int) -> None:
        """`acquire` for every key whose first element is `owner`."""
        for key in [key for key in self._released if key[0] == owner]:
            self.acquire(key)

    def take_over(self, key: Key, memory: Tensor) -> None:
        """Order every `release(key)` so far before what comes next to `memory`, but before nothing else."""
        with self._streams.lock:
            for past in self._released.pop(key, ()):
                self._streams.host.time_s = max(self._streams.host.time_s, past.time_s)
                self._streams.forget(memory, past)

    def ordered(self, keys: Sequence[Key], run: Callable[[], None]) -> None:
        """Run `run` after the previous release of each key, and release the keys when it ends."""
        for key in keys:
            self.acquire(key)
        try:
            run()
        finally:
            for key in keys:
                self.release(key)


class _Launch(NamedTuple):
    """Something that was launched and has not run: the function that executes it, and the tensors that it writes."""

    run: Callable[[], object]
    writes: Sequence[Tensor]


class Stream:
    """One queue of the device.

    Attributes:
        queue: launches that have not run.
        done: how many launches have run.
    """

    def __init__(self, agent: Agent, launcher: Agent | None = None, *, is_network: bool = False) -> None:
        self.agent, self.launcher, self.is_network = agent, launcher, is_network
        self.queue: list[_Launch] = []
        self.done = 0

    @property
    def launched(self) -> int:
        return self.done + len(self.queue)


class _ThreadState(threading.local):
    """The simulation's state of one thread.

    Attributes:
        agents: the thread as an agent, by number of the device.
        streams: its current stream, by number of the device.
        is_untraced: the simulation itself is using tensors; its operators are not recorded.
        asynchronous: copies between host and device do not make the host wait.
        is_worker: a thread of a store.
        gpu: the simulated GPU that its operators run on.
        mode: the torch dispatch mode that passes operators to `gpu`.
    """

    def __init__(self) -> None:
        self.agents: dict[int, Agent] = {}
        self.streams: dict[int, Stream] = {}
        self.is_untraced = self.asynchronous = self.is_worker = False
        self.gpu: Any = None
        self.mode: Any = None


thread = _ThreadState()


@contextmanager
def untraced() -> Iterator[None]:
    """Operators of this thread in the block belong to the simulation: they are not recorded."""
    before, thread.is_untraced = thread.is_untraced, True
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():  # which leaves tensors' versions alone
            yield
    finally:
        thread.is_untraced = before


class Streams:
    """All streams of one simulated device, and the threads that use them.

    Args:
        order: when launches on side streams run; see `simulated_gpu`.
        seed: for the random moments of order "random".

    Attributes:
        counts: launches, waits of the host, bytes copied each way.
        deferred_races: races seen by a finalizer, which cannot raise. The next access raises them.
    """

    def __init__(self, order: str, seed: int) -> None:
        self.lock = threading.RLock()
        self._number = next(_DEVICE_NUMBERS)
        self.counts: Counter[str] = Counter()
        self.deferred_races: list[RaceError] = []
        self._order, self._draw = order, random.Random(seed)
        self._agents: list[Agent] = []
        self._histories: dict[int, History] = {}
        self._streams: list[Stream] = []
        self._named: dict[str, Stream] = {}  # the latest of each name
        self._poisoned: list[tuple[Tensor, Tensor]] = []  # (tensor, the values that it held before)
        self.main = self.stream("the compute stream")

    # -- agents --------------------------------------------------------------------------------------------------------

    def agent(self, name: str) -> Agent:
        """A new agent."""
        with self.lock:
            self._agents.append(Agent(len(self._agents), name))
            return self._agents[-1]

    def stream(self, name: str) -> Stream:
        """The stream of that name, made on first use."""
        with self.lock:
            if name not in self._named:
                self._named[name] = Stream(self.agent(name))
                self._streams.append(self._named[name])
            return self._named[name]

    def new_stream(self, name: str) -> Stream:
        """Another stream, which begins when the last one of that name is done, but is not ordered after it."""
        with self.lock:
            stream = Stream(self.agent(name), self.host)
            if name in self._named:
                stream.agent.time_s = self._named[name].agent.time_s
            self._named[name] = stream
            self._streams.append(stream)
            return stream

    def collective(self) -> Stream:
        """A new stream for one collective: no order among collectives is relied on."""
        with self.lock:
            stream = Stream(self.agent("a collective"), is_network=True)
            self._streams.append(stream)
            return stream

    def begin_action(self) -> None:
        """Make the calling thread a new agent: no order among the actions of one thread of the store is relied on."""
        with self.lock:
            before = self.host
            thread.agents[self._number] = self.agent(before.name)
            self.host.time_s = before.time_s

    @property
    def host(self) -> Agent:
        """The calling thread."""
        if self._number not in thread.agents:
            thread.agents[self._number] = self.agent(f"the host's thread {threading.current_thread().name!r}")
        return thread.agents[self._number]

    @property
    def current(self) -> Stream:
        """The stream that the calling thread launches on."""
        return thread.streams.get(self._number, self.main)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make `stream` the current one of this thread in the block."""
        return patch.dict(thread.streams, {self._number: stream})

    # -- order ---------------------------------------------------------------------------------------------------------

    def record(self, marker: Marker) -> None:
        """Set `marker` to the point that the current stream has reached."""
        with self.lock:
            stream, agent = self.current, self.current.agent
            agent.join(self.host.now())
            marker.past, marker.host = agent.now(), self.host.now()
            marker.stream, marker.count = stream, stream.launched

    def wait_on_stream(self, marker: Marker) -> None:
        """Work launched on the current stream from now on runs after `marker`. The host does not wait."""
        with self.lock:
            stream = self.current
            stream.agent.join(self.host.now())
            other, count = marker.stream, marker.count
            if other is None or marker.past is None or not self._is_set(marker):
                return
            stream.agent.join(marker.past)
            if other is stream:
                return
            if self.is_deferred(stream):
                stream.queue.append(_Launch(lambda: self._execute(other, count), ()))
            else:
                self.run(other, count)

    def synchronize_marker(self, marker: Marker) -> None:
        """The host waits until the device has reached `marker`."""
        with self.lock:
            self._count_wait()
            if marker.stream is not None and marker.past is not None and self._is_set(marker):
                self.host.join(marker.past)
                self.run(marker.stream, marker.count)

    def synchronize(self, *streams: Stream) -> None:
        """The host waits for everything that was launched on `streams`, or on any stream if there are none.

        A thread of the store may launch before or after that, unless the host has waited for it first.
        """
        with self.lock:
            self._count_wait()
            for stream in streams or list(filter(self._has_launched, self._streams)):
                self.host.join(stream.agent.now())
                self.run(stream, stream.launched)

    def _is_set(self, marker: Marker) -> bool:
        return marker.host is not None and self.host.knows(marker.host)

    def _has_launched(self, stream: Stream) -> bool:
        return stream.launcher is None or self.host.knows(stream.launcher.now())

    def _count_wait(self) -> None:
        self.counts["waits of the store's threads" if thread.is_worker else "waits of the host"] += 1

    @property
    def is_idle(self) -> bool:
        """Return whether all work of all streams and threads is ordered before the calling thread's next work."""
        with self.lock:
            done = self.host.clock
            return all(done.get(agent.number, 0) >= agent.worked for agent in self._agents)

    # -- work ----------------------------------------------------------------------------------------------------------

    def access(self, agent: Agent, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:
        """Record that `agent` reads and writes these tensors; `what` names the operation in messages.

        Raises:
            RaceError: the access races with an earlier one, or a finalizer has seen a race since the last access.
        """
        with self.lock:
            if self.deferred_races:
                raise self.deferred_races[0]
            for tensors, is_write in ((reads, False), (writes, True)):
                for where in filter(None, map(byte_range, tensors)):
                    history = self._history(where, agent)
                    history.access(agent, where.start, where.stop, writes=is_write, what=what)

    def allocated(self, tensors: Sequence[Tensor]) -> None:
        """The current stream allocated `tensors`. Other streams must not use them before this point.

        Once they are freed, later work of this stream may get their memory.
        """
        with self.lock:
            agent = self.current.agent
            agent.join(self.host.now())
            for where in filter(None, map(byte_range, tensors)):
                if where.storage not in self._histories:
                    history = self._history(where, agent)
                    history.access(agent, where.start, where.stop, writes=True, what="its allocation")

    def forget(self, memory: Tensor, past: Past) -> None:
        """Forget accesses to `memory` in `past`: what orders later ones after them orders no others."""
        with self.lock:
            where = byte_range(memory)
            if where is not None and where.storage in self._histories:
                self._histories[where.storage].forget(where.start, where.stop, past.clock)

    def launch(self, run: Callable[[], object], writes: Sequence[Tensor]) -> None:
        """Launch `run`, which writes `writes`, on the current stream: it runs now or, on a deferred stream, later."""
        with self.lock:
            stream = self.current
            if self.is_deferred(stream):
                launched = _Launch(run, [tensor.data for tensor in writes])
                stream.queue.append(launched)
                self._poison(launched)
                self._run_at_random()
                return
            self.run(stream, stream.launched)
            stream.done += 1
            self._run_at_random()
        with untraced():
            run()

    def is_deferred(self, stream: Stream | None = None) -> bool:
        """Return whether launches on the stream, by default the current one, run later."""
        return self._order != "program" and (stream or self.current) is not self.main

    def run(self, stream: Stream, until: int) -> None:
        """Execute the first `until` launches of `stream`, and what they wait for, as far as they have not run."""
        with self.lock:
            if until <= stream.done:
                return
            with untraced():
                for tensor, before in reversed(self._poisoned):
                    tensor.copy_(before)
                self._poisoned.clear()
                self._execute(stream, until)
                for other in self._streams:
                    for launched in other.queue:
                        self._poison(launched)

    def add_time(self, agent: Agent, seconds: float, *, is_launch: bool = True) -> None:
        """`agent` works for so many seconds more, after the host has launched it if `is_launch`."""
        with self.lock:
            if is_launch:
                self.host.time_s += LAUNCH_S
                agent.join(self.host.now())
            agent.time_s += seconds

    # -- the simulation's own ------------------------------------------------------------------------------------------

    def _run_at_random(self) -> None:
        """In order "random", sometimes execute the next launch of a random stream."""
        if self._order == "random" and self._draw.random() < 0.3:
            waiting = [stream for stream in self._streams if stream.queue and not stream.is_network]
            if waiting:
                stream = self._draw.choice(waiting)
                self.run(stream, stream.done + 1)

    def _execute(self, stream: Stream, until: int) -> None:
        while stream.done < until:
            launched = stream.queue.pop(0)
            stream.done += 1
            with untraced():
                launched.run()

    def _poison(self, launched: _Launch) -> None:
        with untraced():
            for tensor in launched.writes:
                self._poisoned.append((tensor, tensor.clone()))
                poison(tensor)

    def _history(self, where: ByteRange, agent: Agent) -> History:
        history = self._histories.get(where.storage)
        if history is None:
            what = f"a tensor of {tuple(where.tensor.shape)} {where.tensor.dtype}, or one that shares its memory"
            history = self._histories[where.storage] = History(what, agent)
            storage = where.tensor.untyped_storage()
            weakref.finalize(storage, self._check_free, where.storage, history).atexit = False
        return history

    def _check_free(self, storage: int, history: History) -> None:
        """Takes no lock: each of two ranks may, under its own lock, free the last reference to the other's memory."""
        if self._histories.get(storage) is history:
            del self._histories[storage]
        if self._number not in thread.agents:
            return  # a thread that never used this device, such as one that cleans up at the end
        try:
            history.free(self.host)
        except RaceError as error:  # a finalizer cannot raise
            self.deferred_races.append(error)


def poison(tensor: Tensor) -> None:
    """Fill with bytes that are NaN in every floating-point format, and an unlikely number in other dtypes."""
    if tensor.is_contiguous():
        tensor.reshape(-1).view(torch.uint8).fill_(0xFF)
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
