"""Which sentences are searched together, in arrays of a few recurring shapes.

Each new shape costs a compilation. Owns the ladder of sizes; knows lengths only.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Sizes of arrays: few enough that shapes recur, close enough that at most a third is padding.
_LADDER = tuple(sorted({1, *(base << power for base in (2, 3) for power in range(30))}))


@dataclass(frozen=True)
class SearchBatch:
    """Sentences, by their index, that are searched together in arrays of a ladder's shape."""

    indices: tuple[int, ...]
    rows: int
    source_length: int


def round_up(size: int) -> int:
    """The least number of the ladder 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ... that is no less: 13 gives 16."""
    return _LADDER[bisect.bisect_left(_LADDER, size)]


def round_down(size: int) -> int:
    """The largest number of the ladder that is no more: 13 gives 12."""
    return _LADDER[bisect.bisect_right(_LADDER, size) - 1]


def plan_batches(
    lengths: Sequence[int], *, longest: int, rows_of: Callable[[int], int], shortest: int = 8
) -> list[SearchBatch]:
    """Lays sentences of the given lengths, the longest first, into batches of few different shapes.

    A batch is as long as its longest sentence rounded up to the ladder from `shortest` to `longest`, and has
    room for `rows_of(length)` sentences, whatever rung they are on. So only the last one may have fewer; its
    rows are rounded up to the ladder, since rows without a sentence would cost as much as the others.

    With 2 rows, lengths [3, 30, 5] give batches (1, 2) of 2x32 and (0,) of 1x8.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[SearchBatch] = []
    start = 0
    while start < len(order):
        source_length = min(max(round_up(lengths[order[start]]), shortest), longest)
        rows = rows_of(source_length)
        indices = tuple(order[start : start + rows])
        rows = min(round_up(len(indices)), rows)
        batches.append(SearchBatch(indices, rows, source_length))
        start += len(indices)
    return batches


def deal_rows(rows: int, parts: int) -> np.ndarray:
    """Which rows each of some equal parts gets, one part after another, as cards are dealt.

    Neighbours are of like lengths, so all parts take equally long: 6 rows in 2 parts are [0 2 4 1 3 5].
    """
    return np.arange(rows).reshape(-1, parts).T.ravel()
