"""Sentence pairs with random access: one split of one data set as bytes, and the pairs of several sets."""

import bisect
import hashlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from flaxformer_mt.corpus.score_files import ScoreFile
from flaxformer_mt.errors import UserError, describe_error
from flaxformer_mt.unicode_text import is_blank, split_words

# Pairs read at a time when iterating.
_CHUNK = 16384
# Hashes read at a time.
_HASHES = 1 << 18


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
                "it from data.cache_dir (or tfds_data_dir): the next run prepares it again"
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


class Pairs:
    """Sentence pairs of one split, with `len(pairs)`, `pairs[i]` and iteration; text is read on access.

    fingerprint: hex digest that changes whenever the text could: sets, versions, split, languages, cleaning
    rules, tags. parts: the data sets of a mixture, concatenated in order. languages: the source and target
    language of each part. tags, target_tags: all tags that sources, and tokenized targets, begin with.
    has_source: False for a language model, whose pairs are target sentences alone. report: for each part the
    pairs read and kept, and the problems. weights: of the pairs in the loss, float32; None: all are 1.
    """

    def __init__(
        self,
        splits: Sequence[RawSplit],
        kept: Sequence[np.ndarray | None],
        *,
        weights: Sequence[float],
        fingerprint: str,
        report: dict[str, Any],
        hashes: Sequence[np.ndarray] = (),
        links: Sequence[WordLinks | None] = (),
        scores: Sequence[ScoreFile | None] = (),
    ) -> None:
        """Concatenate `splits`; of split k keep the rows `kept[k]` (None: all of them).

        hashes: of the sources and targets of all rows of each split, uint64 [N, 2]. links, scores: the word
        alignments and a teacher's scores of each split, None for a split without; (): there are none at all.
        """
        self._links, self.scores = tuple(links), tuple(scores)
        self._splits, self._hashes = tuple(splits), tuple(hashes)
        self._kept = tuple(kept)
        sizes = [len(split) if rows is None else len(rows) for split, rows in zip(splits, kept, strict=True)]
        self._ends = list(itertools.accumulate(sizes))
        self.parts = tuple(
            Part(*values) for values in zip((s.name for s in splits), sizes, weights, strict=True)
        )
        self.has_source = all(split.has_source for split in splits)
        self.languages = tuple(split.languages for split in splits)
        self.tags = tuple(dict.fromkeys(tag for split in splits for tag in split.tags))
        self.target_tags = tuple(dict.fromkeys(split.target_tag for split in splits if split.target_tag))
        self.fingerprint = fingerprint
        self.report = report
        self.weights = self._gather_weights() if any(s.weights is not None for s in splits) else None

    def _gather_weights(self) -> np.ndarray:
        weights = []
        for split, kept, part in zip(self._splits, self._kept, self.parts, strict=True):
            values = np.ones(len(split), np.float32) if split.weights is None else split.weights
            weights.append(values if kept is None else values[kept])
            assert len(weights[-1]) == part.size
        return np.concatenate(weights)

    def __len__(self) -> int:
        return self._ends[-1]

    def read_hashes(self) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
        """Yield the hashes of all pairs in blocks, uint64 [N, 2], with the tags of their data set."""
        for split, kept, hashes in zip(self._splits, self._kept, self._hashes, strict=True):
            for start in range(0, len(hashes if kept is None else kept), _HASHES):
                block = slice(start, start + _HASHES)
                yield split.tags, hashes[block] if kept is None else hashes[kept[block]]

    @property
    def links_identity(self) -> str:
        """Changes whenever the word alignments do; "" if there are none."""
        return ",".join(links.identity if links else "none" for links in self._links)

    def read_links(self) -> Iterator[np.ndarray]:
        """Yield the word alignment [K, 2] of each pair; no points where a set has none."""
        nothing = np.zeros((0, 2), np.int32)
        for split, kept, links in zip(
            self._splits, self._kept, self._links or [None] * len(self._kept), strict=True
        ):
            # Tags are words before those of the text.
            tag_words = len(split_words(" ".join(split.tags))), len(split_words(split.target_tag))
            shift = np.array(tag_words, np.int32)
            for row in range(len(split)) if kept is None else kept:
                if links is None:
                    yield nothing
                else:
                    yield links.points[links.offsets[row] : links.offsets[row + 1]] + shift

    def read_target_tags(self) -> Iterator[str]:
        """Yield what precedes each target when it is tokenized: a tag and a space, or ""."""
        for split, part in zip(self._splits, self.parts, strict=True):
            yield from itertools.repeat(f"{split.target_tag} " if split.target_tag else "", part.size)

    def select(self, numbers: np.ndarray) -> "Pairs":
        """The pairs with these ascending numbers, counted over all parts; a number may occur repeatedly."""
        kept, start = [], 0
        for rows, part in zip(self._kept, self.parts, strict=True):
            selected = numbers[np.searchsorted(numbers, start) : np.searchsorted(numbers, start + part.size)]
            kept.append(selected - start if rows is None else rows[selected - start])
            start += part.size
        digest = hashlib.blake2b(self.fingerprint.encode(), digest_size=16)
        digest.update(numbers.astype(np.int64).tobytes())
        return Pairs(
            self._splits,
            kept,
            weights=[part.weight for part in self.parts],
            fingerprint=digest.hexdigest(),
            report=self.report,
            hashes=self._hashes,
            links=self._links,
            scores=self.scores,
        )

    def find_scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each pair the index of its data set in `scores`, and its row there."""
        rows = [
            np.arange(part.size) if kept is None else np.asarray(kept)
            for kept, part in zip(self._kept, self.parts, strict=True)
        ]
        return np.repeat(np.arange(len(rows)), [part.size for part in self.parts]), np.concatenate(rows)

    def __getitem__(self, index: int) -> Pair:
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"pair index {index} is out of range: there are {len(self)} pairs")
        part = bisect.bisect_right(self._ends, position)
        start = self._ends[part - 1] if part else 0
        return self.read_range(part, range(position - start, position - start + 1))[0]

    def __iter__(self) -> Iterator[Pair]:
        for part, dataset in enumerate(self.parts):
            for start in range(0, dataset.size, _CHUNK):
                yield from self.read_range(part, range(start, min(start + _CHUNK, dataset.size)))

    def read_range(self, part: int, positions: range) -> list[Pair]:
        split, kept = self._splits[part], self._kept[part]
        rows: Sequence[int] = positions if kept is None else kept[positions.start : positions.stop].tolist()
        texts = split.read(rows)
        try:
            pairs = [Pair(source.decode(), target.decode()) for source, target in texts]
        except UnicodeDecodeError:
            raise UserError(_find_undecodable(texts, split, rows)) from None
        if not split.tags:
            return pairs
        tags = "".join(f"{tag} " for tag in split.tags)
        return [pair if is_blank(pair.source) else pair._replace(source=tags + pair.source) for pair in pairs]


def _find_undecodable(texts: list[tuple[bytes, bytes]], split: RawSplit, rows: Sequence[int]) -> str:
    for row, pair in zip(rows, texts, strict=True):
        for side, text in enumerate(pair):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                return f"{split.where(row, side)} is not UTF-8 ({error.reason}); convert the text to UTF-8"
    raise AssertionError("all texts are UTF-8")
