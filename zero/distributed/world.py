"""Communication between ranks: gather, reduce-scatter, all-reduce of flat tensors.

A `World` knows nothing of layouts, units or steps. A transport implements three primitives (gather, exchange,
broadcast); everything else is written once, on top of them, so that ranks that are threads and ranks that are processes
add in the same order and give the same bits.

Sums are computed locally: ranks send chunks unchanged, and the rank that owns a chunk adds the received ones in rank
order. This is exact where gloo's own reduce-scatter is not (it adds bf16 in bf16), deterministic, and faster for large
tensors.

Letters: W world size, P elements of a full flat tensor, S = P / W.
Source: Rajbhandari et al. 2020, "ZeRO", section 7 (reduce-scatter and all-gather in place of all-reduce).
"""

import contextlib
import ctypes
import hashlib
import json
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from zero.distributed.failure import field_difference
from zero.distributed.mesh import check_started, dimension_of, ranks_of
from zero.distributed.ordered_sum import ordered_sum
from zero.distributed.process_group import (
    ProcessGroup,
    all_gather,
    all_gather_rows,
    all_to_all,
    all_to_all_uneven,
    broadcast,
    default_group,
    group_count,
    open_group_of_one,
    reduce_scatter,
)
from zero.distributed.rendezvous import check_environment, env_int
from zero.errors import ConfigError, HandshakeError, LayoutError, WorldError
from zero.platform.cuda import claim_device, compute_device
from zero.platform.handle import Done, Handle as Handle, Then
from zero.platform.modes import unobserved


class Collectives(NamedTuple):
    """Bytes that one rank received in gathers and reductions, and time of waits, since its world was opened."""

    gather_bytes: int
    reduce_bytes: int
    wait_s: float
    """Seconds that the host spent in `wait`, additions of chunks included. On a CUDA world the host does not wait."""
    wire_bytes: int = 0
    """The part of `gather_bytes` and `reduce_bytes` that came from other nodes."""


class World(contextlib.AbstractContextManager["World"]):
    """The ranks of one run, seen from one of them.

    Every rank must start the same operations in the same order; handles may be waited for in any order. After the
    handle's `wait` an operation's result may be read and its inputs may be written; on a CUDA world the current stream
    waits, the host does not. `what` names the operation's subject (a unit) in error messages. After a failed operation
    the world cannot be used again.

    Raises:
        DeadlineError: from a handle's `wait`, as the errors below: the other ranks did not start the operation in time.
        RankFailedError: another rank has failed.
        WorldError: the ranks do not run the same operation.

    Attributes:
        rank: 0 to size - 1.
        size: W.
        local_size: number of the world's ranks on this node.
        nodes_alike: whether all nodes have the same number of ranks, with consecutive ranks; otherwise collectives do
            not go by node.
        device: the device of this rank's full tensors.
        compute: streams, memory and measurements of that device, for the engine.
        timeout_s: the longest wait for another rank, in seconds; then an error names the missing rank.
        traffic: bytes that this rank received in gathers and reductions, and time of waits.
        coordinates: this rank's place in the dimensions beside the world, by name, such as {"tp": 1}: in checkpoints.
        keeps_default_group: `close` leaves torch's default process group open, because the script may use it.
    """

    coordinates: Mapping[str, int] = MappingProxyType({})
    keeps_default_group = False
    _whole: "World | None" = None  # None: not a part
    _ranks: Sequence[int]  # rank of this world -> its rank in the whole world
    _name = ""  # name of the order of its operations

    def __init__(self, rank: int, size: int, *, device: torch.device | str, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} does not exist in a world of {size}")
        if not timeout_s > 0:
            raise ConfigError(f"launch.timeout must be more than 0 seconds, not {timeout_s}")
        self.rank = rank
        self.size = size
        self._ranks = range(size)
        self.local_size = size
        self.nodes_alike = True
        self.compute = compute_device(torch.device(device))
        self.device = self.compute.device
        self.timeout_s = timeout_s
        self._moved: dict[str, Any] = dict.fromkeys(Collectives._fields, 0)  # shared with the world's parts

    @property
    def traffic(self) -> Collectives:
        return Collectives(*(self._moved[name] for name in Collectives._fields))

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return -(-self.size // self.local_size)

    @property
    def whole(self) -> "World":
        """The world of all ranks of the run, if this one is a part of it; else this one."""
        return self if self._whole is None else self._whole

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of this world's ranks among all ranks of the run."""
        return tuple(self._ranks)

    def part(self, ranks: Sequence[int], name: str, *, priority: bool = False, alike: bool = False) -> "World":
        """Return some ranks as a world with its own order of operations. Collective among them.

        Its traffic is added to the whole world's, and the two are closed together.

        Args:
            ranks: the ranks, in their order in the part; this rank is among them.
            name: the name of the part, the same on each of its ranks. Parts of the same ranks with one name have one
                order of operations.
            priority: on a GPU, its collectives have a stream of high priority.
            alike: each rank is in one part of this name, and all of them run the same operations, so that a rank which
                runs others is found by comparison with any rank.
        """
        raise NotImplementedError

    def _count(self, nbytes: int, *, gather: bool, ring: bool = False) -> None:
        """Add to the traffic counter the `nbytes` that this rank receives from each other rank.

        Args:
            ring: it receives them from one rank instead, which is on another node for one rank of each node.
        """
        received = nbytes * (self.size - 1)
        self._moved["gather_bytes" if gather else "reduce_bytes"] += received
        of_nodes = received // self.local_size * (self.nodes > 1) if ring else nbytes * (self.size - self.local_size)
        self._moved["wire_bytes"] += of_nodes

    def _timed(self, handle: Handle) -> Handle:
        """Return a handle whose `wait` adds its time to the traffic counter."""

        def wait() -> None:
            begin_s = time.perf_counter()
            try:
                handle.wait()
            finally:
                self._moved["wait_s"] += time.perf_counter() - begin_s

        return Then(wait)

    def _be_part(self, whole: "World", ranks: Sequence[int], name: str, *, alike: bool = False) -> None:
        """Make this world the part `ranks` of `whole`, with the traffic counter of `whole`.

        The name of its order has a hash of the ranks, unless all parts of the name run the same operations.
        """
        self._whole, self._ranks = whole, tuple(ranks)
        self._name = name if alike else f"{name} of {len(ranks)} ranks {crc32(repr(self._ranks).encode()):08x}"
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        nodes = [rank // whole.local_size for rank in ranks]
        self.local_size = nodes.count(whole.rank // whole.local_size)
        self.nodes_alike = whole.nodes_alike and nodes == sorted(nodes) and len({*Counter(nodes).values()}) == 1
        self.compute, self.device, self.timeout_s = whole.compute, whole.device, whole.timeout_s
        self._moved = whole._moved

    @staticmethod
    def from_env(timeout_s: float = 300.0, device: str | None = None) -> "World":
        """Open the world that torchrun's environment describes; a `SoloWorld` without one, or with one rank.

        Args:
            timeout_s: the longest wait for another rank, in seconds; then an error names the missing rank.
            device: "cpu" or "cuda"; by default CUDA where torch finds it. LOCAL_RANK picks the GPU.

        Raises:
            ConfigError: the environment is incomplete, or there is no such device.
            DeadlineError: the other ranks did not connect in time.
        """
        if device is not None and str(device).partition(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f'device={device}: must be cpu or cuda. Write zero.World.from_env(device="cuda")')
        if env_int("WORLD_SIZE", "1") == 1:
            return SoloWorld(claim_device(device, env_int("LOCAL_RANK", "0")), timeout_s=timeout_s)
        return ProcessWorld(timeout_s=timeout_s, device=device)

    @staticmethod
    def from_group(
        group: object,
        *,
        coordinates: Mapping[str, int] = MappingProxyType({}),
        timeout_s: float = 300.0,
        device: str | None = None,
    ) -> "World":
        """Open the world of the ranks of a process group of torch. Collective: every rank of the run passes its group.

        State is sharded over this group alone. Connections are opened between all ranks of the run, beside torch's, so
        that an error of any rank reaches all; closing the world closes them.

        Args:
            group: the process group, or a mesh of one dimension.
            coordinates: the names of the dimensions that are split in other ways, and this rank's place in each, such
                as {"tp": 1}: the same on all ranks of the group, and others in each group. Checkpoints need them.
            timeout_s, device: as in `from_env`.

        Raises:
            ConfigError: `group` is not a group with this rank, ranks passed other groups or coordinates, or the
                environment does not describe torch's process group; or as `from_env`.
        """
        return _world_of(ranks_of(group), coordinates, timeout_s, device)

    @staticmethod
    def from_mesh(mesh: object, name: str, *, timeout_s: float = 300.0, device: str | None = None) -> "World":
        """Open the world of one dimension of a mesh, as `from_group`. Collective among all ranks of the run.

        Args:
            mesh: a `DeviceMesh` of torch with named dimensions.
            name: the dimension, which may be a flattened one. The others are in `coordinates`.
            timeout_s: as in `from_env`.
            device: as in `from_env`, but by default the mesh's.

        Raises:
            ConfigError: the mesh has no such dimension, or not this rank; or as `from_env`.
        """
        line = dimension_of(mesh, name)
        return _world_of(line.ranks, line.coordinates, timeout_s, device or line.device)

    def beside(self, group: object) -> "World":
        """Return the ranks of another group of this rank as a world for host tensors, closed with this one. Collective.

        Args:
            group: a process group, a mesh of one dimension, or a part of the same whole world, which is returned.
        """
        if isinstance(group, World):
            return group
        return self.whole._beside(ranks_of(group))

    def _beside(self, ranks: Sequence[int]) -> "World":
        return self.part(ranks, "beside")

    def gather(self, shard_S: Tensor, full_P: Tensor, *, what: str = "") -> Handle:
        """Start to copy rank r's shard into full_P[r * S : (r + 1) * S], on every rank (all-gather).

        Args:
            shard_S: (S,), any dtype; may be this rank's own slice of `full_P`, which saves a copy.
            full_P: (W * S,), the same dtype, or (W, S) with rows that need not be adjacent; filled when the returned
                handle has been waited for.
            what: names the subject in error messages.

        Raises:
            WorldError: the world is closed. The handle's `wait` raises the errors of other ranks.
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
        """Start to add chunk `rank` of every rank's `full_P` into `sum_S` (reduce-scatter).

        The chunks are added inside `wait`, in rank order and in sum_S.dtype: (c_0 + c_1) + c_2 and so on. On a CUDA
        world the stream that waits adds them, and no other stream may use `recv_P`, `sum_S` or this rank's chunk of
        `full_P` before.

        Args:
            full_P: (W * S,), this rank's summand.
            recv_P: like `full_P`; scratch, holds nothing useful afterwards.
            sum_S: (S,), fp32 or full_P.dtype, not in the memory of `full_P` or `recv_P`; receives the sum.
            accumulate: add the sum to `sum_S` instead of replacing it.
            what: names the subject in error messages.

        Raises:
            WorldError: the world is closed. The handle's `wait` raises the errors of other ranks.
        """
        return self._reduced(full_P, recv_P, sum_S, native=False, accumulate=accumulate, what=what)

    def native_reduce_scatter(
        self, full_P: Tensor, recv_S: Tensor, sum_S: Tensor, *, accumulate: bool = False, what: str = ""
    ) -> Handle:
        """Start a reduce-scatter in which the backend adds, in an order of its own and in the dtype of `full_P`.

        The backend may need no memory for received chunks. On one backend and world the bits of a sum depend only
        on the summands and on the place of a chunk in `full_P`.

        Args:
            full_P: (W * S,), this rank's summand.
            recv_S: (S,) of the same dtype; scratch, holds nothing useful afterwards.
            sum_S: (S,), not in the memory of the others; receives the sum inside `wait`.
            accumulate: add the sum to `sum_S` instead of replacing it.
            what: names the subject in error messages.

        Raises:
            WorldError: the world is closed. The handle's `wait` raises the errors of other ranks.
        """
        return self._reduced(full_P, recv_S, sum_S, native=True, accumulate=accumulate, what=what)

    def _reduced(
        self, full_P: Tensor, received: Tensor, sum_S: Tensor, *, native: bool, accumulate: bool, what: str
    ) -> Handle:
        op = _label("reduce_scatter", what)
        _check(op, full_P, sum_S.numel() * self.size, full_P.dtype)
        _check(op, sum_S, sum_S.numel(), sum_S.dtype)
        _check(op, received, (sum_S if native else full_P).numel(), full_P.dtype)
        if self.size > 1 and (_overlap(full_P, sum_S) or _overlap(received, sum_S)):
            raise LayoutError(
                f"{op}: the output sum_S overlaps an input, which is still read. Allocate sum_S separately."
            )
        arrival = (self._sum if native else self._exchange)(full_P, received, op)

        def add() -> None:
            arrival.wait()
            chunks = received.view(1 if native else self.size, -1)
            own = None if native else full_P.view_as(chunks)[self.rank]
            ordered_sum(chunks, sum_S, own, 0 if native else self.rank, accumulate=accumulate, device=self.compute)

        self._count(full_P.nbytes // self.size, gather=False, ring=native)
        return self._timed(Then(add, (full_P, received, sum_S)))

    def reshard(
        self, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], *, what: str = ""
    ) -> Handle:
        """Start to cut a flat tensor between the ranks in another way (an all-to-all with parts of uneven sizes).

        Args:
            source: elements [before[rank], before[rank + 1]) of the flat tensor.
            into: receives its elements [after[rank], after[rank + 1]).
            before, after: W + 1 ascending indices from 0 to the size of the flat tensor.
            what: names the subject in error messages.
        """
        op, rank = _label("reshard", what), self.rank
        _check(op, source, before[rank + 1] - before[rank], source.dtype)
        _check(op, into, after[rank + 1] - after[rank], source.dtype)
        for r, numel in enumerate(common_numels(after, before, rank)):
            self._moved["reduce_bytes"] += (r != rank) * numel * source.itemsize
            self._moved["wire_bytes"] += (r // self.local_size != rank // self.local_size) * numel * source.itemsize
        return self._timed(self._reshard(source, into, before, after, op))

    def all_to_all(self, full_P: Tensor, recv_P: Tensor, *, what: str = "") -> Handle:
        """Start to send chunk r of `full_P` to rank r, where it becomes chunk `rank` of `recv_P` (all-to-all).

        Args:
            full_P: (W * S,), the chunks that this rank sends, its own included.
            recv_P: like `full_P`, not in its memory; filled when the returned handle has been waited for.
            what: names the subject in error messages.

        Raises:
            WorldError: the world is closed. The handle's `wait` raises the errors of other ranks.
        """
        op = _label("all_to_all", what)
        _check(op, full_P, full_P.numel() // self.size * self.size, full_P.dtype)
        _check(op, recv_P, full_P.numel(), full_P.dtype)
        # here, because messages between processes leave it out, as sums have no use for it
        recv_P.view(self.size, -1)[self.rank].copy_(full_P.view(self.size, -1)[self.rank])
        self._count(full_P.nbytes // self.size, gather=False)
        return self._timed(self._exchange(full_P, recv_P, op))

    def all_reduce(self, values: Tensor, *, what: str = "") -> Handle:
        """Start to replace `values` (contiguous, any shape, small) by their sum over ranks, added in rank order.

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
            ordered_sum(full_P.view(self.size, -1), flat_S, device=self.compute)

        self._count(flat_S.nbytes, gather=False)
        return self._timed(Then(add, (flat_S, full_P)))

    def exchange(self, numbers_N: Tensor, *, what: str = "") -> Tensor:
        """Return every rank's `numbers_N`, on every rank: (W, N) in host memory.

        Exchanges have an order of their own, so ranks need not have started the same other operations before.

        Args:
            numbers_N: (N,) in host memory, any dtype.
        """
        everyone = numbers_N.new_empty(self.size, numbers_N.numel())
        op = _label("exchange", what)
        _check(op, numbers_N, numbers_N.numel(), numbers_N.dtype)
        self._timed(self._gather(numbers_N, everyone.view(-1), op, aside=True)).wait()
        return everyone

    def broadcast(self, tensor: Tensor, source: int = 0, *, what: str = "") -> Handle:
        """Start to copy the `tensor` (contiguous, any shape and dtype) of rank `source` to every rank, in place.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        op = _label(f"broadcast from rank {source}", what)
        if not 0 <= source < self.size:
            raise WorldError(f"{op}: the world has ranks 0 to {self.size - 1}")
        _check(op, tensor, tensor.numel(), tensor.dtype, flat=False)
        return self._broadcast(tensor.view(-1), source, op)

    @unobserved()
    def barrier(self, what: str = "") -> None:
        """Return when the hosts of all ranks have called `barrier`; device streams are not waited for.

        Raises:
            DeadlineError: some ranks did not call it within `timeout_s`; the message names them.
            RankFailedError: another rank has failed.
        """
        token_S = torch.zeros(1, dtype=torch.uint8, device="cpu")
        full_P = torch.empty(self.size, dtype=torch.uint8, device="cpu")
        self._gather(token_S, full_P, _label("barrier", what)).wait()

    @unobserved()
    def agree(self, fields: Mapping[str, str], what: str = "settings") -> None:
        """Check that every rank has the same `fields`. If so, that takes one gather of 64 bytes per rank.

        Raises:
            HandshakeError: on every rank, with the first field that differs, its values and their ranks.
        """
        text = json.dumps(dict(fields), sort_keys=True)
        digest_S = _as_bytes(hashlib.sha256(text.encode()).hexdigest())
        digests = digest_S.new_empty(self.size, digest_S.numel())
        self._gather(digest_S, digests.view(-1), _label("agree", what)).wait()
        if not torch.equal(digests, digest_S.expand_as(digests)):
            different = field_difference([json.loads(text) for text in self.gather_texts(text, what)])
            raise HandshakeError(f"the ranks have different {what}: {different}")

    @unobserved()
    def share(self, text: str, source: int = 0) -> str:
        """Return the `text` of rank `source`, on every rank.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        numel = torch.tensor([len(text.encode())], device="cpu")
        self.broadcast(numel, source, what="the length of a text").wait()
        body = _as_bytes(text) if self.rank == source else torch.empty(int(numel), dtype=torch.uint8, device="cpu")
        self.broadcast(body, source, what="a text").wait()  # not a gather, whose size would grow with the ranks
        return _as_text(body)

    @unobserved()
    def gather_texts(self, text: str, what: str) -> list[str]:
        """Return every rank's `text`, on every rank."""
        numels = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self._gather(torch.tensor([len(text.encode())], device="cpu"), numels, _label("lengths", what)).wait()
        padded_S = _as_bytes(text.encode().ljust(int(numels.max())).decode())
        texts = padded_S.new_empty(self.size, padded_S.numel())
        self._gather(padded_S, texts.view(-1), _label("texts", what)).wait()
        return [_as_text(row[:n]) for row, n in zip(texts, numels.tolist(), strict=True)]

    def on_host(self, tensor: Tensor, what: str = "") -> Tensor:
        """Return `tensor`, the result of started operations, in host memory; the host waits for the current stream.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        return self.compute.on_host(tensor)

    def at(self, place: str) -> None:
        """Record this rank's phase, such as "step 3, backward", for the errors of ranks that wait for it.

        Not collective. A call takes a few microseconds, so call it for the phases of a step and not for each operation.
        """

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Return a lock of the state that ranks in threads share, such as torch's global random generator."""
        return contextlib.nullcontext()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one leaves because of `error`, so that their errors name it."""

    def close(self) -> None:
        """Leave the world. Closing again has no effect."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, {self.device})"

    @abstractmethod
    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        """Start a gather; with `aside` in the order of exchanges, which is for host tensors."""

    @abstractmethod
    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        """Start sending chunk r of `full_P` to rank r, where it becomes chunk `rank` of `recv_P`."""

    @abstractmethod
    def _reshard(self, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], op: str) -> Handle:
        """Start to exchange parts of `source` and `into`, see `reshard`."""

    @abstractmethod
    def _sum(self, full_P: Tensor, recv_S: Tensor, op: str) -> Handle:
        """Start a reduce-scatter of `full_P` into `recv_S` by the backend."""

    @abstractmethod
    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle: ...


class SoloWorld(World):
    """A world of one rank."""

    def __init__(self, device: torch.device | str = "cpu", *, timeout_s: float = 300.0) -> None:
        super().__init__(0, 1, device=device, timeout_s=timeout_s)

    def part(self, ranks: Sequence[int], name: str, *, priority: bool = False, alike: bool = False) -> World:
        if [*ranks] != [0]:
            raise ConfigError(f"{name}: this run has one rank, not ranks {', '.join(map(str, ranks))}.")
        part = copy(self)
        part._be_part(self.whole, [0], name)
        return part

    def reduce_scatter(
        self, full_P: Tensor, recv_P: Tensor, sum_S: Tensor, *, accumulate: bool = False, what: str = ""
    ) -> Handle:
        """Add as `World.reduce_scatter`; `recv_P` is not used."""
        return super().reduce_scatter(full_P, full_P, sum_S, accumulate=accumulate, what=what)

    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        if shard_S.data_ptr() != full_P.data_ptr():
            full_P.copy_(shard_S)
        return Done()

    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return Done()

    def _reshard(self, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], op: str) -> Handle:
        into.copy_(source)
        return Done()

    def _sum(self, full_P: Tensor, recv_S: Tensor, op: str) -> Handle:
        recv_S.copy_(full_P)
        return Done()

    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        return Done()


class Transport(World):
    """The three primitives for processes: by messages for host tensors, by collectives for GPU tensors."""

    _processes: ProcessGroup

    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        if self._by_collective(full_P):
            collective = all_gather if full_P.dim() == 1 else all_gather_rows
            return self._processes.start(collective, full_P, shard_S, op, self._name)
        slots = _rows(full_P, self.size)
        if slots[self.rank].data_ptr() != shard_S.data_ptr():
            slots[self.rank].copy_(shard_S)
        others = self._others()
        return self._messages(op, full_P, dict.fromkeys(others, shard_S), {r: slots[r] for r in others}, aside=aside)

    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        if self._by_collective(full_P):
            return self._processes.start(all_to_all, recv_P, full_P, op, self._name)
        chunks, slots = full_P.view(self.size, -1).unbind(), recv_P.view(self.size, -1).unbind()
        others = self._others()
        return self._messages(op, full_P, {r: chunks[r] for r in others}, {r: slots[r] for r in others})

    def _reshard(self, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], op: str) -> Handle:
        sent, received = common_numels(before, after, self.rank), common_numels(after, before, self.rank)
        alike = source.new_empty(1)  # parts differ between ranks, and may be empty
        if self._by_collective(source):
            collective = partial(all_to_all_uneven, sent=sent, received=received)
            return self._processes.start(collective, into, source, op, self._name, alike)
        out, slots = source.split(sent), into.split(received)
        slots[self.rank].copy_(out[self.rank])
        to, of = ({r: parts[r] for r in self._others() if parts[r].numel()} for parts in (out, slots))
        return self._messages(op, alike, to, of)

    def _sum(self, full_P: Tensor, recv_S: Tensor, op: str) -> Handle:
        return self._processes.start(reduce_scatter, recv_S, full_P, op, self._name)

    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        if self._by_collective(flat):
            return self._processes.start(partial(broadcast, source=source), flat, flat, op, self._name)
        if self.rank == source:
            return self._messages(op, flat, dict.fromkeys(self._others(), flat), {})
        return self._messages(op, flat, {}, {source: flat})

    def _by_collective(self, tensor: Tensor) -> bool:
        return not self.compute.shares_memory and self.compute.is_home_of(tensor)

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one, so that not all ranks send to the same rank first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def _messages(
        self, op: str, whole: Tensor, out: Mapping[int, Tensor], into: Mapping[int, Tensor], *, aside: bool = False
    ) -> Handle:
        sent, received = ({self._ranks[r]: tensor for r, tensor in tensors.items()} for tensors in (out, into))
        return self._processes.send(op, whole, sent, received, f"{self._name} aside" if aside else self._name)


class ProcessWorld(Transport):
    """A world of processes, described by torchrun's environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    LOCAL_RANK picks the GPU.
    """

    def __init__(self, *, timeout_s: float = 300.0, device: str | None = None) -> None:
        check_environment()
        here = claim_device(device, env_int("LOCAL_RANK", "0"))
        super().__init__(env_int("RANK"), env_int("WORLD_SIZE"), device=here, timeout_s=timeout_s)
        self._processes = ProcessGroup(self.rank, self.size, self.compute, timeout_s)
        self.local_size = self._processes.local_size
        self.nodes_alike = self._are_nodes_alike()

    def _are_nodes_alike(self) -> bool:
        here = self.local_size, env_int("LOCAL_RANK", str(self.rank % self.local_size))
        places = self.exchange(torch.tensor(here, device="cpu"), what="places on nodes").tolist()
        alike = all(place == [self.local_size, rank % self.local_size] for rank, place in enumerate(places))
        return alike and not self.size % self.local_size

    def on_host(self, tensor: Tensor, what: str = "") -> Tensor:
        return self._processes.on_host(tensor, _label("a wait for the device", what))

    def at(self, place: str) -> None:
        self._processes.at(place)

    def fail(self, error: BaseException) -> None:
        self._processes.fail(error)

    def part(self, ranks: Sequence[int], name: str, *, priority: bool = False, alike: bool = False) -> "World":
        part = _ProcessPart(self, ranks, name, alike=alike)
        part.open(priority=priority)
        return part

    def _beside(self, ranks: Sequence[int]) -> World:
        return _ProcessPart(self, ranks, "beside")

    def close(self) -> None:
        self._processes.close(keep_default=self.keeps_default_group)


class _ProcessPart(Transport):
    """Some of the ranks of a `ProcessWorld`: host messages use its connections, GPUs have a communicator per part."""

    def __init__(self, whole: ProcessWorld, ranks: Sequence[int], name: str, *, alike: bool = False) -> None:
        self._be_part(whole, ranks, name, alike=alike)
        self._processes = whole._processes

    def open(self, *, priority: bool) -> None:
        """Open the part's communicator of a GPU. Collective.

        Raises:
            ConfigError: torch would name it differently on its ranks, which would wait for each other.
        """
        if not self.compute.shares_memory:
            counts = self.exchange(torch.tensor([group_count()], device="cpu"), what="numbers of process groups")
            if counts.unique().numel() > 1:
                raise ConfigError(
                    f"ranks {', '.join(map(str, self.ranks))} have {counts.flatten().tolist()} process groups of "
                    "torch. Make as many on each rank, by init_device_mesh or new_group."
                )
        self._processes.open_part(self.ranks, self._name, priority=priority)

    def part(self, ranks: Sequence[int], name: str, *, priority: bool = False, alike: bool = False) -> World:
        members, name = [self._ranks[rank] for rank in ranks], f"{name} of {self._name}"
        return self.whole.part(members, name, priority=priority, alike=alike)

    def on_host(self, tensor: Tensor, what: str = "") -> Tensor:
        return self.whole.on_host(tensor, what)

    def at(self, place: str) -> None:
        self.whole.at(place)

    def fail(self, error: BaseException) -> None:
        self._processes.fail_beside(error)

    def _by_collective(self, tensor: Tensor) -> bool:
        return self._processes.has_part(self._name) and super()._by_collective(tensor)

    def close(self) -> None:
        self.whole.close()


def _world_of(ranks: Sequence[int], coordinates: Mapping[str, int], timeout_s: float, device: str | None) -> World:
    """Open the world of `ranks`, with `coordinates` that no other ranks have. Collective among all ranks of the run."""
    for name, place in coordinates.items():
        if not (str(name).isidentifier() and type(place) is int and place >= 0):
            raise ConfigError(f'coordinates: {name!r} is {place!r}. Pass names and whole numbers: {{"tp": 1}}.')
    check_started(env_int("RANK", "0"), env_int("WORLD_SIZE", "1"))
    whole = World.from_env(timeout_s, device)
    with contextlib.ExitStack() as failure:
        failure.push(whole)
        _check_worlds(whole.gather_texts(json.dumps([*ranks, dict(coordinates)], sort_keys=True), "coordinates"))
        world = whole.part(ranks, "a world")
        world.coordinates = dict(coordinates)
        failure.pop_all()
    return world


def _check_worlds(texts: Sequence[str]) -> None:
    """Raise ConfigError, on every rank, unless the ranks of all worlds and their coordinates fit together.

    Args:
        texts: by rank of the run, the ranks and the coordinates of its world.
    """
    worlds = [(members, coordinates) for *members, coordinates in map(json.loads, sorted({*texts}))]
    if sorted(rank for members, _ in worlds for rank in members) != [*range(len(texts))]:
        raise ConfigError(
            f"group: the ranks have the worlds {', '.join(map(str, worlds))}, but each rank must be in one, with the "
            "same coordinates on all its ranks."
        )
    places = [coordinates for _, coordinates in worlds if coordinates]
    if twice := [place for place in places if places.count(place) > 1]:
        raise ConfigError(f"coordinates: two worlds have {twice[0]}, so their checkpoints would have one name.")


_OPENING = threading.Lock()
"""Lock for opening torch's default process group, because ranks may be threads."""


def open_default_group() -> None:
    """Open torch's default process group, also for a single rank, for scripts that ask torch for their rank."""
    with _OPENING:
        if default_group() is not None:
            return
        world = World.from_env()
        if world.size == 1:
            open_group_of_one(world.compute.backend)
        world.keeps_default_group = True
        world.close()


def _label(op: str, what: str) -> str:
    return f"{op} of {what}" if what else op


def _check(op: str, tensor: Tensor, numel: int, dtype: torch.dtype, *, flat: bool = True) -> None:
    if tensor.numel() != numel or tensor.dtype != dtype or not tensor.is_contiguous() or (flat and tensor.dim() != 1):
        raise LayoutError(
            f"{op}: the tensor must be {numel} contiguous elements of {dtype}, "
            f"not shape {tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
        )


def _rows(full_P: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return each rank's shard in a full tensor, as views."""
    return (full_P.view(count, -1) if full_P.dim() == 1 else full_P).unbind()


def common_numels(a: Sequence[int], b: Sequence[int], rank: int) -> list[int]:
    """Return how many indices of range `rank` of the cuts `a` are in each range of the cuts `b`."""
    return [max(0, min(a[rank + 1], stop) - max(a[rank], start)) for start, stop in pairwise(b)]


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _as_bytes(text: str) -> Tensor:
    octets = bytearray(text.encode())
    return torch.frombuffer(octets, dtype=torch.uint8) if octets else torch.empty(0, dtype=torch.uint8, device="cpu")


def _as_text(octets: Tensor) -> str:
    return ctypes.string_at(octets.data_ptr(), octets.numel()).decode()
