"""Which sentences are searched together, in arrays of a few recurring shapes.

Each new shape costs a compilation. Owns the ladder of sizes; knows lengths only.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flaxformer_mt.search.state_rows import Size

# How many times the sentences that wait fill the rows at least, for a size of their own.
_FEWEST_FILLS = 2

# No array of sources is shorter.
SHORTEST = 8

# Limits on lengths are for the worst case. The default capacity is this share of the limit, or this many tokens
# more than the source has, so that more rows fit; the few sentences that need more are searched again.
_DEFAULT_SHARE, _DEFAULT_EXTRA = 0.6, 8

# Sizes of arrays: few enough that shapes recur, close enough that at most a third is padding.
_LADDER = tuple(sorted({1, *(base << power for base in (2, 3) for power in range(30))}))

# With at most a fifth of padding.
_FINE_LADDER = tuple(sorted({1, 2, 3, *(base << power for base in (4, 5, 6, 7) for power in range(30))}))


@dataclass(frozen=True)
class SearchBatch:
    """Sentences, by their index, that are searched together in arrays of a ladder's shape."""

    indices: tuple[int, ...]
    rows: int
    source_length: int


def round_up(size: int) -> int:
    """The least number of the ladder 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ... that is no less: 13 gives 16."""
    return _LADDER[bisect.bisect_left(_LADDER, size)]


def round_up_finely(size: int) -> int:
    """The least number of the ladder 1 to 8, 10, 12, 14, 16, 20, 24, ... that is no less: 13 gives 14."""
    return _FINE_LADDER[bisect.bisect_left(_FINE_LADDER, size)]


def round_up_coarsely(size: int) -> int:
    """The least power of two that is no less: 13 gives 16."""
    return 1 << (size - 1).bit_length()


def round_up_to_power_of_four(size: int) -> int:
    """The least power of four that is no less: 5 gives 16."""
    return 1 << ((size - 1).bit_length() + 1) // 2 * 2


def round_down(size: int) -> int:
    """The largest number of the ladder that is no more: 15 gives 12."""
    return _LADDER[bisect.bisect_right(_LADDER, size) - 1]


def round_down_finely(size: int) -> int:
    """The largest number of the ladder 1 to 8, 10, 12, 14, 16, 20, 24, ... that is no more: 15 gives 14."""
    return _FINE_LADDER[bisect.bisect_right(_FINE_LADDER, size) - 1]


@dataclass(frozen=True)
class LengthRule:
    """How long translations may become, as a function of the source length; all lengths include eos."""

    max_length_ratio: float
    max_length_offset: float
    # The longest source that the model reads.
    longest_source: int
    # The most target tokens that every model has positions for; None: no bound.
    longest_target: int | None

    def limit(self, source_length: int, needed: int = 0) -> int:
        """The most tokens that a translation of such a source may have; at least `needed`."""
        limit = max(1, needed, int(self.max_length_ratio * source_length + self.max_length_offset))
        return self._within_positions(limit)

    def capacity(self, source_length: int, needed: int = 0, *, full: bool) -> int:
        """The number of target tokens that a state provides for, rounded up so that sizes recur.

        Args:
          needed: the tokens of the prefix and the required phrases.
          full: provide for the longest translation that the limit allows, not for the default capacity.
        """
        limit = self.limit(source_length, needed)
        if full:
            return self._within_positions(round_up_coarsely(limit))
        default = max(needed, int(_DEFAULT_SHARE * limit), source_length + _DEFAULT_EXTRA)
        return self._within_positions(round_up_finely(min(limit, default)))

    def _within_positions(self, length: int) -> int:
        return length if self.longest_target is None else min(length, self.longest_target)


@dataclass(frozen=True)
class SizeRule:
    """The size of the state in which sentences are searched together, with as many rows as batch_tokens allow."""

    lengths: LengthRule
    # Hypotheses that a row holds: the beam size, or the number of samples.
    width: int
    # Source and target tokens of all hypotheses on one device, padding included.
    batch_tokens: int
    # Every sentence has the capacity for its longest translation. Such sentences are few and differ from window
    # to window, so all of a window share one size.
    full: bool = False

    def size(self, source_length: int, needed: int) -> Size:
        """The size for sources of at most `source_length` tokens whose translations need `needed` at least."""
        length = round_up(max(source_length, SHORTEST))
        capacity = self.lengths.capacity(source_length, full=self.full)
        if self.full:  # sources of different lengths have one size where they have the same capacity
            length = max(round_up_coarsely(max(source_length, SHORTEST)), capacity // 2)
        length = min(length, self.lengths.longest_source)
        rows = round_down_finely(max(1, self.batch_tokens // (length + self.width * capacity)))
        return Size(rows, length, self.lengths.capacity(source_length, needed, full=self.full))


def plan_batches(
    lengths: Sequence[int], *, longest: int, rows_of: Callable[[int], int], shortest: int = SHORTEST
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


def choose_size(own: Size, before: Size | None, *, busy: int, waiting: int) -> Size:
    """The size of the state in which a search goes on, of which a device has `busy` rows in use.

    The sentences come sorted, so after a while a smaller one does, with more rows. It is taken only where it
    is filled a few times: each size is another program to compile.

    Args:
      own: what the longest of those that are searched or wait would have alone, rows as many as can be.
      before: of the state as it is, with rows for all of `busy`; None: there is none yet.
      waiting: how many sentences wait for this device.
    """
    if before is None:
        return own._replace(rows=min(own.rows, round_up_to_power_of_four(waiting)))
    if not waiting:
        return before._replace(rows=max(1, before.rows // 2)) if busy <= before.rows // 2 else before
    if own.room > before.room:
        return own._replace(rows=before.rows, source_length=before.source_length)
    if own.rows > before.rows and waiting >= _FEWEST_FILLS * own.rows:
        return own
    return before


def deal(waiting: int, parts: int) -> list[list[int]]:
    """Which of the first sentences in the queue each of some equal parts gets, as cards are dealt.

    Neighbours are of like lengths, so all parts take equally long: 5 for 2 parts are [0 2 4] and [1 3].
    """
    return [list(range(part, waiting, parts)) for part in range(parts)]
