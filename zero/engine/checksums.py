"""Checksums of the tensors of a step, in the order in which a rank computes them, to compare two runs of the step."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.platform.device import Device

_WEIGHTS = 2**12
_ROWS = 64
"""Rows of `_WEIGHTS` words that are multiplied at a time on a CPU, so that their products take 2 MiB."""
_ROWS_ON_GPU = 2**10
"""The same for a GPU, where launches cost more than memory: six launches for 16 MiB, and 32 MiB for products."""
_FACTOR = 0x27BB2EE687B0B0FD  # odd, so that a product with it keeps every bit of a difference


class ChecksumEntry(NamedTuple):
    """The checksum of one tensor.

    Attributes:
        unit: the name of the unit or site that the tensor belongs to, or of a buffer.
        what: what the tensor is.
        value: the checksum, 0-dim int64 on the tensor's device.
    """

    unit: str
    what: str
    value: Tensor


class Checksums:
    """The record of one rank, empty unless a run of a step is recorded.

    Attributes:
        active: whether `note` records.
        frozen: (`UnitState.frozen_version`, checksum) at the last replay, by unit index and part of the state.
    """

    def __init__(self, device: Device) -> None:
        self.active, self._rows = False, _ROWS if device.shares_memory else _ROWS_ON_GPU
        self.frozen: dict[tuple[int, str], tuple[int, int]] = {}
        self._entries: list[ChecksumEntry] = []

    def note(self, unit: str, what: str, tensors: Iterable[Tensor]) -> None:
        """Record the checksums that `tensors` have after the work that is enqueued on the current stream."""
        if self.active:
            self._entries += [ChecksumEntry(unit, what, self.of(tensor)) for tensor in tensors]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the `checksum` of a tensor, in as many launches as fit this rank's device."""
        return checksum(tensor, self._rows)

    def begin(self) -> None:
        """Begin a record."""
        self.active = True
        self._entries = []

    def end(self) -> list[ChecksumEntry]:
        """End the record and return it."""
        self.active = False
        entries, self._entries = self._entries, []
        return entries


@torch.no_grad()
def checksum(tensor: Tensor, rows: int = _ROWS) -> Tensor:
    """Return a weighted sum of the words of 4 bytes in a tensor's memory, modulo 2**64: 0-dim int64 on its device.

    Each word has a weight of its own, a product of pseudo-random odd numbers. So any single bit that flips changes the
    sum. Other changes, such as two flipped signs or two exchanged rows, are missed with a probability of about 2**-32.
    The bits of a tensor without strides, such as a sparse or nested one, are not summed.

    Args:
        rows: rows of words that are multiplied at a time; another number gives another sum.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.layout is not torch.strided or tensor.is_nested or is_traceable_wrapper_subclass(tensor):
        return total
    octets = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 4:
        octets = octets.clone()
    words = octets[: octets.numel() // 4 * 4].view(torch.int32)
    whole, weights = words.numel() // _WEIGHTS * _WEIGHTS, _weights(octets)
    for part in words[:whole].view(-1, _WEIGHTS).split(rows):
        if len(part):
            total = total * _FACTOR + part.to(torch.int64).mul_(weights).sum(1).mul_(weights[: len(part)]).sum()
    for rest in (words[whole:], octets[words.nbytes :]):
        if len(rest):
            total = total * _FACTOR + rest.to(torch.int64).mul_(weights[: len(rest)]).sum()
    return total


def _weights(octets: Tensor) -> Tensor:
    """Return (`_WEIGHTS`,) odd int64 numbers, hashes of their index."""
    numbers = octets.new_empty(_WEIGHTS, dtype=torch.int64).fill_(1).cumsum_(0)
    for shift in (32, 29):
        numbers.mul_(_FACTOR)
        numbers.bitwise_xor_(numbers >> shift)
    return numbers.mul_(_FACTOR).bitwise_or_(1)


def on_host(entries: list[ChecksumEntry], device: Device) -> list[int]:
    """Return the checksums of entries as numbers; the host waits for the device once."""
    if not entries:
        return []
    values = [entry.value.to(device.device) for entry in entries]
    return [int(value) for value in device.on_host(torch.stack(values)).tolist()]
