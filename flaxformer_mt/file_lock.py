"""File locks, which the operating system releases when their owner ends, even if it is killed."""

import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

# Answers of a file system that has no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class FileHasNoLock(Exception):
    """Raised when the file system does not support locks; `stream` is the file that `open_locked` opened."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        super().__init__("the file system has no locks")
        self.stream = stream


def lock(file: int, *, wait: bool = False) -> None:
    """Lock an open file or folder until it is closed; raise FileHasNoLock if the file system has no locks.

    If another process holds the lock, wait for it or, without `wait`, raise BlockingIOError.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise FileHasNoLock from error
        raise


def open_locked(path: Path) -> BinaryIO:
    """Open or create a file to read and write, and lock it until it is closed; errors are as in `lock`."""
    while True:
        stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            lock(stream.fileno())
            if is_at(path, stream.fileno()):
                return stream
        except FileHasNoLock as error:
            raise FileHasNoLock(stream) from error
        except OSError:
            stream.close()
            raise
        stream.close()  # its owner has renamed or removed it in between: begin anew


def is_at(path: Path, file: int) -> bool:
    """Return whether `path` still refers to the open file or folder, which may have been moved or removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
