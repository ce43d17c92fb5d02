"""Communication between ranks: gather, reduce-scatter, all-reduce of flat tensors.

A `World` knows nothing of layouts, units or steps. Its transport has the primitives (gather, all-to-all, broadcast);
everything else is written once, on top of them, so that ranks that are threads and ranks that are processes add in the
same order and give the same bits.

Sums are computed locally: ranks send chunks unchanged, and the rank that owns a chunk adds the received ones in rank
order. This is exact where gloo's own reduce-scatter is not (it adds bf16 in bf16), deterministic, and faster for large
tensors.

Letters: W world size, P elements of a full flat tensor, S = P / W.
Source: Rajbhandari et al. 2020, "ZeRO", section 7 (reduce-scatter and all-gather in place of all-reduce).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from zero.distributed.agreement import Hosts
from zero.distributed.mesh import dimension_of, ranks_of
from zero.distributed.opening import open_part, open_transport
from zero.distributed.ordered_sum import ordered_sum, overlap
from zero.distributed.traffic import Collectives as Collectives
from zero.distributed.transport import Solo, Transport, check_tensor, common_numels, label, rows_of
from zero.errors import LayoutError, WorldError
from zero.platform.handle import Handle as Handle, Then


class World(Hosts):
    """The ranks of one run, seen from one of them.

    Every rank must start the same operations in the same order; handles may be waited for in any order. After the
    handle's `wait` an operation's result may be read and its inputs may be written; on a CUDA world the current stream
    waits, the host does not. `what` names the operation's subject (a unit) in error messages. After a failed operation
    the world cannot be used again.

    Raises:
        DeadlineError: from a handle's `wait`, as the errors below: the other ranks did not start the operation in time.
        RankFailedError: another rank has failed.
        WorldError: the ranks do not run the same operation.

    Args:
        transport: the primitives between the ranks.
        whole: the world of all ranks of the run, if this one is a part of it.

    Attributes:
        rank: 0 to size - 1.
        size: W.
        ranks: the numbers of this world's ranks among all ranks of the run.
        local_size: number of the world's ranks on this node.
        nodes_alike: whether all nodes have the same number of ranks, with consecutive ranks; otherwise collectives do
            not go by node.
        device: the device of this rank's full tensors.
        compute: streams, memory and measurements of that device, for the engine.
        coordinates: this rank's place in the dimensions beside the world, by name, such as {"tp": 1}: in checkpoints.
    """

    coordinates: Mapping[str, int] = MappingProxyType({})

    def __init__(self, transport: Transport, whole: "World | None" = None) -> None:
        super().__init__(transport, whole)
        self.ranks = transport.ranks
        self.compute, self.device = transport.compute, transport.compute.device
        self.local_size, self.nodes_alike = transport.local_size, transport.nodes_alike
        if whole is not None:
            nodes = [rank // whole.local_size for rank in self.ranks]
            self.local_size = nodes.count(whole.rank // whole.local_size)
            self.nodes_alike = whole.nodes_alike and nodes == sorted(nodes) and len({*Counter(nodes).values()}) == 1

    @property
    def timeout_s(self) -> float:
        """The longest wait for another rank, in seconds; then an error names the missing rank."""
        return self._transport.timeout_s

    @property
    def traffic(self) -> Collectives:
        """Bytes that this rank received in gathers and reductions, and time of waits."""
        return self._counter.read()

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return -(-self.size // self.local_size)

    def part(
        self, ranks: Sequence[int], name: str, *, priority: bool = False, alike: bool = False, for_host: bool = False
    ) -> "World":
        """Return some ranks as a world with its own order of operations. Collective among them.

        Its traffic is added to the whole world's, and the two are closed together.

        Args:
            ranks: the ranks, in their order in the part; this rank is among them.
            name: the name of the part, the same on each of its ranks. Parts of the same ranks with one name have one
                order of operations.
            priority: on a GPU, its collectives have a stream of high priority.
            alike: each rank is in one part of this name, and all of them run the same operations, so that a rank which
                runs others is found by comparison with any rank.
            for_host: its tensors are in host memory, so nothing is opened on a GPU.
        """
        transport = self._transport.part(ranks, name, alike=alike)
        if not for_host:
            transport.open(priority=priority)
        return World(transport, self.whole)

    def _count(self, nbytes: int, *, gather: bool, ring: bool = False) -> None:
        """Add to the traffic counter the `nbytes` that this rank receives from each other rank.

        In a `ring` this rank receives them from one rank; for one rank of each node the sender is on another node.
        """
        received = nbytes * (self.size - 1)
        of_nodes = received // self.local_size * (self.nodes > 1) if ring else nbytes * (self.size - self.local_size)
        self._counter.received(received, of_nodes, gather=gather)

    @staticmethod
    def from_env(timeout_s: float = 300.0, device: str | None = None) -> "World":
        """Open a world; the older name of `zero.open_world`."""
        return open_world(timeout_s, device)

    @staticmethod
    def solo(device: torch.device | str = "cpu", *, timeout_s: float = 300.0) -> "World":
        """Open a world of this process alone, whatever the environment says."""
        return World(Solo(device, timeout_s=timeout_s))

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
                as {"tp": 1}: the same on all ranks of the group, and different in each group. Checkpoints need them.
            timeout_s, device: as in `open_world`.

        Raises:
            ConfigError: `group` is not a group with this rank, ranks passed other groups or coordinates, or the
                environment does not describe torch's process group; or as `open_world`.
        """
        return _world_of(ranks_of(group), coordinates, timeout_s, device)

    @staticmethod
    def from_mesh(mesh: object, name: str, *, timeout_s: float = 300.0, device: str | None = None) -> "World":
        """Open the world of one dimension of a mesh, as `from_group`. Collective among all ranks of the run.

        Args:
            mesh: a `DeviceMesh` of torch with named dimensions.
            name: the dimension, which may be a flattened one. The others are in `coordinates`.
            timeout_s, device: as in `open_world`, but the device is by default the mesh's.

        Raises:
            ConfigError: the mesh has no such dimension, or not this rank; or as `open_world`.
        """
        line = dimension_of(mesh, name)
        return _world_of(line.ranks, line.coordinates, timeout_s, device or line.device)

    def beside(self, group: object) -> "World":
        """Return the ranks of another group of this rank as a world for host tensors, closed with this one. Collective.

        Args:
            group: a process group, a mesh of one dimension, or a part of the same whole world (returned as it is).
        """
        if isinstance(group, World):
            return group
        return self.whole.part(ranks_of(group), "beside", for_host=True)

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
        op = label("gather", what)
        if full_P.dim() == 1:
            check_tensor(op, full_P, shard_S.numel() * self.size, shard_S.dtype)
        else:
            for row in rows_of(full_P, self.size):
                check_tensor(op, row, shard_S.numel(), shard_S.dtype)
        check_tensor(op, shard_S, shard_S.numel(), shard_S.dtype)
        self._count(shard_S.nbytes, gather=True)
        return self._counter.timed(self._transport.gather(shard_S.detach(), full_P, op))

    def reduce_scatter(
        self,
        full_P: Tensor,
        received: Tensor,
        sum_S: Tensor,
        *,
        native: bool = False,
        accumulate: bool = False,
        what: str = "",
    ) -> Handle:
        """Start to add chunk `rank` of every rank's `full_P` into `sum_S` (reduce-scatter).

        The chunks are added inside `wait`, in rank order and in sum_S.dtype: (c_0 + c_1) + c_2 and so on. On a CUDA
        world the stream that waits adds them, and no other stream may use `received`, `sum_S` or this rank's chunk of
        `full_P` before.

        Args:
            full_P: (W * S,), this rank's summand.
            received: like `full_P`, or (S,) if `native`; scratch, holds nothing useful afterwards.
            sum_S: (S,), not in the memory of `full_P` or `received`; receives the sum. fp32 or full_P.dtype, unless
                `native`.
            native: the backend adds, in an order of its own and in the dtype of `full_P`. It may need no memory for
                received chunks. On one backend and world the bits of a sum depend only on the summands and on the place
                of a chunk in `full_P`.
            accumulate: add the sum to `sum_S` instead of replacing it.
            what: names the subject in error messages.

        Raises:
            WorldError: the world is closed. The handle's `wait` raises the errors of other ranks.
        """
        op = label("reduce_scatter", what)
        check_tensor(op, full_P, sum_S.numel() * self.size, full_P.dtype)
        check_tensor(op, sum_S, sum_S.numel(), sum_S.dtype)
        check_tensor(op, received, (sum_S if native else full_P).numel(), full_P.dtype)
        if self.size > 1 and (overlap(full_P, sum_S) or overlap(received, sum_S)):
            raise LayoutError(
                f"{op}: the output sum_S overlaps an input, which is still read. Allocate sum_S separately."
            )
        start = self._transport.reduce_scatter if native else self._transport.all_to_all
        arrival = start(full_P, received, op)

        def add() -> None:
            arrival.wait()
            chunks = received.view(1 if native else self.size, -1)
            own = None if native else full_P.view_as(chunks)[self.rank]
            ordered_sum(chunks, sum_S, own, 0 if native else self.rank, accumulate=accumulate, device=self.compute)

        self._count(full_P.nbytes // self.size, gather=False, ring=native)
        return self._counter.timed(Then(add, (full_P, received, sum_S)))

    def reshard(
        self, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], *, what: str = ""
    ) -> Handle:
        """Start to cut a flat tensor between the ranks in another way (an all-to-all with parts of uneven sizes).

        Args:
            source: elements [before[rank], before[rank + 1]) of the flat tensor.
            into: receives elements [after[rank], after[rank + 1]) of the flat tensor.
            before, after: W + 1 ascending indices from 0 to the size of the flat tensor.
            what: names the subject in error messages.
        """
        op, rank = label("reshard", what), self.rank
        check_tensor(op, source, before[rank + 1] - before[rank], source.dtype)
        check_tensor(op, into, after[rank + 1] - after[rank], source.dtype)
        for r, numel in enumerate(common_numels(after, before, rank)):
            nbytes = (r != rank) * numel * source.itemsize
            between_nodes = r // self.local_size != rank // self.local_size
            self._counter.received(nbytes, between_nodes * nbytes, gather=False)
        return self._counter.timed(self._transport.reshard(source, into, before, after, op))

    def all_to_all(self, full_P: Tensor, recv_P: Tensor, *, what: str = "") -> Handle:
        """Start to send chunk r of `full_P` to rank r, where it becomes chunk `rank` of `recv_P` (all-to-all).

        Args:
            full_P: (W * S,), the chunks that this rank sends, its own included.
            recv_P: like `full_P`, not in its memory; filled when the returned handle has been waited for.
            what: names the subject in error messages.

        Raises:
            WorldError: the world is closed. The handle's `wait` raises the errors of other ranks.
        """
        op = label("all_to_all", what)
        check_tensor(op, full_P, full_P.numel() // self.size * self.size, full_P.dtype)
        check_tensor(op, recv_P, full_P.numel(), full_P.dtype)
        # here, because messages between processes leave it out, as sums have no use for it
        recv_P.view(self.size, -1)[self.rank].copy_(full_P.view(self.size, -1)[self.rank])
        self._count(full_P.nbytes // self.size, gather=False)
        return self._counter.timed(self._transport.all_to_all(full_P, recv_P, op))

    def all_reduce(self, values: Tensor, *, what: str = "") -> Handle:
        """Start to replace `values` (contiguous, any shape, small) by their sum over ranks, added in rank order.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        op = label("all_reduce", what)
        check_tensor(op, values, values.numel(), values.dtype, flat=False)
        flat_S = values.view(-1)
        full_P = flat_S.new_empty(flat_S.numel() * self.size)
        arrival = self._transport.gather(flat_S, full_P, op)

        def add() -> None:
            arrival.wait()
            ordered_sum(full_P.view(self.size, -1), flat_S, device=self.compute)

        self._count(flat_S.nbytes, gather=False)
        return self._counter.timed(Then(add, (flat_S, full_P)))

    def broadcast(self, tensor: Tensor, source: int = 0, *, what: str = "") -> Handle:
        """Start to copy the `tensor` (contiguous, any shape and dtype) of rank `source` to every rank, in place.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        op = label(f"broadcast from rank {source}", what)
        if not 0 <= source < self.size:
            raise WorldError(f"{op}: the world has ranks 0 to {self.size - 1}")
        check_tensor(op, tensor, tensor.numel(), tensor.dtype, flat=False)
        return self._transport.broadcast(tensor.view(-1), source, op)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, {self.device})"


def open_world(timeout_s: float = 300.0, device: str | None = None) -> World:
    """Open the world that torchrun's environment describes; a world of this process alone without one.

    Args:
        timeout_s: the longest wait for another rank, in seconds; then an error names the missing rank.
        device: "cpu" or "cuda"; by default CUDA where torch finds it. LOCAL_RANK picks the GPU.

    Raises:
        ConfigError: the environment is incomplete, or there is no such device.
        DeadlineError: the other ranks did not connect in time.
    """
    return World(open_transport(timeout_s, device))


def _world_of(ranks: Sequence[int], coordinates: Mapping[str, int], timeout_s: float, device: str | None) -> World:
    whole, part = open_part(ranks, coordinates, timeout_s, device)
    world = World(part, World(whole))
    world.coordinates = dict(coordinates)
    return world
