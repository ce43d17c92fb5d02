"""Data made of other data: several sources in a fixed proportion, and validation from a source of its own."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import torch
from torch import Tensor

from zero.errors import ConfigError
from zero.trainer.data.windows import Data


class Proportion:
    """The source of each row, so that any beginning of the rows has the sources in proportion to their weights.

    Each source takes its share of the rows that earlier sources leave, spread evenly: floor(n x share) of the first n.
    So the source of a row, and its number in that source, follow from the row's number alone, without rounding.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        self._shares = [weight / sum(exact[place:]) for place, weight in enumerate(exact)]

    def place(self, row: int) -> tuple[int, int]:
        """Return the source of a row, and the number of the row in that source."""
        for source, share in enumerate(self._shares):
            before = floor(row * share)
            if floor((row + 1) * share) > before:
                return source, before
            row -= before
        raise AssertionError("the last source takes all that are left")

    def counts(self, rows: int) -> list[int]:
        """Return the number of rows of each source in the first `rows`."""
        counts = []
        for share in self._shares:
            counts.append(floor(rows * share))
            rows -= counts[-1]
        return counts


@dataclass(eq=False)
class Mixed(Data):
    """An implementation of `Data` on several sources with the same tokens.

    Args:
        sources: data by name.
        weights: of the rows, in the order of the sources.
    """

    sources: Mapping[str, Data]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        self._all, self._proportion = [*self.sources.values()], Proportion(self.weights)
        first, named = self._all[0], [*zip(self.sources.items(), self.weights, strict=True)]
        self.vocab_size, self.has_text = first.vocab_size, first.has_text
        self.has_turns = any(data.has_turns for data in self._all)
        self.validation_rows = self._rows_in([data.validation_rows for data in self._all])
        known = " ".join(f"{name} {weight} {data.digest}" for (name, data), weight in named)
        self.digest = hashlib.sha256(known.encode()).hexdigest()
        self.about = "".join(
            f"\n  {weight:g} of {sum(self.weights):g} from {name}{data.about or f', digest {data.digest[:12]}'}"
            for (name, data), weight in named
        )

    def rows(self, start: int, stop: int) -> Tensor:
        places = [self._proportion.place(row) for row in range(start, stop)]
        rows = [self._all[source].rows(number, number + 1) for source, number in places]
        return torch.cat(rows) if rows else self._all[0].rows(0, 0)

    def validation(self, index: int, rows: int) -> Tensor:
        numbers = [number % self.validation_rows for number in range(index * rows, (index + 1) * rows)]
        places = [self._proportion.place(number) for number in numbers]
        return torch.cat([self._all[source].validation(number, 1) for source, number in places])

    def decode(self, tokens: Tensor) -> str:
        return self._all[0].decode(tokens)

    def prompt(self, longest: int) -> tuple[Tensor, int | None]:
        return self._all[0].prompt(longest)

    def rows_of_epochs(self, count: int) -> int:
        raise ConfigError("data.mix: its sources end at different steps, so epochs means nothing. Set steps.")

    def shares(self, rows: int) -> dict[str, float]:
        return {
            name: count / max(1, rows) for name, count in zip(self.sources, self._proportion.counts(rows), strict=True)
        }

    def _rows_in(self, held: Sequence[int]) -> int:
        """Return the number of rows until a source with `held` rows would begin anew."""
        low, high = 0, sum(held)
        while low < high:
            middle = (low + high + 1) // 2
            fits = all(count <= rows for count, rows in zip(self._proportion.counts(middle), held, strict=True))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def lengths(self) -> Sequence[int]:
        return [length for data in self._all for length in data.lengths()]

    def example(self) -> list[tuple[str, bool]]:
        return self._all[self._proportion.place(0)[0]].example()


@dataclass(eq=False)
class Apart(Data):
    """An implementation of `Data` that trains on one source and validates on another."""

    train: Data
    held: Data

    def __post_init__(self) -> None:
        self.vocab_size, self.has_text = self.train.vocab_size, self.train.has_text
        self.has_turns = self.train.has_turns
        self.validation_rows = self.held.validation_rows
        self.digest = hashlib.sha256(f"{self.train.digest} {self.held.digest}".encode()).hexdigest()
        self.about = f"{self.train.about}{f'; validation{self.held.about}' if self.held.about else ''}"

    def rows(self, start: int, stop: int) -> Tensor:
        return self.train.rows(start, stop)

    def validation(self, index: int, rows: int) -> Tensor:
        return self.held.validation(index, rows)

    def decode(self, tokens: Tensor) -> str:
        return self.train.decode(tokens)

    def prompt(self, longest: int) -> tuple[Tensor, int | None]:
        return self.held.prompt(longest)

    def rows_of_epochs(self, count: int) -> int:
        return self.train.rows_of_epochs(count)

    def shares(self, rows: int) -> dict[str, float]:
        return self.train.shares(rows)

    def example(self) -> list[tuple[str, bool]]:
        return self.train.example()

    def lengths(self) -> Sequence[int]:
        return self.train.lengths()
