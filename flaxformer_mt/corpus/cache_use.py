"""Shared use of the cache folder, and the removal of what killed processes have left in it.

Each process that prepares data holds a shared lock of the cache folder until it ends, in whatever way. A
process that gets the lock alone knows that nobody else is writing: every temporary file is a leftover.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from flaxformer_mt import file_lock

_NAME = ".lock"
# Names of temporary files and folders. No finished file has such a name.
_TEMPORARY = (
    "vocabularies/*/.*.model.*",
    *(
        f"{folder}/*.{kind}?*"
        for folder in ("cleaned", "alignments", "weights", "scans")
        for kind in ("json", "npy")
    ),
    "scans/tmp????????",  # of earlier versions
    "tfds/**/incomplete.*",
    "tfds/**/.*.files.json?*",
    # Without a dot at the end they are unfinished: the next build goes on with them.
    "tokens/.tokens-*.*",
    "tokens/process-*/.tokens-*.*",
)

_guard = threading.Lock()
# File descriptors of the locks of this process, by cache folder, and how many it keeps open.
_held: dict[Path, int] = {}
_MOST = 32


def use_cache(root: Path) -> None:
    """Mark the cache as in use until this process ends; remove leftovers first if nobody else uses it.

    A folder that cannot be written to has no leftovers to remove: whoever needs to write there says so.
    """
    with _guard:
        if root in _held:
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            file = os.open(root / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return
        # Where the file system has no locks, leftovers stay: somebody may be writing them.
        with contextlib.suppress(file_lock.FileHasNoLock):
            with contextlib.suppress(BlockingIOError):
                file_lock.lock(file)
                for path in _leftovers(root):
                    _remove(path)
            file_lock.lock(file, shared=True, wait=True)
        _held[root] = file
        while len(_held) > _MOST:
            os.close(_held.pop(next(iter(_held))))


def _leftovers(root: Path) -> Iterator[Path]:
    for pattern in _TEMPORARY:
        yield from root.glob(pattern)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
