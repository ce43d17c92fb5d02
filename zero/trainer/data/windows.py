"""Rows cut out of a long 1-D tensor of tokens: random ones for training, fixed ones for validation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero.errors import ConfigError
from zero.trainer.data.order import draw


class Data(Protocol):
    """The data of a run. Rows have seq + 1 tokens, int64 on the CPU; every method is a pure function."""

    vocab_size: int
    digest: str
    """SHA-256 in hex: runs with equal digests read the same data."""
    validation_rows: int
    """Number of different validation rows."""
    has_text: bool
    """Whether `decode` gives text; otherwise it gives numbers."""

    def batch(self, step: int, start: int, stop: int) -> Tensor:
        """Return rows start to stop of the global batch of `step`: (stop - start, seq + 1)."""

    def validation(self, index: int, rows: int) -> Tensor:
        """Return the index-th validation batch, (rows, seq + 1), for any seed. Wraps after `validation_rows`."""

    def decode(self, tokens: Tensor) -> str:
        """Return the text of a 1-D tensor of tokens."""


def decode_numbers(tokens: Tensor) -> str:
    """Return the numbers as text."""
    return " ".join(str(token) for token in tokens.tolist())


class Tokens(Protocol):
    """A 1-D tensor of any integer dtype, or an object that returns its slices."""

    def numel(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Tensor: ...


def spread(index: int, count: int) -> int:
    """Permute range(count) so that the first members are spread over it (steps by the golden ratio)."""
    stride = max(1, round(count * 0.618))
    while math.gcd(stride, count) != 1:
        stride += 1
    return index * stride % count


@dataclass(eq=False)
class Windows:
    """Data from two sequences of tokens. Training rows start anywhere, with replacement.

    Raises:
        ConfigError: a row holds a token that is not below `vocab_size`.
    """

    train: Tokens
    held: Tokens
    seq: int
    seed: int
    vocab_size: int
    digest: str
    decode: Callable[[Tensor], str]

    def __post_init__(self) -> None:
        self.has_text = self.decode is not decode_numbers
        # targets of a row may be inputs of the next row, so rows overlap by one token
        self.validation_rows = (self.held.numel() - 1) // self.seq

    def batch(self, step: int, start: int, stop: int) -> Tensor:
        below = self.train.numel() - self.seq
        return self._rows(self.train, [draw(self.seed, step, row, below) for row in range(start, stop)])

    def validation(self, index: int, rows: int) -> Tensor:
        numbers = range(index * rows, (index + 1) * rows)
        starts = [spread(number % self.validation_rows, self.validation_rows) * self.seq for number in numbers]
        return self._rows(self.held, starts)

    def _rows(self, tokens: Tokens, starts: list[int]) -> Tensor:
        if not starts:
            return torch.empty(0, self.seq + 1, dtype=torch.int64)
        rows = torch.stack([tokens[start : start + self.seq + 1] for start in starts]).to(torch.int64)
        if int(rows.max()) >= self.vocab_size:
            raise ConfigError(f"the data holds token {int(rows.max())}, but data.vocab={self.vocab_size}; raise it")
        return rows
