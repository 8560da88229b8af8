"""The lock of a run directory: at most one training writes to a run at a time.

The lock is RUN/.lock, locked by the operating system, which releases it when its owner ends in whatever way.
A file that a killed owner left behind therefore locks nothing, and the next owner takes it over. A run in an
object store has a lock there too (object_store/owner_lock.py).
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.file_lock import FileHasNoLock, open_locked
from flaxformer_mt.object_store import working_copies

_NAME = ".lock"


@contextlib.contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run while the body runs; create the run directory if it is absent.

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
            with working_copies.own_run(run_dir):
                yield
        finally:
            # While it is still locked: afterwards the file may be that of another owner.
            with contextlib.suppress(OSError):
                (run_dir / _NAME).unlink()
            _remove_empty(absent)


def _take(path: Path) -> BinaryIO:
    try:
        file = open_locked(path)
    except BlockingIOError:
        raise UserError(
            f"{path.parent} is being trained by {_read_owner(path)}; wait until it ends, or give another "
            "--run=DIR"
        ) from None
    except FileHasNoLock as error:
        warn_user(f"the file system of {path.parent} has no locks; train only once in it at a time")
        assert error.stream is not None
        file = error.stream
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode())
    file.flush()
    return file


def _read_owner(path: Path) -> str:
    try:
        with path.open("rb") as file:
            owner = json.loads(file.read(1000))
        return f"process {owner['process']} on host {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # not written yet, or removed since
        return "another process"


def _remove_empty(folders: list[Path]) -> None:
    """Remove the folders, innermost first, up to the first that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
