"""Communication between processes: gloo messages for host tensors, NCCL collectives for GPU tensors.

Host tensors are sent point to point, because gloo's collectives copy through a buffer as large as the result, take 1.5
times as long, and mix up operations that differ between ranks without an error. Here the tag of every message is a hash
of its operation, so only messages of equal operations match.

Every wait has a deadline. After a failed operation the group cannot be used again.
"""

import os
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero.distributed.failure import NAMING_S, Note, Notes
from zero.distributed.operations import Operations, signature_of
from zero.distributed.rendezvous import (
    check_process_groups,
    connect_all,
    env_int,
    have_gloo_listen,
    hosts,
    listens,
    open_key_value_store,
    store_address,
)
from zero.distributed.stalled import StallWatch, Wait, cut_sockets, open_sockets
from zero.errors import MachineError, WorldError
from zero.platform.device import Device
from zero.platform.handle import Done, Handle, Then

Result = TypeVar("Result")


class ProcessGroup:
    """The connections of one rank to all others.

    An operation waits for at most `timeout_s` less 5 seconds, so that the missing rank can be named within `timeout_s`;
    if `timeout_s` is less than 10, for half of it. On a GPU the host does not wait for operations: NCCL's watchdog
    enforces the deadline and ends the process. A step waits for the device in `on_host`, which notices earlier that
    ranks run different operations.

    If torch's default process group is open already, a new group is opened beside it, so that the order of the script's
    collectives does not change.
    """

    def __init__(self, rank: int, size: int, compute: Device, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self.local_size = min(env_int("LOCAL_WORLD_SIZE", str(self.size)), self.size)
        self._compute, self._wait_s = compute, timeout_s - min(NAMING_S, timeout_s / 2)
        self._store = open_key_value_store(self.rank, self.size, timeout_s)
        self._claim_gpu()
        address = store_address()  # read now, because the environment may have changed when the process ends
        self._notes = Notes(self._store, self.rank, self.size, partial(listens, address))
        machines = hosts(self._store, self.size)
        hint = ""
        several = self.local_size < self.size
        if several or "LOCAL_WORLD_SIZE" in os.environ:
            have_gloo_listen(address, locally=not several)
        if several and compute.shares_memory:
            hint = ". Set GLOO_SOCKET_IFNAME to the network interface between the nodes."
        self._owns_default = not dist.is_initialized()
        if not self._owns_default:
            check_process_groups(self._store, rank, size, dist.distributed_c10d._world.group_count, timeout_s)
        before = open_sockets()
        self._group = connect_all(
            self._store, rank, size, self._connect, timeout_s=timeout_s, wait_s=self._wait_s, hint=hint
        )
        self._parts: dict[str, dist.ProcessGroup] = {}  # name of a part -> its GPU communicator
        connections = open_sockets() - before
        self.operations = Operations(self._notes, rank, size, machines, timeout_s)
        self._stalls = StallWatch(
            self._notes,
            started=self.operations.started,
            counted=self.operations.counted,
            cut=partial(self._cut, connections),
        )

    def _claim_gpu(self) -> None:
        gpu = self._compute.name()
        if gpu and self._store.add(f"gpu {gpu}", 1) > 1:
            raise MachineError(
                f"rank {self.rank} of {self.size} sees one GPU, which another rank uses. Type launch.ranks=1, or "
                "launch.device=cpu."
            )

    def _connect(self) -> dist.ProcessGroup | None:
        timeout = timedelta(seconds=self._wait_s)
        backend, device_id = self._compute.backend, self._compute.bound
        if not self._owns_default:
            return dist.new_group(backend=backend, timeout=timeout)
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timeout, device_id=device_id
        )
        return dist.group.WORLD

    def open_part(self, ranks: Sequence[int], name: str, *, priority: bool = False) -> None:
        """Open a GPU communicator of some ranks. On a CPU nothing is opened, because messages are matched by tags.

        Parts of the same ranks get a communicator each, because below stage 3 a gather may start before a sum on one
        rank and after it on another, and a communicator matches operations in the order in which they start.

        Args:
            priority: open it with a high-priority stream, if the backend is NCCL.
        """
        if self._compute.shares_memory or name in self._parts:
            return
        timeout, backend = timedelta(seconds=self._wait_s), self._compute.backend.rpartition(":")[2]
        options = nccl_options(timeout) if priority and backend == "nccl" else None
        self._compute.join()  # NCCL splits a communicator only after all operations on it have ended
        self._parts[name] = dist.new_group(list(ranks), timeout, backend, options, use_local_synchronization=True)

    def has_part(self, name: str) -> bool:
        """Return whether there is a GPU communicator of this part."""
        return name in self._parts

    def close(self, *, keep_default: bool) -> None:
        """Leave the group. With `keep_default` torch's default process group stays open."""
        if self._group is None:
            return
        self.operations.close()
        self._stalls.close()
        self._notes.post(Note.of_leaving())
        whole, self._group = self._group, None
        if self._stalls.is_cut and not self._compute.shares_memory:
            return  # torch has forgotten the aborted groups
        for group in (*self._parts.values(), whole):
            is_default = self._owns_default and group is whole
            if keep_default and is_default:
                continue
            if self.operations.has_failed and not self._compute.shares_memory:
                abort(group)  # destroying it would wait for kernels that wait for a failed rank
            else:
                dist.destroy_process_group(None if is_default else group)

    def send(self, op: str, whole: Tensor, out: Mapping[int, Tensor], into: Mapping[int, Tensor], order: str) -> Handle:
        """Start sending `out[r]` to rank r and receiving `into[r]` from it.

        Args:
            whole: a tensor whose size and dtype must be the same on every rank.
            order: the name of the operation's order; within each order, ranks must start the same operations in the
                same sequence.
        """
        tag = self._begin(op, whole, order)
        if not whole.numel():
            return Done()
        waited = Wait(order, self.operations.number(order), signature_of(op, whole), (*(out or into),))
        works = [(peer, self._try(op, peer, dist.irecv, flat, peer, self._group, tag)) for peer, flat in into.items()]
        works += [(peer, self._try(op, peer, dist.isend, flat, peer, self._group, tag)) for peer, flat in out.items()]

        def wait() -> None:
            if self.operations.failure is not None:
                raise self.operations.failure
            end_s = time.monotonic() + self._wait_s
            with self._stalls.watching(waited):
                for peer, work in works:
                    self._try(op, peer, work.wait, timedelta(seconds=max(0.001, end_s - time.monotonic())))

        return Then(wait, (out, into))

    def start(
        self,
        collective: Callable[..., Any],
        out: Tensor,
        source: Tensor,
        op: str,
        order: str,
        whole: Tensor | None = None,
    ) -> Handle:
        """Start a collective of the backend, in the part named `order`.

        Args:
            whole: a tensor whose size and dtype must be the same on every rank; None: `out`.
        """
        whole = out if whole is None else whole
        self._begin(op, whole, order)
        if not whole.numel():
            return Done()
        group = self._parts[order] if order else self._group
        work = self._try(op, None, partial(collective, out, source, group=group, async_op=True))
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        waited = Wait(order, self.operations.number(order), signature_of(op, whole), others)

        def wait() -> None:  # blocks the host on a CPU only
            with self._stalls.watching(waited):
                self._try(op, None, work.wait)

        return Then(wait, (out, source))

    def waiting(self, wait: Callable[[], Result], op: str) -> Result:
        """Return the result of a function that waits for the device, and so for collectives that were started."""
        try:
            with self._stalls.watching(Wait("", self.operations.number(""), op, ())):
                result = wait()
        except RuntimeError:
            self._check_cut(op)
            raise
        self._check_cut(op)
        return result

    def _cut(self, sockets: Collection[int]) -> None:
        """Cut this rank's connections to other ranks; `sockets` are the host's sockets."""
        cut_sockets(sockets)
        for group in (*self._parts.values(), self._group) if not self._compute.shares_memory else ():
            if group is not None:
                abort(group)

    def _check_cut(self, op: str) -> None:
        """Raise the failure, if this rank's connections were cut."""

        def fail() -> None:
            raise RuntimeError("the connections were cut")

        if self._stalls.is_cut and self.operations.failure is None:
            self._try(op, None, fail)

    def _begin(self, op: str, whole: Tensor, order: str) -> int:
        """Record the start of an operation and return its tag, which only the same operation has on other ranks."""
        if self._group is None:
            raise WorldError(f"{op}: rank {self.rank} has left this world. Open a new one.")
        self._check_cut(op)
        if self.operations.failure is not None:
            raise self.operations.failure
        signature = signature_of(op, whole)
        return _tag(f"{order} {self.operations.begin(order, _tag(order), signature)} {signature}")

    def _try(self, op: str, peer: int | None, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            raise self.operations.failed(error, op, peer) from error


def nccl_options(timeout: timedelta) -> "dist.ProcessGroupNCCL.Options":
    """Return the options of a communicator with a high-priority stream."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns if it differs from the timeout of the group
    return options


def default_group() -> dist.ProcessGroup | None:
    """Return torch's default process group; None if it is not open."""
    return dist.group.WORLD


def group_count() -> int:
    """Return the number from which torch makes the names of groups that some ranks open alone."""
    torchs = dist.distributed_c10d
    # torch 2.14 counts the groups that this rank has made, earlier versions count its groups
    return torchs._world.group_count if torch.__version__ >= "2.14" else len(torchs._world.pg_names)


def open_group_of_one(backend: str) -> None:
    """Open torch's default process group with this process alone."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def all_gather_rows(out: Tensor, source: Tensor, **keywords: Any) -> Any:
    """All-gather into rows that need not be adjacent in memory."""
    return dist.all_gather(list(out.view(torch.uint8).unbind()), source.view(torch.uint8), **keywords)


def all_gather(out: Tensor, source: Tensor, **keywords: Any) -> Any:
    return _all_gather(out.view(torch.uint8), source.view(torch.uint8), **keywords)


def all_to_all(out: Tensor, source: Tensor, **keywords: Any) -> Any:
    return dist.all_to_all_single(out.view(torch.uint8), source.view(torch.uint8), **keywords)


def all_to_all_uneven(
    out: Tensor, source: Tensor, *, sent: Sequence[int], received: Sequence[int], **keywords: Any
) -> Any:
    """Send the next `sent[r]` elements of `source` to each rank r of the group, and receive `received[r]` from it."""
    return dist.all_to_all_single(out, source, list(received), list(sent), **keywords)


def broadcast(flat: Tensor, _: Tensor, *, source: int, **keywords: Any) -> Any:
    """Broadcast from rank `source` of the group."""
    return dist.broadcast(flat.view(torch.uint8), group_src=source, **keywords)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def abort(group: dist.ProcessGroup) -> None:
    """Abort the running operations of the group's GPU communicators; torch then forgets the group."""
    dist.distributed_c10d._abort_process_group(group)


def _tag(operation: str) -> int:
    return zlib.crc32(operation.encode()) & 0x7FFF_FFFF
