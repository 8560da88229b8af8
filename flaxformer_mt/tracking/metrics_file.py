"""Appends to, reads and rewinds RUN/metrics.jsonl, which has one line for each logged split.

{"step": 1200, "time": 1763712000.0, "split": "train", "loss": 3.412, ...}
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.field_values import LARGEST_INT
from flaxformer_mt.config.files import read_file
from flaxformer_mt.errors import UserError, name_full_disk

METRICS_NAME = "metrics.jsonl"
# A larger file is not one of metrics: a line has about 300 bytes.
_METRICS_BYTES = 1 << 28


def append_metrics(file: TextIO, record: Mapping[str, Any]) -> None:
    with name_full_disk(file.name):
        file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the records of RUN/metrics.jsonl in order, ignoring an incomplete last line."""
    path = Path(run_dir) / METRICS_NAME
    if not path.is_file():
        raise UserError(f"{path} does not exist; train in {run_dir} first, or name another run directory")
    *lines, tail = _read_lines(path)
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse_line(line)
        if record is None:
            raise UserError(f"{path}, line {number} is damaged: {line[:80]!r}; remove the line")
        records.append(record)
    last = _parse_line(tail)
    return records if last is None else [*records, last]


def _read_lines(path: Path) -> list[bytes]:
    try:
        return read_file(path, most=_METRICS_BYTES).split(b"\n")
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; remove it") from error


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested deeply
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_record and all(map(_is_plain, record.values())) else None


def _is_plain(value: Any) -> bool:
    return abs(value) <= LARGEST_INT if isinstance(value, int) else isinstance(value, str | float | None)


def rewind_metrics(path: Path, start_step: int) -> int:
    """Keep only intact lines of steps up to `start_step` (0: no lines); return the number of damaged lines.

    An incomplete last line, left by a process that was killed, does not count as damaged.
    """
    if not path.exists():
        return 0
    earlier, unreadable = [], 0
    lines = _read_lines(path) if start_step else []
    for number, line in enumerate(lines, start=1):
        record = _parse_line(line)
        if record is None:
            unreadable += number < len(lines)
        elif record["step"] <= start_step:
            earlier.append(line + b"\n")
    write_atomically(path, *earlier)
    return unreadable
