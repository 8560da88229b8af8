"""The table of sines and cosines that documents 000, 001 and 003 write down alike (004 computes its own).

Knows nothing of what position a document counts from, or of the type it rounds to.
"""

import numpy as np
import torch


def sinusoid_table(length: int, width: int) -> torch.Tensor:
    """Rows for positions 0 to `length` - 1, [length, width] in float64.

    Columns 2i and 2i + 1 are sine and cosine of position / 10000^(2i / width); an odd width ends in a sine.
    """
    column = np.arange(width)
    angles = np.arange(length)[:, None] / np.power(10000.0, 2 * (column // 2) / width)
    return torch.from_numpy(np.where(column % 2 == 0, np.sin(angles), np.cos(angles)))
