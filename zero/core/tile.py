"""Functions in Triton's language that kernels of `zero.platform.tiles` compile into themselves.

The file of an optimizer or a format has such a function and does not import Triton: the kernel gives it the name `tl`.
"""

from collections.abc import Callable
from typing import Any

Tile = Any
"""A block of numbers in a function that Triton compiles, or a pointer to such numbers."""


def full_name(function: Callable[..., Any]) -> str:
    """Return the name by which a kernel finds the function."""
    return f"{function.__module__}.{function.__qualname__}"
