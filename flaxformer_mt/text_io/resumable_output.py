"""A resumable output file: an interrupted and resumed command writes the same bytes as an uninterrupted one.

Until the output is complete, there are two files, by which a resumed command checks that its inputs and
options are the same:

    FILE.partial       complete lines, and possibly the beginning of one more
    FILE.partial.json  the record: numbers of valid bytes and input lines, digests of both, and options

Both files are updated together after every `step` input lines. A resumed command therefore processes the same
groups of lines as an uninterrupted one, with the same floating-point rounding and the same output.

With `keep`, the record of a complete output stays next to it as FILE.json, so that a later command with the
same inputs and options has nothing to do. A process that writes FILE.partial locks it until the process ends.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.files import read_json_object
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import check_output, open_locked, partial_of

# The remedy, in errors, if an unfinished output file cannot be resumed.
START_OVER = "give --overwrite instead of --resume to start over"


@dataclass(frozen=True)
class Record:
    """The state of an unfinished output file after a multiple of `step` input lines."""

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
        """Raise UserError if `origin` or `step` differs from the record; the error lists the differences."""
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


# The types of the values of a record; numbers are not negative.
_KINDS = {"origin": dict, "step": int, "lines": int, "bytes": int, "digest": str, "inputs": dict}


def read_record(file: Path) -> Record:
    """Read a record; raise ValueError, with the reason, if the file is missing or damaged."""
    try:
        found = read_json_object(file)
    except OSError as error:
        raise ValueError(f"{error.strerror}") from error
    for name, kind in _KINDS.items():
        value: Any = found.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise ValueError(f"its {name} is {value!r}")
    for name, digest in found["inputs"].items():
        if not isinstance(digest, str):
            raise ValueError(f"its inputs.{name} is {digest!r}")
    return Record(**{name: found[name] for name in _KINDS})


# Bytes to read at a time for the digest of the existing output.
_BLOCK_BYTES = 1 << 20


class ResumableOutput:
    """Writes an output file that a later run can continue; computes digests of inputs while reading them."""

    def __init__(
        self,
        path: str,
        *,
        origin: Mapping[str, Any],
        step: int,
        resume: bool,
        overwrite: bool = False,
        keep: bool = False,
    ) -> None:
        """Open FILE.partial, at its beginning or at the last record of an earlier run.

        Args:
          origin: the options that determine the output, as JSON values by name; a resumed run needs the same.
          step: the number of input lines between two records; a resumed run starts after the last record.
          resume: continue an existing FILE.partial.
          overwrite: discard an existing FILE.partial. Without `resume` and `overwrite`, a FILE.partial that
            contains output raises a UserError.
          keep: keep the record of a complete output; with `resume`, only check such an output.
        """
        file = self.file = check_output(path)
        self._keep = keep
        finished = file.is_file() and record_of(file).is_file() and not partial_of(file).exists()
        # Whether the output is complete, so that only its inputs and options are checked.
        self._complete = resume and keep and finished
        self.partial = file if self._complete else partial_of(file)
        self._record_file = record_of(self.partial)
        self._origin, self._step = json.loads(json.dumps(dict(origin))), step
        existed = self.partial.exists()
        self._stream: BinaryIO = open_locked(self.partial)
        self._hash = hashlib.sha256()
        try:
            record = self._find_record() if resume and existed else None
            if record is None and not overwrite:
                self._check_discarded()
        except BaseException:
            self._stream.close()
            raise
        self.done: int = record.lines if record else 0
        self._digests: dict[str, str] = record.inputs if record else {}
        self._readers: dict[str, _Reader] = {}
        self._written = self.done
        if record is None:
            self._write_record(self._record_file)  # a record exists before any output
        self._stream.truncate(record.bytes if record else 0)
        self._stream.seek(0, os.SEEK_END)

    def read(self, name: str, lines: Iterable[str]) -> Iterator[str]:
        """Return an iterator over the remaining lines; raise UserError if the finished ones have changed."""
        reader = self._readers[name] = _Reader(lines, self._step)
        for _ in range(self.done):
            if next(reader, None) is None:
                raise UserError(
                    f"{name} ends after {reader.count} lines, but {self.partial} is the output of "
                    f"{self.done}; give the same input, or {START_OVER}"
                )
        found, expected = reader.digest(self.done), self._digests.get(name, "absent")
        if self.done and found != expected:
            raise UserError(
                f"the first {self.done} lines of {name} differ from those that {self.partial} was made from "
                f"(SHA-256 {found[:12]} now, {expected[:12]} for {self.partial}); give the same input, or "
                f"{START_OVER}"
            )
        if self._complete and next(reader, None) is not None:
            raise UserError(
                f"{name} has more lines than the {self.done} that {self.file} was made from; give the same "
                f"input, or {START_OVER}"
            )
        return reader

    def write(self, lines: Iterable[str]) -> None:
        """Write the output lines that belong to the next input line."""
        for line in lines:
            encoded = line.encode("utf-8", errors="replace") + b"\n"
            self._stream.write(encoded)
            self._hash.update(encoded)
        self._written += 1
        if self._written % self._step == 0:
            self._sync()
            self._write_record(self._record_file)
            self.done = self._written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Close the file; without an error, rename it to FILE, and delete the record unless `keep` is set."""
        if error is None:  # renamed while it is locked
            self._sync()
            if self._keep:
                self._write_record(record_of(self.file))
            os.replace(self.partial, self.file)
            record_of(partial_of(self.file)).unlink(missing_ok=True)
        self._stream.close()

    def _sync(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _write_record(self, file: Path) -> None:
        lines = self._written
        inputs = {name: reader.digest(lines) for name, reader in self._readers.items()}
        num_bytes, digest = self._stream.tell() if lines else 0, self._hash.hexdigest()
        record = Record(self._origin, self._step, lines, num_bytes, digest, inputs)
        write_atomically(file, f"{json.dumps(vars(record))}\n".encode(), sync=True)

    def _find_record(self) -> Record:
        """Read the record of the existing output; raise UserError unless the output agrees with it."""
        try:
            record = read_record(self._record_file)
        except ValueError as error:
            raise UserError(
                f"{self.partial} has no record {self._record_file.name} of its inputs and options, or it is "
                f"damaged ({error}); {START_OVER}"
            ) from error
        record.check_origin(self._origin, self._step, self.partial)
        actual = os.fstat(self._stream.fileno()).st_size
        if actual < record.bytes or (self._complete and actual > record.bytes):
            raise UserError(
                f"{self.partial} has {actual} bytes, but its record says {record.bytes}; {START_OVER}"
            )
        missing = record.bytes
        while missing and (block := self._stream.read(min(missing, _BLOCK_BYTES))):
            self._hash.update(block)
            missing -= len(block)
        if (found := self._hash.hexdigest()) != record.digest:
            raise UserError(
                f"{self.partial} was changed: its first {record.bytes} bytes have the SHA-256 {found[:12]}, "
                f"but its record says {record.digest[:12]}; {START_OVER}"
            )
        return record

    def _check_discarded(self) -> None:
        """Raise UserError if FILE.partial holds output that another command could continue."""
        size = os.fstat(self._stream.fileno()).st_size
        if not size:
            return
        try:
            lines = read_record(self._record_file).lines
            contents = f"the output of the first {lines:,} lines" if lines else ""
        except ValueError:
            contents = f"{size:,} bytes of output without a record"
        if contents:
            raise UserError(
                f"{self.partial} holds {contents} of an interrupted command; give --resume to continue that "
                "command, --overwrite to start over, or another --output"
            )


def record_of(file: Path) -> Path:
    """Return the path of the record of the output file `file` (FILE or FILE.partial)."""
    return file.with_name(file.name + ".json")


class _Reader:
    """Iterates over lines and, at every multiple of `step`, stores the digest of all lines read so far."""

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
        """Return the digest of the first `count` lines, and discard the digests of fewer lines."""
        self._digests = {lines: digest for lines, digest in self._digests.items() if lines >= count}
        return self._digests.get(count, self._hash.hexdigest())
