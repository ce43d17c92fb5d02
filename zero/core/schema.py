"""Sections of settings, and the one-line message for a wrong value or key.

Words of a command line are checked before, in `zero.trainer.complaints`.

Pydantic's errors have several lines each. The messages made here name the key as it was typed, the problem and the
nearest valid word.
"""

import typing
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zero.core import suggest
from zero.errors import SettingError


class Section(BaseModel):
    """A section of settings: a frozen pydantic model that rejects unknown keys and values of another type.

    Raises:
        SettingError: a key is unknown or a value is invalid. One line about the first problem, unknown keys first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    section_key: ClassVar[str] = ""
    """The dotted key of this section in a run's settings; "" for all settings, or if messages need no key."""

    first: ClassVar[tuple[str, ...]] = ()
    """The fields that are listed first, in this order; the others follow in the order of their declaration."""

    def __init__(self, /, **values: Any) -> None:
        aliases = {name: field.alias or name for name, field in type(self).model_fields.items()}
        typed = {aliases.get(name, name): value for name, value in values.items()}
        try:
            super().__init__(**typed)
        except ValidationError as errors:
            raise SettingError(sentence(type(self), errors, typed, self.section_key)) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic makes nested sections without it

    @classmethod
    def in_reading_order(cls) -> dict[str, FieldInfo]:
        """Return the fields by name, those in `first` before the others."""
        return {name: cls.model_fields[name] for name in (*cls.first, *cls.model_fields)}


class Key(NamedTuple):
    """One declaration of a key; a key may be declared in several options of a section."""

    name: str
    option: type[Section]
    """The section that is chosen for the first part of the key; it has the field or a section with it."""
    field: FieldInfo


def walk(model: type[Section], at: str = "", option: type[Section] | None = None) -> Iterator[Key]:
    """Yield every declaration of a dotted key in `model`, in reading order; `at` is the prefix of the keys."""
    for name, field in model.in_reading_order().items():
        key = ".".join([*filter(None, [at]), field.alias or name])
        below = list(models_in(field.annotation))
        if not below:
            yield Key(key, option or model, field)
        for section in below:
            yield from walk(section, key, option or section)


def schema_keys(model: type[Section], at: str = "") -> tuple[str, ...]:
    """Return the dotted keys of all options together, in reading order."""
    return tuple(dict.fromkeys(key.name for key in walk(model, at)))


def sentence(model: type[Section], errors: ValidationError, raw: Mapping[str, Any], at: str = "") -> str:
    """Return one line about the first of pydantic's errors, unknown keys before wrong values.

    Args:
        raw: the values of the section as they were typed.
        at: the dotted key of the section; "" for all settings.
    """
    error = min(errors.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden")
    path, value = _typed(error, raw)
    key = ".".join([*filter(None, [at]), *path])
    match error["type"]:
        case "extra_forbidden":
            return unknown_key(model, key, at)
        case "model_type" | "model_attributes_type" | "dict_type":
            inside = [name for name in schema_keys(model, at) if name.startswith(f"{key}.")]
            return f"{key}={suggest.shown(value)}: {key} is a section of keys. Choose from {', '.join(inside)}."
        case "union_tag_not_found":
            return f"{key} needs {key}.name"
        case "union_tag_invalid":
            options = _words(error["ctx"]["expected_tags"])
            name = value.get("name")
            return f"{key}.name={suggest.shown(name)} does not exist. {suggest.nearest(str(name), options)}"
    text = _problem(error, value)
    if error["type"] not in (*_BOUNDS, "literal_error", "value_error") and _takes_null(model, key, at):
        text += ", or null"
    is_whole = isinstance(value, float) and value.is_integer() and 1 <= value < 2**53 and "a whole number" in text
    write = f". Write {key}={value:.0f}." if is_whole else ""  # YAML reads 1e3 as 1000.0
    return f"{key}={suggest.shown(value)}: {text}{write}"


_TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "int_parsing_size": "must be a smaller number",
        "finite_number": "must be a finite number",
        "bool_type": "must be true or false",
    }
)
_BOUNDS: Mapping[str, str] = MappingProxyType(
    {
        "greater_than_equal": "at least",
        "greater_than": "above",
        "less_than_equal": "at most",
        "less_than": "below",
    }
)


def _problem(error: ErrorDetails, value: object) -> str:
    limits = error.get("ctx", {})
    if error["type"] in _BOUNDS:
        return f"must be {_BOUNDS[error['type']]} {next(iter(limits.values())):g}"
    if error["type"] == "value_error":
        return str(limits["error"])
    if error["type"] == "literal_error":
        options = _words(limits["expected"].replace(" or ", ","))
        if len(options) < 3:
            return f"must be {' or '.join(options)}"
        return f"must be one of {', '.join(options)}{suggest.meant(str(value), options)}"
    return _TEXTS.get(error["type"], error["msg"])


def _words(expected: str) -> list[str]:
    """Split pydantic's list of quoted words."""
    return [word.strip(" '") for word in expected.split(",")]


def _takes_null(model: type[Section], key: str, at: str) -> bool:
    declared = [place.field.annotation for place in walk(model, at) if place.name == key]
    return any(type(None) in typing.get_args(annotation) for annotation in declared)


def _typed(error: ErrorDetails, raw: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Return the path of a wrong value, without the tags of unions that pydantic adds to it, and the value."""
    path: list[str] = []
    node: Any = raw
    for part in error["loc"]:
        if isinstance(node, Mapping) and part in node:
            path.append(str(part))
            node = node[part]
    return path, node


def flat_fields(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as one dict of dotted key -> value."""
    dotted: dict[str, Any] = {}
    for key, value in values.items():
        dotted |= flat_fields(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return dotted


def unknown_key(model: type[Section], key: str, at: str = "") -> str:
    """Return the message for a key that does not exist, or that the chosen options do not have."""
    known = schema_keys(model, at)
    if inside := [name for name in known if f"{name}.".startswith(f"{key}.")]:
        section = key.split(".")[0]
        return f"{key} is not a key of the option chosen for {section}. See mode=explain explain.key={inside[0]}."
    return suggest.unknown(key, known)


def models_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)
