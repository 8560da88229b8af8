"""An array in a file: a model of gigabytes is read array by array, and is never in memory twice."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class StoredArray(NamedTuple):
    """An array whose shape is known, and whose numbers are read whenever it becomes a numpy array."""

    read: Callable[[], np.ndarray]
    shape: tuple[int, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)
