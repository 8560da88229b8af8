"""The record beside an unfinished output file: how much of the file is valid, and what it was made from.

Contains the JSON file, its checks when it is read, and the comparison with a resumed command. The output file
itself is in resumable_output.py.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from flaxformer_mt.config.files import read_json_object
from flaxformer_mt.errors import UserError

# How to go on if an unfinished output file cannot be resumed.
START_OVER = "give --overwrite instead of --resume to start over"


@dataclass(frozen=True)
class Record:
    """What is known of an unfinished output file after a multiple of `step` input lines."""

    # The options that determine the output, by name.
    origin: dict[str, Any]
    # The number of input lines between two records.
    step: int
    # The numbers of input lines that are finished, and of bytes that were written for them.
    lines: int
    bytes: int
    # SHA-256 of these bytes.
    digest: str
    # SHA-256 of the finished lines of each input, by its name.
    inputs: dict[str, str]

    def check_origin(self, origin: Mapping[str, Any], step: int, output: Path) -> None:
        """Raise UserError if a command with this origin and step would write another output."""
        now, then = {**origin, "step": step}, self.origin | {"step": self.step}
        differing = [
            f"{name}: {_show(now, name)} now, {_show(then, name)} for {output}"
            for name in now | then
            if now.get(name) != then.get(name)
        ]
        if differing:
            raise UserError("\n".join([*differing, f"give the same values as before, or {START_OVER}"]))


def _show(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "absent"


def write_record(record: Record, file: Path) -> None:
    """Replace the file by this record, on the disk, completely or not at all."""
    new = file.with_name(file.name + ".new")
    with new.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(vars(record)) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_record(file: Path) -> Record:
    """Read what `write_record` wrote. Raises ValueError, whose message says what is wrong with the file."""
    try:
        found = read_json_object(file)
    except OSError as error:
        raise ValueError(f"{error.strerror}") from error
    hints = get_type_hints(Record)
    for name, hint in hints.items():
        value: Any = found.get(name)
        kind: type = get_origin(hint) or hint
        is_negative = isinstance(value, int) and value < 0
        if not isinstance(value, kind) or isinstance(value, bool) or is_negative:
            raise ValueError(f"its {name} is {value!r}")
    inputs = found["inputs"].items()
    if wrong := [name for name, digest in inputs if not isinstance(digest, str)]:
        raise ValueError(f"its inputs.{wrong[0]} is {found['inputs'][wrong[0]]!r}")
    return Record(**{name: found[name] for name in hints})
