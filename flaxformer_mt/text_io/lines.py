"""Text with one sentence a line, as streams of bytes: read as it is, written whole or marked as cut short.

Owns what counts as a line (what lies between line feeds, nothing else) and when an output file gets its name.
Knows nothing of languages or of translation.
"""

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from flaxformer_mt.errors import UserError

STANDARD = "-"

# How much of a file is read at a time to count its lines.
_BLOCK_BYTES = 1 << 20

# How many line numbers a message names.
_NAMED_LINES = 10


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Opens a file for reading, or standard input for `-`. Raises UserError if it is absent or a folder."""
    if path == STANDARD:
        yield sys.stdin.buffer
        return
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"input {file} {_why_not_a_file(file)}")
    with file.open("rb") as stream:
        yield stream


def _why_not_a_file(file: Path) -> str:
    if file.is_dir():
        return "is a folder; give a file, or - for standard input"
    siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, siblings, n=1)
    return "does not exist" + (f"; did you mean {file.parent / near[0]}?" if near else "")


def read_lines(
    stream: BinaryIO, *, name: str, invalid_utf8: Literal["refuse", "replace"] = "refuse"
) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 stream as they arrive, without their ends.

    Only a line feed ends a line, so that the count agrees with `wc -l`: b"a\x85b\r\nc" is "a\x85b" and "c".
    A byte order mark before the first line is dropped.

    Raises:
      UserError: a line is not UTF-8 and `invalid_utf8` is refuse.
    """
    for number, line in enumerate(stream, start=1):
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            yield line.decode("utf-8", errors="strict" if invalid_utf8 == "refuse" else "replace")
        except UnicodeDecodeError as error:
            where = "standard input" if name == STANDARD else name
            byte = f"byte 0x{line[error.start]:02x} at {error.start + 1}"
            raise UserError(
                f"{where}, line {number}, is not UTF-8 ({byte}); "
                "convert it with iconv, or give --invalid_utf8=replace"
            ) from None


def count_lines(path: str) -> int | None:
    """How many lines `read_lines` gives of a file; None of what can be read only once, as standard input."""
    file = Path(path).expanduser()
    if path == STANDARD or not file.is_file():
        return None
    count, last = 0, b"\n"
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")


@contextlib.contextmanager
def open_output(path: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that writes one line to a file, or to standard output for `-`.

    The file is FILE.partial until all is written, and only then FILE: a name without .partial is never half a
    translation.

    Raises:
      UserError: the folder does not exist, or the file is one.
    """
    if path == STANDARD:
        yield _write_to(sys.stdout.buffer)
        return
    file = check_output(path)
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        yield _write_to(stream)
    os.replace(partial, file)


def check_output(path: str) -> Path:
    """The file that a path names. Raises UserError if its folder does not exist, or it is a folder itself."""
    file = Path(path).expanduser()
    if not file.parent.is_dir():
        raise UserError(f"output folder {file.parent} does not exist; make it with mkdir -p {file.parent}")
    if file.is_dir():
        raise UserError(f"output {file} is a folder; give a file, or - for standard output")
    return file


def _write_to(stream: BinaryIO) -> Callable[[str], None]:
    def write(line: str) -> None:
        stream.write(line.encode("utf-8", errors="replace") + b"\n")
        stream.flush()  # whoever waits at the other end of a pipe sees each line as soon as it is there

    return write


def name_lines(numbers: Sequence[int]) -> str:
    """What messages call lines, of which they name ten: [3] gives "line 3", [3, 5] gives "lines 3, 5"."""
    named = ", ".join(map(str, numbers[:_NAMED_LINES]))
    more = len(numbers) - _NAMED_LINES
    return f"line{'s' * (len(numbers) > 1)} {named}" + (f" and {more} more" if more > 0 else "")
