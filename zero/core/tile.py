"""Functions in Triton's language that kernels of `zero.platform.tiles` compile into themselves.

The file of an optimizer or a format has such a function and does not import Triton: `bound` gives it the name `tl`.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

Tile = Any
"""A block of numbers in a function that Triton compiles, or a pointer to such numbers."""


def full_name(function: Callable[..., Any]) -> str:
    """Return the name by which a kernel finds the function."""
    return f"{function.__module__}.{function.__qualname__}"


def bound(function: FunctionType, tl: Any, wrap: Callable[[FunctionType], Any]) -> Any:
    """Return `wrap` of the function, in which `tl` and the functions that it calls have these meanings."""
    scope = {**function.__globals__, "tl": tl}
    for name in function.__code__.co_names:
        if isinstance(called := scope.get(name), FunctionType):
            scope[name] = bound(called, tl, wrap)
    return wrap(FunctionType(function.__code__, scope, function.__name__))
