"""The order in which documents are read, and the rows that they are packed into: whole documents, first fit.

Every epoch has its own order. A thousand documents are packed together, so a row is a pure function of (seed, number of
the row): a resumed run needs no position, and any number of ranks reads the same rows.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from zero.trainer.data.order import draw

TOGETHER = 1000
"""Number of documents that are packed together."""


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of indices: each document is in the first row that has room for it.

    Args:
        lengths: of the documents, each at most `capacity`.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index, length in enumerate(lengths):
        place = next((number for number, room in enumerate(free) if room >= length), len(rows))
        if place == len(rows):
            rows.append([])
            free.append(capacity)
        rows[place].append(index)
        free[place] -= length
    return rows


class PackedRows:
    """The rows of documents, as many as are asked for, epoch after epoch.

    Args:
        lengths: of the documents.
        capacity: tokens of a row; None: one document in a row.
        seed: of the orders of the epochs; None: one epoch, in the order of the documents.
    """

    def __init__(self, lengths: Sequence[int], capacity: int | None, seed: int | None) -> None:
        self._lengths, self._capacity, self._seed = lengths, capacity, seed
        self._groups = -(-len(lengths) // TOGETHER)  # of an epoch
        self._before = [0]  # number of rows before each group
        self._order = lru_cache(maxsize=2)(self._ordered)
        self._rows = lru_cache(maxsize=4)(self._packed)

    def row(self, number: int) -> Sequence[int]:
        """Return the indices of the documents in row `number`."""
        while self._before[-1] <= number:
            group = len(self._before) - 1
            self._before.append(self._before[-1] + len(self._rows(group)))
        group = bisect_right(self._before, number) - 1
        return self._rows(group)[number - self._before[group]]

    def of_epochs(self, count: int) -> int:
        """Return the number of rows in the first `count` epochs."""
        while len(self._before) <= count * self._groups:
            group = len(self._before) - 1
            self._before.append(self._before[-1] + len(self._rows(group)))
        return self._before[count * self._groups]

    def _ordered(self, epoch: int) -> list[int]:
        documents = list(range(len(self._lengths)))
        if self._seed is None:
            return documents
        seed = self._seed
        return sorted(documents, key=lambda document: draw(seed, document, 2**64, what=f"epoch {epoch}"))

    def _packed(self, group: int) -> list[list[int]]:
        epoch, place = divmod(group, self._groups)
        documents = self._order(epoch)[place * TOGETHER : (place + 1) * TOGETHER]
        if self._capacity is None:
            return [[document] for document in documents]
        packed = first_fit([self._lengths[document] for document in documents], self._capacity)
        return [[documents[index] for index in row] for row in packed]
