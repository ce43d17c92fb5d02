"""Read a tensor block by block from any source; every format reads into and writes from `Stream`.

So a conversion keeps a few MiB of a model in memory, and a format handles only names, dtypes, shapes and bytes.
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
    """Values of `dtype` and `shape`. Each call of `cut` reads them again: 1-D blocks on the host, row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    cut: Callable[[], Iterator[Tensor]]

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...], whole: Callable[[], Tensor]) -> "Stream":
        """Make a stream of a tensor that is read as a whole, such as a mapped one."""

        def cut() -> Iterator[Tensor]:
            flat = whole().detach().resolve_conj().resolve_neg().reshape(-1)  # a view may only be marked as conjugate
            for start in range(0, flat.numel(), BLOCK_NUMEL):
                yield flat[start : start + BLOCK_NUMEL].contiguous()  # every second element is a view, and 1-D

        return cls(dtype, shape, cut)

    @classmethod
    def read_by(cls, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[int, int], Tensor]) -> "Stream":
        """Make a stream of a tensor whose elements [start, stop) `read` returns."""

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
        """Read the values and count them.

        Raises:
            CheckpointError: they are more, fewer, or of another dtype than announced, or cannot be read; the line
                begins with `what`.
        """
        count = 0
        try:
            for block in self.cut():
                count += block.numel()
                if block.dtype != self.dtype or count > self.numel:
                    break
                yield block
            else:
                if count == self.numel:
                    return
        except (RuntimeError, MemoryError) as error:  # sizes that no machine has room for
            raise CheckpointError(f"{what}: cannot be read: {in_short(error)}") from error
        raise CheckpointError(f"{what}: its values are not the {self.numel} of {self.dtype} that its file announces")

    def whole(self, what: str) -> Tensor:
        """Read the values into one tensor."""
        flat, done = torch.empty(self.numel, dtype=self.dtype), 0
        for block in self.blocks(what):
            flat[done : done + block.numel()] = block
            done += block.numel()
        return flat.view(self.shape)

    def to(self, dtype: torch.dtype, what: str) -> "Stream":
        """Return a stream of the values in another floating-point dtype.

        Raises:
            CheckpointError: while reading, at a finite value that becomes infinite.
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
    """The contents of a foreign file or folder.

    Attributes:
        tensors: by their names in the source, in its order.
        ties: further name -> name, for tensors that share memory in the source.
        moments: (name, kind) -> values, if the source has the optimizer's.
        kinds: name -> "parameter", "frozen" or "buffer", if the source states it.
        step: updates made, or None if the source does not state them.
        skipped: further steps, which changed nothing.
        left: names that are not tensors.
    """

    tensors: Mapping[str, Stream]
    ties: Mapping[str, str] = field(default_factory=dict)
    moments: Mapping[tuple[str, str], Stream] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    skipped: int = 0
    left: tuple[str, ...] = ()


def counted(streams: Sequence[Stream], what: str, progress: Progress) -> list[Stream]:
    """Return the streams with `progress` called after each block, with the bytes read of all of them."""
    done, total = 0, sum(stream.nbytes for stream in streams)

    def cut(stream: Stream) -> Iterator[Tensor]:
        nonlocal done
        for block in stream.cut():
            yield block
            done += block.nbytes
            progress(what, done, total)

    return [Stream(stream.dtype, stream.shape, partial(cut, stream)) for stream in streams]


def shape_of(sizes: Any, what: str) -> tuple[int, ...]:
    """Validate a shape from a file of another library.

    Raises:
        CheckpointError: the line begins with `what`.
    """
    try:
        shape = tuple(torch.Size(sizes))  # takes integers and nothing else
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{what}: its shape is none: {in_short(error)}") from error
    if any(length < 0 for length in shape):
        raise CheckpointError(f"{what}: its shape is {shape}")
    return shape


def put(file: IO[bytes], stream: Stream, what: str) -> None:
    for block in stream.blocks(what):
        file.write(memory_of(block))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file and synchronise it at the end of the block; errors of the system are CheckpointError."""
    with naming(path), path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
