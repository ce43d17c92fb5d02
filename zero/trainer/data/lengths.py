"""The lengths of documents, counted in intervals for the report of a run."""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil

PER_DOUBLING = 3
"""Number of intervals from a length to twice as many tokens."""


def counted_lengths(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (from, to, count) of intervals that contain all lengths, which are 1 or more, in ascending order.

    Each interval begins where the one before ends, and is longer by a constant factor, up to whole tokens.
    """
    if not lengths:
        return []
    edges = [1]
    while edges[-1] <= max(lengths):
        edges.append(max(edges[-1] + 1, ceil(2 ** (len(edges) / PER_DOUBLING))))
    counts = [0] * len(edges)
    for length in lengths:
        counts[bisect_right(edges, length) - 1] += 1
    first = next(place for place, count in enumerate(counts) if count)
    return [(edges[place], edges[place + 1], counts[place]) for place in range(first, len(edges) - 1)]
