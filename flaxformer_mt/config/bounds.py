"""Bounds of numbers in a config, written beside each field: `steps: Annotated[int, at_least(1)] = 1000`.

Contains the bounds and the check of every number of a section against its bounds. Problems that concern
several fields are in config/checks.py.
"""

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flaxformer_mt.config.field_values import read_value
from flaxformer_mt.errors import UserError

# The largest whole number of a field without another upper bound: devices count in 32 bits.
_LARGEST_INT = 2**31 - 1
# Larger whole numbers are not written out in messages.
_SHOWN_BITS = 128

# Weights of sentence pairs in the loss lie between these, so that no sum of a batch is lost in float32.
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1e6


@dataclass(frozen=True)
class Bounds:
    """An interval of finite numbers; `low_open` and `high_open` exclude its ends."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def contain(self, value: float) -> bool:
        """Return whether a finite number lies in the interval."""
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high)

    def describe(self) -> str:
        """Describe the interval: `at least 1`, `above 0`, `from 0 to 1`, `at least 0 and below 1`."""
        low = f"{'above' if self.low_open else 'at least'} {self.low}"
        if self.high == math.inf:
            return low
        if not self.low_open and not self.high_open:
            return f"from {self.low} to {self.high}"
        return f"{low} and {'below' if self.high_open else 'at most'} {self.high}"


def at_least(low: float) -> Bounds:
    """Return numbers from `low` on; whole numbers also have the limit of 32 bits."""
    return Bounds(low)


def above(low: float, *, at_most: float = math.inf) -> Bounds:
    """Return numbers greater than `low`, up to `at_most`."""
    return Bounds(low, at_most, low_open=True)


def between(low: float, high: float) -> Bounds:
    """Return numbers from `low` to `high`, both included."""
    return Bounds(low, high)


def share() -> Bounds:
    """Return numbers from 0 to below 1, such as dropout rates."""
    return Bounds(0, 1, high_open=True)


def find_wrong_values(section: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, problem) for each number outside its bounds, and each value of a wrong type.

    Args:
      section: a config or one of its sections; all fields of its sections are checked.
      where: prefix of the names, as in "search." or "--".
    """
    hints = typing.get_type_hints(type(section), include_extras=True)
    for field in dataclasses.fields(section):
        name, value, hint = f"{where}{field.name}", getattr(section, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(value, typing.cast(type, hint)):
            yield from find_wrong_values(value, f"{name}.")
        elif typing.get_origin(hint) is typing.Annotated:
            if problem := _find_problem(value, *typing.get_args(hint)):
                yield name, f"{name} is {_show(value)}; {problem}"
        else:
            try:
                read_value(value, hint, name)
            except UserError as error:
                yield name, str(error)


def _show(value: Any) -> str:
    """Return the value as text; Python refuses to write whole numbers of thousands of digits."""
    too_long = isinstance(value, int) and value.bit_length() > _SHOWN_BITS
    return f"a number of {value.bit_length()} bits" if too_long else f"{value}"


def _find_problem(value: Any, kind: Any, bounds: Bounds) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return "" if value is None else _find_problem(value, arguments[0], bounds)
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return f"it must be a list of numbers, each {bounds.describe()}"
        problems = (_find_problem(item, arguments[0], bounds) for item in value)
        return next((f"each number {problem.removeprefix('it ')}" for problem in problems if problem), "")
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or (kind is int and not isinstance(value, int)):
        return f"it must be a {'whole ' if kind is int else ''}number, {bounds.describe()}"
    # A whole number may be larger than any float; Python then refuses to convert it.
    if abs(value) > sys.float_info.max or value != value:
        return f"it must be a finite number, {bounds.describe()}"
    if not bounds.contain(value):
        return f"it must be {bounds.describe()}"
    if kind is int and value > _LARGEST_INT and bounds.high == math.inf:
        return f"it must be {dataclasses.replace(bounds, high=_LARGEST_INT).describe()}"
    return ""
