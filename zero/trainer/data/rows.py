"""Rows whose elements hold more than a token: whether it trains, and its position in its document.

They are int64 like other rows, so whatever cuts, slices and moves rows knows nothing of it. Without further facts an
element is the token itself.
"""

from torch import Tensor

TOKEN_BITS = 32
_TRAINS = 1 << TOKEN_BITS
_POSITION = _TRAINS << 1


def coded(tokens: Tensor, trains: Tensor, positions: Tensor) -> Tensor:
    """Return a row of int64.

    Args:
        tokens: numbers of tokens below 2^32.
        trains: bool, whether each token is a target that counts in the loss.
        positions: numbers of the tokens in their documents.
    """
    return tokens.long() + trains.long() * _TRAINS + positions.long() * _POSITION


def tokens_of(rows: Tensor) -> Tensor:
    """Return the tokens, int64."""
    return rows & (_TRAINS - 1)


def trains_of(rows: Tensor) -> Tensor:
    """Return whether the tokens count in the loss as targets, bool."""
    return (rows & _TRAINS) != 0


def positions_of(rows: Tensor) -> Tensor:
    """Return the positions of the tokens in their documents, int64."""
    return rows >> (TOKEN_BITS + 1)
