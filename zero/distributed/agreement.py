"""The hosts of a run's ranks: they agree on small values, record their phase, report their failure, and leave.

Tensors of these operations are in host memory, also where the world's device is a GPU.
"""

import contextlib
import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from zero.distributed.failure import field_difference
from zero.distributed.traffic import CollectiveCounter
from zero.distributed.transport import Transport, check_tensor, label
from zero.errors import HandshakeError
from zero.platform.modes import unobserved


class Hosts:
    """The hosts of the ranks of a world, seen from one of them.

    Args:
        transport: the primitives between them.
        whole: the hosts of all ranks of the run, with the counter of their traffic; None: this transport's.

    Attributes:
        rank: 0 to size - 1.
        size: W.
        keeps_default_group: `close` leaves torch's default process group open, because the script may use it.
    """

    keeps_default_group = False

    def __init__(self, transport: Transport, whole: Self | None = None) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._whole = transport, whole
        self._counter: CollectiveCounter = CollectiveCounter() if whole is None else whole._counter

    @property
    def whole(self) -> Self:
        """The world of all ranks of the run; this world itself unless it is a part."""
        return self if self._whole is None else self._whole

    def exchange(self, numbers_N: Tensor, *, what: str = "") -> Tensor:
        """Return every rank's `numbers_N`, on every rank: (W, N) in host memory.

        Exchanges have an order of their own, so ranks need not have started the same other operations before.

        Args:
            numbers_N: (N,) in host memory, any dtype.
        """
        everyone = numbers_N.new_empty(self.size, numbers_N.numel())
        op = label("exchange", what)
        check_tensor(op, numbers_N, numbers_N.numel(), numbers_N.dtype)
        self._counter.timed(self._transport.gather(numbers_N, everyone.view(-1), op, aside=True)).wait()
        return everyone

    def on_host(self, tensor: Tensor, what: str = "") -> Tensor:
        """Return `tensor`, the result of started operations, in host memory; the host waits for the current stream.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        return self._transport.on_host(tensor, label("a wait for the device", what))

    def leave(self, tensor: Tensor, what: str = "") -> Callable[[], Tensor]:
        """Start to copy the result of started operations to host memory; return a function that waits for the copy.

        That function raises the errors of `on_host`.
        """
        copy, arrived = self._transport.compute.leave(tensor)
        return partial(self._transport.arrived, copy, arrived, label("a wait for the device", what))

    @unobserved()
    def barrier(self, what: str = "") -> None:
        """Return when the hosts of all ranks have called `barrier`; device streams are not waited for.

        Raises:
            DeadlineError: some ranks did not call it within `timeout_s`; the message names them.
            RankFailedError: another rank has failed.
        """
        token_S = torch.zeros(1, dtype=torch.uint8, device="cpu")
        full_P = torch.empty(self.size, dtype=torch.uint8, device="cpu")
        self._transport.gather(token_S, full_P, label("barrier", what)).wait()

    @unobserved()
    def agree(self, fields: Mapping[str, str], what: str = "settings") -> None:
        """Check that every rank has the same `fields`. If they are, the check takes one gather of 64 bytes per rank.

        Raises:
            HandshakeError: on every rank, with the first field that differs, its values and their ranks.
        """
        text = json.dumps(dict(fields), sort_keys=True)
        digest_S = _as_bytes(hashlib.sha256(text.encode()).hexdigest())
        digests = digest_S.new_empty(self.size, digest_S.numel())
        self._transport.gather(digest_S, digests.view(-1), label("agree", what)).wait()
        if not torch.equal(digests, digest_S.expand_as(digests)):
            different = field_difference([json.loads(text) for text in self.gather_texts(text, what)])
            raise HandshakeError(f"the ranks have different {what}: {different}")

    @unobserved()
    def share(self, text: str, source: int = 0) -> str:
        """Return the `text` of rank `source`, on every rank.

        Raises:
            DeadlineError, RankFailedError, WorldError: as `Handle.wait`.
        """
        numel, op = torch.tensor([len(text.encode())], device="cpu"), f"broadcast from rank {source}"
        self._transport.broadcast(numel, source, label(op, "the length of a text")).wait()
        body = _as_bytes(text) if self.rank == source else torch.empty(int(numel), dtype=torch.uint8, device="cpu")
        self._transport.broadcast(body, source, label(op, "a text")).wait()  # a gather's size would grow with the ranks
        return _as_text(body)

    @unobserved()
    def gather_texts(self, text: str, what: str) -> list[str]:
        """Return every rank's `text`, on every rank."""
        numels = torch.empty(self.size, dtype=torch.int64, device="cpu")
        numel = torch.tensor([len(text.encode())], device="cpu")
        self._transport.gather(numel, numels, label("lengths", what)).wait()
        padded_S = _as_bytes(text.encode().ljust(int(numels.max())).decode())
        texts = padded_S.new_empty(self.size, padded_S.numel())
        self._transport.gather(padded_S, texts.view(-1), label("texts", what)).wait()
        return [_as_text(row[:n]) for row, n in zip(texts, numels.tolist(), strict=True)]

    def at(self, place: str) -> None:
        """Record this rank's phase, such as "step 3, backward", for the errors of ranks that wait for it.

        Not collective. A call takes a few microseconds, so call it for the phases of a step and not for each operation.
        """
        self._transport.at(place)

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Return a lock of the state that ranks in threads share, such as torch's global random generator."""
        return self._transport.exclusive()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank leaves because of `error`, so that their errors name `error`."""
        self._transport.fail(error)

    def close(self) -> None:
        """Leave the world. Closing again has no effect."""
        self._transport.close(keep_default=self.whole.keeps_default_group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.close()


def _as_bytes(text: str) -> Tensor:
    octets = bytearray(text.encode())
    return torch.frombuffer(octets, dtype=torch.uint8) if octets else torch.empty(0, dtype=torch.uint8, device="cpu")


def _as_text(octets: Tensor) -> str:
    return ctypes.string_at(octets.data_ptr(), octets.numel()).decode()
