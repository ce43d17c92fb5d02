"""The sizes of a batch: global (rows per step) = micro (rows per microbatch) x accumulate (microbatches) x ranks."""

from typing import Literal

from zero.errors import ConfigError

Auto = Literal["auto"]


def solve_batch(
    rows: int | Auto,
    micro: int | Auto,
    accumulate: int | Auto,
    ranks: int,
    names: tuple[str, str, str] = ("batch.global", "batch.micro", "batch.accumulate"),
    unit: str = "rank",
) -> tuple[int, int, int]:
    """Return (global, micro, accumulate) with each "auto" replaced by the number that follows from the other arguments.

    Args:
        rows: rows per step over all ranks.
        micro: rows per microbatch and rank.
        accumulate: microbatches per step and rank; "auto" is 1 unless `rows` and `micro` are both numbers.
        ranks: the number of ranks.
        names: the names of `rows`, `micro` and `accumulate` in messages.
        unit: the word for a rank in messages; "group" if several ranks share rows.

    Raises:
        ConfigError: `rows` and `micro` are both "auto", or the numbers contradict each other or do not divide.
    """
    typed = {names[1]: micro, names[2]: accumulate}
    if accumulate == "auto":
        accumulate = 1 if rows == "auto" or micro == "auto" else rows // (micro * ranks)
    if micro == "auto":
        if rows == "auto":
            raise ConfigError(f"{names[0]} and {names[1]} are both auto. Give one of them.")
        micro = rows // (accumulate * ranks)
    product = micro * accumulate * ranks
    if rows not in ("auto", product):
        factors = [f"{key}={value}" for key, value in typed.items() if value != "auto"]
        text = " x ".join([*factors, f"{ranks} {unit}{'s' * (ranks > 1)}"])
        if len(factors) == 2:
            raise ConfigError(f"{names[0]}={rows} is not {text} = {product}. Set one of the three to auto.")
        raise ConfigError(f"{names[0]}={rows} does not divide by {text}. Choose a multiple.")
    return product, micro, accumulate
