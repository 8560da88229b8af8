"""Values of flags: from text to a typed value, and the spelling of a type in `--help`."""

import difflib
import math
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from flaxformer_mt.config import StageConfig
from flaxformer_mt.config.field_values import LARGEST_INT

_BOOLS = {"true": True, "false": False}
_NOUNS = {int: "whole number", float: "number"}


def read_value(text: str, kind: Any) -> Any:
    """Convert a flag's text to a value of the field's type: "1,2" for tuple[float, ...] is (1.0, 2.0).

    Raises:
      ValueError: the text is not a value of the type; the message continues the flag's name and gives the
        text and, for a choice, the allowed values.
      UserError: the file of stages cannot be read; the message is complete.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        wanted = next(argument for argument in arguments if argument is not types.NoneType)
        return None if text.lower() == "none" else read_value(text, wanted)
    if origin is Literal:
        choices = {
            str(argument).lower() if argument in (True, False) else argument: argument
            for argument in arguments
        }
        found = choices.get(text, choices.get(text.lower()) if text.lower() in _BOOLS else None)
        return _refuse_choice(text, [str(argument) for argument in arguments]) if found is None else found
    if kind == tuple[StageConfig, ...]:
        return _read_stages(text)
    if origin is tuple:
        return tuple(read_value(part, arguments[0]) for part in text.split(",") if part.strip())
    if kind is bool:
        return _refuse_choice(text, ("True", "False")) if text.lower() not in _BOOLS else _BOOLS[text.lower()]
    if kind is Path and not text:  # Path("") would be the working folder
        raise ValueError("has no value; give a path")
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"is {text!r}, which is not a {_NOUNS[kind]}") from None
    if kind is int and abs(value) > LARGEST_INT:
        raise ValueError(f"is {value}; the largest accepted value is {LARGEST_INT}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"is {text!r}, which is not a {_NOUNS[kind]}")
    return value


def _read_stages(path: str) -> tuple[StageConfig, ...]:
    """Return the stages in a YAML file; none for the empty path."""
    if not path:
        return ()
    from flaxformer_mt.corpus.opustrainer_file import read_curriculum

    return read_curriculum(path)


def _refuse_choice(text: str, choices: Sequence[str]) -> NoReturn:
    near = difflib.get_close_matches(text.lower(), choices, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"is {text!r}{hint} (allowed: {', '.join(choices)})")


def describe_type(kind: Any) -> str:
    """Spell a type for `--help`, without its bounds: INT, {bucket,pack}, FLOAT|none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return describe_type(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return "|".join(
            "none" if argument is types.NoneType else describe_type(argument) for argument in arguments
        )
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if kind == tuple[StageConfig, ...]:
        return "FILE.yaml"
    if origin is tuple:
        return f"{describe_type(arguments[0])},..."
    return "{True,False}" if kind is bool else str(kind.__name__).upper()
