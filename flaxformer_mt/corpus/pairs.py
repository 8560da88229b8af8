"""Sentence pairs with random access: one split of one data set as bytes, and the pairs of several sets."""

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from flaxformer_mt.corpus.documents import Context
from flaxformer_mt.errors import UserError, describe_error
from flaxformer_mt.unicode_text import is_blank

# Pairs read at a time when iterating.
_CHUNK = 16384


class Pair(NamedTuple):
    """A sentence and its translation; for a language model the target alone, with the source ""."""

    source: str
    target: str


class Part(NamedTuple):
    """One data set of a mixture: name, number of pairs, and how often each pair is seen in an epoch."""

    name: str
    size: int
    weight: float


class WordLinks(NamedTuple):
    """Word alignments: row i has points[offsets[i]:offsets[i + 1]], (source, target) positions, int32."""

    points: np.ndarray
    offsets: np.ndarray
    identity: str


class Side(NamedTuple):
    """Sentences of one language: `tokens[offsets[i]:offsets[i] + lengths[i]]` are the ids of sentence i."""

    tokens: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray

    def take(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of these sentences, one after the other, and how many each has."""
        lengths = self.lengths[examples]
        starts = self.offsets[examples] - (np.cumsum(lengths) - lengths)
        return self.tokens[np.arange(lengths.sum()) + np.repeat(starts, lengths)], lengths


class Rows(Protocol):
    """Pairs of bytes with random access."""

    def __len__(self) -> int: ...

    def read(self, indices: Iterable[int]) -> list[tuple[bytes, bytes]]:
        """(source, target) of rows, in that order; the source is b"" where there is none."""


class RecordRows:
    """The rows of a TFDS data source of `{language: bytes}`."""

    def __init__(self, records: Any, languages: tuple[str, str], *, name: str) -> None:
        self._records, self._languages, self._name = records, languages, name

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Iterable[int]) -> list[tuple[bytes, bytes]]:
        source, target = self._languages
        try:
            rows = self._records.__getitems__(list(indices))
            return [(row[source] if source else b"", row[target]) for row in rows]
        except (RuntimeError, ValueError, IndexError, KeyError) as error:  # what ArrayRecord and TFDS raise
            raise UserError(
                f"the prepared data set {self._name} is damaged ({describe_error(error)}); remove "
                "it from data.cache_dir (or TFDS_DATA_DIR): the next run prepares it again"
            ) from error


def check_languages(name: str, languages: tuple[str, str], present: Iterable[str]) -> None:
    """Raise UserError unless the data set `name` has text in both languages; "" needs none."""
    available = sorted(present)
    if missing := [language for language in languages if language and language not in available]:
        source = "--config.data.source_language and " if languages[0] else ""
        raise UserError(
            f"{name} has no language {' and no '.join(missing)}; it has {', '.join(available) or 'no text'}: "
            f"set {source}--config.data.target_language"
        )


@dataclass(frozen=True)
class RawSplit:
    """One split of one data set as stored on disk, before cleaning.

    `identity` changes whenever the text does; `sides` and `unit` name the location of a row, as ("train.de",
    "train.en") and "line"; `metadata` is copied into the report. `languages` are ("", "en") where there is no
    source. `tags`, such as (">>fr<<",), are put before each source that is not blank, and `target_tag` before
    each target, but only to tokenize it. `weights`: of the rows in the loss, float32; None: all count alike.
    `documents`: the number of the document of each row; None: rows are in no order, or it was not asked for.
    """

    name: str
    identity: str
    rows: Rows
    languages: tuple[str, str]
    sides: tuple[str, str]
    unit: str
    metadata: dict[str, Any] = field(default_factory=dict)
    weights: np.ndarray | None = None
    tags: tuple[str, ...] = ()
    target_tag: str = ""
    documents: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_source(self) -> bool:
        """False: rows are target sentences alone."""
        return bool(self.languages[0])

    def read(self, indices: Iterable[int]) -> list[tuple[bytes, bytes]]:
        return self.rows.read(indices)

    def read_blocks(self, size: int) -> Iterator[list[tuple[bytes, bytes]]]:
        for start in range(0, len(self), size):
            yield self.read(range(start, min(start + size, len(self))))

    def where(self, row: int, side: int) -> str:
        """Location of one side of a row: `train.de line 7`."""
        return f"{self.sides[side]} {self.unit} {row + 1}"

    def make_example(self, row: int, side: int, pair: tuple[bytes, bytes]) -> dict[str, str]:
        """A row for a report: the location of one side, and the beginnings of the texts that there are."""
        texts = [text.decode("utf-8", errors="replace") for text in pair]
        short = [text if len(text) <= 80 else text[:79] + "…" for text in texts]
        source = {"source": short[0]} if self.has_source else {}
        return {"where": self.where(row, side), **source, "target": short[1]}


class RowSet(NamedTuple):
    """A data set of a mixture: the rows to read (None: all), and the hashes of both sides of all [N, 2]."""

    split: RawSplit
    rows: np.ndarray | None
    hashes: np.ndarray
    weight: float


class Pairs:
    """Sentence pairs of one split, with `len(pairs)`, `pairs[i]` and iteration; text is read on access.

    fingerprint: hex digest that changes whenever the text could: sets, versions, split, languages, cleaning
    rules, tags. parts: the data sets of a mixture, concatenated in order. languages: the source and target
    language of each part. tags: all that sources begin with; target_tags: what tokenized targets of each part
    begin with. has_source: False for a language model, whose pairs are target sentences alone. report: for
    each part the pairs read and kept, and the problems. columns: what pairs have beside their text, by name.
    kept: the rows of each part; None: all. context: what is read before each pair; None: nothing.
    """

    def __init__(
        self,
        sets: Sequence[RowSet],
        *,
        fingerprint: str,
        report: dict[str, Any],
        columns: Mapping[str, Any] = MappingProxyType({}),
        context: Context | None = None,
    ) -> None:
        self._sets, self._splits = tuple(sets), tuple(entry.split for entry in sets)
        self.fingerprint, self.report, self.columns, self.context = fingerprint, report, columns, context
        self.kept = tuple(entry.rows for entry in sets)
        sizes = [len(split) if rows is None else len(rows) for split, rows, *_ in sets]
        self._ends = list(itertools.accumulate(sizes))
        self.parts = tuple(
            Part(entry.split.name, size, entry.weight) for entry, size in zip(sets, sizes, strict=True)
        )
        self.has_source = all(split.has_source for split in self._splits)
        self.languages = tuple(split.languages for split in self._splits)
        self.tags = tuple(dict.fromkeys(tag for split in self._splits for tag in split.tags))
        self.target_tags = tuple(split.target_tag for split in self._splits)

    def __len__(self) -> int:
        return self._ends[-1]

    def name_texts(self) -> dict[str, str]:
        """What changes whenever the text of a set does -> the files of the set, for messages."""
        names = {split.identity: (*split.sides, split.metadata.get("folder", "")) for split in self._splits}
        return {text: f"{source}, {target} in {folder}" for text, (source, target, folder) in names.items()}

    def read_hashes(self) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
        """Yield the hashes of the pairs of each data set, uint64 [N, 2], with its tags."""
        for split, rows, hashes, _ in self._sets:
            yield split.tags, hashes if rows is None else hashes[rows]

    def select(self, numbers: np.ndarray) -> "Pairs":
        """The pairs with these ascending numbers, counted over all parts; a number may occur repeatedly."""
        sets, start = [], 0
        for entry, end in zip(self._sets, self._ends, strict=True):
            rows = numbers[np.searchsorted(numbers, start) : np.searchsorted(numbers, end)] - start
            sets.append(entry._replace(rows=rows if entry.rows is None else entry.rows[rows]))
            start = end
        digest = hashlib.blake2b(self.fingerprint.encode(), digest_size=16)
        digest.update(numbers.astype(np.int64).tobytes())
        facts: dict[str, Any] = {"report": self.report, "columns": self.columns, "context": self.context}
        return Pairs(sets, fingerprint=digest.hexdigest(), **facts)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The index of the data set of each of these pairs, and its row there."""
        parts = np.searchsorted(self._ends, numbers, side="right")
        rows = np.empty(len(numbers), np.int64)
        for part in np.unique(parts):
            inside, kept = parts == part, self.kept[part]
            local = numbers[inside] - (self._ends[part - 1] if part else 0)
            rows[inside] = local if kept is None else kept[local]
        return parts, rows

    def __getitem__(self, index: int) -> Pair:
        position = range(len(self))[index]
        part = bisect.bisect_right(self._ends, position)
        local = position - (self._ends[part - 1] if part else 0)
        return self.read_range(part, range(local, local + 1))[0]

    def __iter__(self) -> Iterator[Pair]:
        for part, dataset in enumerate(self.parts):
            for start in range(0, dataset.size, _CHUNK):
                yield from self.read_range(part, range(start, min(start + _CHUNK, dataset.size)))

    @property
    def documents(self) -> list[tuple[int, int]] | None:
        """Of each pair, its data set and the number of its document there; None: they are not known."""
        numbers: list[Any] = [split.documents for split in self._splits]
        if any(ids is None for ids in numbers):
            return None
        places = zip(*map(np.ndarray.tolist, self.locate(np.arange(len(self)))), strict=True)
        return [(part, int(numbers[part][row])) for part, row in places]

    def with_lines_before(self) -> Iterator[tuple[Pair, tuple[Pair, ...]]]:
        """Yield all pairs in order, each with the pairs that are read before it, the nearest last.

        These are rows of the data set that cleaning may leave out; they have no tags. Each row is read once.
        """
        size = self.context.lines if self.context else 0
        for part, (split, dataset) in enumerate(zip(self._splits, self.parts, strict=True)):
            texts: dict[int, tuple[bytes, bytes]] = {}
            for start in range(0, dataset.size, _CHUNK):
                rows = self._rows(part, range(start, min(start + _CHUNK, dataset.size)))
                needed = sorted({row - n for row in rows for n in range(min(row, size) + 1)} - texts.keys())
                texts |= zip(needed, split.read(needed), strict=True)
                pairs = self._decode(split, rows, [texts[row] for row in rows])
                for pair, row in zip(pairs, rows, strict=True):
                    yield pair, _before(split, row, texts, size)
                texts = {row: text for row, text in texts.items() if row >= rows[-1] - size}

    def read_range(self, part: int, positions: range) -> list[Pair]:
        split, rows = self._splits[part], self._rows(part, positions)
        return self._decode(split, rows, split.read(rows))

    def _rows(self, part: int, positions: range) -> Sequence[int]:
        kept = self.kept[part]
        return positions if kept is None else kept[positions.start : positions.stop].tolist()

    def _decode(self, split: RawSplit, rows: Sequence[int], texts: list[tuple[bytes, bytes]]) -> list[Pair]:
        try:
            pairs = [Pair(source.decode(), target.decode()) for source, target in texts]
        except UnicodeDecodeError as error:
            row, pair = next(both for both in zip(rows, texts, strict=True) if error.object in both[1])
            where = split.where(row, pair.index(error.object))
            raise UserError(f"{where} is not UTF-8 ({error.reason}); convert the text to UTF-8") from None
        if not split.tags:
            return pairs
        tags = "".join(f"{tag} " for tag in split.tags)
        return [pair if is_blank(pair.source) else pair._replace(source=tags + pair.source) for pair in pairs]


def _before(
    split: RawSplit, row: int, texts: Mapping[int, tuple[bytes, bytes]], size: int
) -> tuple[Pair, ...]:
    """The pairs before a row in its document, which ends at a row with a side that is blank, or not UTF-8."""
    pairs: list[Pair] = []
    for number in range(row, max(-1, row - size - 1), -1):
        try:
            pair = Pair(*(text.decode() for text in texts[number]))
        except UnicodeDecodeError:
            break
        in_document = split.documents is None or split.documents[number] == split.documents[row]
        if not in_document or any(map(is_blank, pair)):
            break
        pairs.append(pair)
    return tuple(pairs[:0:-1])
