"""rows: recomputed units run on chunks of their rows, so that the activations inside of them are those of one chunk.

`zero.engine.forward.rows` runs the chunks, and for `auto` `zero.trainer.planning.choices` takes the most rows that fit.
"""

from collections.abc import Iterable
from typing import Literal

from zero.core.activations import ACTIVATIONS, REMAT
from zero.errors import ConfigError

ALL_ROWS = 0
"""The value of `zero.rows` that runs all rows at once."""


def check_recomputes(rows: int | Literal["auto"], policies: Iterable[str]) -> None:
    """Raise ConfigError if there are chunks of rows, but none of the policies, by name, recomputes a unit."""
    if rows != ALL_ROWS and not any(ACTIVATIONS[name].recomputes for name in policies):
        raise ConfigError(
            f"zero.rows={rows} splits units that are recomputed, and none is. Set zero.activations={REMAT.name}."
        )


def halvings(rows: int) -> list[int]:
    """Return the values of `zero.rows` to try for a microbatch of `rows` rows, the one with the most bytes first."""
    counts = [ALL_ROWS]
    while rows > 1:
        rows = -(-rows // 2)
        counts.append(rows)
    return counts
