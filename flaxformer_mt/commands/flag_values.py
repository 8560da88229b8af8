"""Values of flags: from text to the values that a config file would have."""

import types
import typing
from pathlib import Path
from typing import Any

from flaxformer_mt.config import StageConfig
from flaxformer_mt.errors import UserError

_BOOLS = {"true": True, "false": False}
_NOUNS = {int: "whole number", float: "number"}


def parse_text(text: str, kind: Any, flag: str) -> Any:
    """Convert the text of a flag to a value: "1,2" for tuple[float, ...] is (1.0, 2.0).

    Which values a field accepts is for `config.field_values.read_value` to say: a choice stays as it is.

    Raises:
      UserError: the text is no number or truth value, or the file of stages cannot be read.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        wanted = next(argument for argument in arguments if argument is not types.NoneType)
        return None if text.lower() == "none" else parse_text(text, wanted, flag)
    if kind == tuple[StageConfig, ...]:
        return _read_stages(text)
    if origin is tuple:
        return tuple(parse_text(part, arguments[0], flag) for part in text.split(",") if part.strip())
    if kind is bool and text.lower() not in _BOOLS:
        raise UserError(f"{flag} is {text!r} (allowed: True, False)")
    if kind is bool:
        return _BOOLS[text.lower()]
    if kind is Path and not text:  # Path("") would be the working folder
        raise UserError(f"{flag} has no value; give {flag}=PATH")
    try:
        return kind(text) if kind in _NOUNS else text
    except ValueError:
        raise UserError(f"{flag} is {text!r}, which is not a {_NOUNS[kind]}") from None


def _read_stages(path: str) -> tuple[StageConfig, ...]:
    """Return the stages in a YAML file; none for the empty path."""
    if not path:
        return ()
    from flaxformer_mt.corpus.opustrainer_file import read_curriculum

    return read_curriculum(path)
