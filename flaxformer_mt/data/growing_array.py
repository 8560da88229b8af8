"""A one-dimensional array in a file that grows at its end, for data of which nobody knows the size before."""

import os
from pathlib import Path

import numpy as np


class GrowingArray:
    """A one-dimensional .npy file that grows at its end.

    numpy reserves space in the header for the largest size, so that the header can be rewritten in place.
    """

    def __init__(self, path: Path, dtype: type | np.dtype, *, size: int = 0) -> None:
        """Make a file, or go on after the first `size` values of an unfinished one."""
        self.size = size
        self._dtype = np.dtype(dtype)
        self._file = path.open("r+b" if size else "wb")
        self._write_header()
        self._start = self._file.tell()
        self._file.truncate(self._start + size * self._dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, values: np.ndarray) -> None:
        """Write more values after those so far."""
        self._file.write(values.astype(self._dtype, copy=False).tobytes())
        self.size += len(values)

    def flush(self) -> None:
        """Wait until all values are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Complete the file, and wait until it is on the disk."""
        with self._file:
            self._file.seek(0)
            self._write_header()
            assert self._file.tell() == self._start, "the .npy header exceeds its reserved space"
            self._file.flush()
            os.fsync(self._file.fileno())

    def _write_header(self) -> None:
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": self._dtype.str, "fortran_order": False, "shape": (self.size,)}
        )
