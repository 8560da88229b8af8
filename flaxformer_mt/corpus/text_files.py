r"""A user's own text files: which ones hold a split, how many lines they have, and their lines one by one.

Owns the file names and formats of `parallel_text` (`train.de` + `train.en`, or `train.tsv`, each also `.gz`;
of a language model `train.en` alone).
A line ends at b"\n" and nowhere else, so the characters that Unicode also calls line ends stay inside their
sentence. Knows nothing of TFDS or of what makes a pair good.
"""

import dataclasses
import difflib
import gzip
import hashlib
import itertools
import json
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flaxformer_mt.errors import UserError

_BOM = b"\xef\xbb\xbf"
# Lines whose bytes are added up in one number of `Scan.block_bytes`.
BLOCK = 16384
# A file changed less than this long ago may change again within one tick of its clock, unseen: it is read
# again.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class Scan:
    """What one reading tells of a file: lines, digest of their text, bytes of each BLOCK, CRLFs, BOM."""

    lines: int
    digest: str
    block_bytes: tuple[int, ...]
    crlf_lines: int
    bom: bool


def find_files(folder: Path, split: str, languages: tuple[str, str]) -> tuple[Path, ...]:
    """The files of a split: (source, target), or one two-column (tsv,); (target,) if `languages[0]` is "".

    Raises:
      UserError: the folder or a file is missing, or more than one file could be meant.
    """
    _require(folder)
    if not languages[0]:
        return (_find_target(folder, split, languages[1]),)
    source, target, table = (_find_file(folder, f"{split}.{suffix}") for suffix in (*languages, "tsv"))
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
    """Whether the folder holds any file of the split. Raises UserError if there is no such folder."""
    _require(folder)
    return any(_find_file(folder, f"{split}.{suffix}") for suffix in (*filter(None, languages), "tsv"))


def _find_target(folder: Path, split: str, language: str) -> Path:
    """The file of a language model's text."""
    target, table = (_find_file(folder, f"{split}.{suffix}") for suffix in (language, "tsv"))
    if target:
        return target
    if table:
        unpack = "zcat" if table.suffix == ".gz" else "cat"
        raise UserError(
            f"{table} has two columns, and data.source_language is empty: write the one to learn into a file "
            f"of its own, as with `{unpack} {table} | cut -f2 > {folder / split}.{language}`"
        )
    present = _present(folder, f"{split}.{language}")
    raise UserError(
        f"{folder} has no {split}.{language} (or {split}.{language}.gz); {present}. The language "
        f"is {language} (--config.data.target_language), and there is no source language"
    )


def _require(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"the folder of parallel_text {folder} does not exist; set --config.data.text_dir")


def _find_file(folder: Path, name: str) -> Path | None:
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
    """What the folder holds instead: files of like names, else the first ten."""
    present = sorted(path.name for path in folder.iterdir() if path.is_file())
    near = difflib.get_close_matches(wanted, present, n=3) or present[:10]
    return f"it has {', '.join(near)}" if near else "it is empty"


def read_lines(path: Path) -> Iterator[bytes]:
    r"""The lines of a file without their ends: b"\n", one b"\r" before it, and a UTF-8 BOM at the start.

    Raises:
      UserError: the file cannot be read or is no gzip file although it is named so.
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
            yield from file  # a binary file's lines end at b"\n" only
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} is not a whole gzip file ({error}); compress it again or unpack it"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def read_rows(files: tuple[Path, ...]) -> Iterator[tuple[bytes, bytes]]:
    r"""The (source, target) lines of a split, up to the shorter file's end; .tsv lines are cut."""
    if len(files) == 2:
        yield from zip(
            read_lines(files[0]), read_lines(files[1]), strict=False
        )  # counts are the caller's to check
        return
    for line in read_lines(files[0]):
        source, _, target = line.partition(b"\t")
        yield source, target


def scan(path: Path, *, columns: int = 1) -> Scan:
    """Reads a file once, in constant memory, and counts.

    Raises:
      UserError: it cannot be read, or a line has not as many tab-separated columns as asked for (2).
    """
    content = hashlib.blake2b(digest_size=16)
    lines = crlf_lines = 0
    block_bytes: list[int] = []
    bom = False
    for raw in _raw_lines(path):
        bom = bom or (lines == 0 and raw.startswith(_BOM))
        line = _strip(raw, first=lines == 0)
        found = line.count(b"\t") + 1
        if columns == 2 and found != 2:
            raise UserError(
                f"{path} line {lines + 1} has {found} columns; a .tsv line has 2: source, one tab, target"
            )
        crlf_lines += raw.endswith((b"\r\n", b"\r"))
        content.update(line + b"\n")
        if lines % BLOCK == 0:
            block_bytes.append(0)
        block_bytes[-1] += len(line)
        lines += 1
    return Scan(lines, content.hexdigest(), tuple(block_bytes), crlf_lines, bom)


def load_or_scan(path: Path, *, columns: int, folder: Path) -> Scan:
    """`scan`, remembered in `folder` for as long as path, size and time of change stay the same."""
    before = read_stamp(path)
    name = hashlib.blake2b(f"{columns} {path.resolve()}".encode(), digest_size=16).hexdigest()
    memory = folder / f"{name}.json"
    if memory.exists():
        known = json.loads(memory.read_text(encoding="utf-8"))
        if tuple(known["stamp"]) == before:
            return Scan(**(known["scan"] | {"block_bytes": tuple(known["scan"]["block_bytes"])}))
    started = time.time_ns()
    result = scan(path, columns=columns)
    if read_stamp(path) == before and started - path.stat().st_mtime_ns > _SETTLED_NS:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            json.dump({"stamp": before, "scan": dataclasses.asdict(result)}, file)
        os.replace(file.name, memory)
    return result


def read_stamp(path: Path) -> tuple[int, ...]:
    """What changes whenever the file does: its size, time of change in nanoseconds, and inode."""
    facts = path.stat()
    return (facts.st_size, facts.st_mtime_ns, facts.st_ino)


def cut_into_blocks(scans: tuple[Scan, ...], lines: int, *, most_bytes: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) of the first `lines` lines that hold at most `most_bytes` each, in whole BLOCKs.

    Three blocks of 60, 30 and 40 bytes with most_bytes 100 give [(0, 2 * BLOCK), (2 * BLOCK, lines)].
    """
    sizes = [sum(sizes) for sizes in itertools.zip_longest(*(s.block_bytes for s in scans), fillvalue=0)]
    ranges, start, size = [], 0, 0
    for block in range((lines + BLOCK - 1) // BLOCK):
        if size and size + sizes[block] > most_bytes:
            ranges.append((start, block * BLOCK))
            start, size = block * BLOCK, 0
        size += sizes[block]
    ranges.append((start, lines))
    return ranges
