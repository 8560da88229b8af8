"""Layouts of arrays: how the axes of a Flax array map to those of a foreign array, and back.

Contains transpositions and reshapes only. No number changes, so a conversion followed by its inverse gives
the same array, bit for bit. Names of arrays are in name_table.py.

Flax shapes by role: query, key and value kernels [D, H, K] with biases [H, K], attention output [H, E, D],
dense kernels [in, out].
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """A conversion and its inverse; `to_flax` needs the Flax shape, to which it splits flattened axes."""

    to_foreign: Callable[[np.ndarray], np.ndarray]
    to_flax: Callable[[np.ndarray, Shape], np.ndarray]


def _transposed(array: np.ndarray) -> np.ndarray:
    return array.T


# Unchanged.
SAME = Layout(lambda a: a, lambda a, shape: a)
# [in, out] -> [out, in], as in PyTorch's Linear.
TRANSPOSED = Layout(_transposed, lambda a, shape: a.T)
# [D, H, K] -> [HK, D], as in PyTorch's Linear; the rows of one head are contiguous.
HEADS_IN = Layout(
    lambda a: a.reshape(len(a), -1).T,
    lambda a, shape: a.T.reshape(shape),
)
# [H, E, D] -> [D, HE], as in PyTorch's Linear.
HEADS_OUT = Layout(
    lambda a: a.reshape(-1, a.shape[-1]).T,
    lambda a, shape: a.T.reshape(shape),
)
# [H, K] -> [HK].
FLAT = Layout(lambda a: a.reshape(-1), lambda a, shape: a.reshape(shape))
# [H, E, D] -> [HE, D].
FLAT_ROWS = Layout(lambda a: a.reshape(-1, a.shape[-1]), lambda a, shape: a.reshape(shape))
# [D, H, K] -> [H, D, K]: one matrix per head.
HEAD_STACKED = Layout(lambda a: a.transpose(1, 0, 2), lambda a, shape: a.transpose(1, 0, 2))
# [1, in, out] -> [out, in, 1]: a Flax convolution to a PyTorch Conv1d.
CONVOLUTION_BOTH = Layout(lambda a: a.transpose(2, 1, 0), lambda a, shape: a.transpose(2, 1, 0))
# [1, in, out] -> [out, in]: a Flax convolution of kernel size 1 to a PyTorch Linear.
CONVOLUTION_TO_LINEAR = Layout(lambda a: a[0].T, lambda a, shape: a.T[None])
# [V] -> [1, V].
ROW = Layout(lambda a: a[None], lambda a, shape: a[0])
