"""Sinusoids in halves: the layouts of systems whose positions are all sines, then all cosines.

Owns the order of the width, and its way through a layout. Ours alternate, sine and cosine, so their column i
is our column 2i in the first half. The residual stream of a whole model may be permuted if every array that
reads it or writes to it is permuted alike: the function stays the same, and no number changes.
"""

import numpy as np

from flaxformer_mt.convert.array_layouts import Layout, Shape


def half_split_order(width: int) -> np.ndarray:
    """Which of our columns is theirs, for each of theirs: width 5 gives 0, 2, 4, 1, 3."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def half_split(layout: Layout, axis: int) -> Layout:
    """A layout that also reorders the width, which is `axis` of our array."""

    def to_theirs(array: np.ndarray) -> np.ndarray:
        return layout.to_theirs(np.take(array, half_split_order(array.shape[axis]), axis))

    def to_ours(array: np.ndarray, shape: Shape) -> np.ndarray:
        back = np.argsort(half_split_order(shape[axis]))
        return np.take(layout.to_ours(array, shape), back, axis)

    return Layout(to_theirs, to_ours)
