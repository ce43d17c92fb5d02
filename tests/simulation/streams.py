"""Streams, events and threads of a simulated GPU: their order, the execution of launches, and simulated time.

The accesses of every launch are passed to the race detector (`races`), in an order that is possible on a GPU. The
launch itself runs at once, in program order; or, if it is on a side stream, as late as the waits for events allow, or
at a random time before that. Until it runs, the memory that it will write is filled with NaN. So code that reads too
early computes NaN, and code that overwrites too early computes wrong results.

Time is simulated, see `simulated_time`. The duration of an operation follows from its bytes or FLOPs, streams run in
parallel as far as they use different resources, and each launch takes the host a few microseconds. So the overlap of
operations is the same on every machine.
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

from tests.simulation.operators import ByteRange, byte_range
from tests.simulation.races import Agent, History, Past, RaceError
from tests.simulation.simulated_time import RATES, Moment, Rates, SimulatedTime, latest
from zero.platform.host_rule import buffers

_DEVICE_NUMBERS = itertools.count()


class Marker:
    """A point of a stream, such as that of an event: all work launched on the stream before it.

    Attributes:
        past: the past of the stream at this point; None until the marker is recorded.
        host: the past of the thread that recorded the marker. For a thread whose own past does not include it, the
            marker may not be recorded yet, and as in CUDA a stream does not wait for an event that is not recorded.
        stream, count: the stream, and the number of launches on it before this point.
    """

    def __init__(self) -> None:
        self.past: Past | None = None
        self.host: Past | None = None
        self.stream: Stream | None = None
        self.count = 0


Key = tuple[Hashable, ...]


class Handoffs:
    """The vector clocks (`Past`) that threads pass to each other when they synchronize.

    A key names the object through which they synchronize: a ticket, a page or a slot.
    """

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
        """Call `acquire` for every key whose first element is `owner`."""
        for key in [key for key in self._released if key[0] == owner]:
            self.acquire(key)

    def take_over(self, key: Key, memory: Tensor) -> None:
        """Order every `release(key)` so far before the next access to `memory`, but before no other access."""
        with self._streams.lock:
            for past in self._released.pop(key, ()):
                self._streams.host.moment = latest(self._streams.host.moment, past.moment)
                self._streams.forget(memory, past)

    def ordered(self, keys: Sequence[Key], run: Callable[[], None]) -> None:
        """Call `run`, ordered after the previous release of each key, and release the keys when it ends."""
        for key in keys:
            self.acquire(key)
        try:
            run()
        finally:
            for key in keys:
                self.release(key)


class _Launch(NamedTuple):
    """A launch that has not run: the function that executes it, and the tensors that it writes."""

    run: Callable[[], object]
    writes: Sequence[Tensor]


class Stream:
    """One stream of the device.

    Attributes:
        agent: the stream as an agent of the race detector.
        launcher: the thread of the store for which the stream was made, or None.
        queue: launches that have not run.
        done: number of launches that have run.
        urgent: whether its kernels interrupt those of other streams, as on a stream of high priority.
    """

    def __init__(
        self, agent: Agent, launcher: Agent | None = None, *, is_network: bool = False, urgent: bool = False
    ) -> None:
        self.agent, self.launcher, self.is_network, self.urgent = agent, launcher, is_network, urgent
        self.queue: list[_Launch] = []
        self.done = 0

    @property
    def launched(self) -> int:
        return self.done + len(self.queue)


class _ThreadState(threading.local):
    """The simulation's state of one thread.

    Attributes:
        agents: number of a device -> the thread as an agent of the race detector.
        streams: number of a device -> the thread's current stream.
        is_untraced: operators are not recorded, because the simulation itself is using tensors.
        asynchronous: copies between host and device do not make the host wait.
        is_worker: the thread is one of a store's threads.
        gpu: the simulated GPU on which the thread's operators run.
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
    """Do not record this thread's operators in the block, because the simulation itself calls them."""
    before, thread.is_untraced = thread.is_untraced, True
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():  # keeps tensors' versions
            yield
    finally:
        thread.is_untraced = before


class Streams:
    """All streams of one simulated device, and the threads that use them.

    Args:
        order: when launches on side streams run; see `simulated_gpu`.
        seed: seed of the random times of order "random".

    Attributes:
        rates: the rates from which durations are computed.
        counts: numbers of launches, waits of the host and bytes copied each way.
        deferred_races: races found by a finalizer, which cannot raise an error. The next access raises the first one.
    """

    def __init__(self, order: str, seed: int, rates: Rates = RATES) -> None:
        self.lock = threading.RLock()
        self.rates, self._time = rates, SimulatedTime(rates.cores)
        self._number = next(_DEVICE_NUMBERS)
        self.counts: Counter[str] = Counter()
        self.deferred_races: list[RaceError] = []
        self._order, self._draw = order, random.Random(seed)
        self._agents: list[Agent] = []
        self._histories: dict[int, History] = {}
        self._streams: list[Stream] = []
        self._named: dict[str, Stream] = {}  # name -> the last stream of that name
        self._poisoned: list[tuple[Tensor, Tensor]] = []  # (tensor, its values before it was filled with NaN)
        self.main = self.stream("the compute stream")

    # -- agents --------------------------------------------------------------------------------------------------------

    def agent(self, name: str) -> Agent:
        """Make a new agent."""
        with self.lock:
            self._agents.append(Agent(len(self._agents), name))
            return self._agents[-1]

    def stream(self, name: str, *, urgent: bool = False) -> Stream:
        """Return the stream of that name, which is made on first use."""
        with self.lock:
            if name not in self._named:
                self._named[name] = Stream(self.agent(name), urgent=urgent)
                self._streams.append(self._named[name])
            return self._named[name]

    def new_stream(self, name: str) -> Stream:
        """Make another stream of that name.

        In simulated time its work begins after that of the last stream of that name, but no order between the two is
        guaranteed.
        """
        with self.lock:
            stream = Stream(self.agent(name), self.host)
            if name in self._named:
                stream.agent.moment = self._named[name].agent.moment
            self._named[name] = stream
            self._streams.append(stream)
            return stream

    def collective(self) -> Stream:
        """Make a stream for one collective, so that the race detector assumes no order between collectives."""
        with self.lock:
            stream = Stream(self.agent("a collective"), is_network=True)
            self._streams.append(stream)
            return stream

    def begin_action(self) -> None:
        """Make the calling thread, one of the store's, a new agent of the race detector.

        So the detector assumes no order between two actions of the store that the same thread happens to run.
        """
        with self.lock:
            before = self.host
            thread.agents[self._number] = self.agent(before.name)
            if not self.rates.cores:
                self.host.moment = before.moment
        buffers.free.clear()  # the detector assumes no order between two actions of a thread

    @property
    def host(self) -> Agent:
        """Return the calling thread as an agent."""
        if self._number not in thread.agents:
            thread.agents[self._number] = self.agent(f"the host's thread {threading.current_thread().name!r}")
        return thread.agents[self._number]

    @property
    def current(self) -> Stream:
        """Return the stream on which the calling thread launches."""
        return thread.streams.get(self._number, self.main)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context manager that makes `stream` this thread's current stream."""
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
        """Order work launched on the current stream from now on after `marker`. The host does not wait."""
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
        """Make the host wait until the device has reached `marker`."""
        with self.lock:
            self._count_wait()
            if marker.stream is not None and marker.past is not None and self._is_set(marker):
                self.host.join(marker.past)
                self.run(marker.stream, marker.count)

    def synchronize(self, *streams: Stream) -> None:
        """Make the host wait for all work launched on `streams`; without arguments, on all streams.

        This does not include work of a store's thread for which the host has not waited, because the thread may launch
        it before or after this call.
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
            RaceError: the access races with an earlier one, or a finalizer has found a race since the last access.
        """
        with self.lock:
            if self.deferred_races:
                raise self.deferred_races[0]
            for tensors, is_write in ((reads, False), (writes, True)):
                for where in filter(None, map(byte_range, tensors)):
                    history = self._history(where, agent)
                    history.access(agent, where.start, where.stop, writes=is_write, what=what)

    def allocated(self, tensors: Sequence[Tensor]) -> None:
        """Record that the current stream allocated `tensors`, as with torch's caching allocator.

        Other streams must not use the tensors before this point. Once the tensors are freed, later work of this stream
        may reuse their memory.
        """
        with self.lock:
            agent = self.current.agent
            agent.join(self.host.now())
            for where in filter(None, map(byte_range, tensors)):
                if where.storage not in self._histories:
                    history = self._history(where, agent)
                    history.access(agent, where.start, where.stop, writes=True, what="its allocation")

    def forget(self, memory: Tensor, past: Past) -> None:
        """Delete the records of the accesses to `memory` in `past`, so that later accesses to it count as ordered."""
        with self.lock:
            where = byte_range(memory)
            if where is not None and where.storage in self._histories:
                self._histories[where.storage].forget(where.start, where.stop, past.clock)

    def launch(self, run: Callable[[], object], writes: Sequence[Tensor]) -> None:
        """Launch `run`, which writes `writes`, on the current stream. It runs later if the stream is deferred."""
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
        """Return whether `stream`, by default the current one, runs its launches later than in program order."""
        return self._order != "program" and (stream or self.current) is not self.main

    def run(self, stream: Stream, until: int) -> None:
        """Execute the first `until` launches of `stream` and the launches for which they wait, unless they have run."""
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

    def add_time(
        self, agent: Agent, seconds: float, resource: str, *, urgent: bool = False, memory_bytes: int = 0
    ) -> None:
        """Add an operation to the simulated time of `agent`, which is the host, or for which the host launches it.

        Args:
            memory_bytes: the bytes of host memory that it reads and writes meanwhile.
        """
        with self.lock:
            if agent is not self.host:
                self.host.moment = self._time.operation(self.host.moment, self.rates.launch_s)
                agent.join(self.host.now())
            moved = self._time.operation(agent.moment, memory_bytes / self.rates.memory_bytes_per_s, "host memory")
            done = self._time.operation(agent.moment, seconds, resource, urgent=urgent, work=agent.number)
            agent.moment = latest(done, moved)

    def seconds(self, moment: Moment) -> float:
        """Return a moment of simulated time in seconds."""
        with self.lock:
            return self._time.seconds(moment)

    # -- private -------------------------------------------------------------------------------------------------------

    def _run_at_random(self) -> None:
        """Execute the next launch of a random stream, with probability 0.3 and only in order "random"."""
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
        """Check that a storage was not freed while in use. Called by its finalizer.

        No lock is taken, because that could deadlock: each of two ranks may, with its own lock held, free the last
        reference to memory of the other.
        """
        if self._histories.get(storage) is history:
            del self._histories[storage]
        if self._number not in thread.agents:
            return  # a thread that never used this device, such as one that cleans up at the end
        try:
            history.free(self.host)
        except RaceError as error:  # a finalizer cannot raise
            self.deferred_races.append(error)


def poison(tensor: Tensor) -> None:
    """Fill `tensor` with bytes that are NaN in floating-point formats and an unlikely number in other dtypes."""
    if tensor.is_contiguous():
        tensor.reshape(-1).view(torch.uint8).fill_(0xFF)
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
