"""Sentence pairs with random access: a split of one data set as bytes, or the pairs of several data sets."""

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
    """A sentence and its translation; for a language model, the source is ""."""

    source: str
    target: str


class Part(NamedTuple):
    """One data set of a mixture: name, number of pairs, and how often each pair is seen in an epoch."""

    name: str
    size: int
    weight: float


class WordLinks(NamedTuple):
    """Word alignments of a split: row i has points[offsets[i]:offsets[i + 1]].

    points: (source, target) word positions, int32 [K, 2]. identity: digest that changes with the alignments.
    """

    points: np.ndarray
    offsets: np.ndarray
    identity: str


class Side(NamedTuple):
    """Sentences of one language: `tokens[offsets[i]:offsets[i] + lengths[i]]` are the ids of sentence i."""

    tokens: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray

    def take(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated tokens of the sentences `examples`, and the length of each sentence."""
        lengths = self.lengths[examples]
        starts = self.offsets[examples] - (np.cumsum(lengths) - lengths)
        return self.tokens[np.arange(lengths.sum()) + np.repeat(starts, lengths)], lengths


class Rows(Protocol):
    """Rows of a split as pairs of bytes, with random access."""

    def __len__(self) -> int: ...

    def read(self, indices: Iterable[int]) -> list[tuple[bytes, bytes]]:
        """Return (source, target) of each row of `indices`; without a source language, sources are b""."""


class RecordRows:
    """The rows of a TFDS data source, whose records are `{language: bytes}`."""

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
    """Raise UserError unless data set `name` has text in both languages; the source language may be ""."""
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

    identity: changes whenever the text does. sides, unit: name the location of a row in messages, such as
    ("train.de", "train.en") and "line". metadata: is copied into the report. languages: ("", "en") for a
    language model, which has no source. tags: precede each source that is not blank, such as (">>fr<<",).
    target_tag: precedes each target, but only when it is tokenized. weights: of the rows in the loss,
    float32; None: all are 1. documents: document number of each row; None: unknown, or not needed.
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
        """Whether rows have a source; without one, they are only target sentences."""
        return bool(self.languages[0])

    def read(self, indices: Iterable[int]) -> list[tuple[bytes, bytes]]:
        return self.rows.read(indices)

    def read_blocks(self, size: int) -> Iterator[list[tuple[bytes, bytes]]]:
        for start in range(0, len(self), size):
            yield self.read(range(start, min(start + size, len(self))))

    def where(self, row: int, side: int) -> str:
        """Return the location of one side of a row, such as `train.de line 7`."""
        return f"{self.sides[side]} {self.unit} {row + 1}"

    def make_example(self, row: int, side: int, pair: tuple[bytes, bytes]) -> dict[str, str]:
        """Describe a row for a report: the location of one side, and the first 80 characters of each text."""
        texts = [text.decode("utf-8", errors="replace") for text in pair]
        short = [text if len(text) <= 80 else text[:79] + "…" for text in texts]
        source = {"source": short[0]} if self.has_source else {}
        return {"where": self.where(row, side), **source, "target": short[1]}


class RowSet(NamedTuple):
    """A data set of a mixture: its split, the rows to read (None: all), and hashes of all N rows, [N, 2]."""

    split: RawSplit
    rows: np.ndarray | None
    hashes: np.ndarray
    weight: float


class Pairs:
    """Sentence pairs of one split, with `len(pairs)`, `pairs[i]` and iteration; text is read on access.

    fingerprint: hex digest of all that can change the text: data sets, versions, split, languages, cleaning
    rules, tags. parts: the data sets of a mixture, concatenated in order. languages: the source and target
    language of each part. tags: all tags that precede sources. target_tags: the tag that precedes the targets
    of each part when they are tokenized. has_source: False for a language model, whose pairs have only
    targets. report: for each part, the numbers of pairs read and kept, and the problems. columns: additional
    properties of pairs (weights, alignments), by name. kept: the rows of each part; None: all. context: the
    number of lines that a model reads before each source, and their maximum length; None: no lines.
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
        """Return a description of each data set's files for messages, by the identity of the data set."""
        names = {split.identity: (*split.sides, split.metadata.get("folder", "")) for split in self._splits}
        return {text: f"{source}, {target} in {folder}" for text, (source, target, folder) in names.items()}

    def read_hashes(self) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
        """Yield, for each data set, its tags and the hashes of its N pairs, uint64 [N, 2]."""
        for split, rows, hashes, _ in self._sets:
            yield split.tags, hashes if rows is None else hashes[rows]

    def select(self, numbers: np.ndarray) -> "Pairs":
        """Return the pairs with these ascending numbers, from 0 over all parts; numbers may repeat."""
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
        """Return, for each pair number, the index of its data set and its row in that data set."""
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
        """The document of each pair, as (index of the data set, document number); None if unknown."""
        numbers: list[Any] = [split.documents for split in self._splits]
        if any(ids is None for ids in numbers):
            return None
        places = zip(*map(np.ndarray.tolist, self.locate(np.arange(len(self)))), strict=True)
        return [(part, int(numbers[part][row])) for part, row in places]

    def with_lines_before(self) -> Iterator[tuple[Pair, tuple[Pair, ...]]]:
        """Yield all pairs in order, each with the preceding pairs that are its context, the nearest last.

        Context pairs have no tags, and include rows that cleaning drops. Each row is read once.
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
    """Return up to `size` pairs that precede a row in its document.

    A document also ends at a row with a blank side or invalid UTF-8.
    """
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
