"""The lock of a run directory: at most one training writes to a run at a time.

The lock is RUN/.lock, locked by the operating system, which releases it when its owner ends in whatever way.
A file that a killed owner left behind therefore locks nothing, and the next owner takes it over.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flaxformer_mt.errors import UserError, warn_user

_NAME = ".lock"
# Answers of a file system that has no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextlib.contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Holds the lock of a run while the body runs; creates the run directory if it is absent.

    Directories that this function creates and that are empty afterwards are removed again.

    Raises:
      UserError: another process holds the lock, or the directory is not writable.
    """
    absent = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = _take(run_dir / _NAME)
    except OSError as error:
        _remove_empty(absent)
        raise UserError(f"cannot write to the run directory {run_dir}: {error.strerror}") from error
    with file:
        try:
            yield
        finally:
            # While it is still locked: afterwards the file may be that of another owner.
            with contextlib.suppress(OSError):
                (run_dir / _NAME).unlink()
            _remove_empty(absent)


def _take(path: Path) -> BinaryIO:
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise UserError(
                    f"{path.parent} is being trained by {_read_owner(file)}; wait until it ends, or give "
                    "another --run=DIR"
                ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            warn_user(f"the file system of {path.parent} has no locks; train only once in it at a time")
        if _is_at(path, file):
            break
        file.close()  # its owner has removed it meanwhile
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode())
    file.flush()
    return file


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _read_owner(file: BinaryIO) -> str:
    file.seek(0)
    try:
        owner = json.loads(file.read(1000))
        return f"process {owner['process']} on host {owner['host']}"
    except (ValueError, KeyError, TypeError):  # the owner has not written it yet
        return "another process"


def _remove_empty(folders: list[Path]) -> None:
    """Removes the folders, innermost first, up to the first that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
