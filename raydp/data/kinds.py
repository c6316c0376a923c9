"""What a column of a described table (:mod:`raydp.data.table`) holds: public constants that a person writes down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raydp import _validate
from raydp.errors import InvalidValue

Value = str | int | float | bool
_LARGEST_MAGNITUDE = 1e30


@dataclass(frozen=True, kw_only=True)
class Number:
    """A feature of one number, or of a list of ``length`` numbers, with a public range.

    Attributes:
        low, high: of the range; values beyond are cut off.
        missing: stands for a missing value; None refuses one.
        length: of the lists; None for single numbers.
    """

    low: float
    high: float
    missing: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            _validate.between(name, getattr(self, name), -_LARGEST_MAGNITUDE, _LARGEST_MAGNITUDE)
        if not self.low < self.high:
            raise InvalidValue(
                "high", self.high, f"must exceed low = {self.low}", "Give the public range of the column."
            )
        if self.missing is not None:
            _validate.between("missing", self.missing, self.low, self.high)
        if self.length is not None:
            _validate.integer("length", self.length, low=1)

    @property
    def width(self) -> int:
        """Model inputs that it makes."""
        return self.length or 1


@dataclass(frozen=True, kw_only=True)
class Category:
    """A feature out of a public vocabulary; each value is an input of its own, 0 or 1.

    Attributes:
        values: the vocabulary, of one type.
        other: the one that stands for values that are not listed, and for missing ones; None refuses them.
    """

    values: tuple[Value, ...]
    other: Value | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", vocabulary("values", self.values))
        if self.other is not None and self.other not in self.values:
            raise InvalidValue("other", self.other, f"must be one of values = {list(self.values)}", "Add it there.")

    @property
    def width(self) -> int:
        """Model inputs that it makes."""
        return len(self.values)


@dataclass(frozen=True, kw_only=True)
class Classes:
    """A target of classes: class i is any of the values ``groups[i]``."""

    groups: tuple[tuple[Value, ...], ...]

    def __post_init__(self) -> None:
        if len(self.groups) < 2:
            raise InvalidValue("target.values", self.groups, "must name two classes or more", "Name them in order.")
        vocabulary("target.groups", tuple(value for group in self.groups for value in group))


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A target of numbers with a public range, mapped to [-1, 1] and cut off at its ends; metrics are on that scale."""

    low: float
    high: float

    def __post_init__(self) -> None:
        Number(low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """A target of several labels, each yes or no, in columns of their own or in one column of lists.

    Attributes:
        names: of the labels; of the columns, where each has its own.
        values: what stands for no and for yes; None takes false and true, or 0 and 1.
        listed: whether one column holds them as a list an example.
    """

    names: tuple[str, ...]
    values: tuple[Value, ...] | None = None
    listed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", vocabulary("labels" if self.listed else "columns", self.names))
        if self.values is not None:
            object.__setattr__(self, "values", vocabulary("values", self.values))
            if len(self.values) != 2:
                raise InvalidValue("values", list(self.values), "must be two, for no and yes", 'Write ["no", "yes"].')


def vocabulary(field: str, values: Any) -> tuple[Value, ...]:
    """The values as a tuple, of one type and each once."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise InvalidValue(field, values, "must be a list of values", 'Write values = ["a", "b"].')
    for value in values:
        if not isinstance(value, (str, int, float, bool)) or (isinstance(value, float) and not math.isfinite(value)):
            raise InvalidValue(field, value, "must be texts, numbers or true and false", "Write them out.")
    if len({type(value) for value in values}) > 1 or len(set(values)) < len(values):
        raise InvalidValue(field, list(values), "must be of one type, each once", "Write each value once.")
    return tuple(values)


__all__ = ["Category", "Classes", "Labels", "Number", "Quantity", "Value", "vocabulary"]
