"""Files that pyarrow reads: text that is packed with Zstandard, and parquet tables of pairs.

The only importer of pyarrow, which TFDS needs too.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt.corpus.pairs import check_languages
from flaxformer_mt.errors import UserError


def open_zst(path: Path) -> io.BufferedReader:
    """Open a .zst file for reading its unpacked bytes, which cannot be sought.

    Raises:
      OSError: also later: the file cannot be read, or, without `errno`, is damaged or not complete.
    """
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), 1 << 18)


def count_parquet_rows(path: Path) -> int:
    """Return the number of rows of a table; raise UserError if it is damaged."""
    with _open_table(path) as table:
        return table.metadata.num_rows


def read_parquet_pairs(
    path: Path, languages: tuple[str, str], *, first: int, size: int
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the texts of both languages from row `first` on, in lists of `size`.

    They are columns of text with the names of the languages, as such or inside of a column `translation`. A
    text that is null is empty. A line feed becomes a space, since a sentence is one line.

    Args:
      languages: without a source, which is "", all sources are empty.

    Raises:
      UserError: the table is damaged, or lacks the text of a language.
    """
    with _open_table(path) as table:
        columns = _find_columns(path, table, languages)
        group = 0
        while group < table.num_row_groups and first >= table.metadata.row_group(group).num_rows:
            first -= table.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, table.num_row_groups))
        block: list[tuple[bytes, bytes]] = []
        for batch in table.iter_batches(batch_size=size, row_groups=groups, columns=list(columns.values())):
            texts = [_read_texts(batch, columns.get(language)) for language in languages]
            block += list(zip(*texts, strict=True))[first:]
            first = max(0, first - batch.num_rows)
            while len(block) >= size:
                yield block[:size]
                block = block[size:]
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
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is no complete parquet file ({reason}); copy or write it again") from error


def _find_columns(path: Path, table: Any, languages: tuple[str, str]) -> dict[str, str]:
    """Return the path of the column of each language."""
    import pyarrow

    fields, prefix = table.schema_arrow, ""
    if "translation" in fields.names and pyarrow.types.is_struct(fields.field("translation").type):
        fields, prefix = list(fields.field("translation").type), "translation."
    kinds = ("string", "large_string", "string_view")
    check_languages(str(path), languages, [one.name for one in fields if str(one.type) in kinds])
    return {language: prefix + language for language in languages if language}


def _read_texts(batch: Any, column: str | None) -> list[bytes]:
    import pyarrow

    if column is None:
        return [b""] * batch.num_rows
    outer, _, inner = column.rpartition(".")
    texts = batch.column(outer).field(inner) if outer else batch.column(inner)
    return [(text or b"").replace(b"\n", b" ") for text in texts.cast(pyarrow.large_binary()).to_pylist()]
