"""Packing of several sentence pairs into one row: first-fit decreasing, in many windows at once.

Row 4 of the data path. Decides from the lengths which pairs share a row; `batching` forms batches of the
rows.
"""

import numpy as np

# Number of pairs that are packed together. Larger windows fill rows slightly better and take longer.
_WINDOW = 1024
# Windows packed in parallel: enough to hide the overhead of Python, few enough to stay in the CPU cache.
_WINDOWS_AT_ONCE = 512


def pack_rows(
    source_lengths: np.ndarray, target_lengths: np.ndarray, *, source: int, target: int
) -> tuple[np.ndarray, int]:
    """Assign pairs to rows of `source` and `target` tokens; return the row of each pair and the row count.

    With rows of 10 and 10 tokens, the pairs (6, 5), (5, 5), (4, 5) go to rows 0, 1, 0.
    Only pairs of the same window of consecutive pairs share a row: shuffled pairs give another packing in
    each epoch.

    Args:
      source_lengths, target_lengths: [N] number of tokens of each pair, at most those of a row.
      source, target: number of tokens that a row holds; `source` is 0 for a language model.
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
    """[windows, pairs per window]: consecutive lengths, the last window padded with zeros."""
    window = min(_WINDOW, len(lengths))
    padded = np.zeros(-(-len(lengths) // window) * window, np.int32)
    padded[: len(lengths)] = lengths
    return padded.reshape(-1, window)


def _pack_windows(
    source_lengths: np.ndarray, target_lengths: np.ndarray, source: int, target: int
) -> tuple[np.ndarray, np.ndarray]:
    """First-fit decreasing packing of each window; all windows place their k-th pair in one step.

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
