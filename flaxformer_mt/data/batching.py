"""Epoch plans: which pairs form which batch, as a pure function of lengths, config, seed and epoch.

Arrays of lengths [N] hold the number of tokens of each pair, including the end symbol.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.corpus.pairs import Part
from flaxformer_mt.data.buckets import (
    Shape,
    fitting,
    longest_of_groups,
    make_shapes,
    make_training_shapes,
    smallest_shape,
)


def deal_evenly(
    pairs: np.ndarray,
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    rows: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Order shuffled pairs so that consecutive batches of `rows` pairs have similar numbers of tokens.

    The pairs are sorted by target length and cut into groups that have one pair for each batch. From each
    group, the batch with the fewest source tokens so far takes the pair with the longest source. Ties and the
    order within a batch are random, so each pair is equally likely in each batch and row. For example, target
    lengths [9, 3, 8, 4, 5] in 2 batches of 2 rows: each batch has a pair of 3 or 4 and a pair of 8 or 9
    tokens, and the pair of 5 tokens, which fills no batch, stays at the end.
    """
    batches = len(pairs) // rows
    full = batches * rows
    source, target = source_lengths[:full], target_lengths[:full]
    # Sources of neighboring target lengths are sorted in opposite directions, so that a group at the border
    # of two target lengths has sources of similar lengths, too.
    order = np.lexsort((np.where(target % 2 == 0, source, -source), target))
    groups, tokens = pairs[:full][order].reshape(rows, batches), source[order].reshape(rows, batches)
    dealt, totals = np.empty((batches, rows), pairs.dtype), np.zeros(batches, np.int64)
    # Groups of very different sources come first: the others make up for the differences that these leave.
    for group in np.argsort(-np.ptp(tokens, axis=1), kind="stable") if batches else ():
        fewest_first = np.lexsort((random.random(batches), totals))
        longest_first = np.lexsort((random.random(batches), -tokens[group]))
        dealt[fewest_first, group] = groups[group, longest_first]
        totals[fewest_first] += tokens[group, longest_first]
    return np.concatenate([random.permuted(dealt, axis=1).ravel(), pairs[full:]])


# Number of pairs that are packed together. Larger windows fill rows slightly better and take longer.
_WINDOW = 1024
# Windows packed in parallel: enough to hide the overhead of Python, few enough to stay in the CPU cache.
_WINDOWS_AT_ONCE = 512


def pack_rows(
    source_lengths: np.ndarray, target_lengths: np.ndarray, *, source: int, target: int
) -> tuple[np.ndarray, int]:
    """Pack pairs into rows of `source` and `target` tokens; return the row of each pair and the row count.

    With rows of 10 and 10 tokens, the pairs (6, 5), (5, 5), (4, 5) go to rows 0, 1, 0. Pairs are packed in
    windows of consecutive pairs, so pairs that are shuffled in each epoch are packed differently each time.
    """
    rows = np.empty(len(source_lengths), np.int64)
    num_rows, size = 0, _WINDOW * _WINDOWS_AT_ONCE
    for start in range(0, len(rows), size):
        block = slice(start, start + size)
        local, used = _pack_windows(
            _windows(source_lengths[block]), _windows(target_lengths[block]), source, target
        )
        local += num_rows + np.concatenate([[0], np.cumsum(used)[:-1]])[:, None]  # rows of the windows before
        rows[block] = local.ravel()[: len(rows[block])]
        num_rows += int(used.sum())
    return rows, num_rows


def _windows(lengths: np.ndarray) -> np.ndarray:
    """Reshape lengths to [windows, pairs per window]; the last window is padded with zeros."""
    window = min(_WINDOW, len(lengths))
    return np.pad(lengths.astype(np.int32), (0, -len(lengths) % window)).reshape(-1, window)


def _pack_windows(
    source_lengths: np.ndarray, target_lengths: np.ndarray, source: int, target: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pack each window by first-fit decreasing; one step of the loop places the k-th pair of all windows.

    Returns the row of each pair within its window, and the number of rows of each window.
    """
    shares = np.maximum(source_lengths / max(source, 1), target_lengths / target)
    order = np.argsort(-shares, axis=1, kind="stable")
    source_lengths = np.take_along_axis(source_lengths, order, axis=1)
    target_lengths = np.take_along_axis(target_lengths, order, axis=1)
    windows = np.arange(len(order))
    source_left = np.full(
        order.shape, source, np.int32
    )  # [windows, rows]: a window has at most as many rows as pairs
    target_left = np.full(order.shape, target, np.int32)
    placed = np.empty(order.shape, np.int64)
    used = 0
    for k in range(order.shape[1]):
        open_rows = slice(0, used + 1)  # the rows in use, and an empty row that holds any pair
        fits = source_left[:, open_rows] >= source_lengths[:, k, None]
        fits &= target_left[:, open_rows] >= target_lengths[:, k, None]
        row = fits.argmax(axis=1)
        source_left[windows, row] -= source_lengths[:, k]
        target_left[windows, row] -= target_lengths[:, k]
        placed[:, k] = row
        used = max(used, int(np.max(row)) + 1)
    in_window = np.empty_like(placed)
    np.put_along_axis(in_window, order, placed, axis=1)
    # Padding has length 0 and goes to row 0: exactly the rows with real pairs have used target capacity.
    return in_window, (target_left < target).sum(axis=1)


class PlannedBatch(NamedTuple):
    """The pairs of one batch: pair number `examples[i]` of the store goes to row `rows[i]`.

    Without packing, the rows are 0, 1, 2, ...; with packing, several pairs share a row, in the given order.
    """

    examples: np.ndarray
    rows: np.ndarray
    shape: Shape
    packed: bool = False


class Groups(NamedTuple):
    """Pairs grouped into batches: batch i has the pairs `examples[starts[i]:stops[i]]`.

    rows: with packing, the row of each pair within its batch; else None. shape_numbers: the index of each
    batch's shape in the plan's `shapes`.
    """

    examples: np.ndarray
    rows: np.ndarray | None
    starts: np.ndarray
    stops: np.ndarray
    shape_numbers: np.ndarray

    def take(self, batches: Any) -> "Groups":
        """Return `Groups` of only the batches that the index `batches` selects, in its order."""
        taken = (self.starts[batches], self.stops[batches], self.shape_numbers[batches])
        return Groups(self.examples, self.rows, *taken)


@dataclass(frozen=True)
class EpochPlan:
    """The batches of an epoch, in order: `len(plan)` is their number, and `plan[i]` is one `PlannedBatch`.

    shapes: the possible batch shapes, smallest first; some may not occur in an epoch. skipped: the number of
    pairs that are left out because one side is too long. tokens: the numbers of source and target tokens.
    """

    shapes: tuple[Shape, ...]
    skipped: int
    tokens: tuple[int, int]
    groups: Groups

    def __len__(self) -> int:
        return len(self.groups.starts)

    def __getitem__(self, index: int) -> PlannedBatch:
        examples, rows, starts, stops, shape_numbers = self.groups
        pairs = slice(starts[index], stops[index])
        numbers = np.arange(pairs.stop - pairs.start) if rows is None else rows[pairs]
        return PlannedBatch(examples[pairs], numbers, self.shapes[shape_numbers[index]], self.packed)

    def shorten(self, batches: int) -> "EpochPlan":
        """Return a plan of the first `batches` batches, with `skipped` and `tokens` of the whole epoch."""
        return dataclasses.replace(self, groups=self.groups.take(slice(batches)))

    @property
    def packed(self) -> bool:
        return self.groups.rows is not None

    @property
    def num_pairs(self) -> int:
        """The number of pairs; a pair that occurs several times is counted each time."""
        return len(self.groups.examples)

    @property
    def shape_counts(self) -> np.ndarray:
        return np.bincount(self.groups.shape_numbers, minlength=len(self.shapes))

    def likely_tokens(self, lengths: np.ndarray) -> list[int]:
        """Return, for each shape, a number of tokens on one side that full batches almost never exceed.

        `lengths` [N] has the tokens of all pairs on this side. The result is five standard deviations above
        the mean, or 0 if no batch has the shape. The deviation is the sum of two: between the full batches of
        this plan, and between the pairs of different epochs, which are treated as random samples. Packed
        plans, whose rows have several pairs, are not supported.
        """
        examples, _, starts, stops, shape_numbers = self.groups
        counts = stops - starts
        places = np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        tokens = lengths[examples[places]].astype(np.float64)
        owners = np.repeat(np.arange(len(counts)), counts)
        of_batches = np.bincount(owners, tokens, minlength=len(counts))
        likely = []
        for number, shape in enumerate(self.shapes):
            of_shape = shape_numbers == number
            shape_tokens = tokens[of_shape[owners]]
            if not len(shape_tokens):
                likely.append(0)
                continue
            full = of_batches[of_shape & (counts == shape.rows)]
            of_epochs = shape_tokens.std() * shape.rows / len(shape_tokens) ** 0.5
            spread = 5 * ((full.std() if len(full) else 0.0) + of_epochs)
            likely.append(int(np.ceil(shape_tokens.mean() * shape.rows + spread)))
        return likely

    @property
    def padding_share(self) -> float:
        """Fraction of padding in the source and target arrays of all batches; 0 for an empty plan."""
        sizes = [shape.rows * (shape.source + shape.target) for shape in self.shapes]
        slots = int(self.shape_counts @ sizes)
        return 1 - sum(self.tokens) / slots if slots else 0.0


def plan_epoch(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    config: DataConfig,
    seed: int,
    epoch: int,
    parts: Sequence[Part] | None = None,
    shapes: tuple[Shape, ...] | None = None,
    drawn: np.ndarray | None = None,
) -> EpochPlan:
    """Shuffle the pairs and group them into batches in random order, determined by (seed, epoch).

    Args:
      parts: the data sets of a mixture. A pair of a set with weight w occurs floor(w) times, and once more
        with probability w - floor(w).
      shapes: the batch shapes; None: `make_training_shapes`. Pairs that fit no shape are skipped.
      drawn: the numbers of the pairs of this epoch, if a stage of training selects them.
    """
    if shapes is None:
        shapes = make_training_shapes(source_lengths, target_lengths, config=config)
    random = np.random.default_rng([seed & 0xFFFF_FFFF_FFFF_FFFF, epoch])
    fits = fitting(source_lengths, target_lengths, config=config)
    fits &= smallest_shape(source_lengths, target_lengths, shapes) < len(shapes)
    candidates = _occurrences(fits, parts, random) if drawn is None else drawn[fits[drawn]]
    skipped = int(len(fits) - fits.sum()) if drawn is None else len(drawn) - len(candidates)
    examples = random.permutation(candidates)
    del candidates, fits
    lengths = source_lengths[examples], target_lengths[examples]
    if config.batching == "pack":
        groups = _group_into_packs(examples, *lengths, shapes[-1], random)
    elif config.batching == "shuffle":
        groups = _group_in_order(examples, *lengths, shapes)
    else:
        groups = _group_into_buckets(examples, source_lengths, target_lengths, shapes, random)
    order = random.permutation(len(groups.starts))
    return EpochPlan(shapes, skipped, _count_tokens(*lengths), groups.take(order))


def plan_in_order(source_lengths: np.ndarray, target_lengths: np.ndarray, *, config: DataConfig) -> EpochPlan:
    """Plan evaluation batches: each pair once, in fixed order, in at most `config.num_shapes` shapes.

    Pairs above the config's maximum lengths are included: the last shape is as long as the longest pair.
    """
    shapes = make_shapes(source_lengths, target_lengths, config=config)
    examples = np.arange(len(source_lengths))
    groups = _group_into_buckets(examples, source_lengths, target_lengths, shapes)
    return EpochPlan(shapes, 0, _count_tokens(source_lengths, target_lengths), groups)


def _count_tokens(*lengths: np.ndarray) -> tuple[int, int]:
    source, target = (int(side.sum(dtype=np.int64)) for side in lengths)
    return source, target


def plan_summary(plan: EpochPlan, source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, Any]:
    shapes = [
        {**shape._asdict(), "batches": int(count)}
        for shape, count in zip(plan.shapes, plan.shape_counts, strict=True)
    ]
    if not plan.packed:
        likely = zip(plan.likely_tokens(source_lengths), plan.likely_tokens(target_lengths), strict=True)
        for shape, tokens in zip(shapes, likely, strict=True):
            shape["likely_tokens"] = list(tokens)
    return {
        "batches": len(plan),
        "pairs": plan.num_pairs,
        "skipped": plan.skipped,
        "source_tokens": plan.tokens[0],
        "target_tokens": plan.tokens[1],
        "padding": round(plan.padding_share, 4),
        "shapes": shapes,
    }


def _occurrences(fits: np.ndarray, parts: Sequence[Part] | None, random: np.random.Generator) -> np.ndarray:
    """Return the numbers of the pairs that fit, each repeated according to the weight of its data set."""
    numbers = np.int32 if len(fits) < 1 << 31 else np.int64
    repeated, start = [], 0
    for part in parts or [Part("all", len(fits), 1.0)]:
        present = (start + np.flatnonzero(fits[start : start + part.size])).astype(numbers)
        start += part.size
        times = int(part.weight)
        # Stochastic rounding: the expected number is exact even for a handful of pairs.
        extra = int((part.weight - times) * len(present) + random.random())
        repeated += [present] * times
        repeated.append(random.choice(present, extra, replace=False, shuffle=False))
    return np.concatenate(repeated)


def _group_into_buckets(
    examples: np.ndarray,
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    shapes: tuple[Shape, ...],
    random: np.random.Generator | None = None,
) -> Groups:
    """Cut each shape's pairs into batches, with `random` by `deal_evenly`; the last may be partly filled."""
    lengths = source_lengths[examples], target_lengths[examples]
    numbers = smallest_shape(*lengths, shapes)
    del lengths
    by_shape = examples[np.argsort(numbers, kind="stable")]
    ends = np.cumsum(np.bincount(numbers, minlength=len(shapes)))
    groups = _promote_leftovers(np.split(by_shape, ends[:-1]), shapes)
    if random is not None:
        groups = [
            deal_evenly(group, source_lengths[group], target_lengths[group], rows=shape.rows, random=random)
            for group, shape in zip(groups, shapes, strict=True)
        ]
    starts, stops, first = [], [], 0
    for group, shape in zip(groups, shapes, strict=True):
        last = first + len(group)
        starts.append(np.arange(first, last, shape.rows))
        stops.append(np.minimum(starts[-1] + shape.rows, last))
        first = last
    shape_numbers = np.repeat(np.arange(len(shapes)), [len(batches) for batches in starts])
    return Groups(np.concatenate(groups), None, np.concatenate(starts), np.concatenate(stops), shape_numbers)


def _group_in_order(
    examples: np.ndarray, source_lengths: np.ndarray, target_lengths: np.ndarray, shapes: tuple[Shape, ...]
) -> Groups:
    """Cut the pairs into batches in the given order, each with the smallest shape that holds its pairs."""
    rows = shapes[-1].rows
    starts = np.arange(0, len(examples), rows)
    longest = longest_of_groups(source_lengths, rows), longest_of_groups(target_lengths, rows)
    numbers = smallest_shape(*longest, shapes)
    return Groups(examples, None, starts, np.minimum(starts + rows, len(examples)), numbers)


def _promote_leftovers(groups: list[np.ndarray], shapes: tuple[Shape, ...]) -> list[np.ndarray]:
    """Move the pairs of a partly filled batch to a larger shape where this reduces the total work.

    With shapes of 4, 4 and 2 rows that have 5, 3 and 2 pairs, the fifth pair of the first shape completes a
    batch of the second shape.
    """
    groups = list(groups)
    for number, shape in enumerate(shapes):
        left = len(groups[number]) % shape.rows
        if not left or number + 1 == len(shapes):
            continue

        def added_work(larger: int, left: int = left) -> int:
            rows, size = shapes[larger].rows, len(groups[larger])
            return (-(-(size + left) // rows) - -(-size // rows)) * shapes[larger].work

        best = min(range(number + 1, len(shapes)), key=added_work)
        if added_work(best) < shape.work:
            groups[number], leftover = np.split(groups[number], [-left])
            groups[best] = np.concatenate([groups[best], leftover])
    return groups


def _group_into_packs(
    examples: np.ndarray,
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    shape: Shape,
    random: np.random.Generator,
) -> Groups:
    """Pack pairs into rows, shuffle the rows, and cut them into batches; the last may be partly filled."""
    rows, num_rows = pack_rows(source_lengths, target_lengths, source=shape.source, target=shape.target)
    rows = random.permutation(num_rows)[rows]
    by_row = np.argsort(rows, kind="stable")
    rows = rows[by_row]
    starts = np.searchsorted(rows, np.arange(0, num_rows, shape.rows))
    stops = np.append(starts[1:], len(rows))[: len(starts)]
    return Groups(
        examples[by_row], (rows % shape.rows).astype(np.int32), starts, stops, np.zeros(len(starts), np.int64)
    )
