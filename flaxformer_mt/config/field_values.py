"""Annotations of config fields (bounds and marks), and the parser of values from files, flags and Python.

A field is declared as Annotated[int, at_least(1), USUAL, MayChange("...")].
"""

import contextlib
import dataclasses
import math
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.config.foreign_names import find_field
from flaxformer_mt.errors import UserError, suggest

# Larger whole numbers overflow arithmetic with floats and arrays.
LARGEST_INT = (1 << 63) - 1
# The largest whole number of a field without another upper bound: devices count in 32 bits.
LARGEST_COUNT = 2**31 - 1
# Weights of sentence pairs in the loss lie between these, so that no sum of a batch is lost in float32.
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1e6

_BOOLS = {"true": True, "false": False}


@dataclass(frozen=True)
class Bounds:
    """An interval of finite numbers; `low_open` and `high_open` exclude the lower and the upper end."""

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
    """Return the bounds x >= `low`; whole numbers must also fit into 32 bits."""
    return Bounds(low)


def above(low: float, *, at_most: float = math.inf) -> Bounds:
    return Bounds(low, at_most, low_open=True)


def between(low: float, high: float) -> Bounds:
    return Bounds(low, high)


def share() -> Bounds:
    """Return the bounds 0 <= x < 1, for dropout rates and other shares."""
    return Bounds(0, 1, high_open=True)


@dataclass(frozen=True)
class MayChange:
    """Marks a field that may change when a run is resumed; `effect`: how results change; "": not at all."""

    effect: str = ""


class Usual:
    """Marks a field that most experiments set; `--help` lists it, not only `--help=all`."""


USUAL = Usual()


def find_marks(section: type, mark: type, where: str = "", of_all: Any = None) -> dict[str, Any]:
    """Return the marks of one type by the dotted names of their fields: {"train.steps": MayChange("...")}.

    A mark on a section applies to all fields of the section.
    """
    marks: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(section, include_extras=True).items():
        notes = [note for one in (hint, *typing.get_args(hint)) for note in getattr(one, "__metadata__", ())]
        value = next((note for note in notes if isinstance(note, mark)), of_all)
        kind = _split_hint(hint)[0]
        if dataclasses.is_dataclass(kind):
            marks |= find_marks(typing.cast(type, kind), mark, f"{where}{name}.", value)
        elif value is not None:
            marks[f"{where}{name}"] = value
    return marks


def _split_hint(hint: Any) -> tuple[Any, Bounds | None]:
    """Return type and bounds of an annotation: Annotated[int, at_least(1), USUAL] gives int, at_least(1)."""
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, None
    return hint.__origin__, next((note for note in hint.__metadata__ if isinstance(note, Bounds)), None)


def make_section(kind: type, values: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    built = {
        name: read_value(value, _find_type(hints, name, where), f"{where}.{name}")
        for name, value in values.items()
    }
    return kind(**built)


def replace_fields(section: Any, changes: Mapping[str, Any], where: str) -> Any:
    """Return a copy of a section with changed fields; `changes` maps their dotted names to the new values."""
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
    hint = suggest(name, hints, prefix=f"{where}.", otherwise=f"known: {', '.join(hints)}")
    if field := find_field(name):
        hint = f"; here it is config.{field}"
    raise UserError(f"unknown config field {where}.{name}{hint}")


def show_value(value: Any) -> str:
    """Format a value of any type for a message, shortened if it is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no number of so many digits
        return "a number of thousands of digits"


def read_value(
    value: Any, hint: Any, where: str, bounds: Bounds | None = None, *, from_text: bool = False
) -> Any:
    """Convert a value to the declared type (a list to a tuple, 1 to 1.0 for a float) and check its bounds.

    The value comes from JSON or Python, or with `from_text` from the text of a flag: for tuple[float, ...],
    "1,2" becomes (1.0, 2.0), and "none" becomes None.
    """
    kind, own_bounds = _split_hint(hint)
    bounds = own_bounds or bounds
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(one for one in args if one is not types.NoneType)
        is_choice = "none" in typing.get_args(inner)  # as sacreBLEU's tokenizer of that name
        none = from_text and value.lower() == "none" and not is_choice
        if types.NoneType in args and (none or value is None):
            return None
        return read_value(value, inner, where, bounds, from_text=from_text)
    if origin is tuple:
        items = [part for part in value.split(",") if part.strip()] if from_text else value
        if isinstance(items, list | tuple):
            return tuple(read_value(item, args[0], where, bounds, from_text=from_text) for item in items)
    elif origin is Literal or kind is bool:
        return _read_choice(value, args or (True, False), where, from_text=from_text)
    elif dataclasses.is_dataclass(kind):
        if isinstance(value, dict):
            return make_section(typing.cast(type, kind), value, where)
        if isinstance(value, typing.cast(type, kind)):
            return value
    elif kind is Path and value != "" and isinstance(value, str | Path):  # Path("") is the working folder
        return Path(value)
    elif kind in (int, float):
        number, limits = _read_number(value, kind, from_text=from_text), _limits(kind, bounds)
        if number is not None and limits.contain(number):
            return number
        if number is not None:
            broken = bounds if bounds and not bounds.contain(number) else limits
            shown = show_value(number if from_text else value)
            raise UserError(f"{where} is {shown}; it must be {broken.describe()}")
    elif isinstance(value, kind):
        return value
    raise UserError(f"{where} is {show_value(value)}; it must be {_describe(kind, bounds)}")


def _read_choice(value: Any, choices: Sequence[Any], where: str, *, from_text: bool) -> Any:
    if from_text and True in choices:
        value = _BOOLS.get(value.lower(), value)
    if not any(type(value) is type(choice) and value == choice for choice in choices):  # 1 is not True
        texts = list(map(str, choices))
        similar = suggest(str(value).lower(), texts)
        raise UserError(f"{where} is {show_value(value)}{similar} (allowed: {', '.join(texts)})")
    return value


def _read_number(value: Any, kind: type, *, from_text: bool) -> Any:
    if from_text:
        with contextlib.suppress(ValueError):
            value = kind(value)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return None
    # A whole number may be larger than any float; Python then refuses to convert it.
    if kind is float:
        return float(value) if abs(value) <= sys.float_info.max else None
    return value


def _limits(kind: type, bounds: Bounds | None) -> Bounds:
    if kind is int and bounds is not None and bounds.high == math.inf:
        return dataclasses.replace(bounds, high=LARGEST_COUNT)
    largest = LARGEST_INT if kind is int else math.inf
    return bounds or Bounds(-largest, largest)


def _describe(kind: Any, bounds: Bounds | None) -> str:
    """Describe the values that a field accepts: "a whole number, at least 1", "a list", "an object"."""
    if dataclasses.is_dataclass(kind):
        return "an object"
    names = {int: "a whole number", float: "a finite number", str: "text", Path: "a path"}
    return names.get(kind, "a list") + (f", {bounds.describe()}" if bounds else "")


def find_wrong_values(section: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, problem) for each value of a wrong type or outside its bounds."""
    hints = typing.get_type_hints(type(section), include_extras=True)
    for field in dataclasses.fields(section):
        name, value = f"{where}{field.name}", getattr(section, field.name)
        kind = _split_hint(hints[field.name])[0]
        if dataclasses.is_dataclass(kind) and isinstance(value, typing.cast(type, kind)):
            yield from find_wrong_values(value, f"{name}.")
            continue
        try:
            read_value(value, hints[field.name], name)
        except UserError as error:
            yield name, str(error)
