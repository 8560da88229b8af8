r"""The user's text files: which files hold a split, how many lines they have, and reading them by line.

Contains the file names and formats of `parallel_text`: `train.de` + `train.en`, or a table `train.tsv`,
`train.jsonl` or `train.parquet`; for a language model `train.en` alone. Each may be packed.
A line ends at b"\n" only, so other characters that Unicode counts as line ends stay inside their sentence.
"""

import dataclasses
import difflib
import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flaxformer_mt.corpus.arrow_files import count_parquet_rows
from flaxformer_mt.corpus.cached_json import digest_file, read_cached, write_cached
from flaxformer_mt.corpus.packed_files import PACKINGS, find_packing, name_unpacked, open_unpacked
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_encoding import BEGINNING, check_encoding

_BOM = b"\xef\xbb\xbf"
# Endings of tables, which have both sides of a pair in a row.
TABLES = ("tsv", "jsonl", "parquet")
# Lines per block, the unit of reading and of what a worker is given.
BLOCK = 16384
# Part of the cache key: raise it when the facts of a scan change.
_FORMAT = 2
# A file that changed less than this time before its scan may change again within one tick of the file
# system's clock, undetected: its scan is not cached.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class Scan:
    """Facts about a file: number of lines, digest of the text, where each BLOCK begins, CRLF lines, BOM.

    A block begins at this byte of the unpacked text, or at this row of a parquet file.
    """

    lines: int
    digest: str
    starts: tuple[int, ...]
    crlf_lines: int
    bom: bool
    # Whether each line of a .tsv file has a third column, the weight of the pair.
    weighted: bool = False


def find_files(folder: Path, split: str, languages: tuple[str, str]) -> tuple[Path, ...]:
    """Return the files of a split: (source, target), or one (table,); (target,) if `languages[0]` is "".

    Raises:
      UserError: the folder or a file is missing, or the choice of files is ambiguous.
    """
    _require(folder)
    wanted = [language for language in languages if language]
    present = {suffix: find_file(folder, f"{split}.{suffix}") for suffix in (*wanted, *TABLES)}
    found = [path for path in present.values() if path]
    tables = [path for path in found if find_table(path)]
    if not languages[0] and tables in ([], [present["tsv"]]):
        return (_find_target(folder, split, languages[1]),)
    if tables and len(found) > 1:
        other = next(path for path in found if path != tables[0])
        raise UserError(f"{folder} has both {tables[0].name} and {other.name}; keep one of them")
    if tables:
        return (tables[0],)
    if missing := [language for language in languages if not present[language]]:
        raise UserError(_missing(folder, split, missing[0], languages))
    return tuple(found)


def find_table(path: Path) -> str:
    """Return the kind of table that a file is by its name, one of TABLES; "" for lines of one language."""
    ending = name_unpacked(path).rpartition(".")[2]
    return ending if ending in TABLES else ""


def has_files(folder: Path, split: str, languages: tuple[str, str]) -> bool:
    """Return whether the folder holds any file of the split.

    Raises:
      UserError: the folder does not exist.
    """
    _require(folder)
    return any(find_file(folder, f"{split}.{suffix}") for suffix in (*filter(None, languages), *TABLES))


def _find_target(folder: Path, split: str, language: str) -> Path:
    """Return the file with the text of a language model."""
    target, table = (find_file(folder, f"{split}.{suffix}") for suffix in (language, "tsv"))
    if target:
        return target
    if table:
        unpack = {"": "cat", ".gz": "zcat", ".zst": "zstdcat"}[find_packing(table)]
        raise UserError(
            f"{table} has two columns, but data.source_language is empty: copy the column to learn into a "
            f"file of its own, as with `{unpack} {table} | cut -f2 > {folder / split}.{language}`"
        )
    present = _present(folder, f"{split}.{language}")
    raise UserError(
        f"{folder} has no {split}.{language} (or {split}.{language}.gz or .zst); {present}. The language "
        f"is {language} (--config.data.target_language), and there is no source language"
    )


def _require(folder: Path) -> None:
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UserError(f"the parallel_text folder {folder} {problem}; set --config.data.text_dir")


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file of this name, or the packed one; raise UserError if there are several."""
    found = [path for packing in PACKINGS if (path := folder / f"{name}{packing}").is_file()]
    if len(found) > 1:
        raise UserError(f"{folder} has both {found[0].name} and {found[1].name}; keep one of them")
    return found[0] if found else None


def _missing(folder: Path, split: str, language: str, languages: tuple[str, str]) -> str:
    wanted = f"{split}.{language}"
    return (
        f"{folder} has no {wanted} (or {wanted}.gz or .zst, or {split}.tsv with two columns); "
        f"{_present(folder, wanted)}. "
        f"The languages are {languages[0]} -> {languages[1]} (--config.data.source_language, target_language)"
    )


def _present(folder: Path, wanted: str) -> str:
    """Describe what the folder holds instead: files with similar names, else the first ten."""
    names = (path.name for path in folder.iterdir() if path.is_file())
    present = sorted(name for name in names if not name.startswith("."))
    near = difflib.get_close_matches(wanted, present, n=3) or present[:10]
    return f"it has {', '.join(near)}" if near else "it is empty"


def read_lines(path: Path) -> Iterator[bytes]:
    r"""Yield the lines of a file, without the final b"\n" or b"\r\n" and without a UTF-8 BOM at the start.

    Raises:
      UserError: the file cannot be read, or a packed file is damaged.
    """
    for number, text in enumerate(_find_blocks(path)):
        yield from _split(text, first=number == 0)


def read_blocks(path: Path, starts: Sequence[int], *, number: int = 0) -> Iterator[list[bytes]]:
    """Yield the lines of a file in lists of BLOCK, as `read_lines` does, from block `number` on.

    Args:
      starts: where each block begins, as in `Scan.starts`.
    """
    with open_unpacked(path, start=starts[number]) as file:
        for index in range(number, len(starts)):
            size = starts[index + 1] - starts[index] if index + 1 < len(starts) else -1
            yield _split(file.read(size), first=index == 0)


def _split(text: bytes, *, first: bool) -> list[bytes]:
    """Split lines that end in a line feed; `first` says whether they begin the file."""
    lines = (text.removeprefix(_BOM) if first else text).removesuffix(b"\n").split(b"\n")
    return [line.removesuffix(b"\r") for line in lines] if b"\r" in text else lines


def _find_blocks(path: Path) -> Iterator[bytes]:
    """Yield the text of each BLOCK of lines."""
    with open_unpacked(path) as file:
        check_encoding(file.peek(BEGINNING), str(path))
        while block := list(itertools.islice(file, BLOCK)):  # a binary file's lines end at b"\n" only
            yield b"".join(block)


def scan(path: Path, *, columns: int = 1) -> Scan:
    """Read a file once, in constant memory, and return its counts and digest.

    Raises:
      UserError: the file cannot be read, or `columns` is 2 and a line has not two tab-separated columns, or
        three if the first line has three.
    """
    if find_table(path) == "parquet":
        rows = count_parquet_rows(path)
        return Scan(rows, digest_file(path), tuple(range(0, rows, BLOCK)), 0, False)
    content = hashlib.blake2b(digest_size=16)
    lines = crlf_lines = start = 0
    starts: list[int] = []
    bom = weighted = False
    for text in _find_blocks(path):
        starts.append(start)
        start += len(text)
        bom = bom or (lines == 0 and text.startswith(_BOM))
        crlf_lines += text.count(b"\r\n") + text.endswith(b"\r")
        block = _split(text, first=lines == 0)
        if columns == 2:
            weighted = weighted or (lines == 0 and block[0].count(b"\t") == 2)
            _check_columns(path, lines, block, 2 + weighted)
        content.update(b"\n".join([*block, b""]))
        lines += len(block)
    return Scan(lines, content.hexdigest(), tuple(starts), crlf_lines, bom, weighted)


def _check_columns(path: Path, before: int, block: list[bytes], wanted: int) -> None:
    counts = [line.count(b"\t") + 1 for line in block]
    if counts.count(wanted) == len(block):
        return
    row, found = next((row, count) for row, count in enumerate(counts) if count != wanted)
    expected = "3, as the first one: source, tab, target, tab, weight"
    if wanted == 2:
        expected = "2: source, one tab, target; or all lines have a third one, the weight of the pair"
    raise UserError(f"{path} line {before + row + 1} has {found} columns; a .tsv line has {expected}")


def load_or_scan(path: Path, *, columns: int, folder: Path) -> Scan:
    """Run `scan`, or load its result from `folder` while the file's path and stamp are unchanged."""
    before = read_stamp(path)
    name = hashlib.blake2b(f"{_FORMAT} {columns} {path.resolve()}".encode(), digest_size=16).hexdigest()
    cached = folder / f"{name}.json"
    record = read_cached(cached)
    if record is not None and tuple(record["stamp"]) == before:
        return Scan(**(record["scan"] | {"starts": tuple(record["scan"]["starts"])}))
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
