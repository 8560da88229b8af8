"""`parallel_text`: all lines of the user's text files as the rows of a split, read in place in blocks."""

import array
import itertools
import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.atomic_folder import artifact, digest, map_arrays, save_arrays
from flaxformer_mt.config import CleanConfig, DataConfig
from flaxformer_mt.config.field_values import LARGEST_WEIGHT, SMALLEST_WEIGHT
from flaxformer_mt.corpus import text_files
from flaxformer_mt.corpus.pair_checks import EXAMPLES
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.corpus.text_files import (
    Scan,
    find_file,
    find_packing,
    load_or_scan,
    read_lines,
    read_parquet_pairs,
)
from flaxformer_mt.corpus.tfds_cache import cache_dir
from flaxformer_mt.errors import UserError


def read_json_pairs(
    path: Path, block: Sequence[bytes], languages: tuple[str, str], *, first_line: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the (source, target) of each JSON line of a block.

    A line feed becomes a space. Null becomes "", as does all text of the language "". Raises UserError for an
    invalid line.
    """
    for number, line in enumerate(block, first_line):
        try:
            values = json.loads(line)
            values = values.get("translation", values)
            values = dict.fromkeys(languages) if values is None else values
            source, target = (values[language] if language else "" for language in languages)
            yield _encode(source), _encode(target)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            wanted = ", ".join(f'"{language}": "..."' for language in languages if language)
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{path} line {number} is no JSON object of texts such as {{{wanted}}}: {reason}"
            ) from None


def _encode(text: object) -> bytes:
    text = "" if text is None else text
    if not isinstance(text, str):
        raise TypeError(f"a text is {type(text).__name__}")
    return text.replace("\n", " ").encode("utf-8", "surrogatepass")


def load_weights(
    folder: Path, split: str, files: tuple[Path, ...], scan: Scan, *, lines: int, cache: Path
) -> tuple[np.ndarray, str] | None:
    """Return the pair weights of a split, float32, and their digest; None if the split has no weights."""
    path = find_file(folder, f"{split}.weights")
    if path is not None and scan.weighted:
        raise UserError(f"{files[0]} has a column of weights, but there is {path} too; remove one of them")
    if path is not None:
        scan = load_or_scan(path, columns=1, folder=cache / "scans")
    elif scan.weighted:
        path = files[0]
    else:
        return None
    if scan.lines != lines:
        raise UserError(f"{path} has {scan.lines} lines for {lines} pairs; give one weight for each pair")
    arrays = artifact(
        cache / "weights" / scan.digest,
        lambda folder: save_arrays(folder, {"weights": read_weights(path)}),
        map_arrays,
    )
    return arrays["weights"], scan.digest


def read_weights(path: Path) -> np.ndarray:
    weights = array.array("f")
    for number, line in enumerate(read_lines(path), start=1):
        text = line.rsplit(b"\t", 1)[-1].strip()
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not (weight == 0 or SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT):
            shown = text.decode("utf-8", errors="replace")
            raise UserError(
                f"{path} line {number} has the weight {shown[:40]!r}; a weight is 0, which leaves the pair "
                f"out, or a number from {SMALLEST_WEIGHT:.6f} to {LARGEST_WEIGHT:,.0f}"
            )
        weights.append(weight)
    return np.array(weights, np.float32)


def load_documents(folder: Path, split: str, *, lines: int) -> np.ndarray:
    """Return the document number of each line of a split; a new document starts where the id changes."""
    path = find_file(folder, f"{split}.documents")
    if path is None:
        return np.zeros(lines, np.int32)
    numbers, number, last = array.array("i"), -1, None
    for identity in read_lines(path):
        number += identity != last
        numbers.append(number)
        last = identity
    if len(numbers) != lines:
        raise UserError(
            f"{path} has {len(numbers)} lines for {lines} pairs; give the id of the document of each pair"
        )
    return np.array(numbers, np.int32)


def drop_weightless(
    split: RawSplit, rows: np.ndarray | None, report: dict[str, Any]
) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Drop pairs of weight 0 from `rows`, the rows kept by cleaning (None: all); report the dropped pairs."""
    if split.weights is None:
        return rows, report
    numbers = np.arange(len(split)) if rows is None else np.asarray(rows)
    counts = split.weights[numbers] > 0
    if counts.all():
        return rows, report
    dropped = numbers[~counts]
    first = dropped[:EXAMPLES].tolist()
    examples = [split.make_example(row, 0, pair) for row, pair in zip(first, split.read(first), strict=True)]
    problem = {"count": len(dropped), "action": "drop", "examples": examples}
    problems = report["problems"] | {"weight_0": problem}
    return numbers[counts], report | {"problems": problems, "pairs": int(counts.sum())}


class TextRows:
    """The rows of one table, of two files with one language each, or of one file of targets.

    Caches the last block of lines, so that reading rows in ascending order reads each block once. In a
    compressed file, reading ahead decompresses all blocks in between. Reading is thread-safe.
    """

    def __init__(
        self,
        files: tuple[Path, ...],
        stamps: tuple[tuple[int, ...], ...],
        scans: tuple[Scan, ...],
        lines: int,
        languages: tuple[str, str],
    ) -> None:
        self._files, self._stamps, self._scans, self._lines = files, stamps, scans, lines
        self._languages, self._table = languages, text_files.find_table(files[0])
        self._lock = threading.Lock()
        self._packed = any(map(find_packing, files))
        self._number, self._block = -1, list[tuple[bytes, bytes]]()
        self._following: Iterator[list[tuple[bytes, bytes]]] = iter(())

    def __len__(self) -> int:
        return self._lines

    def read(self, indices: Iterable[int]) -> list[tuple[bytes, bytes]]:
        size, pairs = text_files.BLOCK, list[tuple[bytes, bytes]]()
        with self._lock:
            for number, rows in itertools.groupby(indices, lambda index: index // size):
                block = self._open(number)
                pairs += [block[row % size] for row in rows]
        return pairs

    def _open(self, number: int) -> list[tuple[bytes, bytes]]:
        if number != self._number:
            last, self._number = self._number, -1  # stays so if an error is raised
            # Going back in a compressed file, or reopening it further ahead, decompresses it from its start.
            reads_on = 0 <= last < number and (self._packed or number == last + 1)
            if not reads_on:
                self._following, last = self._read_from(number), number - 1
            self._block = next(itertools.islice(self._following, number - last - 1, None), [])
            for path, stamp in zip(self._files, self._stamps, strict=True):
                if not path.is_file() or text_files.read_stamp(path) != stamp:
                    raise UserError(f"{path} changed while it was being read; run the command again")
            self._number = number
        return self._block

    def _read_from(self, number: int) -> Iterator[list[tuple[bytes, bytes]]]:
        if self._table == "parquet":
            first, size = self._scans[0].starts[number], text_files.BLOCK
            yield from read_parquet_pairs(self._files[0], self._languages, first=first, size=size)
            return
        columns = [
            text_files.read_blocks(path, scan.starts, number=number)
            for path, scan in zip(self._files, self._scans, strict=True)
        ]
        for blocks in zip(*columns, strict=False):  # the line counts were compared
            if self._table == "jsonl":
                line = number * text_files.BLOCK + 1
                rows = blocks[0][: self._lines - line + 1]  # without a blank last line
                yield list(read_json_pairs(self._files[0], rows, self._languages, first_line=line))
            elif len(blocks) == 2:
                yield list(zip(*blocks, strict=False))
            elif self._languages[0]:
                yield [tuple(line.split(b"\t", 2)[:2]) for line in blocks[0]]
            else:
                yield [(b"", text) for text in blocks[0]]
            number += 1


def open_parallel_text(
    folder: Path, split: str, languages: tuple[str, str], config: DataConfig, *, name: str, is_train: bool
) -> RawSplit:
    """Open the files `folder/split.*` as a split; scan and check the files unless the cache has their scan.

    Weights are only read for the train split, since other splits never drop pairs.
    """
    cache = cache_dir(config)
    files = text_files.find_files(folder, split, languages)
    stamps = tuple(text_files.read_stamp(path) for path in files)
    present = tuple(filter(None, languages))
    table = text_files.find_table(files[0])
    columns = 2 if table == "tsv" else 1
    scans = tuple(text_files.load_or_scan(path, columns=columns, folder=cache / "scans") for path in files)
    lines = _count_lines(files, scans, config.clean, may_drop=is_train)
    weights = load_weights(folder, split, files, scans[0], lines=lines, cache=cache) if is_train else None
    rows = TextRows(files, stamps, scans, lines, languages)
    named = [table] if table in ("jsonl", "parquet") else []  # their columns have names
    identity = digest([present, columns, lines, [scan.digest for scan in scans], *named])
    return RawSplit(
        name=name,
        identity=identity if weights is None else digest([identity, weights[1]]),
        rows=rows,
        languages=languages,
        sides=(files[0].name, files[-1].name),
        unit="line",
        metadata={
            "folder": str(folder),
            "files": [
                {"file": path.name, "lines": scan.lines, "crlf_lines": scan.crlf_lines, "bom": scan.bom}
                for path, scan in zip(files, scans, strict=True)
            ],
            "surplus_lines": max(scan.lines for scan in scans) - lines,
            **_read_tag(files[0]),
        },
        weights=None if weights is None else weights[0],
        documents=load_documents(folder, split, lines=lines) if config.context or not is_train else None,
    )


def _read_tag(file: Path) -> dict[str, str]:
    """Return the tag of back-translated sources from the report of `backtranslate` next to a train file."""
    try:
        report = json.loads((file.parent / "report.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    made = file.name.startswith("train.") and isinstance(report, dict) and "dropped" in report
    tag = report.get("tag") if made else None
    return {"tag": tag} if isinstance(tag, str) and tag else {}


def _count_lines(
    files: tuple[Path, ...], scans: tuple[Scan, ...], clean: CleanConfig, *, may_drop: bool
) -> int:
    counts = [scan.lines for scan in scans]
    for path, count in zip(files, counts, strict=True):
        if count == 0:
            raise UserError(f"{path} is empty; it should hold one sentence per line")
    if len(set(counts)) > 1 and not (may_drop and clean.unequal_lines == "drop"):
        remedy = "correct the files; validation and test data is never dropped"
        if may_drop:
            remedy = "correct them, or drop the surplus lines with --config.data.clean.unequal_lines=drop"
        raise UserError(f"{files[0]} has {counts[0]} lines, but {files[1]} has {counts[1]}; {remedy}")
    return min(counts)
