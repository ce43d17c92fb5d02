"""Read a section of settings; the one-line message for a value or a key that it refuses.

Pydantic answers with a list of records over several lines; a person at a command line wants to know what to type: the
key as typed, what is wrong, the nearest right word.
"""

import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zero.core import suggest
from zero.errors import ConfigError, SettingError


class Section(BaseModel):
    """A closed, frozen, strict group of keys.

    Raises:
        SettingError: one line about the first key or value that no run could have, unknown keys first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    section_key: ClassVar[str] = ""
    """The dotted key of this section in a run's settings; "" for a whole run, and where a message needs none."""

    first: ClassVar[tuple[str, ...]] = ()
    """The fields that a reader meets first, in this order; the others follow as they are declared."""

    def __init__(self, /, **given: Any) -> None:
        aliases = {name: field.alias or name for name, field in type(self).model_fields.items()}
        typed = {aliases.get(name, name): value for name, value in given.items()}
        try:
            super().__init__(**typed)
        except ValidationError as refused:
            raise SettingError(sentence(type(self), refused, typed, self.section_key)) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # a section inside one is not made by it

    @classmethod
    def in_reading_order(cls) -> dict[str, FieldInfo]:
        """The fields by name."""
        return {name: cls.model_fields[name] for name in (*cls.first, *cls.model_fields)}


class Key(NamedTuple):
    """One place where a key is declared; a group of options may declare it once for each."""

    name: str
    section: type[Section]
    field: FieldInfo


def walk(model: type[Section], at: str = "") -> Iterator[Key]:
    """Every declaration of a dotted key below `at`, in reading order."""
    for name, field in model.in_reading_order().items():
        key = ".".join([*filter(None, [at]), field.alias or name])
        below = list(models_in(field.annotation))
        if not below:
            yield Key(key, model, field)
        for section in below:
            yield from walk(section, key)


def keys(model: type[Section], at: str = "") -> tuple[str, ...]:
    """Every dotted key that some choice of options has, in reading order."""
    return tuple(dict.fromkeys(key.name for key in walk(model, at)))


def sentence(model: type[Section], refused: ValidationError, raw: Mapping[str, Any], at: str = "") -> str:
    """One line about the first of pydantic's errors, unknown keys before wrong values.

    Args:
        at: the dotted key of the section that `raw` is for; "" for a whole run.
    """
    errors = refused.errors(include_url=False)
    error = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    return _sentence(model, error, raw, at)


def _sentence(model: type[Section], error: ErrorDetails, raw: Mapping[str, Any], at: str) -> str:
    path, node = _typed(error, raw)
    key, kind, limits = ".".join([*filter(None, [at]), *path]), error["type"], error.get("ctx", {})
    seen = f"{key}={suggest.shown(node)}"
    if kind == "extra_forbidden":
        return unknown_key(model, key, at)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return _section_given_a_value(model, key, node, at)
    if kind == "union_tag_not_found":
        return f"{key} needs {key}.name"
    if kind == "union_tag_invalid":
        options = [option.strip().strip("'") for option in limits["expected_tags"].split(",")]
        name = node.get("name")
        return f"{key}.name={suggest.shown(name)} does not exist. {suggest.nearest(str(name), options)}"
    if kind == "literal_error":
        options = [option.strip(" '") for option in limits["expected"].replace(" or ", ",").split(",")]
        if len(options) < 3:
            return f"{seen}: must be {' or '.join(options)}"
        return f"{seen}: must be one of {', '.join(options)}{suggest.meant(str(node), options)}"
    if kind == "value_error":
        return f"{seen}: {limits['error']}{_as_whole(key, node, str(limits['error']))}"
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
    optional = any(type(None) in typing.get_args(one.field.annotation) for one in walk(model, at) if one.name == key)
    text = f"{texts.get(kind, error['msg'])}{', or null' if optional else ''}"
    return f"{seen}: {text}{_as_whole(key, node, text)}"


def _typed(error: ErrorDetails, raw: Mapping[str, Any]) -> tuple[list[str], Any]:
    """The path of a wrong value, and the value: pydantic puts the tag of a union, which nobody typed, into the path."""
    path: list[str] = []
    node: Any = raw
    for part in error["loc"]:
        if isinstance(node, Mapping) and part in node:
            path.append(str(part))
            node = node[part]
    return path, node


def _as_whole(key: str, value: object, text: str) -> str:
    """What to write where a whole number was typed as 1e3, which YAML reads as 1000.0."""
    is_whole = isinstance(value, float) and value.is_integer() and 1 <= value < 2**53 and "a whole number" in text
    return f"; write {key}={value:.0f}" if is_whole else ""


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key to value, of nested values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def unknown_key(model: type[Section], key: str, at: str = "") -> str:
    """The sentence for a key that does not exist, or not with the options that were chosen."""
    known = keys(model, at)
    if key in known:
        section = key.split(".")[0]
        return f"{key} is not a key of the option chosen for {section}; see mode=explain explain.key={key}"
    return suggest.unknown(key, known)


def _section_given_a_value(model: type[Section], key: str, value: object, at: str) -> str:
    """With the section's first key for the value, where that key would take it."""
    inside = [name for name in keys(model, at) if name.startswith(f"{key}.")]
    seen = f"{key}={suggest.shown(value)}: {key} is a section of keys"
    nested: Any = value
    for part in reversed(inside[0].removeprefix(f"{at}." if at else "").split(".")):
        nested = {part: nested}
    try:
        model(**nested)
    except ConfigError as refused:
        if str(refused).startswith(inside[0]):
            return f"{seen}. Choose from {', '.join(inside)}."
    return f"{seen}. Did you mean {inside[0]}={suggest.shown(value)}?"


def models_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)
