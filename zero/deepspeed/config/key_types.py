"""Declare keys of a configuration: types of values, a key's meaning, and the setting that a key is copied to."""

from collections.abc import Callable, Container
from typing import Annotated, Any, Literal

from pydantic import Field

from zero.core.schema import Section
from zero.core.setting_types import Reads

NonNegativeFloat = Annotated[float, Field(ge=0)]
Dtype = Literal["fp32", "fp16", "bf16"]


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(beta) in (int, float) for beta in value):
        raise ValueError
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError
    return float(value[0]), float(value[1])


def _by_group(words: str, is_valid: Callable[[float], bool]) -> Reads:
    """Return the type of a number, or of a list with a number for each group of the optimizer."""

    def read(value: Any) -> float | tuple[float, ...]:
        numbers = value if isinstance(value, list | tuple) else [value]
        if not numbers or not all(type(number) in (int, float) and is_valid(number) for number in numbers):
            raise ValueError
        return tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)

    return Reads(f"{words}, or a list with such a number for each group", read)


PeakRates = Annotated[
    float | tuple[float, ...], _by_group("a number from 1e-37, at most 1000", lambda rate: 1e-37 <= rate <= 1000)
]
GroupRates = Annotated[
    float | tuple[float, ...], _by_group("a number from 0, at most 1000", lambda rate: 0 <= rate <= 1000)
]
Fractions = Annotated[float | tuple[float, ...], _by_group("a number from 0, below 1", lambda share: 0 <= share < 1)]
Betas = Annotated[tuple[float, float], Reads("two numbers from 0, below 1, such as [0.9, 0.999]", _betas)]


def means(text: str, default: Any = None) -> Any:
    """Declare a key; `text` describes its meaning in this library."""
    return Field(default, description=text)


def to(setting: str, default: Any = None) -> Any:
    """Declare a key whose value is copied to `setting` of this library; None leaves the setting out."""
    return Field(default, description=f"`{setting}`", json_schema_extra={"to": setting})


def moved(keys: Section, section: str, without: Container[str] = ()) -> dict[str, Any]:
    """Return the values that are copied to settings in `section` unchanged, except those of keys in `without`."""
    values = {}
    for name, declared in type(keys).model_fields.items():
        extra, value = declared.json_schema_extra, getattr(keys, name)
        setting = str(extra["to"]) if isinstance(extra, dict) else ""
        if setting.startswith(f"{section}.") and value is not None and f"{keys.section_key}.{name}" not in without:
            values[setting.removeprefix(f"{section}.")] = value
    return values
