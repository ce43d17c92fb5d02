"""Checks of the arguments of public calls, one for each type of value.

Each returns the value, or raises ConfigError with one line, so that no later line meets a value of another type.
"""

from collections.abc import Callable, Collection
from typing import Any, SupportsFloat

from zero.core.suggest import meant
from zero.errors import ConfigError


def instance(key: str, value: Any, cls: Any, instead: str, error: type[ConfigError] = ConfigError) -> Any:
    """Return an instance of a class, or of one in a union of classes; `instead` is a sentence with what to pass."""
    if not isinstance(value, cls):
        raise error(f"{key} is {type_text(value)}. {instead}")
    return value


def patterns(key: str, value: Any, error: type[ConfigError] = ConfigError) -> tuple[str, ...]:
    """Return names or patterns of names as a tuple."""
    if isinstance(value, str):
        raise error(f"{key}={_line(value)} is one string. Pass a list: [{value!r}].")
    if not isinstance(value, list | tuple | set | frozenset):
        raise error(f'{key}={_line(value)}: must be a list of names or patterns. Write ["*.bias"], or [] for none.')
    for pattern in value:
        text(f"an entry of {key}", pattern, error)
    return tuple(value)


def text(key: str, value: Any, error: type[ConfigError] = ConfigError) -> str:
    """Return a text, such as a pattern of names."""
    if not isinstance(value, str):
        raise error(f'{key} is {_line(value)}, but must be text. Write a name or a pattern: "*.bias".')
    return value


def one_of(key: str, value: Any, options: Collection[str], error: type[ConfigError] = ConfigError) -> Any:
    """Return a value that is one of the words `options`."""
    if not isinstance(value, str) or value not in options:
        hint = meant(value, options) if isinstance(value, str) else ""
        raise error(f"{key}={' '.join(str(value).split())}: must be one of {', '.join(options)}{hint}")
    return value


def boolean(key: str, value: Any, error: type[ConfigError] = ConfigError) -> bool:
    """Return a bool; a text would count as true."""
    if not isinstance(value, bool):
        raise error(f"{key}={_line(value)}: must be True or False")
    return value


def whole(key: str, value: Any, least: int | None, of: str = "", error: type[ConfigError] = ConfigError) -> int:
    """Return a whole number from `least`; None: any.

    Args:
        of: the things that are counted.
    """
    if type(value) is not int or (least is not None and value < least):
        limit = "" if least is None else f", {least} or more"
        raise error(f"{key}={_line(value)}: must be a {f'number of {of}' if of else 'whole number'}{limit}")
    return value


def number(key: str, value: Any, holds: Callable[[float], bool], wanted: str) -> float:
    """Return a number, or something that converts to one, if `holds(value)`.

    Args:
        holds: must be false for NaN, as every comparison with NaN is.
        wanted: describes these numbers.
    """
    if not isinstance(value, SupportsFloat):
        raise ConfigError(f"{key}={_line(value)} is a {type(value).__name__}, but must be a number")
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # such as a tensor of two elements
        raise ConfigError(f"{key}={_line(value)}: must be one number") from None
    if not holds(value):  # type: ignore[arg-type]
        raise ConfigError(f"{key}={value}: must be {wanted}")
    return value  # type: ignore[return-value]


def type_text(value: object) -> str:
    """Return the name of the value's type with "a" or "an", for a message."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if value is None:
        return "None"
    name = type(value).__qualname__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def _line(value: object) -> str:
    """Return `repr(value)` on one line."""
    return " ".join(repr(value).split())
