"""Rows cut from a long sequence of tokens: at random positions for training, at fixed positions for validation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero.errors import ConfigError
from zero.trainer.data.order import draw

PROMPT_TOKENS = 32


class Data(Protocol):
    """The data of a run. Rows have seq + 1 tokens, int64 on the CPU; every method is a pure function."""

    vocab_size: int
    digest: str
    """SHA-256 in hex: runs with equal digests read the same data."""
    validation_rows: int
    """Number of different validation rows."""
    has_text: bool
    """Whether `decode` returns text; otherwise it returns token numbers."""
    has_turns: bool = False
    """Whether documents are chats with roles, so that the chat template makes a prompt of a question."""
    about: str
    """A text behind the digest about what was read; "" if there is nothing to say."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the run, counted from its first step: (stop - start, seq + 1)."""

    def validation(self, index: int, rows: int) -> Tensor:
        """Return validation rows [index * rows, (index + 1) * rows), modulo `validation_rows`: (rows, seq + 1).

        They do not depend on the seed.
        """

    def rows_of_epochs(self, count: int) -> int:
        """Return the number of training rows in the first `count` passes over the data."""

    def shares(self, rows: int) -> dict[str, float]:
        """Return the share of each source of `data.mix` in the first rows; {} for one source."""
        return {}

    def example(self) -> list[tuple[str, bool]]:
        """Return the parts of the first training row and whether they train; [] if all of every row does."""
        return []

    def lengths(self) -> Sequence[int]:
        """Return the numbers of tokens of the documents, before they are cut; [] if rows are not of documents."""
        return []

    def prompt(self, longest: int) -> tuple[Tensor, int | None]:
        """Return the tokens of a prompt for a sample, (1, t) with t <= longest, and the token that ends an answer."""
        return self.validation(0, 1)[:, : min(PROMPT_TOKENS, longest)], None

    def decode(self, tokens: Tensor) -> str:
        """Return the text of a 1-D tensor of tokens."""


def slice_of(rows: Tensor, number: int, count: int) -> Tensor:
    """Return slice `number` of `count` of rows, (b, seq + 1): (b, seq / count + 1), with the last token's target."""
    tokens = (rows.shape[1] - 1) // count
    return rows[:, number * tokens : (number + 1) * tokens + 1]


def decode_numbers(tokens: Tensor) -> str:
    """Return the token numbers as text, separated by spaces."""
    return " ".join(str(token) for token in tokens.tolist())


class Tokens(Protocol):
    """A 1-D tensor of any integer dtype, or an object that can be sliced like one."""

    def numel(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Tensor: ...


def spread_over(index: int, count: int) -> int:
    """Return element `index` of a permutation of range(count) whose first elements are spread over the whole range.

    The permutation takes steps of about 0.618 * count (golden ratio).
    """
    stride = max(1, round(count * 0.618))
    while math.gcd(stride, count) != 1:
        stride += 1
    return index * stride % count


@dataclass(eq=False)
class Windows(Data):
    """An implementation of `Data` on two sequences of tokens, one for training and one for validation.

    Training rows start at random positions, drawn with replacement.

    Raises:
        ConfigError: a row holds a token that is not below `vocab_size`.
    """

    train: Tokens
    held: Tokens
    seq: int
    seed: int
    vocab_size: int
    digest: str
    decode_tokens: Callable[[Tensor], str]
    about: str = ""

    def __post_init__(self) -> None:
        self.has_text = self.decode_tokens is not decode_numbers
        # the last token of a row is only a target, so it may be the first token of the next row
        self.validation_rows = (self.held.numel() - 1) // self.seq

    def rows(self, start: int, stop: int) -> Tensor:
        below = self.train.numel() - self.seq
        return self._rows(self.train, [draw(self.seed, row, below) for row in range(start, stop)])

    def decode(self, tokens: Tensor) -> str:
        return self.decode_tokens(tokens)

    def rows_of_epochs(self, count: int) -> int:
        return count * self.train.numel() // self.seq  # drawn at random, so a pass has as many tokens as the data

    def validation(self, index: int, rows: int) -> Tensor:
        numbers = range(index * rows, (index + 1) * rows)
        starts = [spread_over(number % self.validation_rows, self.validation_rows) * self.seq for number in numbers]
        return self._rows(self.held, starts)

    def _rows(self, tokens: Tokens, starts: list[int]) -> Tensor:
        if not starts:
            return torch.empty(0, self.seq + 1, dtype=torch.int64)
        rows = torch.stack([tokens[start : start + self.seq + 1] for start in starts]).to(torch.int64)
        if int(rows.max()) >= self.vocab_size:
            raise ConfigError(
                f"the data holds token {int(rows.max())}, but data.vocab={self.vocab_size}. Raise data.vocab."
            )
        return rows
