"""Axes of charts, which map numbers to coordinates, and the formatting of numbers as text.

The distance between ticks is 1, 2 or 5 times a power of ten, for bytes a power of two. Ticks of a logarithmic axis are
powers of ten, on a short axis also 2 and 5 times these. A series may be empty, constant, or contain any values: a value
that is not a finite number is drawn as a gap, and values beyond 1e300 at 1e300, so that differences do not overflow.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zero.tracker.views.console import minutes

HUGE, TINY = 1e300, 1e-300

UNKNOWN = "–"
"""The text of an unknown number."""

SIZES = ((1024**5, "PiB"), (1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))
POWERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


class Scale(NamedTuple):
    """An axis that maps numbers from `low` to `high` to coordinates from `begin` to `end`.

    `log` is whether the axis is logarithmic. `ticks` are pairs (number, text) in ascending order.
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: object) -> float:
        """Return the coordinate of `value`, or of the nearest end of the axis if `value` is outside."""
        known = finite_values(value)
        assert known is not None, "a gap has no place"
        low, high, known = self.low, self.high, max(self.low, min(self.high, known))
        if self.log:
            low, high, known = math.log10(low), math.log10(high), math.log10(known)
        return self.begin + (self.end - self.begin) * ((known - low) / (high - low))

    def shows(self, value: object) -> bool:
        """Return whether `value` has a coordinate: a finite number, positive if the axis is logarithmic."""
        number = finite_values(value)
        return number is not None and (number > 0 or not self.log)


def finite_values(value: object) -> float | None:
    """Return `value` as a float that can be drawn, limited to 1e300 in size; None if it is not a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    drawn = float(max(-HUGE, min(HUGE, value)))
    return drawn if abs(drawn) >= TINY else 0.0


def linear(
    values: Iterable[object],
    begin: float,
    end: float,
    *,
    from_zero: bool = False,
    snug: bool = False,
    whole: bool = False,
    binary: bool = False,
    count: int = 5,
) -> Scale:
    """Return a linear axis that contains `values`.

    Args:
        begin, end: coordinates of the ends of the axis.
        from_zero: the axis contains zero.
        snug: the axis ends at the lowest and highest value; otherwise at ticks.
        whole: ticks are integers.
        binary: ticks are sizes in bytes.
        count: the approximate number of ticks.
    """
    low, high = _range(values)
    if from_zero or binary:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = max(1.0, 1e-8 * abs(high)) if whole or high == 0 else 0.05 * abs(high)
        low, high = (low, high + room) if from_zero or binary else (low - room, high + room)
    step = _binary_step((high - low) / count) if binary else _round_step((high - low) / count)
    step = max(1.0, step) if whole or binary else step
    if snug:
        marks = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    else:
        first = math.floor(low / step + 1e-9)
        marks = range(first, max(math.ceil(high / step - 1e-9), first + 1) + 1)
        low, high = marks[0] * step, marks[-1] * step
    ticks = [mark * step for mark in marks]
    names = [size(tick) for tick in ticks] if binary else _names(ticks, step)
    return Scale(low, high, begin, end, False, tuple(zip(ticks, names, strict=True)))


def logarithmic(values: Iterable[object], begin: float, end: float) -> Scale:
    """Return a logarithmic axis that contains the positive numbers in `values` and ends at ticks."""
    low, high = _range(value for value in values if (finite_values(value) or 0.0) > 0)
    low, high = (low, high) if low > 0 else (0.1, 1.0)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / 6))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    marks = [factor * 10.0**power for power in [*range(first, last, stride), last] for factor in factors]
    lowest = max(index for index, mark in enumerate(marks) if mark <= low * (1 + 1e-9))
    highest = min(index for index, mark in enumerate(marks) if mark >= high * (1 - 1e-9))
    marks = marks[lowest : max(highest, lowest + 1) + 1]
    return Scale(marks[0], marks[-1], begin, end, True, tuple((mark, _short(mark)) for mark in marks))


def duration_unit(longest_s: float, least: float = 1.0) -> tuple[float, str]:
    """Return (seconds, name) of the largest unit of time of which `longest_s` seconds are at least `least` units."""
    return next(((unit, name) for unit, name in TIME_UNITS if longest_s >= least * unit), TIME_UNITS[-1])


# Numbers as text


def number_text(value: object, digits: int = 4) -> str:
    """Format `value` with `digits` significant digits: 12,345, 0.00123, 1.5e-7; a dash if it is not a finite number."""
    shown = finite_values(value)
    if shown is None:
        return UNKNOWN
    if shown == 0:
        return "0"
    if 1e-4 <= abs(shown) < 1e15:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(shown))))
        return _trimmed(f"{shown:,.{decimals}f}")
    return _exponent(f"{shown:.{digits - 1}e}")


def size(value: object) -> str:
    """Format a number of bytes, such as 12.5 MiB."""
    shown = finite_values(value)
    if shown is None:
        return UNKNOWN
    unit, name = next(((unit, name) for unit, name in SIZES if abs(shown) >= unit), (1, "B"))
    if abs(shown) >= 1e6 * SIZES[0][0]:
        return f"{_exponent(f'{shown / unit:.2e}')} {name}"
    return f"{_trimmed(f'{shown / unit:,.1f}')} {name}"


def seconds(value: object) -> str:
    """Format a duration in seconds as 1:02:03, 12.3 s or 4.56 ms."""
    shown = finite_values(value)
    if shown is None:
        return UNKNOWN
    if 100 <= shown < 1e9:
        return minutes(shown)
    unit, name = duration_unit(shown) if shown else (1.0, "s")
    return f"{number_text(shown / unit, 3)} {name}"


def loss_scale_of(value: object) -> str:
    """Format a loss with four decimals, such as 2.3456."""
    shown = finite_values(value)
    return UNKNOWN if shown is None else f"{shown:.4f}" if abs(shown) < 1e6 else number_text(shown)


def count(value: object) -> str:
    """Format a count; from a million on with three digits and a unit, such as 1.24 B."""
    shown = finite_values(value)
    if shown is None or shown < 1e6:
        return number_text(shown, 7)
    unit, name = next((unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if shown >= unit)
    return f"{number_text(shown / unit, 3)} {name}"


def percent(value: object) -> str:
    """Format a fraction as a percentage, below a tenth with one decimal."""
    shown = finite_values(value)
    return UNKNOWN if shown is None else f"{100 * shown:.{int(abs(shown) < 0.1)}f} %"


def _range(values: Iterable[object]) -> tuple[float, float]:
    known = [value for value in map(finite_values, values) if value is not None]
    return (min(known), max(known)) if known else (0.0, 0.0)


def _round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 10 * TINY else TINY
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9) or factor == 10)


def _binary_step(least: float) -> float:
    return 2.0 ** max(0, math.ceil(math.log2(least)))


def _names(ticks: Sequence[float], step: float) -> list[str]:
    """Format the ticks of an axis in one unit, with enough decimals to distinguish neighbours."""
    largest = max(map(abs, ticks), default=0.0)
    if largest >= 1e15 or 0 < largest < 1e-4 or 0 < step < 1e-9:
        return ["0" if tick == 0 else _with_exponent(tick, step) for tick in ticks]
    unit, name = next(((unit, name) for unit, name in POWERS if largest >= unit), (1.0, ""))
    unit = 1e3 if name == "k" else unit
    if step < 1e-3 * unit:
        unit, name = 1.0, ""
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return ["0" if tick == 0 else f"{tick / unit:,.{decimals}f}{name}" for tick in ticks]


def _with_exponent(tick: float, step: float) -> str:
    decimals = math.floor(math.log10(abs(tick))) - math.floor(math.log10(step) + 1e-9)
    return _exponent(f"{tick:.{max(0, decimals)}e}")


def _short(value: float) -> str:
    """Format a tick of a logarithmic axis: 1e-5, 0.02, 500, 20k."""
    if not 0.99e-2 <= value < 1e15:
        return _exponent(f"{value:.0e}")
    unit, name = next(((unit, name) for unit, name in POWERS if value >= unit * (1 - 1e-9)), (1.0, ""))
    unit = 1e3 if name == "k" else unit
    return f"{value / unit:.6g}{name}"


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _exponent(text: str) -> str:
    """Shorten Python's 1.50e-07 to 1.5e-7."""
    digits, _, power = text.partition("e")
    return f"{_trimmed(digits)}e{int(power)}"
