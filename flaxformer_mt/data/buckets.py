"""Which few array shapes batches have: the choice that wastes least on padding.

Row 4 of the data path. Owns `Shape` and the search for shapes over a histogram of lengths; knows nothing of
epochs, of random numbers, or of tokens.
"""

from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.errors import UserError

# A padded target token costs about twice a padded source token: it passes the decoder with its
# cross-attention, the output matrix and the loss.
_TARGET_WORK = 2
# Lengths of a side that the search tries: with multiples of 4 all up to 160; of more than that, a choice.
_MAX_LEVELS = 40


class Shape(NamedTuple):
    """The static shape of a batch: `rows` of `source` and `target` tokens."""

    rows: int
    source: int
    target: int

    @property
    def work(self) -> int:
        """What a batch of this shape costs, in units of a source token."""
        return self.rows * (self.source + _TARGET_WORK * self.target)


def make_shapes(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    config: DataConfig,
    least: tuple[int, int] = (0, 0),
) -> tuple[Shape, ...]:
    """At most `config.num_shapes` shapes that hold all pairs, each at least as long as the one before.

    Of all such chains it is the one with the least padded work, found exactly by dynamic programming. Source
    and target of a shape are chosen separately, in multiples of `config.length_multiple`. Rows fill
    `config.batch_tokens` on the longer side, but no more than `config.batch_pairs`, in multiples of
    `config.row_multiple`, at least one of them.

    Args:
      source_lengths, target_lengths: [N] tokens of each pair, N >= 1; without sources all of theirs are 0.
      config: of the batches.
      least: the last shape has at least these source and target lengths, whatever the pairs need.
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
    """The shapes of all epochs: a function of the data and the config, not of the epoch.

    Args:
      source_lengths, target_lengths: [N] tokens of each pair; those over the maxima do not count.
      config: bucket: the shapes of `make_shapes`; pack: one shape, of the config's maxima.
      headroom: whether lengths vary from epoch to epoch, as they do with subword sampling. Then the last
        shape is as long as the config's maxima, so that the shapes are right for every epoch.

    Raises:
      UserError: no pair is within the maxima.
    """
    longest = make_longest_shape(config)
    if config.batching == "pack":
        return (longest,)
    fits = fitting(source_lengths, target_lengths, config=config)
    if not fits.any():
        raise UserError(_all_too_long(source_lengths, target_lengths, config))
    least = (longest.source, longest.target) if headroom else (0, 0)
    return make_shapes(source_lengths[fits], target_lengths[fits], config=config, least=least)


def make_longest_shape(config: DataConfig) -> Shape:
    """The shape of the longest sentences that the config allows; a language model's source has none."""
    source = config.max_source_length if config.source_language else 0
    return _with_rows(source, config.max_target_length, config)


def fitting(source_lengths: np.ndarray, target_lengths: np.ndarray, *, config: DataConfig) -> np.ndarray:
    """[N] bool: which pairs are within `max_source_length` and `max_target_length`."""
    return (source_lengths <= config.max_source_length) & (target_lengths <= config.max_target_length)


def smallest_shape(
    source_lengths: np.ndarray, target_lengths: np.ndarray, shapes: tuple[Shape, ...]
) -> np.ndarray:
    """[N] the number of the first shape that holds each pair; `len(shapes)` if none does.

    Of the shapes (B, 8, 8) and (B, 12, 16), pairs (5, 8), (5, 9) and (13, 2) take 0, 1 and 2: none.
    """
    by_source = np.searchsorted([shape.source for shape in shapes], source_lengths)
    by_target = np.searchsorted([shape.target for shape in shapes], target_lengths)
    return np.maximum(by_source, by_target)


def _all_too_long(source_lengths: np.ndarray, target_lengths: np.ndarray, config: DataConfig) -> str:
    longest = f"data.max_target_length {config.max_target_length}"
    if not config.source_language:
        return (
            f"all {len(target_lengths)} training sentences are longer than {longest} tokens (the shortest "
            f"has {target_lengths.min()}); raise it"
        )
    return (
        f"all {len(target_lengths)} training pairs are longer than data.max_source_length "
        f"{config.max_source_length} or {longest} tokens (the shortest sides have {source_lengths.min()} and "
        f"{target_lengths.min()}); raise them"
    )


def _with_rows(source: int, target: int, config: DataConfig) -> Shape:
    multiple = config.row_multiple
    rows = config.batch_tokens // max(source, target)
    if config.batch_pairs:
        rows = min(rows, config.batch_pairs)
    return Shape(max(rows // multiple * multiple, multiple), source, target)


def _levels(lengths: np.ndarray, multiple: int, least: int, most: int) -> np.ndarray:
    """The lengths, ascending, that a shape may have on one side: multiples that occur, the longest always.

    None is rounded beyond `most`, the config's maximum, where the model's positions may end.
    """
    most = max(most, int(lengths.max(initial=0)))
    rounded = np.minimum(-(-lengths.astype(np.int64) // multiple) * multiple, most)
    values, counts = np.unique(rounded, return_counts=True)
    if len(values) > _MAX_LEVELS:  # spread so that each step covers an equal share of all tokens
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
    """The chain of at most `num_shapes` (source, target), ending in the largest, with the least padded work.

    A pair takes the first shape of the chain that holds it. So going from one shape to the next costs the
    work of a row times the pairs that fit the next but not this one: the best chain is a shortest path.
    """
    cells = np.searchsorted(sources, source_lengths) * len(targets) + np.searchsorted(targets, target_lengths)
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
