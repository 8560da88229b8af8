"""An output file that is gone on with, byte for byte, after whatever ended the program that wrote it.

Owns the two files beside it while it grows, and what must be the same for going on:

    FILE.partial       whole lines, and perhaps the beginning of one
    FILE.partial.json  how much of it counts, of which input lines it is the output, and what made it

Both are brought up to date together after every `step` input lines, so that a resumed run works on the same
lines at a time as one that was never interrupted: it rounds alike and gives the same bytes. Knows nothing of
what the lines are.
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
    """What output is written to, and what its input is read through."""

    def __init__(self, file: Path, *, origin: Mapping[str, Any], step: int, resume: bool) -> None:
        """Opens FILE.partial, at its beginning or where an earlier run had got to.

        Args:
          origin: what made the output, as JSON values by name; for going on it must be the same.
          step: the number of input lines whose output is worth keeping only as a whole.

        Raises:
          UserError: what is there cannot be gone on with.
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
            self._write_record(0)  # before there is output that it describes
        self._stream: BinaryIO = self.partial.open("wb" if record is None else "r+b")
        self._stream.truncate(record["bytes"] if record else 0)
        self._stream.seek(0, os.SEEK_END)

    def read(self, name: str, lines: Iterable[str]) -> Iterator[str]:
        """Gives the lines whose output is still to come, of all lines of an input.

        Raises:
          UserError: the lines before them are not those that the output so far was made from.
        """
        reader = self._readers[name] = _Reader(lines, self._step)
        for _ in range(self.done):
            if next(reader, None) is None:
                raise UserError(
                    f"{name} ends after {reader.count} lines, but {self.partial} is of {self.done}; "
                    "give the same input, or leave out --resume to begin anew"
                )
        found, expected = reader.digest(self.done), self._digests.get(name, "absent")
        if self.done and found != expected:
            raise UserError(
                f"the first {self.done} lines of {name} are not those that {self.partial} was made from "
                f"(SHA-256 {found[:12]}, then {expected[:12]}); give the same input, or leave out "
                "--resume to begin anew"
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
        """Closes the file; what is whole gets its name, and the record goes."""
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
        anew = "leave out --resume to begin anew"
        try:
            record: dict[str, Any] = json.loads(self._record_file.read_text(encoding="utf-8"))
            then, size = record["origin"] | {"step": record["step"]}, record["bytes"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.partial} has no record {self._record_file.name} of what made it ({error}); {anew}"
            ) from error
        now = self._origin | {"step": self._step}
        differing = [
            f"{name}: {_show(now, name)} now, {_show(then, name)} for {self.partial}"
            for name in now | then
            if now.get(name) != then.get(name)
        ]
        if differing:
            raise UserError("\n".join([*differing, f"give the same as before, or {anew}"]))
        if (actual := self.partial.stat().st_size) < size:
            raise UserError(f"{self.partial} has {actual} bytes, but its record says {size}; {anew}")
        return record


def _show(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "absent"


class _Reader:
    """Lines with the digests of those read so far, at every multiple of `step`."""

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
        """Of the first `count` lines; those of fewer are forgotten."""
        self._digests = {lines: digest for lines, digest in self._digests.items() if lines >= count}
        return self._digests.get(count, self._hash.hexdigest())


@contextlib.contextmanager
def open_resumable(
    path: str, *, origin: Mapping[str, Any], step: int, resume: bool
) -> Iterator[ResumableOutput]:
    """Opens an output file that has its name only when it is whole; see `ResumableOutput`.

    Raises:
      UserError: the folder does not exist, the file is one, or there is something else to go on with.
    """
    output = ResumableOutput(check_output(path), origin=origin, step=step, resume=resume)
    whole = False
    try:
        yield output
        whole = True
    finally:
        output.close(whole=whole)
