"""How ranks talk: the only file that imports torch.distributed.

A `World` moves flat tensors between ranks and adds them up. It knows nothing of layouts, units or steps.
A transport has to bring three primitives (gather, exchange, broadcast); everything else is written once, on top of
them, so that thread ranks and processes add in the same order and give the same bits.

Sums are local: a chunk travels as it is, and the rank that owns it adds what arrived in rank order. That is exact
where gloo's own reduce-scatter is not (it adds bf16 in bf16), deterministic, and faster for large tensors.

Every wait has a deadline. A world whose operation failed is finished: its later operations fail as well.

Letters: W world size, P elements of a full flat tensor, S = P / W.
Source: Rajbhandari et al. 2020, "ZeRO", section 7 (reduce-scatter and all-gather in place of all-reduce).
"""

import contextlib
import hashlib
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from zero.errors import ConfigError, DeadlineError, HandshakeError, LayoutError, RankFailedError, WorldError

SUM_NUMEL = 65_536
"""Elements that a local sum adds at a time: two fp32 chunks and a half one stay in the cache."""

_GRACE_S = 1.0
"""How long a failing rank listens for what the others were doing."""


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the result may be read and the inputs may be written. Waiting again is free.

        On a CUDA world the current stream waits, the host does not.

        Raises:
            DeadlineError: the other ranks did not come in time.
            RankFailedError: another rank is gone.
            WorldError: the ranks do not run the same operation.
        """
        ...


class _Done:
    def wait(self) -> None:
        pass


class _Then:
    """`first`, then `finish`, once; holds every tensor of the operation until then."""

    def __init__(self, first: Handle, finish: Callable[[], None]) -> None:
        self._first: Handle | None = first
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        first, finish, self._first, self._finish = self._first, self._finish, None, None
        if first is not None and finish is not None:
            first.wait()
            finish()


class World(ABC):
    """The ranks of one run, seen from one of them.

    Every rank must start the same operations in the same order; handles may be waited for in any order.
    `what` names the operation's subject (a unit) in error messages.

    Attributes:
        rank: 0 to size - 1.
        size: W.
        device: where this rank's full tensors live.
        timeout_s: the deadline of every wait.
    """

    def __init__(self, rank: int, size: int, *, device: torch.device | str, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} does not exist in a world of {size}")
        if not timeout_s > 0:
            raise ConfigError(f"launch.timeout must be more than 0 seconds, not {timeout_s}")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.timeout_s = timeout_s

    @staticmethod
    def from_env(timeout_s: float = 300.0, device: str | None = None) -> "World":
        """The world that torchrun's environment describes; a `SoloWorld` where there is none or it has one rank.

        Args:
            timeout_s: the deadline of every wait, in seconds.
            device: "cpu" or "cuda"; by default CUDA where torch finds it. LOCAL_RANK picks the GPU.

        Raises:
            ConfigError: the environment is incomplete.
            DeadlineError: the other ranks did not come.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return SoloWorld(_local_device(device), timeout_s=timeout_s)
        return ProcessWorld(timeout_s=timeout_s, device=device)

    def gather(self, shard_S: Tensor, full_P: Tensor, *, what: str = "") -> Handle:
        """Put rank r's shard into full_P[r * S : (r + 1) * S], on every rank.

        Args:
            shard_S: (S,), any dtype; may be this rank's own slice of `full_P`, which saves a copy.
            full_P: (W * S,), the same dtype.
        """
        op = _label("gather", what)
        _check(op, full_P, shard_S.numel() * self.size, shard_S.dtype)
        _check(op, shard_S, shard_S.numel(), shard_S.dtype)
        return self._gather(shard_S, full_P, op)

    def reduce_scatter(
        self, full_P: Tensor, recv_P: Tensor, sum_S: Tensor, *, accumulate: bool = False, what: str = ""
    ) -> Handle:
        """Add chunk `rank` of every rank's `full_P`: the transpose of `gather`.

        The chunks are added in rank order in sum_S.dtype, (c_0 + c_1) + c_2 and so on, inside `wait`.

        Args:
            full_P: (W * S,), this rank's summand.
            recv_P: like `full_P`; scratch, holds nothing useful afterwards.
            sum_S: (S,), fp32 or full_P.dtype; receives the sum.
            accumulate: add the sum to `sum_S` instead.
        """
        op = _label("reduce_scatter", what)
        _check(op, full_P, sum_S.numel() * self.size, full_P.dtype)
        _check(op, sum_S, sum_S.numel(), sum_S.dtype)
        _check(op, recv_P, full_P.numel(), full_P.dtype)

        def add() -> None:
            ordered_sum(recv_P, sum_S, self.size, accumulate=accumulate)

        return _Then(self._exchange(full_P, recv_P, op), add)

    def all_reduce(self, values: Tensor, *, what: str = "") -> Handle:
        """Replace `values` (contiguous, any shape, small) by their sum over ranks, added in rank order."""
        op = _label("all_reduce", what)
        _check(op, values, values.numel(), values.dtype, flat=False)
        flat_S = values.view(-1)
        full_P = flat_S.new_empty(flat_S.numel() * self.size)

        def add() -> None:
            ordered_sum(full_P, flat_S, self.size)

        return _Then(self._gather(flat_S, full_P, op), add)

    def broadcast(self, tensor: Tensor, source: int = 0, *, what: str = "") -> Handle:
        """Give every rank the `tensor` (contiguous, any shape and dtype) of rank `source`, in place."""
        op = _label(f"broadcast from rank {source}", what)
        if not 0 <= source < self.size:
            raise WorldError(f"{op}: the world has ranks 0 to {self.size - 1}")
        _check(op, tensor, tensor.numel(), tensor.dtype, flat=False)
        return self._broadcast(tensor.view(-1), source, op)

    def barrier(self, what: str = "") -> None:
        """Return when every rank's host is here; device streams are not waited for."""
        token_S = torch.zeros(1, dtype=torch.uint8)
        self._gather(token_S, torch.empty(self.size, dtype=torch.uint8), _label("barrier", what)).wait()

    def agree(self, fields: Mapping[str, str], what: str = "settings") -> None:
        """Check that every rank came with the same `fields`; costs one gather of 32 bytes when they did.

        Raises:
            HandshakeError: on every rank, with the first field that differs, its values and their ranks.
        """
        message = json.dumps(dict(fields), sort_keys=True).encode()
        digest_S = torch.frombuffer(bytearray(hashlib.sha256(message).digest()), dtype=torch.uint8)
        digests_P = digest_S.new_empty(32 * self.size)
        self._gather(digest_S, digests_P, _label("agree", what)).wait()
        if torch.equal(digests_P.view(self.size, 32), digest_S.expand(self.size, 32)):
            return
        raise HandshakeError(_difference(what, [json.loads(text) for text in self._gather_texts(message, what)]))

    def share(self, text: str, source: int = 0) -> str:
        """The `text` of rank `source`, on every rank."""
        message = text.encode()
        numel = torch.tensor([len(message)])
        self.broadcast(numel, source, what="the length of a text").wait()
        if self.rank == source:
            body = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0).byte()
        else:
            body = torch.empty(int(numel), dtype=torch.uint8)
        self.broadcast(body, source, what="a text").wait()
        return bytes(body.tolist()).decode()

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Hold what the ranks of one process share (torch's global generator); free where ranks are processes."""
        return contextlib.nullcontext()

    def fail(self, error: BaseException) -> None:  # noqa: B027  (nobody to tell in a world of one)
        """Tell the other ranks that this one leaves because of `error`, so that they can name it."""

    def close(self) -> None:  # noqa: B027  (nothing to give back in a world of one)
        """Leave the world. Closing again is free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, {self.device})"

    def _gather_texts(self, message: bytes, what: str) -> list[str]:
        numels_P = torch.empty(self.size, dtype=torch.int64)
        self._gather(torch.tensor([len(message)]), numels_P, _label("agree on lengths", what)).wait()
        padded_S = torch.frombuffer(bytearray(message.ljust(int(numels_P.max()), b" ")), dtype=torch.uint8)
        full_P = padded_S.new_empty(padded_S.numel() * self.size)
        self._gather(padded_S, full_P, _label("agree on fields", what)).wait()
        return [bytes(row).decode() for row in full_P.view(self.size, -1).tolist()]

    @abstractmethod
    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str) -> Handle: ...

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

    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str) -> Handle:
        if shard_S.data_ptr() != full_P.data_ptr():
            full_P.copy_(shard_S)
        return _Done()

    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return _Done()

    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        return _Done()


class ProcessWorld(World):
    """One process per rank, over gloo for tensors in host memory and NCCL for tensors on GPUs.

    Reads torchrun's environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
    """

    def __init__(self, *, timeout_s: float = 300.0, device: str | None = None) -> None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"the environment lacks {', '.join(missing)}; start the ranks with torchrun")
        place = _local_device(device)
        super().__init__(
            int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device=place, timeout_s=timeout_s
        )
        if place.type == "cuda":
            torch.cuda.set_device(place)
        timeout = timedelta(seconds=timeout_s)
        try:
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.size, timeout=timeout))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
                store=dist.PrefixStore("zero", store),
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
            )
        except RuntimeError as error:
            raise DeadlineError(
                f"rank {self.rank} of {self.size} could not join the others within {timeout_s:g} s: {error}"
            ) from error

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str) -> Handle:
        return self._start(_all_gather, full_P, shard_S, op)

    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return self._start(dist.all_to_all_single, recv_P, full_P, op)

    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        raise NotImplementedError

    def _start(self, collective: Callable[..., dist.Work], out: Tensor, into: Tensor, op: str) -> Handle:
        raise NotImplementedError


def ordered_sum(parts_P: Tensor, sum_S: Tensor, size: int, *, accumulate: bool = False) -> None:
    """Add the `size` chunks of `parts_P` in order, in sum_S.dtype: sum_S = [sum_S +] ((c_0 + c_1) + c_2) ...

    Allocates no more than two chunks of `SUM_NUMEL` elements.

    Args:
        parts_P: (size * S,), any dtype; left as it is.
        sum_S: (S,).
    """
    parts = parts_P.view(size, -1)
    if not accumulate:
        for start in range(0, sum_S.numel(), SUM_NUMEL):
            out, pieces = sum_S[start : start + SUM_NUMEL], parts[:, start : start + SUM_NUMEL]
            out.copy_(pieces[0])
            for r in range(1, size):
                out.add_(pieces[r])
        return
    total = sum_S.new_empty(min(SUM_NUMEL, sum_S.numel()))
    for start in range(0, sum_S.numel(), SUM_NUMEL):
        out, pieces = sum_S[start : start + SUM_NUMEL], parts[:, start : start + SUM_NUMEL]
        acc = total[: out.numel()].copy_(pieces[0])
        for r in range(1, size):
            acc.add_(pieces[r])
        out.add_(acc)


def _label(op: str, what: str) -> str:
    return f"{op} of {what}" if what else op


def _check(op: str, tensor: Tensor, numel: int, dtype: torch.dtype, *, flat: bool = True) -> None:
    if tensor.numel() != numel or tensor.dtype != dtype or not tensor.is_contiguous() or (flat and tensor.dim() != 1):
        raise LayoutError(
            f"{op}: got shape {tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}; "
            f"it takes {numel} contiguous elements of {dtype}"
        )


def _local_device(device: str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device, int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device(device)


def _difference(what: str, fields: list[dict[str, str]]) -> str:
    """The first field that is not the same everywhere, as one line."""
    names = sorted(set().union(*fields))
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(fields):
            ranks.setdefault(own.get(name, "(absent)"), []).append(rank)
        if len(ranks) > 1:
            seen = "; ".join(f"{value} on {_ranks(where)}" for value, where in ranks.items())
            return f"the ranks were started with different {what}: {name} is {seen}"
    raise AssertionError("the digests differ and the fields do not")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
