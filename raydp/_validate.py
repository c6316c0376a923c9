"""Shared validators. Every one returns the value in its canonical type or raises InvalidValue."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterable
from typing import Any

from raydp.errors import InvalidValue, UnknownName

_NAME = re.compile(r"[a-z0-9_][a-z0-9_.]*")


def real(field: str, value: object) -> float:
    """A finite real number. NaN and infinities are refused: NaN passes ``x <= 0``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidValue(field, value, "must be a number", f"Write {field} as an int or a float.")
    try:
        number = float(value)
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise InvalidValue(field, value, "must be finite", f"Give {field} a finite number.")
    return number


def between(
    field: str, value: object, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> float:
    """A finite number in the interval from low to high, open at the ends that are marked so."""
    number = real(field, value)
    below = number <= low if low_open else number < low
    above = number >= high if high_open else number > high
    if below or above:
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
        raise InvalidValue(field, value, f"must lie in {interval}", f"Choose {field} inside {interval}.")
    return number


def positive(field: str, value: object) -> float:
    """A finite number above zero."""
    number = real(field, value)
    if number <= 0:
        raise InvalidValue(field, value, "must be > 0", f"Give {field} a positive number.")
    return number


def integer(field: str, value: object, *, low: int | None = None, high: int | None = None) -> int:
    """An integer (bools are refused, floats are refused even when whole) within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidValue(field, value, "must be an integer", f"Write {field} without a fraction or a decimal point.")
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = [f"must be >= {low}" if low is not None else "", f"must be <= {high}" if high is not None else ""]
        rule = " and ".join(bound for bound in bounds if bound)
        raise InvalidValue(field, value, rule, f"Choose {field} accordingly.")
    return number


def name(field: str, value: object) -> str:
    """A name made of ``a-z 0-9 _ .`` (a slash would nest it in Ray and MLflow; ray-project/ray#11947)."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidValue(
            field, value, "must be made of a-z, 0-9, '_' and '.' and not begin with '.'", "Rename it; '/' is refused."
        )
    return value


def one_of(field: str, value: object, known: Iterable[str]) -> str:
    """A string out of a closed set; near names are suggested otherwise."""
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        raise UnknownName(field, str(value), known)
    return value


def json_object(content: str | bytes) -> dict[str, Any]:
    """The JSON object that a text holds. NaN, infinities and names that stand twice are refused.

    Raises:
        ValueError: it is none, whatever the text holds; also where :func:`json.loads` raises a RecursionError.
    """
    try:
        record = json.loads(content, parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return record


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return record
