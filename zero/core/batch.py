"""The arithmetic of a batch: global = micro x accumulate x ranks."""

from typing import Literal

from zero.errors import ConfigError

Auto = Literal["auto"]


def solve_batch(
    rows: int | Auto,
    micro: int | Auto,
    accumulate: int | Auto,
    ranks: int,
    names: tuple[str, str, str] = ("batch.global", "batch.micro", "batch.accumulate"),
) -> tuple[int, int, int]:
    """Replace each "auto" of (global, micro, accumulate) by its number; a free accumulate is 1.

    Args:
        names: of the three, for messages.

    Raises:
        ConfigError: the numbers contradict each other or do not divide.
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
        text = " x ".join([*factors, f"{ranks} rank{'s' * (ranks > 1)}"])
        if len(factors) == 2:
            raise ConfigError(f"{names[0]}={rows} is not {text} = {product}. Set one of the three to auto.")
        raise ConfigError(f"{names[0]}={rows} does not divide by {text}. Choose a multiple.")
    return product, micro, accumulate
