"""How an array of ours lies in a foreign one: each layout with its inverse.

Owns moves of axes alone; no number changes, so going there and back is the identity, bit for bit. Knows
nothing of names.

Ours, by role: attention kernels [D, H, K] with biases [H, K], attention output [H, E, D], dense [in, out].
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """A move of axes. `to_ours` also takes the shape of our array, which says what was flattened."""

    to_theirs: Callable[[np.ndarray], np.ndarray]
    to_ours: Callable[[np.ndarray, Shape], np.ndarray]


def _transposed(array: np.ndarray) -> np.ndarray:
    return array.T


# As it is.
SAME = Layout(lambda a: a, lambda a, shape: a)
# [in, out] -> [out, in], as PyTorch's Linear.
TRANSPOSED = Layout(_transposed, lambda a, shape: a.T)
# [D, H, K] -> [HK, D], as PyTorch's Linear: heads are contiguous rows.
HEADS_IN = Layout(
    lambda a: a.reshape(len(a), -1).T,
    lambda a, shape: a.T.reshape(shape),
)
# [H, E, D] -> [D, HE], as PyTorch's Linear.
HEADS_OUT = Layout(
    lambda a: a.reshape(-1, a.shape[-1]).T,
    lambda a, shape: a.T.reshape(shape),
)
# [H, K] -> [HK].
FLAT = Layout(lambda a: a.reshape(-1), lambda a, shape: a.reshape(shape))
# [H, E, D] -> [HE, D].
FLAT_ROWS = Layout(lambda a: a.reshape(-1, a.shape[-1]), lambda a, shape: a.reshape(shape))
# [D, H, K] -> [H, D, K]: one matrix a head.
HEAD_STACKED = Layout(lambda a: a.transpose(1, 0, 2), lambda a, shape: a.transpose(1, 0, 2))
# [in, out] -> [out, in, 1], as PyTorch's Conv1d of width one.
CONVOLUTION = Layout(lambda a: a.T[:, :, None], lambda a, shape: a[:, :, 0].T)
# [1, in, out] -> [out, in, 1]: a convolution of ours as one of PyTorch's.
CONVOLUTION_BOTH = Layout(lambda a: a.transpose(2, 1, 0), lambda a, shape: a.transpose(2, 1, 0))
# [1, in, out] -> [out, in]: a convolution of ours as a Linear.
CONVOLUTION_TO_LINEAR = Layout(lambda a: a[0].T, lambda a, shape: a.T[None])
# [V] -> [1, V].
ROW = Layout(lambda a: a[None], lambda a, shape: a[0])
