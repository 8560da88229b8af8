"""Values of config fields: from nested dicts or dotted paths to the declared types, and bounds of numbers."""

import dataclasses
import difflib
import math
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.config.foreign_names import find_our_field
from flaxformer_mt.errors import UserError

# Larger whole numbers overflow arithmetic with floats and arrays.
LARGEST_INT = (1 << 63) - 1
# The largest whole number of a field without another upper bound: devices count in 32 bits.
LARGEST_COUNT = 2**31 - 1
# Weights of sentence pairs in the loss lie between these, so that no sum of a batch is lost in float32.
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1e6

# Fields of earlier versions, which their runs and exports still have.
_REMOVED = ("config.train.prng",)


def make_section(kind: type, values: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    built = {}
    for name, value in values.items():
        if f"{where}.{name}" in _REMOVED:
            continue
        built[name] = read_value(value, _find_type(hints, name, where), f"{where}.{name}")
    return kind(**built)


def replace_fields(section: Any, changes: Mapping[str, Any], where: str) -> Any:
    """Return a section with other values of some fields, which are named by their dotted paths."""
    values: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    hints = typing.get_type_hints(type(section))
    for path, value in changes.items():
        name, dot, rest = path.partition(".")
        kind = _find_type(hints, name, where)
        if dot and dataclasses.is_dataclass(kind):
            inner.setdefault(name, {})[rest] = value
        elif dot:
            raise UserError(f"{where}.{name} is no section, so that there is no {where}.{path}")
        else:
            values[name] = read_value(value, kind, f"{where}.{name}")
    for name, part in inner.items():
        values[name] = replace_fields(values.get(name, getattr(section, name)), part, f"{where}.{name}")
    return dataclasses.replace(section, **values)


def _find_type(hints: Mapping[str, Any], name: str, where: str) -> Any:
    if name in hints:
        return hints[name]
    near = difflib.get_close_matches(name, hints, n=1)
    hint = f"; did you mean {where}.{near[0]}?" if near else f"; known: {', '.join(hints)}"
    if foreign := find_our_field(name):
        hint = f"; here it is {foreign}"
    raise UserError(f"unknown config field {where}.{name}{hint}")


def show_value(value: Any) -> str:
    """Shorten a value of any kind and size for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no number of so many digits
        return "a number of thousands of digits"


def read_value(value: Any, hint: Any, where: str) -> Any:
    """Return a JSON value as the declared type: a list as a tuple, a text as a path, 1 as 1.0 for a float."""
    shown = show_value(value)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type, hint)):
            return value
        if not isinstance(value, dict):
            raise UserError(f"{where} should be an object, got {shown}")
        return make_section(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in args):  # 1 is not True
            choices = list(map(str, args))
            near = difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
            similar = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{where} is {shown}{similar} (allowed: {', '.join(choices)})")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} should be a list, got {shown}")
        return tuple(read_value(item, args[0], where) for item in value)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return read_value(value, next(a for a in args if a is not type(None)), where)
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if type(value) is not hint:
        raise UserError(f"{where} should be {hint.__name__}, got {shown} ({type(value).__name__})")
    if hint is int and abs(value) > LARGEST_INT:
        raise UserError(f"{where} is {shown}; the largest accepted value is {LARGEST_INT}")
    if hint is float and not math.isfinite(value):
        raise UserError(f"{where} is {value}; it must be a finite number")
    return value


@dataclass(frozen=True)
class Bounds:
    """An interval of finite numbers; `low_open` and `high_open` exclude its ends."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def contain(self, value: float) -> bool:
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
    return Bounds(low, at_most, low_open=True)


def between(low: float, high: float) -> Bounds:
    return Bounds(low, high)


def share() -> Bounds:
    """Return numbers from 0 to below 1, such as dropout rates."""
    return Bounds(0, 1, high_open=True)


def find_wrong_values(section: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, problem) for each number outside its bounds, and each value of a wrong type."""
    hints = typing.get_type_hints(type(section), include_extras=True)
    for field in dataclasses.fields(section):
        name, value, hint = f"{where}{field.name}", getattr(section, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(value, typing.cast(type, hint)):
            yield from find_wrong_values(value, f"{name}.")
        elif typing.get_origin(hint) is typing.Annotated:
            if problem := _find_problem(value, *typing.get_args(hint)):
                too_long = isinstance(value, int) and value.bit_length() > 128
                shown = f"a number of {value.bit_length()} bits" if too_long else value
                yield name, f"{name} is {shown}; {problem}"
        else:
            try:
                read_value(value, hint, name)
            except UserError as error:
                yield name, str(error)


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
    if kind is int and value > LARGEST_COUNT and bounds.high == math.inf:
        return f"it must be {dataclasses.replace(bounds, high=LARGEST_COUNT).describe()}"
    return ""
