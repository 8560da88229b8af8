"""Chooses a few batch shapes that need the least padding for the given sentence lengths.

Arrays of lengths [N] hold the number of tokens of each pair; the sources of a language model have length 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.errors import UserError

# A padded target token costs about twice as much as a padded source token: it passes through the decoder
# with its cross-attention, the output projection and the loss.
_TARGET_WORK = 2
# Most lengths per side that the search tries: all multiples of 4 up to 160 tokens; beyond that a subset.
_MAX_LEVELS = 40


class Shape(NamedTuple):
    """The shape of a batch: its number of rows, and the numbers of source and target tokens per row."""

    rows: int
    source: int
    target: int

    @property
    def work(self) -> int:
        """The cost of a batch; one source token costs 1, one target token 2."""
        return self.rows * (self.source + _TARGET_WORK * self.target)


def make_shapes(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    config: DataConfig,
    least: tuple[int, int] = (0, 0),
) -> tuple[Shape, ...]:
    """Choose at most `config.num_shapes` shapes that hold all pairs, in ascending order.

    Among all ascending sequences of shapes, dynamic programming finds the one with the least work, padding
    included. The source and target lengths of a shape are chosen separately, in multiples of
    `config.length_multiple`; those of the last shape are at least `least`. The number of rows is a multiple
    of `config.row_multiple`; it fills `config.batch_tokens` on the longer side, up to `config.batch_pairs`
    rows.
    """
    chain = _best_chain(
        _levels(source_lengths, config.length_multiple, least[0], config.max_source_length),
        _levels(target_lengths, config.length_multiple, least[1], config.max_target_length),
        source_lengths,
        target_lengths,
        config.num_shapes,
    )
    return tuple(_with_rows(source, target, config) for source, target in chain)


def make_training_shapes(
    source_lengths: np.ndarray, target_lengths: np.ndarray, *, config: DataConfig, headroom: bool = False
) -> tuple[Shape, ...]:
    """Choose the batch shapes of all epochs from the data and the config.

    With data.batching=bucket, these are the shapes of `make_shapes`. With shuffle, all shapes have the same
    number of rows, and `make_shapes` chooses their lengths for the longest sentences of shuffled batches.
    With pack, the only shape has the maximum lengths of the config. With `headroom`, for lengths that vary
    from epoch to epoch, the last shape has the maximum lengths. Raises UserError if all pairs exceed the
    maximum lengths.
    """
    longest = make_longest_shape(config)
    if config.batching == "pack":
        return (longest,)
    fits = fitting(source_lengths, target_lengths, config=config)
    if not fits.any():
        raise UserError(
            f"all {len(fits)} training pairs are longer than data.max_source_length "
            f"{config.max_source_length} or data.max_target_length {config.max_target_length} tokens (the "
            f"shortest source and target have {source_lengths.min()} and {target_lengths.min()}); raise them"
        )
    least = (longest.source, longest.target) if headroom else (0, 0)
    source_lengths, target_lengths = source_lengths[fits], target_lengths[fits]
    if config.batching == "bucket":
        return make_shapes(source_lengths, target_lengths, config=config, least=least)
    rows = _with_rows(int(source_lengths.max()), int(target_lengths.max()), config).rows
    order = np.random.default_rng(0).permutation(len(source_lengths))
    longest_sides = [longest_of_groups(side[order], rows) for side in (source_lengths, target_lengths)]
    chain = make_shapes(*longest_sides, config=config, least=least)
    return tuple(shape._replace(rows=chain[-1].rows) for shape in chain)


def make_longest_shape(config: DataConfig) -> Shape:
    source = config.max_source_length if config.source_language else 0
    return _with_rows(source, config.max_target_length, config)


def fitting(source_lengths: np.ndarray, target_lengths: np.ndarray, *, config: DataConfig) -> np.ndarray:
    return (source_lengths <= config.max_source_length) & (target_lengths <= config.max_target_length)


def smallest_shape(
    source_lengths: np.ndarray, target_lengths: np.ndarray, shapes: tuple[Shape, ...]
) -> np.ndarray:
    """Return, for each pair, the index of the first shape that holds it, uint16 [N]; none: `len(shapes)`.

    With the shapes (B, 8, 8) and (B, 12, 16), the pairs (5, 8), (5, 9) and (13, 2) get 0, 1 and 2 (no shape).
    """
    by_source = _first_holding([shape.source for shape in shapes], source_lengths)
    by_target = _first_holding([shape.target for shape in shapes], target_lengths)
    return np.maximum(by_source, by_target)


def _first_holding(sizes: Sequence[int] | np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return, for each length, the index of the first ascending size >= it, uint16 [N]; len(sizes): none."""
    table = np.searchsorted(sizes, np.arange(lengths.max(initial=0) + 1)).astype(np.uint16)
    return table[lengths]


def longest_of_groups(lengths: np.ndarray, size: int) -> np.ndarray:
    """Return the maximum of each group of `size` consecutive lengths [N]; the last group may be smaller."""
    return np.maximum.reduceat(lengths, np.arange(0, len(lengths), size))


def _with_rows(source: int, target: int, config: DataConfig) -> Shape:
    multiple = config.row_multiple
    rows = config.batch_tokens // max(source, target)
    if config.batch_pairs:
        rows = min(rows, config.batch_pairs)
    return Shape(max(rows // multiple * multiple, multiple), source, target)


def _levels(lengths: np.ndarray, multiple: int, least: int, most: int) -> np.ndarray:
    """Return the candidate lengths of one side, ascending: the lengths that occur, rounded up to `multiple`.

    Rounding stops at `most`, the config's maximum length, because the model may have no positions beyond it.
    """
    most = max(most, int(lengths.max(initial=0)))
    present, of_each = np.unique(lengths, return_counts=True)
    rounded = np.minimum(-(-present.astype(np.int64) // multiple) * multiple, most)
    values, owners = np.unique(rounded, return_inverse=True)
    counts = np.bincount(owners, of_each).astype(np.int64)
    if len(values) > _MAX_LEVELS:  # chosen so that each step covers an equal share of all tokens
        tokens = np.cumsum(values * counts)
        shares = np.linspace(0, tokens[-1], _MAX_LEVELS + 1)[1:]
        values = values[np.unique(np.searchsorted(tokens, shares))]
    last = min(-(-least // multiple) * multiple, most)
    return values if values[-1] >= last else np.append(values, last)


def _best_chain(
    sources: np.ndarray,
    targets: np.ndarray,
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    num_shapes: int,
) -> list[tuple[int, int]]:
    """Return the ascending chain of at most `num_shapes` (source, target) lengths that needs the least work.

    The chain ends in the largest lengths. A pair takes the first shape of the chain that holds it, so a step
    from one shape to the next costs the number of pairs that fit only the next shape, times the work of a row
    of that shape. The best chain is therefore a shortest path.
    """
    cells = _first_holding(sources, source_lengths) * np.uint16(len(targets))  # fewer than 2 ** 16
    cells += _first_holding(targets, target_lengths)
    counts = np.bincount(cells, minlength=len(sources) * len(targets)).reshape(len(sources), len(targets))
    held = counts.cumsum(0).cumsum(1).ravel().astype(np.float64)  # pairs that fit each candidate shape
    source, target = (grid.ravel() for grid in np.meshgrid(sources, targets, indexing="ij"))
    work = (source + _TARGET_WORK * target).astype(np.float64)
    nested = (source[:, None] <= source) & (target[:, None] <= target)
    step = np.where(nested, (held[None, :] - held[:, None]) * work, np.inf)
    best, came_from = held * work, []
    for _ in range(num_shapes - 1):
        total = best[:, None] + step
        came_from.append(total.argmin(axis=0))
        best = total.min(axis=0)
    last = len(best) - 1
    chain = [last]
    for previous in reversed(came_from):
        chain.append(int(previous[chain[-1]]))
    return [(int(source[i]), int(target[i])) for i in dict.fromkeys(reversed(chain))]
