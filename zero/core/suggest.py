"""What to say to a setting that a pydantic schema refuses: the key as typed, what is wrong, the nearest right word.

Pydantic answers with a list of records over several lines; a person at a command line wants to know what to type.
"""

import difflib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

SHOWN = 5
"""Names that a sentence lists before it only counts."""

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_NO_TEXT = ("true", "false", "null", "inf", "nan")


class Key(NamedTuple):
    """One place where a key is declared; a group of options may declare it once for each."""

    name: str
    section: type[BaseModel]
    field: FieldInfo


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every declaration of a dotted key, in reading order."""
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        below = list(models_in(field.annotation))
        if not below:
            yield Key(key, model, field)
        for section in below:
            yield from walk(section, f"{key}.")


def keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Every dotted key that some choice of options has, in reading order."""
    return tuple(dict.fromkeys(key.name for key in walk(model)))


def sentence(model: type[BaseModel], refused: ValidationError, raw: Mapping[str, Any]) -> str:
    """One line about the first of pydantic's errors, unknown keys before wrong values."""
    errors = refused.errors(include_url=False)
    error = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    # pydantic puts the tag of a union into the path: keep only what the user typed
    path: list[str] = []
    node: Any = raw
    for part in error["loc"]:
        if isinstance(node, Mapping) and part in node:
            path.append(str(part))
            node = node[part]
    key, kind, limits = ".".join(path), error["type"], error.get("ctx", {})
    seen = f"{key}={shown(node)}"
    if kind == "extra_forbidden":
        return unknown_key(model, key)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return _section_given_a_value(model, key, node)
    if kind == "union_tag_not_found":
        return f"{key} needs {key}.name"
    if kind == "union_tag_invalid":
        options = [option.strip().strip("'") for option in limits["expected_tags"].split(",")]
        return f"{key}.name={shown(node.get('name'))} does not exist; {nearest(str(node.get('name')), options)}"
    if kind == "literal_error":
        options = [option.strip(" '") for option in limits["expected"].replace(" or ", ",").split(",")]
        return f"{seen}: must be {' or '.join(options)}" if len(options) < 3 else f"{seen}: {_choose(node, options)}"
    if kind == "value_error":
        return f"{seen}: {limits['error']}"
    texts = {
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "int_parsing_size": "must be a smaller number",
        "finite_number": "must be a finite number",
        "bool_type": "must be true or false",
    }
    bounds = {
        "greater_than_equal": "at least",
        "greater_than": "above",
        "less_than_equal": "at most",
        "less_than": "below",
    }
    if kind in bounds:
        return f"{seen}: must be {bounds[kind]} {next(iter(limits.values())):g}"
    optional = any(type(None) in typing.get_args(one.field.annotation) for one in walk(model) if one.name == key)
    return f"{seen}: {texts.get(kind, error['msg'])}{', or null' if optional else ''}"


def nearest(word: str, options: Iterable[str]) -> str:
    """The end of a sentence: the option that looks most like `word`, or all of them."""
    options = list(options)
    close = difflib.get_close_matches(word.lower(), [option.lower() for option in options], n=1, cutoff=0.5)
    for option in options:
        if close and option.lower() == close[0]:
            return f"did you mean {option}?"
    return "there are " + ", ".join(options)


def meant(word: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a sentence about a word that is unknown: what looks most like it, or nothing where nothing does."""
    close = difflib.get_close_matches(word, options, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def some(names: Sequence[str]) -> str:
    """At most `SHOWN` of them, and how many more there are; on one line, whatever they hold."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:SHOWN]) + more


def unknown_key(model: type[BaseModel], key: str) -> str:
    """The sentence for a key that does not exist, or not with the options that were chosen."""
    known = keys(model)
    if key in known:
        section = key.split(".")[0]
        return f"{key} is not a key of the option chosen for {section}; see mode=explain explain.key={key}"
    return unknown(key, known)


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
    if elsewhere:
        return f"unknown key {key}; there are {', '.join(siblings)}"
    for options in ([] if section else tops, known, tops):
        if end := meant(key, options, cutoff=0.7):
            return f"unknown key {key}{end}"
    return f"unknown key {key}; there are " + ", ".join(siblings if section else tops)


def _section_given_a_value(model: type[BaseModel], key: str, value: object) -> str:
    first = next(name for name in keys(model) if name.startswith(f"{key}."))
    return f"{key}={shown(value)}: {key} is a section of keys; did you mean {first}={shown(value)}?"


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def shown(value: object) -> str:
    """A value as it was typed, on one short line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    # one line, whatever was typed, and nothing that a terminal would obey
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(value).split()))
    return text if len(text) <= 60 else text[:57] + "..."


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


def _choose(value: object, options: list[str]) -> str:
    tail = nearest(str(value), options)
    choices = "must be one of " + ", ".join(options)
    return choices if tail.startswith("there are") else f"{choices}; {tail}"
