"""Packed formats: frozen parameters as bytes, called codes, which each gather expands to values.

A parameter is cut in row-major order into blocks; its codes are a row of bytes for each, in turn. A row depends on its
block alone, so each rank makes only the bytes that it keeps, and no cut of the codes changes a bit. The last row is
shorter, in steps of 64 values. Expanding rounds in fp32 after each product and sum, last to the result's dtype.

A format is a file beside this one: its sizes, its functions from values to rows and back, and its function for the
kernel of `zero.platform.tiles`, which expands a tile of values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from zero.core.layout import VECTOR
from zero.core.tile import full_name
from zero.errors import ConfigError

if TYPE_CHECKING:
    import triton.language as tl

    from zero.core.tile import Tile

LEAST_DIVISOR = 1e-38
"""The least divisor, for blocks of zeros. Its inverse is finite in fp32."""

EXPANDED_AT_ONCE = 2**18
"""Values that are encoded or expanded at once, so that temporaries take 3 MiB. Half as many take a third longer."""


@dataclass(frozen=True)
class PackedFormat(ABC):
    """A format of frozen parameters.

    Attributes:
        name: the format's name in settings and checkpoints.
        block: the number of values of a row.
        head_bytes: bytes of a row that are not of its vectors.
        vector_bytes: bytes of a row for each 64 values.
        moved_bytes: bytes of memory that operators could read and write in the time that they take to expand a value;
            measured on an EPYC core that copies 27 GB/s.
        tile: function of a module in Triton's language, whose name `tl` it gets from the kernel. It takes pointers to a
            parameter's codes, which begin at a multiple of 64 bytes, and to two of `tables`, the number of the
            parameter's vectors of 64 values, the first vector of a tile, the numbers of its at most 256 vectors, and of
            the values in a vector; it returns the values. None: operators expand the format on every device.
    """

    name: ClassVar[str]
    block: ClassVar[int]
    head_bytes: ClassVar[int]
    vector_bytes: ClassVar[int]
    moved_bytes: ClassVar[float]
    tile: ClassVar[Callable[..., Any] | None] = None

    @property
    def row_bytes(self) -> int:
        return self.nbytes(self.block)

    @property
    def rule(self) -> str:
        """The full name of `tile`, by which the kernel finds it; empty if there is none."""
        return "" if self.tile is None else full_name(self.tile)

    def nbytes(self, count: int) -> int:
        """Return the number of bytes that `count` values take."""
        return self.head_bytes * -(-count // self.block) + self.vector_bytes * -(-count // VECTOR)

    def encode(self, values: Tensor) -> Tensor:
        """Return the codes of a parameter's values, (n,) fp32: (`nbytes(n)`,) uint8, of which `is_finite` may be false.

        A part of a parameter that begins at a multiple of `block` gives a part of its codes.
        """
        codes = values.new_empty(self.nbytes(values.numel()), dtype=torch.uint8)
        for rows, first, last in self._rows(codes, values.numel()):
            padded = values.new_zeros(rows.shape[0], (rows.shape[1] - self.head_bytes) // self.vector_bytes * VECTOR)
            padded.view(-1)[: last - first].copy_(values[first:last])
            self._encode(padded, rows)
        return codes

    def expand(self, codes: Tensor, values: Tensor, chunk: int = EXPANDED_AT_ONCE) -> None:
        """Write the values of codes, (`nbytes(n)`,) uint8, to `values`, (n,) of any floating-point dtype.

        Args:
            chunk: the number of values that are expanded at once, a multiple of `EXPANDED_AT_ONCE`.
        """
        for rows, first, last in self._rows(codes, values.numel(), chunk):
            values[first:last].copy_(self._expanded(rows).view(-1)[: last - first])

    def is_finite(self, codes: Tensor) -> bool:
        """Return whether all scales of some rows of codes, (n,) uint8, are finite.

        They are not if a value is NaN or infinite, or if the largest values of the blocks of a row of nf4 are above
        1.3e36 on average, because their sum is infinite.
        """
        rows = torch.arange(0, codes.numel(), self.row_bytes, device=codes.device)
        heads = codes[rows[:, None] + torch.arange(self.head_bytes, device=codes.device)]
        return bool(heads.view(torch.float32).isfinite().all())

    def tables(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tables of `tile`, at most two, on `device`."""
        return ()

    def bytes_of(self, name: str, count: int, values: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
        """Return a function from (start, stop) to this range of a parameter's codes, `checked`.

        Args:
            name, count: the parameter's name and number of values.
            values: function from (start, stop) to these values, (stop - start,) of any floating-point dtype.
        """

        def codes(start: int, stop: int) -> Tensor:
            first, last = start // self.row_bytes, -(-stop // self.row_bytes)
            rows = self.encode(values(first * self.block, min(last * self.block, count)).float())
            return rows[start - first * self.row_bytes : stop - first * self.row_bytes]

        return self.checked(name, count, codes)

    def checked(self, name: str, count: int, codes: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
        """Return a function to ranges of codes that raises ConfigError if a scale is NaN or infinite.

        Args:
            name, count: the parameter's name and number of values.
            codes: function from (start, stop) in the parameter's codes to these bytes.
        """

        def read(start: int, stop: int) -> Tensor:
            first = start // self.row_bytes * self.row_bytes
            rows = codes(first, min(-(-stop // self.row_bytes) * self.row_bytes, self.nbytes(count)))
            if not self.is_finite(rows):
                raise ConfigError(
                    f"{name} has a value that is NaN, infinite or above 1e36, so it has no codes. Repair the weights, "
                    "or name other parameters in precision.coded."
                )
            return rows[start - first : stop - first]

        return read

    def values_of(
        self, codes: Callable[[int, int], Tensor], count: int, dtype: torch.dtype = torch.float32
    ) -> Callable[[int, int], Tensor]:
        """Return a function to ranges of the values of codes, as a gather in `dtype` makes them; see `bytes_of`."""

        def values(start: int, stop: int) -> Tensor:
            first, last = start // self.block, -(-stop // self.block)
            end = min(last * self.block, count)
            whole = torch.empty(end - first * self.block, dtype=dtype, device="cpu")
            self.expand(codes(first * self.row_bytes, self.nbytes(end)), whole)
            return whole[start - first * self.block : stop - first * self.block]

        return values

    def _rows(self, codes: Tensor, count: int, chunk: int = EXPANDED_AT_ONCE) -> list[tuple[Tensor, int, int]]:
        """Return (rows of equal length, first value, last value) of some rows of codes at once, in order."""
        whole, parts = count // self.block * self.block, []
        for first in range(0, whole, chunk):
            last = min(first + chunk, whole)
            parts.append((codes[self.nbytes(first) : self.nbytes(last)].view(-1, self.row_bytes), first, last))
        if whole < count:
            parts.append((codes[self.nbytes(whole) :].view(1, -1), whole, count))
        return parts

    @abstractmethod
    def _encode(self, values: Tensor, rows: Tensor) -> None:
        """Write the codes of blocks, (r, n) fp32, to rows, (r, b)."""

    @abstractmethod
    def _expanded(self, rows: Tensor) -> Tensor:
        """Return the values of rows, (r, b), as fp32, (r, n)."""


def fp32_numbers(head: Tensor) -> Tensor:
    """Return the fp32 numbers, (r, n), in the heads of rows, (r, 4 n); copied, because a last row is not aligned."""
    return head.clone(memory_format=torch.contiguous_format).view(torch.float32)


def of_fp32(pointer: "Tile") -> "Tile":
    """Return a pointer to bytes, which are aligned, as one to fp32 numbers; for functions `tile`."""
    return pointer.to(tl.pointer_type(tl.float32), bitcast=True)
