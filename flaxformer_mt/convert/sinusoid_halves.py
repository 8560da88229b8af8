"""Layouts for systems whose sinusoidal positions are all sines followed by all cosines.

Contains the permutation of the model width and its combination with another layout. Sines and cosines of this
package alternate, so column i of the first half of a foreign array is Flax column 2i. A model computes the
same function if every array that reads or writes the residual stream is permuted in the same way, and the
permutation changes no number.
"""

import numpy as np

from flaxformer_mt.convert.array_layouts import Layout, Shape


def half_split_order(width: int) -> np.ndarray:
    """Return the Flax column of each foreign column: width 5 gives 0, 2, 4, 1, 3."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def half_split(layout: Layout, axis: int) -> Layout:
    """Return a layout that also permutes the model width, which is axis `axis` of the Flax array."""

    def to_foreign(array: np.ndarray) -> np.ndarray:
        return layout.to_foreign(np.take(array, half_split_order(array.shape[axis]), axis))

    def to_flax(array: np.ndarray, shape: Shape) -> np.ndarray:
        inverse = np.argsort(half_split_order(shape[axis]))
        return np.take(layout.to_flax(array, shape), inverse, axis)

    return Layout(to_foreign, to_flax)
