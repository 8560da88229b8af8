"""A resumable output file: an interrupted and resumed program writes the same bytes as an uninterrupted one.

Contains the two files that are kept until the output is complete, and the check that a resumed run has the
same inputs and options:

    FILE.partial       complete lines, and possibly the beginning of one more
    FILE.partial.json  the record: numbers of valid bytes and input lines, digests of the input, and options

Both are updated together after every `step` input lines. A resumed run therefore processes the same groups of
lines as an uninterrupted one, with the same floating-point rounding and the same bytes.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import check_output


class ResumableOutput:
    """Writes the output, and reads the inputs through iterators that compute their digests."""

    def __init__(self, file: Path, *, origin: Mapping[str, Any], step: int, resume: bool) -> None:
        """Opens FILE.partial, at its beginning or at the last record of an earlier run.

        Args:
          origin: the options that determine the output, as JSON values by name; a resumed run needs the same.
          step: the number of input lines between two records; a resumed run starts after the last record.

        Raises:
          UserError: the existing FILE.partial cannot be resumed with this origin.
        """
        self.file = file
        self.partial = file.with_name(file.name + ".partial")
        self._record_file = self.partial.with_name(self.partial.name + ".json")
        self._origin, self._step = json.loads(json.dumps(dict(origin))), step
        record = self._read_record() if resume and self.partial.exists() else None
        self.done: int = record["lines"] if record else 0
        self._digests: dict[str, str] = record["inputs"] if record else {}
        self._readers: dict[str, _Reader] = {}
        self._written = self.done
        if record is None:
            self._write_record(0)  # a record exists before any output
        self._stream: BinaryIO = self.partial.open("wb" if record is None else "r+b")
        self._stream.truncate(record["bytes"] if record else 0)
        self._stream.seek(0, os.SEEK_END)

    def read(self, name: str, lines: Iterable[str]) -> Iterator[str]:
        """Yields the lines of an input whose output is still to be written, and skips the lines before.

        Raises:
          UserError: the skipped lines differ from those that the existing output was made from.
        """
        reader = self._readers[name] = _Reader(lines, self._step)
        for _ in range(self.done):
            if next(reader, None) is None:
                raise UserError(
                    f"{name} ends after {reader.count} lines, but {self.partial} is the output of "
                    f"{self.done}; give the same input, or leave out --resume to start over"
                )
        found, expected = reader.digest(self.done), self._digests.get(name, "absent")
        if self.done and found != expected:
            raise UserError(
                f"the first {self.done} lines of {name} differ from those that {self.partial} was made from "
                f"(SHA-256 {found[:12]} now, {expected[:12]} for {self.partial}); give the same input, or "
                "leave out --resume to start over"
            )
        return reader

    def write(self, lines: Iterable[str]) -> None:
        """Writes the output lines of the next input line."""
        for line in lines:
            self._stream.write(line.encode("utf-8", errors="replace") + b"\n")
        self._written += 1
        if self._written % self._step == 0:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._write_record(self._written)
            self.done = self._written

    def close(self, *, whole: bool) -> None:
        """Closes the file; if `whole`, renames it to FILE and deletes the record."""
        self._stream.close()
        if whole:
            os.replace(self.partial, self.file)
            self._record_file.unlink(missing_ok=True)

    def _write_record(self, lines: int) -> None:
        record = {
            "origin": self._origin,
            "step": self._step,
            "lines": lines,
            "bytes": self._stream.tell() if lines else 0,
            "inputs": {name: reader.digest(lines) for name, reader in self._readers.items()},
        }
        new = self._record_file.with_name(self._record_file.name + ".new")
        new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self._record_file)

    def _read_record(self) -> dict[str, Any]:
        remedy = "leave out --resume to start over"
        try:
            record: dict[str, Any] = json.loads(self._record_file.read_text(encoding="utf-8"))
            then, size = record["origin"] | {"step": record["step"]}, record["bytes"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.partial} has no record {self._record_file.name} of its inputs and options "
                f"({error}); {remedy}"
            ) from error
        now = self._origin | {"step": self._step}
        differing = [
            f"{name}: {_show(now, name)} now, {_show(then, name)} for {self.partial}"
            for name in now | then
            if now.get(name) != then.get(name)
        ]
        if differing:
            raise UserError("\n".join([*differing, f"give the same values as before, or {remedy}"]))
        if (actual := self.partial.stat().st_size) < size:
            raise UserError(f"{self.partial} has {actual} bytes, but its record says {size}; {remedy}")
        return record


def _show(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "absent"


class _Reader:
    """Iterates over lines, and keeps a digest of all lines read so far at every multiple of `step`."""

    def __init__(self, lines: Iterable[str], step: int) -> None:
        self._lines, self._step = iter(lines), step
        self._hash = hashlib.sha256()
        self._digests = {0: self._hash.hexdigest()}
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._hash.update(line.encode("utf-8", errors="surrogatepass") + b"\n")
        self.count += 1
        if self.count % self._step == 0:
            self._digests[self.count] = self._hash.hexdigest()
        return line

    def digest(self, count: int) -> str:
        """Returns the digest of the first `count` lines; discards the digests of fewer lines."""
        self._digests = {lines: digest for lines, digest in self._digests.items() if lines >= count}
        return self._digests.get(count, self._hash.hexdigest())


@contextlib.contextmanager
def open_resumable(
    path: str, *, origin: Mapping[str, Any], step: int, resume: bool
) -> Iterator[ResumableOutput]:
    """Opens a resumable output file, which gets its final name once it is complete; see `ResumableOutput`.

    Raises:
      UserError: the parent folder does not exist, the path is a folder, or the existing file cannot be
        resumed.
    """
    output = ResumableOutput(check_output(path), origin=origin, step=step, resume=resume)
    whole = False
    try:
        yield output
        whole = True
    finally:
        output.close(whole=whole)
