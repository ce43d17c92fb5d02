"""Did you mean: the nearest known word for a wrong one; and values and names on one line, as a person types them."""

import contextlib
import difflib
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from zero.errors import ConfigError

SHOWN = 5
"""Names that a sentence lists before it only counts."""

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_SHELL_LEAVES = re.compile(r"[\w@%+=:,./\[\]-]+")
_BETWEEN = re.compile(r"\.{2,}|[,;:]|(?<=\d)-(?=\d)")
"""The separators between the values of a list or the ends of a range."""
_NO_TEXT = ("true", "false", "null", "inf", "nan")
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def nearest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a sentence: the option that looks most like `word`, or all of them."""
    options = list(options)
    close = difflib.get_close_matches(word.lower(), [option.lower() for option in options], n=1, cutoff=cutoff)
    for option in options:
        if close and option.lower() == close[0]:
            return f"did you mean {option}?"
    return "there are " + ", ".join(options)


def meant(word: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a sentence about a word that is unknown: what looks most like it, or nothing where nothing does."""
    close = difflib.get_close_matches(word, options, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def own_arguments(
    lines: Mapping[str, str] = MappingProxyType({}), theirs: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[_Given, _Made]], Callable[_Given, _Made]]:
    """For a function whose users know other names, of torch or DeepSpeed: Python's own TypeError names neither.

    An argument that it does not take is answered with the name that was meant, or with all that it has.

    Args:
        lines: what to write for an argument that has to be given, by its name.
        theirs: what other libraries call an argument, to its name here.

    Raises:
        ConfigError: by the function; one line.
    """
    return partial(_own_arguments, lines=lines, theirs=theirs)


def _own_arguments(
    function: Callable[_Given, _Made], lines: Mapping[str, str], theirs: Mapping[str, str]
) -> Callable[_Given, _Made]:
    signature = inspect.signature(function)
    names = list(signature.parameters)
    known = [name for name in names if name != "self"]
    required = [name for name in known if signature.parameters[name].default is inspect.Parameter.empty]

    @wraps(function)
    def checked(*given: _Given.args, **named: _Given.kwargs) -> _Made:
        try:
            signature.bind(*given, **named)
        except TypeError as error:
            called = function.__qualname__.removesuffix(".__init__")
            unknown = next((name for name in named if name not in known), "")
            lacking = [name for name in required if name not in named and name not in names[: len(given)]]
            if lacking and not unknown:
                write = ", ".join(lines[name] for name in lacking if name in lines)
                needs = f"zero.{called} needs {' and '.join(lacking)}"
                raise ConfigError(f"{needs}; write {write}" if write else needs) from None
            wrong = f"{unknown} is not an argument" if unknown else error
            ends = meant(theirs.get(unknown, unknown), known, cutoff=0.82) or f"; there are {', '.join(known)}"
            raise ConfigError(f"zero.{called}: {wrong}{ends}") from None
        return function(*given, **named)

    return checked


def some(names: Sequence[str]) -> str:
    """At most `SHOWN` of them, and how many more there are; on one line, whatever they hold."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:SHOWN]) + more


def alternatives(names: Sequence[str]) -> str:
    """All of them: "a, b or c"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def unknown(key: str, known: Sequence[str]) -> str:
    """The sentence for a dotted key that is not among the `known`."""
    section, _, own = key.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    tops = list(dict.fromkeys(name.split(".")[0] for name in known))
    beside = difflib.get_close_matches(own, [name.rpartition(".")[2] for name in siblings], n=1, cutoff=0.7)
    if beside:  # compared without their section, which would make any two of them alike
        return f"unknown key {key}; did you mean {'.'.join([*filter(None, [section]), beside[0]])}?"
    elsewhere = [name for name in known if name.rpartition(".")[2] == own]
    if len(elsewhere) == 1 or (elsewhere and not siblings):  # of several none is meant where the section is right
        return f"unknown key {key}{meant(key, elsewhere, cutoff=0)}"
    if elsewhere or (section and siblings):
        return f"unknown key {key}; there are {', '.join(siblings)}"
    for options in ([] if section else tops, known, tops):
        if end := meant(key, options, cutoff=0.7):
            return f"unknown key {key}{end}"
    return f"unknown key {key}; there are {', '.join(tops)}"


def shown(value: object) -> str:
    """A value as it was typed, on one short line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        value = f"[{', '.join(map(shown, value[:SHOWN]))}{', ...' * (len(value) > SHOWN)}]"
    # one line, whatever was typed, and nothing that a terminal would obey
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(value).split()))
    return text if len(text) <= 60 else text[:57] + "..."


def values_in(typed: object) -> list[object]:
    """The values of a list, or of text such as 1,2 or 1e-4..1e-2; none of a single value."""
    if isinstance(typed, list | tuple):
        return list(typed)
    parts = _BETWEEN.split(typed) if isinstance(typed, str) else []
    return [_as_number(part.strip()) for part in parts] if len(parts) > 1 else []


def _as_number(text: str) -> object:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def command(words: Iterable[str], **instead: object) -> str:
    """A run's command line, for a shell.

    Args:
        words: its settings.
        instead: keys that have another value in it.
    """
    kept = [one for one in words if one.partition("=")[0] not in instead]
    return shlex.join(["python", "train.py", *kept, *(f"{key}={word(value)}" for key, value in instead.items())])


def typed(word: str) -> str:
    """A word of a command line as a shell gives it to us: it would remove quotes, and split at spaces."""
    if _SHELL_LEAVES.fullmatch(word):
        return word
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


def word(value: object) -> str:
    """A value to be typed: as Hydra's grammar reads it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word, value))}]"
    text = str(value)
    if not isinstance(value, str) or (_PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT):
        return text
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + (found[2] and '\\"'), text)
    return f'"{escaped}"'  # where a backslash means itself, unless a quote follows
