r"""The user's text files: which files hold a split, how many lines they have, and reading them by line.

Contains the file names and formats of `parallel_text` (`train.de` + `train.en`, or `train.tsv`, each also
`.gz`; for a language model `train.en` alone).
A line ends at b"\n" only, so other characters that Unicode counts as line ends stay inside their sentence.
"""

import dataclasses
import difflib
import gzip
import hashlib
import itertools
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flaxformer_mt.corpus.cached_json import read_cached, write_cached
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_encoding import BEGINNING, check_encoding

_BOM = b"\xef\xbb\xbf"
# Lines per block, the unit of `Scan.block_bytes`.
BLOCK = 16384
# A file that changed less than this time before its scan may change again within one tick of the file
# system's clock, undetected: its scan is not cached.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class Scan:
    """Facts about a file: number of lines, digest of the text, bytes of each BLOCK, CRLF lines, BOM."""

    lines: int
    digest: str
    block_bytes: tuple[int, ...]
    crlf_lines: int
    bom: bool
    # Whether each line of a .tsv file has a third column, the weight of the pair.
    weighted: bool = False


def find_files(folder: Path, split: str, languages: tuple[str, str]) -> tuple[Path, ...]:
    """The files of a split: (source, target), or one two-column (tsv,); (target,) if `languages[0]` is "".

    Raises:
      UserError: the folder or a file is missing, or the choice of files is ambiguous.
    """
    _require(folder)
    if not languages[0]:
        return (_find_target(folder, split, languages[1]),)
    source, target, table = (find_file(folder, f"{split}.{suffix}") for suffix in (*languages, "tsv"))
    for other in (source, target):
        if table and other:
            raise UserError(f"{folder} has both {table.name} and {other.name}; keep one of them")
    if table:
        return (table,)
    if source is None or target is None:
        missing = languages[0] if source is None else languages[1]
        raise UserError(_missing(folder, split, missing, languages))
    return source, target


def has_files(folder: Path, split: str, languages: tuple[str, str]) -> bool:
    """Whether the folder holds any file of the split.

    Raises:
      UserError: the folder does not exist.
    """
    _require(folder)
    return any(find_file(folder, f"{split}.{suffix}") for suffix in (*filter(None, languages), "tsv"))


def _find_target(folder: Path, split: str, language: str) -> Path:
    """The file with the text of a language model."""
    target, table = (find_file(folder, f"{split}.{suffix}") for suffix in (language, "tsv"))
    if target:
        return target
    if table:
        unpack = "zcat" if table.suffix == ".gz" else "cat"
        raise UserError(
            f"{table} has two columns, but data.source_language is empty: copy the column to learn into a "
            f"file of its own, as with `{unpack} {table} | cut -f2 > {folder / split}.{language}`"
        )
    present = _present(folder, f"{split}.{language}")
    raise UserError(
        f"{folder} has no {split}.{language} (or {split}.{language}.gz); {present}. The language "
        f"is {language} (--config.data.target_language), and there is no source language"
    )


def _require(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"the parallel_text folder {folder} does not exist; set --config.data.text_dir")


def find_file(folder: Path, name: str) -> Path | None:
    """The file of this name or the same with .gz; raises UserError if there are both."""
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if len(found) == 2:
        raise UserError(f"{folder} has both {name} and {name}.gz; keep one of them")
    return found[0] if found else None


def _missing(folder: Path, split: str, language: str, languages: tuple[str, str]) -> str:
    wanted = f"{split}.{language}"
    return (
        f"{folder} has no {wanted} (or {wanted}.gz, or {split}.tsv with two columns); "
        f"{_present(folder, wanted)}. "
        f"The languages are {languages[0]} -> {languages[1]} (--config.data.source_language, target_language)"
    )


def _present(folder: Path, wanted: str) -> str:
    """Describes what the folder holds instead: files with similar names, else the first ten."""
    names = (path.name for path in folder.iterdir() if path.is_file())
    present = sorted(name for name in names if not name.startswith("."))
    near = difflib.get_close_matches(wanted, present, n=3) or present[:10]
    return f"it has {', '.join(near)}" if near else "it is empty"


def read_lines(path: Path) -> Iterator[bytes]:
    r"""Yields the lines of a file, without the final b"\n" or b"\r\n" and without a UTF-8 BOM at the start.

    Raises:
      UserError: the file cannot be read, or a .gz file is not a complete gzip file.
    """
    for index, line in enumerate(_raw_lines(path)):
        yield _strip(line, first=index == 0)


def _strip(line: bytes, *, first: bool) -> bytes:
    if first:
        line = line.removeprefix(_BOM)
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            check_encoding(file.peek(BEGINNING), str(path))
            yield from file  # a binary file's lines end at b"\n" only
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} is not a complete gzip file ({error}); compress it again or unpack it"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def read_rows(files: tuple[Path, ...]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the (source, target) lines of a split, up to the end of the shorter file."""
    if len(files) == 2:
        # The caller compares the line counts.
        yield from zip(read_lines(files[0]), read_lines(files[1]), strict=False)
        return
    for line in read_lines(files[0]):
        source, target, *_ = line.split(b"\t", 2)
        yield source, target


def scan(path: Path, *, columns: int = 1) -> Scan:
    """Reads a file once, in constant memory, and returns its counts and digest.

    Raises:
      UserError: the file cannot be read, or `columns` is 2 and a line has not two tab-separated columns, or
        three if the first line has three.
    """
    content = hashlib.blake2b(digest_size=16)
    lines = crlf_lines = 0
    block_bytes: list[int] = []
    bom = weighted = False
    for raw in _raw_lines(path):
        bom = bom or (lines == 0 and raw.startswith(_BOM))
        line = _strip(raw, first=lines == 0)
        found = line.count(b"\t") + 1
        weighted = weighted or (columns == 2 and lines == 0 and found == 3)
        if columns == 2 and found != 2 + weighted:
            expected = "3, as the first one: source, tab, target, tab, weight"
            if not weighted:
                expected = "2: source, one tab, target; or all lines have a third one, the weight of the pair"
            raise UserError(f"{path} line {lines + 1} has {found} columns; a .tsv line has {expected}")
        crlf_lines += raw.endswith((b"\r\n", b"\r"))
        content.update(line + b"\n")
        if lines % BLOCK == 0:
            block_bytes.append(0)
        block_bytes[-1] += len(line)
        lines += 1
    return Scan(lines, content.hexdigest(), tuple(block_bytes), crlf_lines, bom, weighted)


def load_or_scan(path: Path, *, columns: int, folder: Path) -> Scan:
    """Runs `scan`, or loads its result from `folder` while the file's path and stamp are unchanged."""
    before = read_stamp(path)
    name = hashlib.blake2b(f"{columns} {path.resolve()}".encode(), digest_size=16).hexdigest()
    cached = folder / f"{name}.json"
    record = read_cached(cached)
    if record is not None and tuple(record["stamp"]) == before:
        return Scan(**(record["scan"] | {"block_bytes": tuple(record["scan"]["block_bytes"])}))
    started = time.time_ns()
    result = scan(path, columns=columns)
    if read_stamp(path) == before and started - path.stat().st_mtime_ns > _SETTLED_NS:
        write_cached(cached, {"stamp": before, "scan": dataclasses.asdict(result)})
    return result


def read_stamp(path: Path) -> tuple[int, ...]:
    """Size, times in nanoseconds and inode of a file: one of them changes whenever the file does.

    Programs that copy files can set the time of modification (`cp -p`), but not that of change.
    """
    facts = path.stat()
    return (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


def cut_into_blocks(scans: tuple[Scan, ...], lines: int, *, max_bytes: int) -> list[tuple[int, int]]:
    """Cuts the first `lines` lines into ranges [start, stop) of whole BLOCKs with at most `max_bytes` each.

    A larger block is a range of its own.
    Three blocks of 60, 30 and 40 bytes with max_bytes 100 give [(0, 2 * BLOCK), (2 * BLOCK, lines)].
    """
    sizes = [sum(sizes) for sizes in itertools.zip_longest(*(s.block_bytes for s in scans), fillvalue=0)]
    ranges, start, size = [], 0, 0
    for block in range((lines + BLOCK - 1) // BLOCK):
        if size and size + sizes[block] > max_bytes:
            ranges.append((start, block * BLOCK))
            start, size = block * BLOCK, 0
        size += sizes[block]
    ranges.append((start, lines))
    return ranges
