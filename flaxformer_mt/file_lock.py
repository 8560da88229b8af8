"""Locks of files and folders, which the operating system releases when their owner ends in whatever way.

Knows neither what is written into a locked file nor how a refusal is worded.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO, Any, BinaryIO

# Answers of a file system that has no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class FileHasNoLock(Exception):
    """The file system has no locks; `stream` is the open file."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__("the file system has no locks")
        self.stream = stream


def lock(file: int | IO[Any], kind: int) -> bool:
    """Locks an open file or folder until it is closed; returns False if the file system has no locks.

    Args:
      kind: as `fcntl.flock` takes it: LOCK_EX or LOCK_SH, with LOCK_NB so as not to wait.

    Raises:
      BlockingIOError: another process has locked it, and LOCK_NB is given.
    """
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def open_locked(path: Path) -> BinaryIO:
    """Opens a file for reading and writing, without changing it, and locks it until it is closed.

    The file is created if it is absent.

    Raises:
      BlockingIOError: another process has locked the file.
      FileHasNoLock: the file system has no locks; the caller decides whether to go on without one.
      OSError: the file cannot be opened.
    """
    while True:
        stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            locked = lock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if locked and _is_at(path, stream):
                return stream
        except OSError:
            stream.close()
            raise
        if not locked:
            raise FileHasNoLock(stream)
        stream.close()  # its owner has renamed or removed it in between: begin anew


def _is_at(path: Path, stream: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False
