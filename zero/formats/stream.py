"""A tensor read block by block, wherever it is: what every format reads into and writes from.

So a model passes from one format into another with a few MiB of it in memory, and a format needs to know only names,
dtypes, shapes and bytes.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor

from zero.core.master import rounded
from zero.errors import CheckpointError, in_short
from zero.platform.files import memory_of, naming
from zero.progress import Progress

BLOCK_NUMEL = 2**20


@dataclass(frozen=True)
class Stream:
    """Values of `dtype` and `shape`. `cut` makes them anew: 1-D, contiguous, on the host, row-major, in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    cut: Callable[[], Iterator[Tensor]]

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...], whole: Callable[[], Tensor]) -> "Stream":
        """Of a tensor that can only be had whole; a mapped one is not in memory for that."""

        def cut() -> Iterator[Tensor]:
            flat = whole().detach().resolve_conj().resolve_neg().reshape(-1)  # a view may only be marked as conjugate
            for start in range(0, flat.numel(), BLOCK_NUMEL):
                yield flat[start : start + BLOCK_NUMEL].contiguous()  # every second element is a view, and 1-D

        return cls(dtype, shape, cut)

    @classmethod
    def read_by(cls, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[int, int], Tensor]) -> "Stream":
        """Of a tensor whose elements [start, stop) `read` gives."""

        def cut() -> Iterator[Tensor]:
            for start in range(0, prod(shape), BLOCK_NUMEL):
                yield read(start, min(start + BLOCK_NUMEL, prod(shape)))

        return cls(dtype, shape, cut)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def blocks(self, what: str) -> Iterator[Tensor]:
        """The values, counted.

        Raises:
            CheckpointError: they are more, fewer, or of another dtype than announced, or cannot be read; the line
                begins with `what`.
        """
        found = 0
        try:
            for block in self.cut():
                found += block.numel()
                if block.dtype != self.dtype or found > self.numel:
                    break
                yield block
            else:
                if found == self.numel:
                    return
        except (RuntimeError, MemoryError) as error:  # sizes that no machine has room for
            raise CheckpointError(f"{what}: cannot be read: {in_short(error)}") from error
        raise CheckpointError(f"{what}: its values are not the {self.numel} of {self.dtype} that its file announces")

    def whole(self, what: str) -> Tensor:
        """The values in one tensor."""
        flat, done = torch.empty(self.numel, dtype=self.dtype), 0
        for block in self.blocks(what):
            flat[done : done + block.numel()] = block
            done += block.numel()
        return flat.view(self.shape)

    def to(self, dtype: torch.dtype, what: str) -> "Stream":
        """The same values in another floating-point dtype.

        Raises:
            CheckpointError: from the cut, at a finite value that `dtype` has no finite value for.
        """
        if dtype == self.dtype:
            return self

        def cut() -> Iterator[Tensor]:
            for block in self.blocks(what):
                cast = rounded(block, dtype)
                if bool((cast.isinf() & block.isfinite()).any()):
                    raise CheckpointError(f"{what}: {dtype} cannot hold its largest value; choose bf16 or fp32")
                yield cast

        return Stream(dtype, self.shape, cut)


@dataclass(frozen=True)
class Source:
    """What was found somewhere else.

    Attributes:
        tensors: by the names that they have there, in their order.
        ties: further name -> name, for tensors that are one in the source.
        moments: (name, kind) -> values, where the source has the optimizer's.
        kinds: name -> "parameter", "frozen" or "buffer", where the source states it.
        step: updates made, None where it does not state them. `skipped`: steps beside them that changed nothing.
        left: what is there and is not a tensor.
    """

    tensors: Mapping[str, Stream]
    ties: Mapping[str, str] = field(default_factory=dict)
    moments: Mapping[tuple[str, str], Stream] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    skipped: int = 0
    left: tuple[str, ...] = ()


def counted(streams: Sequence[Stream], what: str, progress: Progress) -> list[Stream]:
    """The same values; `progress` is called with how many bytes of all were cut."""
    done, total = 0, sum(stream.nbytes for stream in streams)

    def cut(stream: Stream) -> Iterator[Tensor]:
        nonlocal done
        for block in stream.cut():
            yield block
            done += block.nbytes
            progress(what, done, total)

    return [Stream(stream.dtype, stream.shape, partial(cut, stream)) for stream in streams]


def shape_of(sizes: Any, what: str) -> tuple[int, ...]:
    """A shape that a file of another library states.

    Raises:
        CheckpointError: it is none; the line begins with `what`.
    """
    try:
        shape = tuple(torch.Size(sizes))  # takes integers and nothing else
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{what}: its shape is none: {in_short(error)}") from error
    if any(length < 0 for length in shape):
        raise CheckpointError(f"{what}: its shape is {shape}")
    return shape


def put(file: IO[bytes], stream: Stream, what: str) -> None:
    """Write all values."""
    for block in stream.blocks(what):
        file.write(memory_of(block))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that does not exist yet, on the disk when the block ends.

    Raises:
        CheckpointError: the system refuses.
    """
    with naming(path), path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
