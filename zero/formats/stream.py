"""Read tensors block by block, so that a conversion keeps only a few MiB of a model in memory.

Every format reads its tensors as `Stream` and writes them from `Stream`.
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
    """The values of one tensor, read block by block.

    Attributes:
        cut: reads the tensor, flattened in row-major order, as 1-D CPU blocks. Each call reads it from the start.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    cut: Callable[[], Iterator[Tensor]]

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...], whole: Callable[[], Tensor]) -> "Stream":
        """Make a stream of a tensor that `whole` returns, such as a memory-mapped one."""

        def cut() -> Iterator[Tensor]:
            flat = whole().detach().resolve_conj().resolve_neg().reshape(-1)  # conj() is lazy: it returns a marked view
            for start in range(0, flat.numel(), BLOCK_NUMEL):
                yield flat[start : start + BLOCK_NUMEL].contiguous()  # reshape does not copy a 1-D view with gaps

        return cls(dtype, shape, cut)

    @classmethod
    def read_by(cls, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[int, int], Tensor]) -> "Stream":
        """Make a stream of a tensor; `read(start, stop)` returns elements [start, stop) of it as a 1-D CPU tensor."""

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
        """Yield the values in blocks, and check their number and dtype.

        Raises:
            CheckpointError: the values are not `numel` values of `dtype`, or cannot be read; the message begins with
                `what`.
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
        except (RuntimeError, MemoryError) as error:  # a damaged file may claim any size
            raise CheckpointError(f"{what}: cannot be read: {in_short(error)}") from error
        raise CheckpointError(f"{what}: the data is not the {self.numel} elements of {self.dtype} in its header")

    def whole(self, what: str) -> Tensor:
        """Read the values and return them as one tensor of `shape`."""
        flat, done = torch.empty(self.numel, dtype=self.dtype), 0
        for block in self.blocks(what):
            flat[done : done + block.numel()] = block
            done += block.numel()
        return flat.view(self.shape)

    def to(self, dtype: torch.dtype, what: str, cast: Callable[[Tensor, torch.dtype], Tensor] = rounded) -> "Stream":
        """Return a stream of the values, converted by `cast` to another floating-point dtype.

        Raises:
            CheckpointError: while the stream is read, if a finite value becomes infinite.
        """
        if dtype == self.dtype:
            return self

        def cut() -> Iterator[Tensor]:
            for block in self.blocks(what):
                values = cast(block, dtype)
                if bool((values.isinf() & block.isfinite()).any()):
                    raise CheckpointError(f"{what}: {dtype} cannot hold its largest value. Choose bf16 or fp32.")
                yield values

        return Stream(dtype, self.shape, cut)


@dataclass(frozen=True)
class TensorSource:
    """The contents of a file or folder of another library.

    Attributes:
        tensors: name -> values, in the order of the source.
        ties: alias -> name in `tensors`, for tensors that share memory in the source.
        moments: (name, kind) -> values of the optimizer's moments; empty if the source has none.
        kinds: name -> "parameter", "frozen" or "buffer", for tensors whose kind the source states.
        step: number of updates made, or None if the source does not state it.
        updates: name -> number of updates of a parameter, where it is not `step`.
        skipped: number of skipped steps, which are not in `step`.
        left: names of the objects that are not imported, because they are not tensors.
    """

    tensors: Mapping[str, Stream]
    ties: Mapping[str, str] = field(default_factory=dict)
    moments: Mapping[tuple[str, str], Stream] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    updates: Mapping[str, int] = field(default_factory=dict)
    skipped: int = 0
    left: tuple[str, ...] = ()


def counted(streams: Sequence[Stream], what: str, progress: Progress) -> list[Stream]:
    """Return equal streams that call `progress` after each block, with the number of bytes read from all of them."""
    done, total = 0, sum(stream.nbytes for stream in streams)

    def cut(stream: Stream) -> Iterator[Tensor]:
        nonlocal done
        for block in stream.cut():
            yield block
            done += block.nbytes
            progress(what, done, total)

    return [Stream(stream.dtype, stream.shape, partial(cut, stream)) for stream in streams]


def shape_in(sizes: Any, what: str) -> tuple[int, ...]:
    """Validate a shape from a file of another library.

    Raises:
        CheckpointError: the shape is not a list of non-negative integers; the message begins with `what`.
    """
    try:
        shape = tuple(torch.Size(sizes))  # raises TypeError unless all are integers
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{what}: its shape is not a list of integers: {in_short(error)}") from error
    if any(length < 0 for length in shape):
        raise CheckpointError(f"{what}: its shape {shape} has a negative size")
    return shape


def put(file: IO[bytes], stream: Stream, what: str) -> None:
    for block in stream.blocks(what):
        file.write(memory_of(block))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, and fsync and close it at the end of the block.

    Raises:
        CheckpointError: a file call failed; the message names the path.
    """
    with naming(path), path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
