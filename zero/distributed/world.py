"""Communication between ranks: gather, reduce-scatter, all-reduce. The only file that imports torch.distributed.

A `World` moves flat tensors between ranks and adds them up. It knows nothing of layouts, units or steps.
A transport has to bring three primitives (gather, exchange, broadcast); everything else is written once, on top of
them, so that thread ranks and processes add in the same order and give the same bits.

Sums are local: a chunk travels as it is, and the rank that owns it adds what arrived in rank order. That is exact
where gloo's own reduce-scatter is not (it adds bf16 in bf16), deterministic, and faster for large tensors.

Host tensors travel point to point. Gloo's collectives copy through a buffer of their own as large as the result
and take half as long again; they also mix up operations that differ between ranks without a word, where here the
tag of every message is a digest of its operation, so that only equal operations meet.

Every wait has a deadline. A world whose operation failed is finished: its later operations fail as well.

Letters: W world size, P elements of a full flat tensor, S = P / W.
Source: Rajbhandari et al. 2020, "ZeRO", section 7 (reduce-scatter and all-gather in place of all-reduce).
"""

import contextlib
import ctypes
import hashlib
import ipaddress
import json
import os
import socket
import threading
import time
import zlib
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from zero.distributed.failure import (
    GRACE_S,
    NAMING_S,
    LastWord,
    Note,
    Notes,
    Places,
    explain,
    field_difference,
    first_line,
    some_ranks,
)
from zero.distributed.stalled import StallWatch, Wait, open_sockets
from zero.errors import (
    ConfigError,
    DeadlineError,
    HandshakeError,
    LayoutError,
    MachineError,
    RankFailedError,
    WorldError,
)
from zero.platform.cuda import claim_device, compute_device
from zero.platform.device import Device
from zero.platform.handle import Done, Handle as Handle, Then

RECENT_OPS = 64
"""Operations that a rank remembers, to find the first one that ranks started differently."""


class Collectives(NamedTuple):
    """What one rank's gathers and reductions brought it from other ranks, since its world was opened."""

    gather_bytes: int
    """An all-reduce at stage 0 is a reduction and a gather."""
    reduce_bytes: int
    wait_s: float
    """Seconds that the host was in `wait`, which adds up what arrived; on a CUDA world it never waits there."""
    wire_bytes: int = 0
    """Of the first two, what came from other nodes."""


class World(contextlib.AbstractContextManager["World"]):
    """The ranks of one run, seen from one of them.

    Every rank must start the same operations in the same order; handles may be waited for in any order. After its
    `wait` an operation's result may be read and its inputs may be written; on a CUDA world the current stream waits for
    that, the host does not. `what` names the operation's subject (a unit) in error messages.

    Raises:
        DeadlineError: by a handle's `wait`, as those below: the other ranks did not come in time.
        RankFailedError: another rank is gone.
        WorldError: the ranks do not run the same operation.

    Attributes:
        rank: 0 to size - 1.
        size: W.
        local_size: how many of them share this machine's memory: a node.
        nodes_alike: every node has so many ranks, and consecutive ones; else there are no ways by node.
        device: where this rank's full tensors live.
        compute: the same, for the engine: streams, memory, readings.
        timeout_s: the longest wait for another rank, until it is said which one does not come; in seconds.
        traffic: what gathers and reductions have moved.
        keeps_default_group: `close` leaves torch's default process group open, because the script may use it.
    """

    keeps_default_group = False

    def __new__(cls, *_: Any, **__: Any) -> "World":
        if cls is World:
            raise ConfigError("zero.World is made of what torchrun says; write world = zero.World.from_env()")
        return super().__new__(cls)

    def __init__(self, rank: int, size: int, *, device: torch.device | str, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} does not exist in a world of {size}")
        if not timeout_s > 0:
            raise ConfigError(f"launch.timeout must be more than 0 seconds, not {timeout_s}")
        self.rank = rank
        self.size = size
        self.local_size = size
        self.nodes_alike = True
        self.compute = compute_device(torch.device(device))
        self.device = self.compute.device
        self.timeout_s = timeout_s
        self._moved: dict[str, Any] = dict.fromkeys(Collectives._fields, 0)  # by this world and its parts together

    @property
    def traffic(self) -> Collectives:
        return Collectives(*(self._moved[name] for name in Collectives._fields))

    @property
    def nodes(self) -> int:
        """How many machines there are."""
        return -(-self.size // self.local_size)

    def part(self, ranks: Sequence[int], name: str) -> "World":
        """Those of its ranks as a world of its own, with an order of operations of its own. Collective among them.

        It moves and adds as any world does. What it moves counts as its whole world's, and it ends with that.

        Args:
            ranks: with this one among them; their order is that of the part.
            name: the same on each of them; two parts with one name must not have a rank in common.
        """
        raise NotImplementedError

    def _count(self, nbytes: int, *, gather: bool) -> None:
        """From each other rank `nbytes` come."""
        self._moved["gather_bytes" if gather else "reduce_bytes"] += nbytes * (self.size - 1)
        self._moved["wire_bytes"] += nbytes * (self.size - self.local_size)

    def _timed(self, handle: Handle) -> Handle:
        """The operation, whose wait counts."""

        def wait() -> None:
            begin_s = time.perf_counter()
            try:
                handle.wait()
            finally:
                self._moved["wait_s"] += time.perf_counter() - begin_s

        return Then(wait)

    def _be_part(self, whole: "World", ranks: Sequence[int]) -> None:
        """Be these ranks of `whole`, and count for it."""
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        self.local_size = sum(rank // whole.local_size == whole.rank // whole.local_size for rank in ranks)
        self.compute, self.device, self.timeout_s = whole.compute, whole.device, whole.timeout_s
        self._moved = whole._moved

    @staticmethod
    def from_env(timeout_s: float = 300.0, device: str | None = None) -> "World":
        """The world that torchrun's environment describes; a `SoloWorld` where there is none or it has one rank.

        Args:
            timeout_s: the longest wait for another rank, until it is said which one does not come; in seconds.
            device: "cpu" or "cuda"; by default CUDA where torch finds it. LOCAL_RANK picks the GPU.

        Raises:
            ConfigError: the environment is incomplete, or there is no such device.
            DeadlineError: the other ranks did not come.
        """
        if not isinstance(timeout_s, int | float):
            raise ConfigError(f"timeout_s={timeout_s!r}: it is a number of seconds; a device is device={timeout_s!r}")
        if device is not None and str(device).partition(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f'device={device}: it is cpu or cuda; write zero.World.from_env(device="cuda")')
        if _env_int("WORLD_SIZE", "1") == 1:
            return SoloWorld(claim_device(device, _env_int("LOCAL_RANK", "0")), timeout_s=timeout_s)
        return ProcessWorld(timeout_s=timeout_s, device=device)

    def gather(self, shard_S: Tensor, full_P: Tensor, *, what: str = "") -> Handle:
        """Start to put rank r's shard into full_P[r * S : (r + 1) * S], on every rank (all-gather).

        Args:
            shard_S: (S,), any dtype; may be this rank's own slice of `full_P`, which saves a copy.
            full_P: (W * S,), the same dtype, or (W, S) with rows apart from one another; filled when the returned
                handle has been waited for.
            what: names the subject in error messages.

        Raises:
            WorldError: the world is closed. What other ranks did wrong is raised by the handle's `wait`.
        """
        op = _label("gather", what)
        if full_P.dim() == 1:
            _check(op, full_P, shard_S.numel() * self.size, shard_S.dtype)
        else:
            for row in _rows(full_P, self.size):
                _check(op, row, shard_S.numel(), shard_S.dtype)
        _check(op, shard_S, shard_S.numel(), shard_S.dtype)
        self._count(shard_S.nbytes, gather=True)
        return self._timed(self._gather(shard_S.detach(), full_P, op))

    def reduce_scatter(
        self, full_P: Tensor, recv_P: Tensor, sum_S: Tensor, *, accumulate: bool = False, what: str = ""
    ) -> Handle:
        """Add chunk `rank` of every rank's `full_P`: the transpose of `gather`.

        The chunks are added in rank order in sum_S.dtype, (c_0 + c_1) + c_2 and so on, inside `wait`: on a CUDA world
        by the stream that waits, to which `recv_P`, `sum_S` and this rank's part of `full_P` belong until then.

        Args:
            full_P: (W * S,), this rank's summand.
            recv_P: like `full_P`; scratch, holds nothing useful afterwards.
            sum_S: (S,), fp32 or full_P.dtype, apart from `full_P`; receives the sum.
            accumulate: add the sum to what `sum_S` holds already, instead of replacing it.
            what: names the subject in error messages.

        Raises:
            WorldError: the world is closed. What other ranks did wrong is raised by the handle's `wait`.
        """
        op = _label("reduce_scatter", what)
        _check(op, full_P, sum_S.numel() * self.size, full_P.dtype)
        _check(op, sum_S, sum_S.numel(), sum_S.dtype)
        _check(op, recv_P, full_P.numel(), full_P.dtype)
        if self.size > 1 and (_overlap(full_P, sum_S) or _overlap(recv_P, sum_S)):
            raise LayoutError(f"{op}: sum_S lies inside a tensor that is still read while the sum is written")
        arrival = self._exchange(full_P, recv_P, op)

        def add() -> None:
            arrival.wait()
            chunks = list(recv_P.view(self.size, -1).unbind())
            chunks[self.rank] = full_P.view(self.size, -1)[self.rank]
            ordered_sum(chunks, sum_S, accumulate=accumulate, device=self.compute)

        self._count(full_P.nbytes // self.size, gather=False)
        return self._timed(Then(add, (full_P, recv_P, sum_S)))

    def all_reduce(self, values: Tensor, *, what: str = "") -> Handle:
        """Replace `values` (contiguous, any shape, small) by their sum over ranks, added in rank order. Waits.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        op = _label("all_reduce", what)
        _check(op, values, values.numel(), values.dtype, flat=False)
        flat_S = values.view(-1)
        full_P = flat_S.new_empty(flat_S.numel() * self.size)
        arrival = self._gather(flat_S, full_P, op)

        def add() -> None:
            arrival.wait()
            ordered_sum(full_P.view(self.size, -1).unbind(), flat_S, device=self.compute)

        self._count(flat_S.nbytes, gather=False)
        return self._timed(Then(add, (flat_S, full_P)))

    def exchange(self, numbers_N: Tensor, *, what: str = "") -> Tensor:
        """Every rank's `numbers_N`, on every rank: (W, N) in host memory.

        Other operations need not have been started alike so far: only these have to be, among themselves.

        Args:
            numbers_N: (N,) in host memory, any dtype.
        """
        everyone = numbers_N.new_empty(self.size, numbers_N.numel())
        op = _label("exchange", what)
        _check(op, numbers_N, numbers_N.numel(), numbers_N.dtype)
        self._timed(self._gather(numbers_N, everyone.view(-1), op, aside=True)).wait()
        return everyone

    def broadcast(self, tensor: Tensor, source: int = 0, *, what: str = "") -> Handle:
        """Give every rank the `tensor` (contiguous, any shape and dtype) of rank `source`, in place. Waits.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        op = _label(f"broadcast from rank {source}", what)
        if not 0 <= source < self.size:
            raise WorldError(f"{op}: the world has ranks 0 to {self.size - 1}")
        _check(op, tensor, tensor.numel(), tensor.dtype, flat=False)
        return self._broadcast(tensor.view(-1), source, op)

    def barrier(self, what: str = "") -> None:
        """Return when every rank's host is here; device streams are not waited for.

        Raises:
            DeadlineError: some ranks did not come within `timeout_s`; the line names them.
            RankFailedError: another rank is gone.
        """
        token_S = torch.zeros(1, dtype=torch.uint8, device="cpu")
        full_P = torch.empty(self.size, dtype=torch.uint8, device="cpu")
        self._gather(token_S, full_P, _label("barrier", what)).wait()

    def agree(self, fields: Mapping[str, str], what: str = "settings") -> None:
        """Check that every rank came with the same `fields`; costs one gather of 64 bytes when they did.

        Raises:
            HandshakeError: on every rank, with the first field that differs, its values and their ranks.
        """
        text = json.dumps(dict(fields), sort_keys=True)
        digest_S = _as_bytes(hashlib.sha256(text.encode()).hexdigest())
        digests = digest_S.new_empty(self.size, digest_S.numel())
        self._gather(digest_S, digests.view(-1), _label("agree", what)).wait()
        if not torch.equal(digests, digest_S.expand_as(digests)):
            different = field_difference([json.loads(own) for own in self.gather_texts(text, what)])
            raise HandshakeError(f"the ranks have different {what}: {different}")

    def share(self, text: str, source: int = 0) -> str:
        """The `text` of rank `source`, on every rank.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        numel = torch.tensor([len(text.encode())], device="cpu")
        self.broadcast(numel, source, what="the length of a text").wait()
        body = _as_bytes(text) if self.rank == source else torch.empty(int(numel), dtype=torch.uint8, device="cpu")
        self.broadcast(body, source, what="a text").wait()
        return _as_text(body)

    def gather_texts(self, text: str, what: str) -> list[str]:
        """Every rank's `text`, on every rank."""
        numels = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self._gather(torch.tensor([len(text.encode())], device="cpu"), numels, _label("agree on lengths", what)).wait()
        padded_S = _as_bytes(text.encode().ljust(int(numels.max())).decode())
        texts = padded_S.new_empty(self.size, padded_S.numel())
        self._gather(padded_S, texts.view(-1), _label("agree on fields", what)).wait()
        return [_as_text(row[:n]) for row, n in zip(texts, numels.tolist(), strict=True)]

    def at(self, place: str) -> None:  # nobody waits for a rank that is alone
        """Say what this rank is at, such as "step 3, backward", for those who may wait for it in vain. Not collective.

        It costs a few microseconds: for the phases of a step, not for each of its operations.
        """

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Hold what the ranks of one process share (torch's global generator); free where ranks are processes."""
        return contextlib.nullcontext()

    def fail(self, error: BaseException) -> None:  # nobody to tell in a world of one
        """Tell the other ranks that this one leaves because of `error`, so that they can name it."""

    def close(self) -> None:  # nothing to give back in a world of one
        """Leave the world. Closing again is free."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, {self.device})"

    @abstractmethod
    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        """Start a gather; `aside` from the order of all others, for host tensors."""

    @abstractmethod
    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        """Start sending chunk r of `full_P` to rank r, where it becomes chunk `rank` of `recv_P`."""

    @abstractmethod
    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle: ...


class SoloWorld(World):
    """A world of one rank: nothing to wait for."""

    def __init__(self, device: torch.device | str = "cpu", *, timeout_s: float = 300.0) -> None:
        super().__init__(0, 1, device=device, timeout_s=timeout_s)

    def reduce_scatter(
        self, full_P: Tensor, recv_P: Tensor, sum_S: Tensor, *, accumulate: bool = False, what: str = ""
    ) -> Handle:
        """As in any world; `recv_P` is left alone."""
        return super().reduce_scatter(full_P, full_P, sum_S, accumulate=accumulate, what=what)

    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        if shard_S.data_ptr() != full_P.data_ptr():
            full_P.copy_(shard_S)
        return Done()

    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return Done()

    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        return Done()


class _Transport(World):
    """The primitives, from messages between ranks in host memory and from collectives of GPUs."""

    _whole: "ProcessWorld"  # whose connections take the messages: this one, or what it is a part of
    _ranks: Sequence[int]  # what its ranks are there
    _name: str  # of the order that its operations are in
    _group: dist.ProcessGroup | None  # for collectives of GPUs

    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        if self._by_collective(full_P):
            return self._collective(_all_gather if full_P.dim() == 1 else _all_gather_rows, full_P, shard_S, op)
        slots = _rows(full_P, self.size)
        if slots[self.rank].data_ptr() != shard_S.data_ptr():
            slots[self.rank].copy_(shard_S)
        others = self._others()
        return self._messages(op, full_P, dict.fromkeys(others, shard_S), {r: slots[r] for r in others}, aside=aside)

    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        if self._by_collective(full_P):
            return self._collective(dist.all_to_all_single, recv_P, full_P, op)
        chunks, slots = full_P.view(self.size, -1).unbind(), recv_P.view(self.size, -1).unbind()
        others = self._others()
        return self._messages(op, full_P, {r: chunks[r] for r in others}, {r: slots[r] for r in others})

    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        if self._by_collective(flat):
            return self._collective(
                lambda out, _, **keywords: dist.broadcast(out, group_src=source, **keywords), flat, flat, op
            )
        if self.rank == source:
            return self._messages(op, flat, dict.fromkeys(self._others(), flat), {})
        return self._messages(op, flat, {}, {source: flat})

    def _by_collective(self, tensor: Tensor) -> bool:
        return not self.compute.shares_memory and self.compute.is_home_of(tensor)

    def _others(self) -> list[int]:
        """The other ranks, nearest first, so that no rank is everyone's first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def _messages(
        self, op: str, whole: Tensor, out: Mapping[int, Tensor], into: Mapping[int, Tensor], *, aside: bool = False
    ) -> Handle:
        """Start sending `out[r]` to rank r and receiving `into[r]` from it."""
        sent, received = ({self._ranks[r]: tensor for r, tensor in tensors.items()} for tensors in (out, into))
        return self._whole._send(op, whole, sent, received, f"{self._name} aside" if aside else self._name)

    def _collective(self, collective: Callable[..., Any], out: Tensor, into: Tensor, op: str) -> Handle:
        """Start an NCCL collective. Only bytes move, so every dtype may travel."""
        self._whole._begin(op, out, self._name)
        if not out.numel():
            return Done()
        out_bytes, into_bytes = out.view(torch.uint8), into.view(torch.uint8)
        start = partial(collective, out_bytes, into_bytes, group=self._group, async_op=True)
        work = self._whole._try(op, None, start)
        return Then(lambda: self._whole._try(op, None, work.wait), (out, into))


class ProcessWorld(_Transport):
    """One process per rank: gloo for tensors in host memory, NCCL for tensors on GPUs.

    Reads torchrun's environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK for the GPU. Where a
    default process group exists already it is left alone, and so is its order of collectives.

    An operation waits for five seconds less than `timeout_s`, so that who is missing is said within it; where that is
    less than ten, for half of it. On a GPU the host never waits: the deadline is kept by NCCL's watchdog, which ends
    the process.
    """

    def __init__(self, *, timeout_s: float = 300.0, device: str | None = None) -> None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"the environment lacks {', '.join(missing)}; start the ranks with torchrun")
        here = claim_device(device, _env_int("LOCAL_RANK", "0"))
        super().__init__(_env_int("RANK"), _env_int("WORLD_SIZE"), device=here, timeout_s=timeout_s)
        self._whole, self._ranks, self._name = self, range(self.size), ""
        self.local_size = min(_env_int("LOCAL_WORLD_SIZE", str(self.size)), self.size)
        self._store = _open_store(self.rank, self.size, timeout_s)
        gpu = self.compute.name()
        if gpu and self._store.add(f"gpu {gpu}", 1) > 1:
            raise MachineError(
                f"rank {self.rank} of {self.size} sees one GPU, which another rank has; type launch.ranks=1, or "
                "launch.device=cpu"
            )
        address = os.environ["MASTER_ADDR"], _env_int("MASTER_PORT")
        self._notes = Notes(self._store, self.rank, self.size, partial(_listens, address))
        self._places = Places(self.rank)
        self._communicators: dict[str, dist.ProcessGroup] = {}  # of parts, by their names
        self._hosts = [host.decode() for host in self._store.multi_get([f"here/{r}" for r in range(self.size)])]
        if self.local_size < self.size:
            _have_gloo_listen_towards(address)
        self._owns_default = not dist.is_initialized()
        before = open_sockets()
        self._group = self._open_group()
        connections = open_sockets() - before
        self._numbers = Counter[str]()  # of operations that were started, by the order that they are in
        self._started: deque[tuple[int, str]] = deque(maxlen=RECENT_OPS)
        self._failure: WorldError | None = None
        self._raised = False
        self._last_word = LastWord(self._notes)
        self._stalls = StallWatch(
            self._notes,
            started=lambda: dict(self._started.copy()),  # copied at once, while the other thread goes on
            counted=self._numbers.copy,
            sockets=connections,
        )
        self.nodes_alike = self._are_nodes_alike()

    @property
    def _wait_s(self) -> float:
        """The deadline of an operation."""
        return self.timeout_s - min(NAMING_S, self.timeout_s / 2)

    def _are_nodes_alike(self) -> bool:
        """The same on every rank."""
        here = self.local_size, _env_int("LOCAL_RANK", str(self.rank % self.local_size))
        places = self.exchange(torch.tensor(here, device="cpu"), what="places on nodes").tolist()
        alike = all(place == [self.local_size, rank % self.local_size] for rank, place in enumerate(places))
        return alike and not self.size % self.local_size

    def _open_group(self) -> dist.ProcessGroup | None:
        """Returns when all are connected: a rank that left earlier would tear connections that others still make."""
        begin_s = time.monotonic()
        try:
            group = self._connect()
        except RuntimeError as error:
            ran_out = time.monotonic() - begin_s >= self._wait_s
            refusal, within = (DeadlineError, f" within {self._wait_s:g} s") if ran_out else (RankFailedError, "")
            message = f"rank {self.rank} of {self.size} could not connect to the others{within}: {first_line(error)}"
            if self.local_size < self.size and self.compute.shares_memory:
                message += "; GLOO_SOCKET_IFNAME must name the interface through which the nodes reach each other"
            with contextlib.suppress(RuntimeError):  # the store may be gone with its host
                self._store.set(f"connected/{self.rank}", message)
            raise refusal(message) from error
        self._store.set(f"connected/{self.rank}", "")
        _await_all(self._store, "connected", self.rank, self.size, self.timeout_s, "connect")
        for r in self._others():
            if message := self._store.get(f"connected/{r}").decode():
                raise RankFailedError(message)
        self._store.set(f"joined/{self.rank}", "")
        if self.rank == 0:  # it may be the store's host, and stays until the others have read
            _await_all(self._store, "joined", self.rank, self.size, self.timeout_s, "join")
        return group

    def _connect(self) -> dist.ProcessGroup | None:
        timeout = timedelta(seconds=self._wait_s)
        backend, device_id = self.compute.backend, self.compute.bound
        if not self._owns_default:
            return dist.new_group(backend=backend, timeout=timeout)
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timeout, device_id=device_id
        )
        return dist.group.WORLD

    def at(self, place: str) -> None:
        self._places.set(place)

    def fail(self, error: BaseException) -> None:
        self._raised = True
        self._notes.post(Note.of_raise(error))

    def part(self, ranks: Sequence[int], name: str) -> "World":
        return _ProcessPart(self, ranks, name)

    def _communicator(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup | None:
        """NCCL's among these ranks; None on a CPU, where messages find their way by their tags.

        Parts of the same ranks have one each: below stage 3 a gather may come before a sum on one rank and after it on
        another, and a communicator pairs operations in the order in which they come.
        """
        if self.compute.shares_memory:
            return None
        if name not in self._communicators:
            timeout, backend = timedelta(seconds=self._wait_s), self.compute.backend
            group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
            self._communicators[name] = group
        return self._communicators[name]

    def close(self) -> None:
        if self._group is not None:
            self._last_word.cancel()
            self._stalls.close()
            self._notes.post(Note.of_leaving())
            group, self._group = self._group, None
            failed = self._failure is not None or self._raised  # here or elsewhere
            for one in (*self._communicators.values(), group):
                if self.keeps_default_group and self._owns_default and one is group:
                    continue
                if failed and not self.compute.shares_memory:
                    _abort(one)  # to destroy it would wait for kernels whose other half never comes
                else:
                    dist.destroy_process_group(None if self._owns_default and one is group else one)

    def _send(
        self, op: str, whole: Tensor, out: Mapping[int, Tensor], into: Mapping[int, Tensor], order: str
    ) -> Handle:
        """Start sending and receiving, as `_messages` does, among the ranks of this world."""
        tag = self._begin(op, whole, order)
        if not whole.numel():
            return Done()
        waited = Wait(order, self._numbers[order], signature_of(op, whole), (*(out or into),))
        works = [(peer, self._try(op, peer, dist.irecv, flat, peer, self._group, tag)) for peer, flat in into.items()]
        works += [(peer, self._try(op, peer, dist.isend, flat, peer, self._group, tag)) for peer, flat in out.items()]

        def wait() -> None:
            if self._failure is not None:
                raise self._failure
            end_s = time.monotonic() + self._wait_s
            self._stalls.begin(waited)
            try:
                for peer, work in works:
                    self._try(op, peer, work.wait, timedelta(seconds=max(0.001, end_s - time.monotonic())))
            finally:
                self._stalls.end()

        return Then(wait, (out, into))

    def _begin(self, op: str, whole: Tensor, order: str) -> int:
        """Note the operation as started; returns the tag that only the same operation of another rank has."""
        if self._group is None:
            raise WorldError(f"{op}: rank {self.rank} has left this world; open a new one")
        if self._failure is not None:
            raise self._failure
        signature = signature_of(op, whole)
        self._numbers[order] += 1
        if not order.endswith(" aside"):  # the numbers of parts come after those of the whole world
            self._started.append((self._numbers[order] + (_tag(order) << 32 if order else 0), signature))
        return _tag(f"{order} {self._numbers[order]} {signature}")

    def _try(self, op: str, peer: int | None, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            if self._failure is None:
                where = f"{op} ({self._places.own})" if self._places.own else op
                mine = Note.of_wait(error, where, dict(self._started), peer)
                self._notes.post(mine)
                notes = self._notes.read()
                places, hosts = self._places.of, self._hosts
                self._failure = explain(self.rank, self.size, mine, notes, self._wait_s, places, hosts)
            raise self._failure from error


class _ProcessPart(_Transport):
    """Some of the ranks of a `ProcessWorld`. Messages go over its connections; GPUs get a communicator of their own."""

    def __init__(self, whole: ProcessWorld, ranks: Sequence[int], name: str) -> None:
        self._be_part(whole, ranks)
        self._whole, self._ranks, self._name = whole, tuple(ranks), name
        self._group = whole._communicator(ranks, name)


def _abort(group: dist.ProcessGroup) -> None:
    """End what the group's communicators of GPUs have under way; torch forgets the group."""
    dist.distributed_c10d._abort_process_group(group)


_OPENING = threading.Lock()
_HOSTED: dict[tuple[str, int], dist.Store] = {}
"""Stores that this process hosts until it ends: a rank may open its next world before this one has left the last."""


def rank_of_process() -> int:
    """This process's rank, which is known before there is a world."""
    return dist.get_rank() if dist.is_initialized() else _env_int("RANK", "0")


def open_default_group() -> None:
    """Have torch's default process group open, in a world of one too: for scripts that ask torch for their rank."""
    with _OPENING:  # ranks may be threads
        if dist.is_initialized():
            return
        world = World.from_env()
        if world.size == 1:
            dist.init_process_group(world.compute.backend, store=dist.HashStore(), rank=0, world_size=1)
        world.keeps_default_group = True
        world.close()


def default_group() -> dist.ProcessGroup | None:
    """Torch's default process group; None where it is not open."""
    return dist.group.WORLD


def _open_store(rank: int, size: int, timeout_s: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, once every rank is there.

    torchrun's agent hosts it, or else rank 0 does.
    """
    host, port = os.environ["MASTER_ADDR"], _env_int("MASTER_PORT")
    hosting_is_ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    hosting = rank == 0 and hosting_is_ours
    timeout = timedelta(seconds=timeout_s)
    try:
        server = dist.TCPStore(host, port, size, hosting, timeout, wait_for_workers=False, multi_tenant=True)
        if hosting:
            _HOSTED[host, port] = server
        # A second world in the same processes must not find the first one's keys, nor a later start, in an agent's
        # store, those of an earlier one. Without that the ranks of two nodes may have counted different restarts.
        start = "0" if hosting_is_ours else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        opened = server.add(f"zero/opened/{rank}/{start}", 1)
        store = dist.PrefixStore(f"zero/{start}/{opened}", server)
        store.set(f"here/{rank}", socket.gethostname())
    except RuntimeError as error:
        refusal = DeadlineError if "timed out" in str(error).lower() else WorldError
        raise refusal(
            f"rank {rank} of {size} found no store at {host}:{port} within {timeout_s:g} s: {first_line(error)}"
        ) from error
    _await_all(store, "here", rank, size, timeout_s, "start")
    return store


def _listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, GRACE_S).close()
    except OSError:
        return False
    return True


def _have_gloo_listen_towards(address: tuple[str, int]) -> None:
    """Name the interface through which this machine reaches `address`, unless the user has named one.

    By itself gloo listens where the machine's own name leads, and that is often the loopback.
    """
    with socket.create_connection(address, GRACE_S) as connection:
        own = connection.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in (one.address for one in addresses) and not ipaddress.ip_address(own).is_loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _await_all(store: dist.Store, key: str, rank: int, size: int, timeout_s: float, to: str) -> None:
    """Wait until every rank has set its `key`, as it does once it came `to` that point."""
    begin_s = time.monotonic()
    try:
        store.wait([f"{key}/{r}" for r in range(size)], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if time.monotonic() - begin_s < timeout_s:
            raise WorldError(
                f"rank {rank} of {size} lost the store as it waited for the others to {to}: {first_line(error)}"
            ) from error
        absent = [r for r in range(size) if not store.check([f"{key}/{r}"])]
        raise DeadlineError(f"rank {rank} of {size} waited {timeout_s:g} s for {some_ranks(absent)} to {to}") from error


@torch.no_grad()
def ordered_sum(
    chunks: Sequence[Tensor], sum_S: Tensor, *, accumulate: bool = False, device: Device | None = None
) -> None:
    """Add `chunks` in order, in sum_S.dtype: sum_S = [sum_S +] ((c_0 + c_1) + c_2) ...

    Works through `Device.sum_numel` elements at a time and allocates two such pieces at most: a host add of two dtypes
    would first make a converted copy of the whole operand.

    Args:
        chunks: each (S,), all of one dtype; left as they are, so they must be apart from `sum_S`.
        sum_S: (S,).
        device: where; None: a CPU.
    """
    on_host = device is None or device.shares_memory
    numel = min((device or Device).sum_numel, sum_S.numel())
    total = sum_S.new_empty(numel) if accumulate else None
    cast = sum_S.new_empty(numel) if on_host and chunks[0].dtype != sum_S.dtype else None
    if not numel:
        return
    for out, first, *rest in zip(sum_S.split(numel), *(chunk.split(numel) for chunk in chunks), strict=True):
        acc = out if total is None else total[: out.numel()]
        if rest and first.dtype == acc.dtype:
            torch.add(first, rest.pop(0), out=acc)
        else:
            acc.copy_(first)
        for piece in rest:
            acc.add_(piece if cast is None else cast[: out.numel()].copy_(piece))
        if total is not None:
            out.add_(acc)


def _label(op: str, what: str) -> str:
    return f"{op} of {what}" if what else op


def _check(op: str, tensor: Tensor, numel: int, dtype: torch.dtype, *, flat: bool = True) -> None:
    if tensor.numel() != numel or tensor.dtype != dtype or not tensor.is_contiguous() or (flat and tensor.dim() != 1):
        raise LayoutError(
            f"{op}: got shape {tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}; "
            f"it takes {numel} contiguous elements of {dtype}"
        )


def _rows(full_P: Tensor, count: int) -> tuple[Tensor, ...]:
    """The shards of a full tensor."""
    return (full_P.view(count, -1) if full_P.dim() == 1 else full_P).unbind()


def signature_of(op: str, whole: Tensor) -> str:
    """What must be the same on every rank."""
    return f"{op}, {whole.numel()} elements of {whole.dtype}"


def _tag(operation: str) -> int:
    return zlib.crc32(operation.encode()) & 0x7FFF_FFFF


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _env_int(name: str, default: str = "") -> int:
    value = os.environ.get(name, default)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"the environment variable {name} must be a whole number, not {value!r}") from None


def _as_bytes(text: str) -> Tensor:
    octets = bytearray(text.encode())
    return torch.frombuffer(octets, dtype=torch.uint8) if octets else torch.empty(0, dtype=torch.uint8, device="cpu")


def _as_text(octets: Tensor) -> str:
    return ctypes.string_at(octets.data_ptr(), octets.numel()).decode()


def _all_gather_rows(out: Tensor, into: Tensor, **keywords: Any) -> Any:
    return dist.all_gather(list(out.unbind()), into, **keywords)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
