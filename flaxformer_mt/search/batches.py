"""Which sentences are searched together, in arrays of a few recurring shapes.

Each new shape costs a compilation. Owns the ladder of sizes; knows lengths only.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# A queue is at least and at most so many times what is searched at a time. The shorter it is, the more of its
# time has rows that are free since nobody waits; the longer, the later its results are there.
_FEWEST_FILLS, _MOST_FILLS = 2, 16

# A part of the rows that are searched at a time, as many as are filled again together.
_REFILL_SHARE = 8

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


@dataclass(frozen=True)
class Queue:
    """Sentences, by their index, that are searched one after the other, `rows` of them at a time.

    num_lines: the rows of arrays that hold all sentences; the last ones may be empty. With as many as `rows`,
      all sentences are searched at once.
    """

    indices: tuple[int, ...]
    num_lines: int
    rows: int
    # How many of the rows are filled again together, on each device.
    refill: int
    source_length: int


def plan_queues(
    lengths: Sequence[int], *, longest: int, rows_of: Callable[[int], int], parts: int = 1, shortest: int = 8
) -> list[Queue]:
    """Lays sentences of the given lengths, the longest first, into queues of few different shapes.

    A queue's sources are as long as its longest sentence, rounded up to the ladder from `shortest` to
    `longest`. It ends where sentences fit a lower rung, unless it would be a short queue. Each of `parts`
    devices takes sentences in turn and searches `rows_of(length)` at a time, so num_lines and rows are
    multiples of parts.

    With one row, lengths [3, 30, 5, 28, 29] give queues (1, 4, 3) of 1x32 and (2, 0) of 1x8.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    rungs = [min(max(round_up(lengths[index]), shortest), longest) for index in order]
    queues: list[Queue] = []
    start = 0
    while start < len(order):
        most = rows_of(rungs[start]) * parts
        end = start
        while end < len(order) and end - start < _MOST_FILLS * most:
            if rungs[end] < rungs[start] and end - start >= _FEWEST_FILLS * most:
                break
            end += 1
        own = min(round_up(-(-(end - start) // parts)), most // parts)
        rows = own * parts
        num_lines = rows if end - start <= rows else _MOST_FILLS * rows
        refill = own if num_lines == rows else max(1, own // _REFILL_SHARE)
        queues.append(Queue(tuple(order[start:end]), num_lines, rows, refill, rungs[start]))
        start = end
    return queues


def deal_rows(rows: int, parts: int) -> np.ndarray:
    """Which rows each of some equal parts gets, one part after another, as cards are dealt.

    Neighbours are of like lengths, so all parts take equally long: 6 rows in 2 parts are [0 2 4 1 3 5].
    """
    return np.arange(rows).reshape(-1, parts).T.ravel()
