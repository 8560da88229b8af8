"""YAML that other toolkits write beside their models: plain values, never code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flaxformer_mt.config.files import read_file
from flaxformer_mt.errors import UserError

# Larger files are not read, nor those that have more values once their references are written out.
_LARGEST, _MOST_VALUES = 1 << 26, 1 << 22


def read_yaml(path: Path, *, as_text: bool = False) -> dict[str, Any]:
    """Read a file of YAML that is a mapping; see `parse_yaml`."""
    try:
        content = read_file(path, most=_LARGEST).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; copy it again") from error
    return parse_yaml(content, str(path), as_text=as_text)


def parse_yaml(content: str, name: str, *, as_text: bool = False) -> dict[str, Any]:
    """Parse YAML that is a mapping.

    Args:
      name: of the file, for messages.
      as_text: whether all keys and values stay text, as the words of a vocabulary: `no` is not a truth value.

    Raises:
      UserError: the text is no YAML, no mapping, or has references with which few bytes claim much.
    """
    try:
        found = yaml.load(content, yaml.CBaseLoader if as_text else yaml.CSafeLoader)  # noqa: S506
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name} is not YAML that can be read: {reason}") from error
    if not isinstance(found, Mapping):
        raise UserError(f"{name} must be a mapping of names to values, but is {type(found).__name__}")
    left: list[Any] = [found]
    for _ in range(_MOST_VALUES):
        if not left:
            return {str(key): value for key, value in found.items()}
        one = left.pop()
        left += one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else []
    raise UserError(f"{name} has more than {_MOST_VALUES} values with its references (*name); write them out")
