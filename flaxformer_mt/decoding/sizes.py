"""Sizes of batches and search states: lengths and rows are rounded so that few shapes recur.

Each new shape requires a compilation. Contains the ladders of sizes, length limits, and the rules for the
size of the next batch or state, as functions of lengths alone.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flaxformer_mt.search.state_rows import Size

# A smaller size is chosen only if the waiting sentences fill its rows at least this many times.
_MIN_FILLS = 2

# Minimum length of an array of sources.
SHORTEST = 8

# Maximum number of candidates of a shortlist for each source token, besides those of all sentences.
CANDIDATES_PER_TOKEN = 16

# Length limits are for the worst case. The default capacity is the likely length, so that more rows fit; the
# few sentences that exceed it are searched again. Where nothing is known of likely lengths, it is this share
# of the limit, or the source length plus this many tokens, whichever is more.
_DEFAULT_SHARE, _DEFAULT_EXTRA = 0.6, 8

# Numbers of sentences of a device that the programs for small inputs take, and the shortest of their source
# lengths, which are powers of two: few enough that all of them can be compiled in advance.
SMALL_INPUTS = (1, 2, 8, 64)
_SHORTEST_SMALL = 16

# What a step of such a program does once for all its rows takes about as long as this many rows: reading the
# parameters of a large model from memory. For a small one it is less.
_ROWS_OF_A_STEP = 4

# Maximum source length of the programs for small inputs that are compiled in advance.
_LONGEST_IN_ADVANCE = 128

# Ladder of sizes: few enough that shapes recur, close enough that at most a third is padding.
_LADDER = tuple(sorted({1, *(base << power for base in (2, 3) for power in range(30))}))

# Ladder with at most a fifth of padding.
_FINE_LADDER = tuple(sorted({1, 2, 3, *(base << power for base in (4, 5, 6, 7) for power in range(30))}))


@dataclass(frozen=True)
class SearchBatch:
    """Sentences that form a batch, in arrays whose shape is on the ladder."""

    # Indices of the sentences.
    indices: tuple[int, ...]
    rows: int
    source_length: int


def round_up(size: int) -> int:
    """Rounds up to the ladder 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...: 13 gives 16."""
    return _LADDER[bisect.bisect_left(_LADDER, size)]


def round_up_finely(size: int) -> int:
    """Rounds up to the ladder 1 to 8, 10, 12, 14, 16, 20, 24, ...: 13 gives 14."""
    return _FINE_LADDER[bisect.bisect_left(_FINE_LADDER, size)]


def round_up_coarsely(size: int) -> int:
    """Rounds up to a power of two: 13 gives 16."""
    return 1 << (size - 1).bit_length()


def round_down(size: int) -> int:
    """Rounds down to the ladder of `round_up`: 15 gives 12."""
    return _LADDER[bisect.bisect_right(_LADDER, size) - 1]


def round_down_finely(size: int) -> int:
    """Rounds down to the ladder of `round_up_finely`: 15 gives 14."""
    return _FINE_LADDER[bisect.bisect_right(_FINE_LADDER, size) - 1]


@dataclass(frozen=True)
class LengthRule:
    """The maximum length of translations as a function of the source length; all lengths include eos."""

    max_length_ratio: float
    max_length_offset: float
    # Maximum source length.
    longest_source: int
    # Maximum number of target tokens for which all models have positions; None: unlimited.
    longest_target: int | None
    # Ratio and offset of the length that few translations of the training set exceed; None: unknown.
    learned: tuple[float, float] | None = None

    def limit(self, source_length: int, needed: int = 0) -> int:
        """Returns the maximum number of tokens of a translation of such a source; at least `needed`."""
        limit = max(1, needed, int(self.max_length_ratio * source_length + self.max_length_offset))
        return self._within_positions(limit)

    def likely(self, source_length: int, needed: int = 0) -> int:
        """Returns the number of tokens that few translations of such a source exceed, at most its limit."""
        limit = self.limit(source_length, needed)
        if self.learned is None:
            return limit
        ratio, offset = self.learned
        return min(limit, max(1, needed, int(ratio * source_length + offset)))

    def capacity(self, source_length: int, needed: int = 0, *, full: bool) -> int:
        """Returns the token capacity of a state for such a source, rounded up so that sizes recur.

        Args:
          needed: minimum number of tokens of the translation, such as its prefix and required phrases.
          full: return the capacity for the longest translation that the limit allows, not the default
            capacity.
        """
        limit = self.limit(source_length, needed)
        if full:
            return self._within_positions(round_up_coarsely(limit))
        default = max(needed, int(_DEFAULT_SHARE * limit), source_length + _DEFAULT_EXTRA)
        if self.learned is not None:
            default = self.likely(source_length, needed)
        return self._within_positions(round_up_finely(min(limit, default)))

    def _within_positions(self, length: int) -> int:
        return length if self.longest_target is None else min(length, self.longest_target)


@dataclass(frozen=True)
class SizeRule:
    """The size of a search state as a function of lengths, with as many rows as batch_tokens allow."""

    lengths: LengthRule
    # Number of hypotheses of a row: the beam size, or the number of samples.
    width: int
    # Maximum number of tokens on one device: the sources and all hypotheses, padding included.
    batch_tokens: int
    # Whether each sentence has the capacity for its longest translation. Such sentences are few and differ
    # from window to window, so all of a window share one size.
    full: bool = False

    def size(self, source_length: int, needed: int) -> Size:
        """Returns the size for source lengths up to `source_length` and translation lengths from `needed`."""
        length = round_up(max(source_length, SHORTEST))
        capacity = self.lengths.capacity(source_length, needed, full=self.full)
        if self.full:  # sources of different lengths share one size if they have the same capacity
            length = max(round_up_coarsely(max(source_length, SHORTEST)), capacity // 2)
        length = min(length, self.lengths.longest_source)
        rows = round_down_finely(max(1, self.batch_tokens // (length + self.width * capacity)))
        return Size(rows, length, capacity)


class NeedGroup(NamedTuple):
    """Sentences whose translations need similar capacities: indices, and the minimum length of each one's."""

    indices: list[int]
    needed: list[int]


def group_by_need(
    lengths: Sequence[int], needed: Sequence[int], fixed: Sequence[int], sizes: SizeRule, *, parts: int
) -> list[NeedGroup]:
    """Groups sentences so that no long prefix takes the rows of sentences that need little capacity.

    Sentences whose source allows a translation with their fixed tokens form one group, of the same sizes as
    without these; the others form one for each step of `round_up`, of one capacity each. If all sentences fit
    into one state together, there is one group.

    Args:
      lengths: lengths of the sources.
      needed: minimum number of tokens of each translation, at least `fixed`.
      fixed: number of tokens of each one's prefix and required phrases, with eos.
      parts: number of devices that search a state of `sizes` each.
    """
    if sizes.size(max(lengths), max(needed)).rows * parts >= len(lengths):
        return [NeedGroup(list(range(len(lengths))), list(needed))]
    groups: dict[int, list[int]] = {}
    for index, (length, tokens) in enumerate(zip(lengths, fixed, strict=True)):
        exceeds = tokens > sizes.lengths.capacity(length, full=sizes.full)
        groups.setdefault(round_up(tokens) if exceeds else 0, []).append(index)
    return [
        NeedGroup(
            indices,
            [needed[i] for i in indices] if key == 0 else [max(needed[i] for i in indices)] * len(indices),
        )
        for key, indices in sorted(groups.items())
    ]


def plan_batches(
    lengths: Sequence[int], *, longest: int, rows_of: Callable[[int], int], shortest: int = SHORTEST
) -> list[SearchBatch]:
    """Groups sentences of the given lengths, the longest first, into batches of few different shapes.

    The length of a batch is that of its longest sentence, rounded up to the ladder and limited to the range
    from `shortest` to `longest`. A batch has `rows_of(length)` sentences. Only the last batch may have fewer;
    its rows are rounded up to the ladder, because a row of padding costs as much as a sentence.

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


class SmallSize(NamedTuple):
    """The size of a program for small inputs: the sentences that each device takes, and those at a time."""

    lines: int
    size: Size


def small_size(source_length: int, lines: int, sizes: SizeRule) -> SmallSize | None:
    """Returns the size for up to `lines` sentences on each device; None if there are too many for one.

    Up to 8 sentences are searched at once with the capacity for their longest translations: none is searched
    again. More of them share rows of the default capacity.
    """
    length = max(source_length, _SHORTEST_SMALL)
    length = min(round_up_coarsely(length), sizes.lengths.longest_source)
    lines = next((entry for entry in SMALL_INPUTS if entry >= lines), 0)
    if lines == SMALL_INPUTS[-1]:
        shared = sizes.size(length, 0)
        size = Size(min(shared.rows, lines), length, shared.capacity)
    else:
        size = Size(lines, length, sizes.lengths.limit(length))
    tokens = size.rows * (length + sizes.width * size.capacity)
    return SmallSize(lines, size) if lines and (lines == 1 or tokens <= sizes.batch_tokens) else None


def plan_small_input(
    lengths: Sequence[int], sizes: SizeRule, *, parts: int
) -> list[tuple[list[int], SmallSize]]:
    """Returns the indices of the sentences of each program call, and its size; [] if the input is not small.

    Up to 16 sentences on each device are divided so that all calls together take the least time: a long
    sentence does not keep short ones in rows beside it until it is done. On one device with a beam of 4,
    lengths [10, 47, 9] give a call of one row for [1] and a call of two rows for [0, 2].

    Args:
      lengths: lengths of the sources.
      parts: number of devices that share the sentences.
    """
    at_once = SMALL_INPUTS[-2] * parts
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if len(order) <= 2 * at_once:
        if _call_size(lengths[order[0]], min(len(order), at_once), sizes, parts=parts) is None:
            return []
        starts = _divide([lengths[index] for index in order], sizes, parts=parts)
    elif len(order) <= SMALL_INPUTS[-1] * parts and not sizes.full:
        starts = [0]
    else:
        return []
    calls = []
    for start, end in itertools.pairwise([*starts, len(order)]):
        size = _call_size(lengths[order[start]], end - start, sizes, parts=parts)
        if size is None:
            return []
        calls.append((order[start:end], size))
    return calls


def _call_size(longest: int, count: int, sizes: SizeRule, *, parts: int) -> SmallSize | None:
    return small_size(longest, -(-count // parts), sizes)


def _divide(lengths: Sequence[int], sizes: SizeRule, *, parts: int) -> list[int]:
    """Returns where each program call begins in lengths, the longest first, for the least time together.

    A call takes as many steps as its translations are long, and a step the time that its rows take, and the
    time of some more rows for all that it does once.
    """
    at_once = SMALL_INPUTS[-2] * parts
    # Of the first `end` sentences: the least time, and where the last call of them begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(lengths) + 1):
        found = []
        for start in range(max(0, end - at_once), end):
            size = _call_size(lengths[start], end - start, sizes, parts=parts)
            assert size is not None, "as many sentences of the longest source fit at once"
            time = size.size.capacity * (size.lines + _ROWS_OF_A_STEP)
            found.append((best[start][0] + time, start))
        best.append(min(found))
    starts = []
    end = len(lengths)
    while end:
        end = best[end][1]
        starts.append(end)
    return starts[::-1]


def sizes_in_advance(sizes: SizeRule) -> list[SmallSize]:
    """Returns the sizes of all small inputs of sources of up to 128 tokens."""
    longest = min(_LONGEST_IN_ADVANCE, sizes.lengths.longest_source)
    lengths = {min(_SHORTEST_SMALL << power, longest) for power in range(longest.bit_length())}
    found = [small_size(length, lines, sizes) for lines in SMALL_INPUTS for length in sorted(lengths)]
    return list(dict.fromkeys(size for size in found if size is not None))


def choose_size(preferred: Size, current: Size | None, *, busy: int, waiting: int) -> Size:
    """Returns the size of the state for the next program call.

    Sentences are sorted by length, so later ones fit into a smaller state with more rows. A smaller state is
    chosen only if the waiting sentences fill it several times, because each size requires a compilation.

    Args:
      preferred: the size for the longest of the active and the next sentences, with the maximum number of
        rows.
      current: the size of the existing state, which has at least `busy` rows; None: there is no state yet.
      busy: number of active rows of a device.
      waiting: number of sentences that wait for a device.
    """
    if current is None:
        return preferred._replace(rows=min(preferred.rows, round_up_coarsely(waiting)))
    if not waiting:
        return current._replace(rows=max(1, current.rows // 2)) if busy <= current.rows // 2 else current
    if preferred.capacity > current.capacity:
        return preferred._replace(rows=current.rows, source_length=current.source_length)
    if preferred.rows > current.rows and waiting >= _MIN_FILLS * preferred.rows:
        return preferred
    return current


def deal(waiting: int, parts: int) -> list[list[int]]:
    """Distributes the first `waiting` sentences of a queue over parts in turn; returns each part's indices.

    Sentences next to each other have similar lengths, so all parts take equally long: 5 sentences for 2 parts
    give [0 2 4] and [1 3].
    """
    return [list(range(part, waiting, parts)) for part in range(parts)]
