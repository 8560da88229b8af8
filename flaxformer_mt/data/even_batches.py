"""Batches of one shape with about equally many tokens each, though their pairs are drawn at random.

Row 4 of the data path. Contains the dealing of pairs to the batches of a shape; `batching` decides which
pairs these are. A network that computes no padding has room for the fullest batch in all of them, so a batch
that is fuller than the others costs time.
"""

import numpy as np


def deal_evenly(
    pairs: np.ndarray,
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    rows: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Return the pairs in an order whose consecutive batches of `rows` have similar numbers of tokens.

    The pairs are sorted by target length and cut into groups of one pair for each batch. The batch with the
    fewest source tokens so far takes the pair with the longest source of a group. Between equals chance
    decides, and so it does about the order of a batch: each pair is in each batch and each row equally often.
    Pairs beyond the last full batch stay where they are.

    Of target lengths [9, 3, 8, 4, 5] in 2 batches of 2 rows, one of 3 and 4 and one of 8 and 9 tokens form a
    batch, and the pair of 5 stays at the end.

    Args:
      pairs: [N] numbers of pairs, in random order.
      source_lengths, target_lengths: [N] number of tokens of each of them.
      rows: number of pairs in a batch.
    """
    batches = len(pairs) // rows
    full = batches * rows
    source, target = source_lengths[:full], target_lengths[:full]
    # Sources of neighbouring target lengths are sorted in opposite directions, so that a group at the border
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
