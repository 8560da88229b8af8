"""Runs in object stores, for everything that reads and writes run directories: each is a local folder.

`open_copy` turns the URL of a run into that folder. The other functions are called where runs are read and
written: they do nothing for a folder that is no copy of a run in a store.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flaxformer_mt.config.user_cache import user_cache_dir
from flaxformer_mt.errors import (
    TrainingInterrupted,
    UserError,
    find_url,
    folder_of_arrays,
    name_urls,
    show_as,
)
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.lease import Lease
from flaxformer_mt.object_store.mirror import Mirror

_guard = threading.Lock()
# The copies of this process, by URL, and the files whose locks it holds until it ends.
_mirrors: dict[str, Mirror] = {}
_locked: list[int] = []


def open_copy(run: str | Path) -> Path:
    """The folder of a run: that of a path, with its ~ expanded, or the local copy of the run at a URL.

    The copy is made equal to the store, but for the arrays of checkpoints, which follow when they are read.

    Raises:
      UserError: the store cannot be read.
    """
    if not (url := find_url(run)):
        folder = folder_of_arrays(run)
        refresh(folder)
        return folder
    with _guard:
        if url not in _mirrors:
            store = ObjectStore(url)
            root = _take_folder(url)
            show_as(root, url)
            _mirrors[url] = Mirror(store, root)
        mirror = _mirrors[url]
    _pull(mirror)
    return mirror.root


def close_copies() -> None:
    """Ends the use of all copies of this process; other processes may use their folders."""
    with _guard:
        _mirrors.clear()
        while _locked:
            os.close(_locked.pop())


def refresh(folder: Path) -> None:
    """Makes the copy that this folder is equal to the store, unless this process owns the run."""
    if (mirror := _find(folder)) is not None:
        _pull(mirror)


def fetch(folder: Path, wanted: Callable[[str], bool]) -> None:
    """Fetches the files of a folder that `wanted` selects by their names in it."""
    if (mirror := _find(folder)) is not None:
        mirror.fetch(folder, wanted)


def publish_folder(folder: Path) -> None:
    """Uploads a complete checkpoint."""
    if (mirror := _find(folder)) is not None:
        mirror.publish_folder(folder)


def withdraw_folder(folder: Path) -> None:
    """Removes a checkpoint from the store."""
    if (mirror := _find(folder)) is not None:
        mirror.withdraw_folder(folder)


def publish_files(folder: Path) -> None:
    """Uploads the changed files of a run, but for checkpoints; only the first process of a job calls it."""
    if (mirror := _find(folder)) is not None:
        mirror.publish_files()


def publish_run(folder: Path) -> None:
    """Uploads all of a new run; of several processes, only the first calls it."""
    if (mirror := _find(folder)) is not None:
        mirror.publish_run()


@contextlib.contextmanager
def own_run(folder: Path) -> Iterator[None]:
    """Holds the lease of the run while the body runs; uploads its changed files at the end.

    Raises:
      UserError: another process trains the run.
    """
    mirror = _find(folder)
    if mirror is None:
        yield
        return
    lease = Lease(mirror.store)
    lease.acquire()
    try:
        mirror.pull()
        mirror.sweep()
        mirror.lease = lease
        try:
            yield
        except (UserError, TrainingInterrupted):  # the log tells what has happened
            with contextlib.suppress(UserError):
                mirror.publish_files()
            raise
        mirror.publish_files()
    finally:
        mirror.lease = None
        lease.release()


def to_url(folder: Path) -> str:
    """A text that names a folder to all processes of a job, whose copies differ."""
    return name_urls(str(folder))


def to_local(text: str) -> Path:
    """The folder that `to_url` has named in another process."""
    for url, mirror in _mirrors.items():
        if text == url or text.startswith(f"{url}/"):
            return mirror.root / text[len(url) :].lstrip("/")
    return Path(text)


def send_parts(folder: Path) -> None:
    """Uploads what this process has written of a hidden folder."""
    if (mirror := _find(folder)) is not None:
        mirror.send_parts(folder)


def collect_parts(folder: Path) -> None:
    """Fetches what the other processes of the job have uploaded of a hidden folder."""
    if (mirror := _find(folder)) is not None:
        mirror.collect_parts(folder)


def _find(folder: Path) -> Mirror | None:
    """The copy that a folder belongs to; None for all others."""
    if not _mirrors:
        return None
    folder = folder.absolute()
    return next((mirror for mirror in _mirrors.values() if folder.is_relative_to(mirror.root)), None)


def _pull(mirror: Mirror) -> None:
    if mirror.lease is None:
        mirror.pull()


def _take_folder(url: str) -> Path:
    """A folder for a copy that no other process uses; one that was used before still has its files."""
    name = url.rpartition("/")[2]
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    base = user_cache_dir().resolve() / "stores" / f"{name}-{digest}"
    for number in itertools.count():
        place = base / str(number)
        try:
            place.mkdir(parents=True, exist_ok=True)
            file = os.open(place / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        except OSError as error:
            raise UserError(
                f"{url} needs a local copy in {base}, which cannot be made: {error.strerror}; set another "
                "cache folder with FLAXFORMER_MT_CACHE"
            ) from error
        _locked.append(file)
        return place / name
    raise AssertionError("numbers do not end")
