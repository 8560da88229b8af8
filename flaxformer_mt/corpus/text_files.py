r"""The user's text files: finds the files of a split, counts their lines, and reads them line by line.

The files of `parallel_text` are `train.de` and `train.en`, or a table `train.tsv`, `train.jsonl` or
`train.parquet`; for a language model, only `train.en`. All may be compressed.
A line ends only at b"\n", so other characters that Unicode counts as line ends stay inside a sentence.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flaxformer_mt.atomic_folder import artifact, digest, digest_file, read_artifact
from flaxformer_mt.corpus.pairs import check_languages
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.unicode_text import BEGINNING, check_encoding


def read_parquet_pairs(
    path: Path, languages: tuple[str, str], *, first: int, size: int
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield (source, target) of each row from `first` on, in lists of `size`.

    The text columns are named after the languages, at the top level or inside of a column `translation`.
    Null becomes "", as does all text of the language "". A line feed becomes a space: a sentence is one line.
    """
    with _open_table(path) as table:
        columns = _find_columns(path, table, languages)
        group = 0
        while group < table.num_row_groups and first >= table.metadata.row_group(group).num_rows:
            first -= table.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, table.num_row_groups))
        block: list[tuple[bytes, bytes]] = []
        unpacked = 0
        for batch in table.iter_batches(batch_size=_ROWS, row_groups=groups, columns=list(columns.values())):
            texts = [_read_texts(batch, columns.get(language)) for language in languages]
            block += list(zip(*texts, strict=True))[first:]
            first = max(0, first - batch.num_rows)
            unpacked = unpacked + batch.nbytes if block else 0
            _check_block(path, unpacked)
            while len(block) >= size:
                yield block[:size]
                block, unpacked = block[size:], 0
        if block:
            yield block


@contextlib.contextmanager
def _open_table(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is no complete parquet file ({first_line(error)}); copy or write it again"
        ) from error


def _find_columns(path: Path, table: Any, languages: tuple[str, str]) -> dict[str, str]:
    import pyarrow

    fields, prefix = table.schema_arrow, ""
    if "translation" in fields.names and pyarrow.types.is_struct(fields.field("translation").type):
        fields, prefix = list(fields.field("translation").type), "translation."
    kinds = ("string", "large_string", "string_view")
    check_languages(str(path), languages, [field.name for field in fields if str(field.type) in kinds])
    return {language: prefix + language for language in languages if language}


def _read_texts(batch: Any, column: str | None) -> list[bytes]:
    import pyarrow

    if column is None:
        return [b""] * batch.num_rows
    outer, _, inner = column.rpartition(".")
    texts = batch.column(outer).field(inner) if outer else batch.column(inner)
    return [(text or b"").replace(b"\n", b" ") for text in texts.cast(pyarrow.large_binary()).to_pylist()]


# Suffixes of compressed files; "" for files that are not compressed.
PACKINGS = ("", ".gz", ".zst")
# The names of the compressions for pyarrow and in messages.
_PACKED_BY = {".gz": ("gzip", "gzip"), ".zst": ("zstd", "Zstandard")}
# Bytes that are skipped at a time.
_SKIPPED = 1 << 20


def find_packing(path: Path) -> str:
    """Return the suffix of a compressed file, such as ".gz"; "" if the file is not compressed."""
    return path.suffix if path.suffix in _PACKED_BY else ""


def name_unpacked(path: Path) -> str:
    return path.name.removesuffix(find_packing(path))


@contextlib.contextmanager
def open_unpacked(path: Path, *, start: int = 0) -> Iterator[io.BufferedReader]:
    """Open a file, which may be compressed, for reading its decompressed bytes from offset `start` on."""
    packing = find_packing(path)
    try:
        with contextlib.ExitStack() as stack:
            if packing:
                import pyarrow

                unpacked = pyarrow.input_stream(str(path), compression=_PACKED_BY[packing][0])
                file = stack.enter_context(io.BufferedReader(unpacked, 1 << 18))
                while start and (skipped := len(file.read(min(start, _SKIPPED)))):
                    start -= skipped
            else:
                file = stack.enter_context(path.open("rb"))
                file.seek(start)
            yield file
    except OSError as error:
        if error.errno is not None:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        name = _PACKED_BY[packing][1]
        raise UserError(
            f"{path} is not a complete {name} file ({error}); compress it again or unpack it"
        ) from None


_BOM = b"\xef\xbb\xbf"
# Suffixes of tables, which have both sides of a pair in one row.
TABLES = ("tsv", "jsonl", "parquet")
# Lines per block, the unit of reading.
BLOCK = 16384
# Maximum bytes of a line, and of a block of lines or rows: a compressed megabyte may unpack to gigabytes.
_LONGEST_LINE, _LARGEST_BLOCK = 1 << 24, 1 << 28
# Rows of a table that are unpacked at a time.
_ROWS = 64
# Part of the cache key: raise it when the facts of a scan change.
_FORMAT = 3
# The scan of a file is cached only if the file is older than this: a newer file may change again within one
# tick of the file system's clock, which would go unnoticed.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class Scan:
    """The result of scanning a file: digest of its text, first byte (or row) of each block, and counts."""

    lines: int
    digest: str
    starts: tuple[int, ...]
    crlf_lines: int
    bom: bool
    # Whether each line of a .tsv file has a third column, the weight of the pair.
    weighted: bool = False


def find_files(folder: Path, split: str, languages: tuple[str, str]) -> tuple[Path, ...]:
    """Return the files of a split: (source, target), (table,) or, for a language model, (target,).

    Raises UserError if files are missing or ambiguous.
    """
    _require(folder)
    wanted = [language for language in languages if language]
    present = {suffix: find_file(folder, f"{split}.{suffix}") for suffix in (*wanted, *TABLES)}
    matches = [path for path in present.values() if path]
    tables = [path for path in matches if find_table(path)]
    if not languages[0] and tables == [present["tsv"]]:
        matches.remove(tables.pop())  # a language model reads the file of targets instead
        if not matches:
            raise UserError(_cut_second_column(present["tsv"], folder / f"{split}.{languages[1]}"))
    if tables and len(matches) > 1:
        other = next(path for path in matches if path != tables[0])
        raise UserError(f"{folder} has both {tables[0].name} and {other.name}; keep one of them")
    if tables:
        return (tables[0],)
    if missing := [f"{split}.{language}" for language in wanted if not present[language]]:
        others = f", or {split}.tsv with two columns" if languages[0] else ""
        raise UserError(
            f"{folder} has no {missing[0]} (or {missing[0]}.gz or .zst{others}); "
            f"{_present(folder, missing[0])}. {_describe_languages(languages)}"
        )
    return tuple(matches)


def _cut_second_column(table: Path | None, file: Path) -> str:
    assert table is not None
    unpack = {"": "cat", ".gz": "zcat", ".zst": "zstdcat"}[find_packing(table)]
    return (
        f"{table} has two columns, but data.source_language is empty: copy the column to learn into a file "
        f"of its own, as with `{unpack} {table} | cut -f2 > {file}`"
    )


def find_table(path: Path) -> str:
    """Return the kind of table that the name of a file indicates, one of TABLES; "" for a plain text file."""
    ending = name_unpacked(path).rpartition(".")[2]
    return ending if ending in TABLES else ""


def has_files(folder: Path, split: str, languages: tuple[str, str]) -> bool:
    _require(folder)
    return any(find_file(folder, f"{split}.{suffix}") for suffix in (*filter(None, languages), *TABLES))


def _describe_languages(languages: tuple[str, str]) -> str:
    if languages[0]:
        arrow = " -> ".join(languages)
        return f"The languages are {arrow} (--config.data.source_language, target_language)"
    language = f"{languages[1]} (--config.data.target_language)"
    return f"The language is {language}, and there is no source language"


def _require(folder: Path) -> None:
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        # The absolute path: a run may have a path relative to the folder in which it was trained.
        remedy = "set --config.data.text_dir, or start the command where the run was trained"
        raise UserError(f"the parallel_text folder {folder.absolute()} {problem}; {remedy}")


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file of this name, plain or compressed, or None; raise UserError if there are several."""
    matches = [path for packing in PACKINGS if (path := folder / f"{name}{packing}").is_file()]
    if len(matches) > 1:
        raise UserError(f"{folder} has both {matches[0].name} and {matches[1].name}; keep one of them")
    return matches[0] if matches else None


def _present(folder: Path, wanted: str) -> str:
    """Describe the content of a folder: files with names similar to `wanted`, else the first ten files."""
    names = (path.name for path in folder.iterdir() if path.is_file())
    present = sorted(name for name in names if not name.startswith("."))
    near = difflib.get_close_matches(wanted, present, n=3) or present[:10]
    return f"it has {', '.join(near)}" if near else "it is empty"


def read_lines(path: Path) -> Iterator[bytes]:
    r"""Yield the lines of a file, without the final b"\n" or b"\r\n" and without a UTF-8 BOM at the start."""
    for number, text in enumerate(_find_blocks(path)):
        yield from _split(text, first=number == 0)


def read_blocks(path: Path, starts: Sequence[int], *, number: int = 0) -> Iterator[list[bytes]]:
    """Yield lines (see `read_lines`) in blocks, from block `number` on; `starts` come from a `Scan`."""
    with open_unpacked(path, start=starts[number]) as file:
        for index in range(number, len(starts)):
            size = starts[index + 1] - starts[index] if index + 1 < len(starts) else -1
            yield _split(file.read(size), first=index == 0)


def _split(text: bytes, *, first: bool) -> list[bytes]:
    lines = (text.removeprefix(_BOM) if first else text).removesuffix(b"\n").split(b"\n")
    return [line.removesuffix(b"\r") for line in lines] if b"\r" in text else lines


def _find_blocks(path: Path) -> Iterator[bytes]:
    with open_unpacked(path) as file:
        check_encoding(file.peek(BEGINNING), str(path))
        lines = _read_lines(file, path)
        while block := list(itertools.islice(lines, BLOCK)):
            yield b"".join(block)


def _read_lines(file: io.BufferedReader, path: Path) -> Iterator[bytes]:
    number = unpacked = 0
    while line := file.readline(_LONGEST_LINE):  # a binary file's lines end at b"\n" only
        unpacked = len(line) + (unpacked if number % BLOCK else 0)
        number += 1
        if len(line) == _LONGEST_LINE:
            raise UserError(f"{path} line {number} has 16 MB or more; a line is a sentence, or a few")
        _check_block(path, unpacked)
        yield line


def _check_block(path: Path, size: int) -> None:
    if size > _LARGEST_BLOCK:
        raise UserError(f"{path} has 256 MB or more in {BLOCK} lines; a line is a sentence, or a few")


def scan(path: Path, *, columns: int = 1) -> Scan:
    if find_table(path) == "parquet":
        with _open_table(path) as table:
            rows = table.metadata.num_rows
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
    if lines and find_table(path) == "jsonl" and not block[-1].strip():  # as an editor leaves it
        lines -= 1
    return Scan(lines, content.hexdigest(), tuple(starts), crlf_lines, bom, weighted)


def _check_columns(path: Path, before: int, block: list[bytes], wanted: int) -> None:
    counts = [line.count(b"\t") + 1 for line in block]
    if counts.count(wanted) == len(block):
        return
    row, columns = next((row, count) for row, count in enumerate(counts) if count != wanted)
    expected = "3, as the first one: source, tab, target, tab, weight"
    if wanted == 2:
        expected = "2: source, one tab, target; or all lines have a third one, the weight of the pair"
    raise UserError(f"{path} line {before + row + 1} has {columns} columns; a .tsv line has {expected}")


def load_or_scan(path: Path, *, columns: int, folder: Path) -> Scan:
    """Run `scan`, or load its cached result if the path and the `read_stamp` of the file are unchanged."""
    before = read_stamp(path)
    cached = folder / digest([_FORMAT, columns, str(path.resolve()), before])
    if metadata := read_artifact(cached):
        return Scan(**(metadata[0] | {"starts": tuple(metadata[0]["starts"])}))
    started = time.time_ns()
    result = scan(path, columns=columns)
    if read_stamp(path) == before and started - path.stat().st_mtime_ns > _SETTLED_NS:
        artifact(cached, lambda folder: dataclasses.asdict(result))
    return result


def read_stamp(path: Path) -> tuple[int, ...]:
    """Return size, mtime and ctime in nanoseconds, and inode; at least one changes whenever the file does.

    The ctime is included because `cp -p` restores an old mtime.
    """
    status = path.stat()
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
