"""Sentence pairs at random access: what every data set becomes, and the concatenation of several.

Owns `Pair`, `Part`, `RawSplit` (one split of one set, as bytes) and `Pairs` (what the floors above hold). Row
1 of the data path. Knows nothing of files, of how a set is prepared, or of tokens.
"""

import bisect
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.errors import UserError

# Pairs that are read together when iterating: one call into ArrayRecord instead of many.
_CHUNK = 1024


class Pair(NamedTuple):
    """A sentence and its translation; or the target alone, with the source "", for a language model."""

    source: str
    target: str


class Part(NamedTuple):
    """One set of a mixture: its name, its number of pairs, how often each is seen in an epoch."""

    name: str
    size: int
    weight: float


@dataclass(frozen=True)
class RawSplit:
    """One split of one set as it lies on disk, before any pair is judged.

    `rows` is a TFDS data source of `{language: bytes}`; `identity` changes whenever the text does; `sides`
    and `unit` say where a row stands, as ("train.de", "train.en") and "line"; `facts` go into the report as
    they are. `languages` are ("", "en") where there is no source.
    """

    name: str
    identity: str
    rows: Any
    languages: tuple[str, str]
    sides: tuple[str, str]
    unit: str
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_source(self) -> bool:
        """Whether rows are pairs, and not target sentences alone."""
        return bool(self.languages[0])

    def read(self, indices: Iterable[int]) -> list[tuple[bytes, bytes]]:
        """The (source, target) bytes of some rows, in the order of `indices`."""
        source, target = self.languages
        rows = self.rows.__getitems__(list(indices))
        return [(row[source] if self.has_source else b"", row[target]) for row in rows]

    def where(self, row: int, side: int) -> str:
        """Where one side of a row stands: `train.de line 7`."""
        return f"{self.sides[side]} {self.unit} {row + 1}"


class Pairs:
    """Sentence pairs of one split: `len(pairs)`, `pairs[i]`, and iteration; text is read only when asked for.

    fingerprint: hex digest that changes whenever the text could: sets, versions, split, languages, cleaning
    rules. parts: the mixed sets, concatenated in order. has_source: False for a language model, whose pairs
    are target sentences alone. report: JSON values: for each part how many pairs were read and kept, and what
    was found wrong and where.
    """

    def __init__(
        self,
        splits: Sequence[RawSplit],
        kept: Sequence[np.ndarray | None],
        *,
        weights: Sequence[float],
        fingerprint: str,
        report: dict[str, Any],
    ) -> None:
        """Concatenates `splits`; `kept[k]` holds the rows of split k that count (None: all of them)."""
        self._splits = tuple(splits)
        self._kept = tuple(kept)
        sizes = [len(split) if rows is None else len(rows) for split, rows in zip(splits, kept, strict=True)]
        self._ends = list(itertools.accumulate(sizes))
        self.parts = tuple(
            Part(*facts) for facts in zip((s.name for s in splits), sizes, weights, strict=True)
        )
        self.has_source = all(split.has_source for split in splits)
        self.fingerprint = fingerprint
        self.report = report

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Pair:
        """The pair at `index`, counted over all parts; negative indices count from the end."""
        position = operator.index(index)
        if position < 0:
            position += len(self)
        if not 0 <= position < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        part = bisect.bisect_right(self._ends, position)
        start = self._ends[part - 1] if part else 0
        return self._read(part, range(position - start, position - start + 1))[0]

    def __iter__(self) -> Iterator[Pair]:
        for part, facts in enumerate(self.parts):
            for start in range(0, facts.size, _CHUNK):
                yield from self._read(part, range(start, min(start + _CHUNK, facts.size)))

    def _read(self, part: int, positions: range) -> list[Pair]:
        split, kept = self._splits[part], self._kept[part]
        rows: list[int] = list(positions) if kept is None else kept[positions.start : positions.stop].tolist()
        return [
            Pair(*(_decode(text, split, row, side) for side, text in enumerate(sides)))
            for row, sides in zip(rows, split.read(rows), strict=True)
        ]


def _decode(text: bytes, split: RawSplit, row: int, side: int) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{split.where(row, side)} is not UTF-8 ({error.reason}); convert the text to UTF-8"
        ) from None
