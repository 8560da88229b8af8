"""Reads and writes text with one sentence per line.

Only a line feed ends a line. Lines that arrive from a pipe are grouped into windows, which close after about
five seconds at most. An output file gets its final name when it is complete.
"""

import collections
import contextlib
import itertools
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TypeVar

from flaxformer_mt import file_lock
from flaxformer_mt.errors import UserError, name_full_disk, suggest_sibling, warn_user
from flaxformer_mt.unicode_text import check_encoding

STANDARD = "-"

# Bytes to read at a time when the lines of a file are counted.
_BLOCK_BYTES = 1 << 20

# A window of arriving lines closes after _PAUSE seconds without another line, and at the latest after
# _LONGEST_WAIT seconds.
_PAUSE, _LONGEST_WAIT = 0.5, 5.0

Item = TypeVar("Item")

# Maximum number of line numbers in a message.
_NAMED_LINES = 10


@contextlib.contextmanager
def open_input(path: str, what: str = "input") -> Iterator[BinaryIO]:
    """Open a regular file for reading, or standard input for `-`; raise UserError for any other path."""
    if path == STANDARD:
        yield sys.stdin.buffer
        return
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{what} {file} {_why_not_a_file(file)}")
    with file.open("rb") as stream:
        yield stream


def _why_not_a_file(file: Path) -> str:
    if file.is_dir():
        return "is a folder; give a file, or - for standard input"
    if file.exists():  # such as a pipe, which can be read only once
        return "is no regular file; give one, or - for standard input"
    return f"does not exist{suggest_sibling(file)}"


def read_lines(
    stream: Iterable[bytes], *, name: str, invalid_utf8: Literal["refuse", "replace"] = "refuse"
) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 stream as they arrive, without line endings.

    Only a line feed ends a line, so that the count agrees with `wc -l`: b"a\x85b\r\nc" is "a\x85b" and "c".
    A byte order mark before the first line is removed.
    """
    where = "standard input" if name == STANDARD else name
    for number, line in enumerate(stream, start=1):
        if number == 1:
            check_encoding(line, where)
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        try:
            yield line.decode("utf-8", errors="strict" if invalid_utf8 == "refuse" else "replace")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x} at {error.start + 1}"
            raise UserError(
                f"{where}, line {number}, is not UTF-8 ({byte}); "
                "convert it with iconv, or give --invalid_utf8=replace"
            ) from None


class Text(NamedTuple):
    """The lines of an open file; for a pipe, `is_ready` returns whether another line has arrived."""

    lines: Iterator[str]
    is_ready: Callable[[], bool] | None


@contextlib.contextmanager
def open_lines(
    path: str, what: str = "input", *, invalid_utf8: Literal["refuse", "replace"]
) -> Iterator[Text]:
    """Open a file, or standard input for `-`, during the body; yield the lines that `read_lines` reads."""
    with open_input(path, what) as stream:
        arriving = watch_arrival(stream)
        lines = read_lines(arriving or stream, name=path, invalid_utf8=invalid_utf8)
        yield Text(lines, arriving.is_ready if arriving else None)


class ArrivingLines:
    """Iterates over the lines of a pipe, terminal or socket; `is_ready` checks if the next has arrived."""

    def __init__(self, descriptor: int) -> None:
        """Read from the file descriptor, which nothing else must read."""
        self._descriptor = descriptor
        self._lines: collections.deque[bytes] = collections.deque()
        self._beginning: list[bytes] = []  # of the next line
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while not self._lines and not self._ended:
            self._read(None)
        if not self._lines:
            raise StopIteration
        return self._lines.popleft()

    def is_ready(self) -> bool:
        """Wait for up to half a second; return whether the next line, or the end, has arrived."""
        deadline = time.monotonic() + _PAUSE
        while not self._lines and not self._ended:
            if not self._read(max(0.0, deadline - time.monotonic())):
                return False
        return True

    def _read(self, seconds: float | None) -> bool:
        """Read available bytes once; return False if no bytes arrive within `seconds` (None: wait)."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return False
        block = os.read(self._descriptor, _BLOCK_BYTES)
        first, *rest = block.split(b"\n")
        self._beginning.append(first)
        for following in rest:
            self._lines.append(b"".join(self._beginning) + b"\n")
            self._beginning = [following]
        if not block:
            self._ended = True
            if last := b"".join(self._beginning):
                self._lines.append(last)
        return True


def watch_arrival(stream: BinaryIO) -> ArrivingLines | None:
    """Return the arriving lines of a pipe, terminal or socket; None for a file or an in-memory stream."""
    try:
        descriptor = stream.fileno()
    except OSError:  # an in-memory stream
        return None
    return None if stat.S_ISREG(os.fstat(descriptor).st_mode) else ArrivingLines(descriptor)


def take_windows(
    items: Iterable[Item], size: int, is_ready: Callable[[], bool] | None
) -> Iterator[list[Item]]:
    """Yield lists of `size` items, or fewer at the end and when the next item is not ready.

    `is_ready` is a function like `ArrivingLines.is_ready`; with it, a list has the items of at most about
    five seconds. None: all items are ready. An error is raised after the items before it are yielded.
    """
    problems: list[Exception] = []

    def read() -> Iterator[Item]:
        try:
            yield from items
        except Exception as problem:
            problems.append(problem)

    readable = read()
    while window := list(itertools.islice(readable, size if is_ready is None else 1)):
        deadline = time.monotonic() + _LONGEST_WAIT
        while is_ready and len(window) < size and is_ready() and time.monotonic() < deadline:
            following = list(itertools.islice(readable, 1))
            if not following:
                break
            window += following
        yield window
    if problems:
        raise problems[0]


def count_lines(path: str) -> int | None:
    """Count lines as `read_lines` does; return None for standard input, a pipe or a missing file."""
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
    """Yield a function that writes one line to a file, device or pipe, or to standard output for `-`.

    A file is named FILE.partial until it is complete, so that FILE is always complete. The target of a link
    is written; devices and pipes are written directly.
    """
    if path == STANDARD:
        yield _write_to(sys.stdout.buffer, "standard output")
        return
    file = check_output(path)
    if is_device(path):
        with name_full_disk(path), file.open("wb") as stream:  # closing it retries the bytes that did not fit
            yield _write_to(stream, path)
        return
    partial = partial_of(file)
    with name_full_disk(partial), open_locked(partial) as stream:
        stream.truncate()
        yield _write_to(stream, str(partial))
        os.replace(partial, file)  # while the file is locked


def open_locked(path: Path) -> BinaryIO:
    """Open a file without truncating it, and lock it; raise UserError if another process has locked it."""
    try:
        return file_lock.open_locked(path)
    except BlockingIOError:
        raise UserError(
            f"another process is writing {path}; wait until it has ended, or give another --output"
        ) from None
    except file_lock.FileHasNoLock as error:
        warn_user(
            f"the file system of {path.parent} has no locks; only one command at a time may write {path.name}"
        )
        assert error.stream is not None
        return error.stream


def check_output(path: str, *, inputs: Sequence[str | None] = ()) -> Path:
    """Return an output file's path, with links resolved; raise UserError if it is unwritable or an input."""
    file = Path(path).expanduser()
    if is_device(path):
        return file
    if file.is_symlink():
        file = Path(os.path.realpath(file))  # the finished file is renamed, and must not replace the link
    if not file.parent.is_dir():
        raise UserError(f"output folder {file.parent} does not exist; create it with mkdir -p {file.parent}")
    if file.is_dir():
        raise UserError(f"output {file} is a folder; give a file, or - for standard output")
    check_writable(file.parent)
    partial = partial_of(file)
    if os.path.lexists(partial) and not partial.is_file():
        raise UserError(f"output {file} is written as {partial}, which exists and is not a file; remove it")
    for name in inputs:
        if name is not None and name != STANDARD and _is_one_of(name, (file, partial)):
            raise UserError(
                f"output {path} would overwrite the input {name} while it is read; give another --output=FILE"
            )
    return file


def check_writable(folder: Path) -> None:
    """Raise UserError unless files can be written to an output folder, which need not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"output folder {folder}: {existing} is a file; give another path")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"output folder {existing} cannot be written to: it is read-only, or another user's; give "
            "another folder, or change its permissions"
        )


def is_device(path: str) -> bool:
    """Return whether a path is, or links to, a device, pipe or socket, which must not be replaced."""
    file = Path(path).expanduser()
    return file.exists() and not file.is_file() and not file.is_dir()


def partial_of(file: Path) -> Path:
    """Return the path FILE.partial, which an output file has until it is complete."""
    return file.with_name(file.name + ".partial")


def _is_one_of(name: str, files: Sequence[Path]) -> bool:
    path = Path(name).expanduser()
    return path.is_file() and any(file.exists() and path.samefile(file) for file in files)


def _write_to(stream: BinaryIO, name: str) -> Callable[[str], None]:
    def write(line: str) -> None:
        with name_full_disk(name):
            stream.write(line.encode("utf-8", errors="replace") + b"\n")
            stream.flush()  # the reader of a pipe receives each line immediately

    return write


def format_line_numbers(numbers: Sequence[int]) -> str:
    """Format at most ten line numbers for a message: [3] gives "line 3", [3, 5] gives "lines 3, 5"."""
    named = ", ".join(map(str, numbers[:_NAMED_LINES]))
    more = len(numbers) - _NAMED_LINES
    return f"line{'s' * (len(numbers) > 1)} {named}" + (f" and {more} more" if more > 0 else "")
