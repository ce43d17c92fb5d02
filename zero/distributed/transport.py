"""The primitives that ranks communicate with: one rank alone, or processes with gloo's messages and NCCL's collectives.

A transport moves tensors and adds nothing, except in `reduce_scatter`, where its backend adds. `World` makes all other
collectives of these primitives, so ranks that are threads and ranks that are processes give the same bits.

Every rank must start the same operations in the same order. A part, some of the ranks, has an order of its own.

Letters: W size of the transport, P elements of a full flat tensor, S = P / W.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from zlib import crc32

import torch
from torch import Tensor

from zero.distributed.process_group import (
    ProcessGroup,
    all_gather,
    all_gather_rows,
    all_to_all,
    all_to_all_uneven,
    broadcast,
    group_count,
    reduce_scatter,
)
from zero.distributed.rendezvous import env_int
from zero.errors import ConfigError, LayoutError
from zero.platform.cuda import compute_device
from zero.platform.device import Event, torch_device
from zero.platform.handle import Done, Handle


class Transport:
    """The primitives between ranks, seen from one of them. `op` names an operation in error messages.

    Attributes:
        rank, size: this rank, 0 to size - 1, and W.
        ranks: the numbers of its ranks among all ranks of the run.
        order: the name of the order of its operations; "" if it has all ranks of the run.
        local_size, nodes_alike: as in `World`, of all ranks of the run.
        compute: the device of this rank's full tensors.
        timeout_s: the longest wait for another rank, in seconds.
    """

    order = ""

    def __init__(self, rank: int, size: int, *, device: torch.device | str, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} does not exist in a world of {size}")
        if not timeout_s > 0:
            raise ConfigError(f"launch.timeout must be more than 0 seconds, not {timeout_s}")
        self.rank, self.size, self.ranks = rank, size, tuple(range(size))
        self.local_size, self.nodes_alike = size, True
        self.compute = compute_device(torch_device(device))
        self.timeout_s = timeout_s

    def part(self, ranks: Sequence[int], name: str, *, alike: bool = False) -> "Transport":
        """Return some ranks, this rank among them, as a transport with its own order of operations.

        The order's name has a hash of the ranks, unless all parts called `name` run the same operations (`alike`).
        """
        part = copy(self)
        part.ranks = tuple(self.ranks[rank] for rank in ranks)
        part.rank, part.size = ranks.index(self.rank), len(ranks)
        name = f"{name} of {self.order}" if self.order else name
        part.order = name if alike else f"{name} of {part.size} ranks {crc32(repr(part.ranks).encode()):08x}"
        return part

    def open(self, *, priority: bool) -> None:
        """Open what a part needs for tensors of a GPU, with a stream of high priority if `priority`. Collective."""

    @abstractmethod
    def gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        """Start a gather; with `aside` in the order of exchanges, which is for host tensors."""

    @abstractmethod
    def all_to_all(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        """Start sending chunk r of `full_P` to rank r, where it becomes chunk `rank` of `recv_P`.

        This rank's own chunk may be left out.
        """

    @abstractmethod
    def reshard(self, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], op: str) -> Handle:
        """Start to exchange parts of `source` and `into`, see `World.reshard`."""

    @abstractmethod
    def reduce_scatter(self, full_P: Tensor, recv_S: Tensor, op: str) -> Handle:
        """Start a reduce-scatter of `full_P` into `recv_S` by the backend."""

    @abstractmethod
    def broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        """Start to copy `flat` of rank `source` to every rank."""

    def on_host(self, tensor: Tensor, op: str) -> Tensor:
        """Return a tensor in host memory. The host waits for the device."""
        return self.compute.on_host(tensor)

    def arrived(self, copy: Tensor, event: Event, op: str) -> Tensor:
        """Return a copy in host memory after its event, for which the host waits."""
        event.finish()
        return copy

    def at(self, place: str) -> None:
        """Record this rank's phase, see `World.at`."""

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Return a lock of the state that ranks in threads share."""
        return contextlib.nullcontext()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank leaves because of `error`."""

    def close(self, *, keep_default: bool) -> None:
        """Leave all ranks of the run. With `keep_default` torch's default process group stays open."""


class Solo(Transport):
    """One rank alone."""

    def __init__(self, device: torch.device | str = "cpu", *, timeout_s: float = 300.0) -> None:
        super().__init__(0, 1, device=device, timeout_s=timeout_s)

    def part(self, ranks: Sequence[int], name: str, *, alike: bool = False) -> "Transport":
        if [*ranks] != [0]:
            raise ConfigError(f"{name}: this run has one rank, not ranks {', '.join(map(str, ranks))}.")
        return super().part(ranks, name, alike=alike)

    def gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        if shard_S.data_ptr() != full_P.data_ptr():
            full_P.copy_(shard_S)
        return Done()

    def all_to_all(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return Done()

    def reshard(self, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], op: str) -> Handle:
        into.copy_(source)
        return Done()

    def reduce_scatter(self, full_P: Tensor, recv_S: Tensor, op: str) -> Handle:
        recv_S.copy_(full_P)
        return Done()

    def broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        return Done()


class Processes(Transport):
    """Processes, described by torchrun's environment: messages for host tensors, collectives for GPU tensors.

    A part sends host messages over the connections of all ranks, and has a communicator of its own on GPUs.
    """

    def __init__(self, device: torch.device | str, *, timeout_s: float) -> None:
        super().__init__(env_int("RANK"), env_int("WORLD_SIZE"), device=device, timeout_s=timeout_s)
        self._processes = ProcessGroup(self.rank, self.size, self.compute, timeout_s)
        self.local_size = self._processes.local_size
        self.nodes_alike = self._are_nodes_alike()

    def _are_nodes_alike(self) -> bool:
        here = self.local_size, env_int("LOCAL_RANK", str(self.rank % self.local_size))
        places = self._exchange(here, "places on nodes")
        alike = all(place == [self.local_size, rank % self.local_size] for rank, place in enumerate(places))
        return alike and not self.size % self.local_size

    def _exchange(self, numbers: tuple[int, ...], what: str) -> list[list[int]]:
        """Return every rank's numbers."""
        own = torch.tensor(numbers, device="cpu")
        everyone = own.new_empty(self.size, len(numbers))
        self.gather(own, everyone.view(-1), label("exchange", what), aside=True).wait()
        return everyone.tolist()

    def open(self, *, priority: bool) -> None:
        """Open the part's communicator of a GPU. Collective.

        Raises:
            ConfigError: torch would name the communicator differently on its ranks, which would wait for each other.
        """
        if not self.compute.shares_memory:
            counts = [count for [count] in self._exchange((group_count(),), "numbers of process groups")]
            if len({*counts}) > 1:
                raise ConfigError(
                    f"ranks {', '.join(map(str, self.ranks))} have {counts} process groups of "
                    "torch. Make as many on each rank, by init_device_mesh or new_group."
                )
        self._processes.open_part(self.ranks, self.order, priority=priority)

    def gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        if self._by_collective(full_P):
            collective = all_gather if full_P.dim() == 1 else all_gather_rows
            return self._processes.start(collective, full_P, shard_S, op, self.order)
        slots = rows_of(full_P, self.size)
        if slots[self.rank].data_ptr() != shard_S.data_ptr():
            slots[self.rank].copy_(shard_S)
        others = self._others()
        return self._messages(op, full_P, dict.fromkeys(others, shard_S), {r: slots[r] for r in others}, aside=aside)

    def all_to_all(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        if self._by_collective(full_P):
            return self._processes.start(all_to_all, recv_P, full_P, op, self.order)
        chunks, slots = full_P.view(self.size, -1).unbind(), recv_P.view(self.size, -1).unbind()
        others = self._others()
        return self._messages(op, full_P, {r: chunks[r] for r in others}, {r: slots[r] for r in others})

    def reshard(self, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], op: str) -> Handle:
        sent, received = common_numels(before, after, self.rank), common_numels(after, before, self.rank)
        alike = source.new_empty(1)  # parts differ between ranks, and may be empty
        if self._by_collective(source):
            collective = partial(all_to_all_uneven, sent=sent, received=received)
            return self._processes.start(collective, into, source, op, self.order, alike)
        out, slots = source.split(sent), into.split(received)
        slots[self.rank].copy_(out[self.rank])
        to, of = ({r: parts[r] for r in self._others() if parts[r].numel()} for parts in (out, slots))
        return self._messages(op, alike, to, of)

    def reduce_scatter(self, full_P: Tensor, recv_S: Tensor, op: str) -> Handle:
        return self._processes.start(reduce_scatter, recv_S, full_P, op, self.order)

    def broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        if self._by_collective(flat):
            return self._processes.start(partial(broadcast, source=source), flat, flat, op, self.order)
        if self.rank == source:
            return self._messages(op, flat, dict.fromkeys(self._others(), flat), {})
        return self._messages(op, flat, {}, {source: flat})

    def on_host(self, tensor: Tensor, op: str) -> Tensor:
        return self._processes.waiting(partial(self.compute.on_host, tensor), op)

    def arrived(self, copy: Tensor, event: Event, op: str) -> Tensor:
        self._processes.waiting(event.finish, op)
        return copy

    def at(self, place: str) -> None:
        self._processes.operations.at(place)

    def fail(self, error: BaseException) -> None:
        if self.order:
            self._processes.operations.fail_beside(error)
        else:
            self._processes.operations.fail(error)

    def close(self, *, keep_default: bool) -> None:
        self._processes.close(keep_default=keep_default)

    def _by_collective(self, tensor: Tensor) -> bool:
        on_gpu = not self.compute.shares_memory and self.compute.is_home_of(tensor)
        return on_gpu and (not self.order or self._processes.has_part(self.order))

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one, so that not all ranks send to the same rank first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def _messages(
        self, op: str, whole: Tensor, out: Mapping[int, Tensor], into: Mapping[int, Tensor], *, aside: bool = False
    ) -> Handle:
        sent, received = ({self.ranks[r]: tensor for r, tensor in tensors.items()} for tensors in (out, into))
        return self._processes.send(op, whole, sent, received, f"{self.order} aside" if aside else self.order)


def rows_of(full_P: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return each rank's shard in a full tensor, as views."""
    return (full_P.view(count, -1) if full_P.dim() == 1 else full_P).unbind()


def common_numels(a: Sequence[int], b: Sequence[int], rank: int) -> list[int]:
    """Return how many indices of range `rank` of the cuts `a` are in each range of the cuts `b`."""
    return [max(0, min(a[rank + 1], stop) - max(a[rank], start)) for start, stop in pairwise(b)]


def label(op: str, what: str) -> str:
    """Return the name of an operation in error messages, with its subject."""
    return f"{op} of {what}" if what else op


def check_tensor(op: str, tensor: Tensor, numel: int, dtype: torch.dtype, *, flat: bool = True) -> None:
    """Raise LayoutError unless `tensor` has `numel` contiguous elements of `dtype`, in one dimension if `flat`."""
    if tensor.numel() != numel or tensor.dtype != dtype or not tensor.is_contiguous() or (flat and tensor.dim() != 1):
        raise LayoutError(
            f"{op}: the tensor must be {numel} contiguous elements of {dtype}, "
            f"not shape {tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
        )
