"""Runs in object stores: a local folder is kept as a copy of each run, and the other modules use this folder.

`open_copy` returns the folder for the URL of a run. The other functions, such as `fetch` and `publish`,
synchronize this folder and the store. For a folder that is not the copy of a run, they do nothing.

    Reading     Small files are fetched when the run is opened, the arrays of a checkpoint when they are read.
    Publishing  An object appears atomically, but a folder does not. So the manifest of a checkpoint is
                uploaded last, and a checkpoint without manifest counts as absent, like a run without
                config.json. If a checkpoint is written again, it is absent until it is complete.
    Parts       Each process of a job has its own copy. It uploads its shards of a checkpoint to
                `checkpoints/.writing-...`; process 0 fetches the other shards and seals the checkpoint.

The objects that a killed process leaves are ignored; the next owner of the run removes them.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.files import user_cache_dir
from flaxformer_mt.errors import (
    TrainingInterrupted,
    UserError,
    find_url,
    folder_of_arrays,
    local_path,
    name_urls,
    show_as,
)
from flaxformer_mt.file_lock import FileHasNoLock, open_locked
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.owner_lock import OwnerLock


class Mirror:
    """Copies files between an object store and the local folder `root`, by name."""

    def __init__(self, store: ObjectStore, root: Path) -> None:
        self.store, self.root = store, root
        # Name -> version of each object when the store was last listed.
        self.objects: dict[str, str] = {}
        # For each file that equals its object: the version of the object, and size and time of the file.
        self.equal: dict[str, list[str | int]] = {}

    def is_equal(self, name: str) -> bool:
        """Return whether file and object are both unchanged since one was copied to the other."""
        path = self.root / name
        return name in self.objects and path.is_file() and self.equal.get(name) == self._describe(name)

    def fetch(self, names: Iterable[str]) -> None:
        """Download objects that differ from their files; raise FileNotFoundError if one has been removed."""
        wanted = [name for name in names if name in self.objects and not self.is_equal(name)]
        self.store.download((name, self.root / name) for name in wanted)
        self.note(wanted)

    def upload(self, names: Iterable[str]) -> None:
        """Upload the named files; then list the store again."""
        names = list(names)
        self.store.upload((self.root / name, name) for name in names)
        self.objects = self.store.list()
        self.note(names)

    def note(self, names: Iterable[str]) -> None:
        """Record that the named files and objects are equal now, if both exist."""
        for name in names:
            if name in self.objects and (self.root / name).is_file():
                self.equal[name] = self._describe(name)

    def _describe(self, name: str) -> list[str | int]:
        stat = (self.root / name).stat()
        return [self.objects[name], stat.st_size, stat.st_mtime_ns]


def cache_of(url: str) -> Path:
    digest = hashlib.blake2b(os.fsencode(url), digest_size=8).hexdigest()
    return user_cache_dir().resolve() / "stores" / digest


_CONFIG, _MANIFEST = "config.json", "/manifest.json"
_CHECKPOINTS, _WRITING = "checkpoints/", "checkpoints/.writing-"
# Folders that no command reads.
_NOT_READ = ("tensorboard/", "profile/", "plots/", "wandb/")


class _Copy(Mirror):
    """The local copy of one run; callers hold the lock `guard` while they call a method."""

    def __init__(self, url: str) -> None:
        store = ObjectStore(url)
        self.folder_lock, root = _take_folder(url)
        super().__init__(store, root)
        self.guard = threading.RLock()
        weakref.finalize(self, self.folder_lock.close)
        self.owner_lock: OwnerLock | None = None

    def refresh(self, folder: Path) -> None:
        if self.owner_lock is None:
            self.objects = self.store.list()
            seen = self.seen()
            for name in self.files():
                if name not in seen or not self.is_equal(name):
                    (self.root / name).unlink()
                    with contextlib.suppress(OSError):
                        os.removedirs((self.root / name).parent)  # those that are empty
            self.root.mkdir(parents=True, exist_ok=True)
            self.get(n for n in seen if not n.startswith(_CHECKPOINTS) or n.count("/") == 2)

    def fetch_folder(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        prefix = f"{self.name(folder)}/"
        absent = (n for n in self.seen() if n.startswith(prefix) and not (self.root / n).exists())
        self.get(n for n in absent if wanted(n[len(prefix) :]))

    def publish(self, folder: Path) -> None:
        """Upload the changed files in `folder` (a complete checkpoint or the run) and outside checkpoints.
        A run that is not in the store yet is uploaded only if `folder` is the run directory itself.
        """
        if _CONFIG not in self.objects:
            if folder != self.root:
                return
            self.sweep(_CHECKPOINTS)  # those of a run that was never complete
        within = "" if folder == self.root else f"{self.name(folder)}/"
        names = [n for n in self.files() if n.startswith(within) or not n.startswith(_CHECKPOINTS)]
        changed = {n for n in names if not self.is_equal(n)}
        for manifest in [n for n in changed if n in self.objects and n.startswith(_CHECKPOINTS)]:
            # New metrics change only the manifest; changed arrays mean another checkpoint.
            if any(n != manifest and n.startswith(f"{_folder_of(manifest)}/") for n in changed):
                self.remove(_folder_of(manifest))
                changed |= {n for n in names if n.startswith(f"{_folder_of(manifest)}/")}
        for rank in range(3):  # a manifest after what it lists, config.json last
            if now := [n for n in changed if (2 if n == _CONFIG else n.endswith(_MANIFEST)) == rank]:
                self.check_owner()
                self.upload(now)
        if within:
            self.sweep(f"{within[:-1].replace(_CHECKPOINTS, _WRITING)}-")  # not what a job writes meanwhile

    def send_parts(self, folder: Path) -> None:
        """Upload from the hidden `folder` the files that this process has written."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self.store.upload((path, self.name(path)) for path in paths)

    def collect_parts(self, folder: Path) -> None:
        """Fetch into the hidden `folder` the files that the other processes of the job have uploaded."""
        parts = self.store.list(self.name(folder))
        self.objects |= parts
        self.store.download((n, self.root / n) for n in parts if not (self.root / n).exists())

    def check_owner(self) -> None:
        if self.owner_lock is not None:
            self.owner_lock.check()

    def sweep(self, prefix: str) -> None:
        """Remove incomplete checkpoints, left by killed processes, whose object names begin with `prefix`."""
        for folder in {_folder_of(n) for n in self.objects if n.startswith(prefix)}:
            if folder + _MANIFEST not in self.objects or _CONFIG not in self.objects:
                self.remove(folder)

    def seen(self) -> set[str]:
        """Return the names of the objects that commands read, without those of incomplete checkpoints."""
        if _CONFIG not in self.objects:
            return set()
        names = (n for n in self.objects if not _is_hidden(n) and not n.startswith(_NOT_READ))
        return {
            n for n in names if not n.startswith(_CHECKPOINTS) or _folder_of(n) + _MANIFEST in self.objects
        }

    def files(self) -> list[str]:
        """Return the names of the local files, without hidden files, which are still being written."""
        names = (self.name(path) for path in self.root.rglob("*") if path.is_file())
        return [name for name in names if not _is_hidden(name)]

    def get(self, names: Iterable[str]) -> None:
        """Fetch files; a file that was removed meanwhile is reported later, by the code that needs it."""
        with contextlib.suppress(FileNotFoundError):
            self.fetch(names)

    def remove(self, folder: str) -> None:
        """Remove a checkpoint's objects, the manifest first, so that the checkpoint is absent at once."""
        self.check_owner()
        names = {n for n in self.objects if n.startswith(f"{folder}/")}
        self.store.remove(sorted(names, key=lambda n: n != folder + _MANIFEST))
        self.objects = {n: version for n, version in self.objects.items() if n not in names}

    def name(self, path: Path) -> str:
        return path.absolute().relative_to(self.root).as_posix()


# The copies of this process, by URL.
_copies: dict[str, _Copy] = {}
_guard = threading.Lock()


def _where_copied(method: Callable[..., None]) -> Callable[..., None]:
    """Make a function that calls a method of the copy to which a folder belongs, if there is one."""

    @functools.wraps(method)
    def call(folder: Path, *arguments: Any) -> None:
        if (copy := _find(folder)) is not None:
            with copy.guard:
                method(copy, folder, *arguments)

    return call


refresh = _where_copied(_Copy.refresh)
fetch = _where_copied(_Copy.fetch_folder)
publish = _where_copied(_Copy.publish)
withdraw = _where_copied(lambda copy, folder: copy.remove(copy.name(folder)))
send_parts = _where_copied(_Copy.send_parts)
collect_parts = _where_copied(_Copy.collect_parts)


def open_copy(run: str | Path) -> Path:
    """Return the folder of a run: for a path, the path with ~ expanded; for a URL, the local copy of the run.

    The copy is updated from the store, except for the arrays of checkpoints, which are fetched when they are
    read.
    """
    if url := find_url(run):
        with _guard:
            if url not in _copies:
                _copies[url] = _Copy(url)
                show_as(_copies[url].root, url)
    folder = _copies[url].root if url else folder_of_arrays(run)
    refresh(folder)
    return folder


@contextlib.contextmanager
def own_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a run in an object store during the body; at its end, upload the changed files."""
    if (copy := _find(folder)) is None:
        yield
        return
    lock = OwnerLock(copy.store)
    try:
        copy.refresh(folder)
        copy.sweep(_CHECKPOINTS)
        copy.owner_lock = lock
        try:
            yield
        except (UserError, TrainingInterrupted):  # the log tells what has happened
            with contextlib.suppress(UserError):
                publish(folder)
            raise
        publish(folder)
    finally:
        copy.owner_lock = None
        lock.release()


def to_url(folder: Path) -> str:
    """Return a folder as text that is valid in all processes of a job; a local copy becomes its URL."""
    return name_urls(str(folder))


def to_local(text: str) -> Path:
    for url, copy in _copies.items():
        if f"{text}/".startswith(f"{url}/"):
            return copy.root / text[len(url) :].lstrip("/")
    return Path(text)


def _find(folder: Path) -> _Copy | None:
    folder = folder.absolute()
    return next((copy for copy in _copies.values() if folder.is_relative_to(copy.root)), None)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _folder_of(name: str) -> str:
    """Return the folder of a checkpoint's file: checkpoints/5 for checkpoints/5/params/d."""
    return "/".join(name.split("/")[:2])


def _take_folder(url: str) -> tuple[BinaryIO, Path]:
    """Return the lock of an empty folder for a copy, and the folder; no other process uses the folder."""
    for place in (cache_of(url) / str(number) for number in itertools.count()):
        try:
            place.mkdir(parents=True, exist_ok=True)
            lock = open_locked(place / "lock")
            root = place / url.rpartition("/")[2]
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            return lock, root
        except BlockingIOError:
            continue
        except (OSError, FileHasNoLock) as error:
            remedy = "set another cache folder with FLAXFORMER_MT_CACHE"
            raise UserError(
                f"{url} needs a copy in {place}, which cannot be made: {error}; {remedy}"
            ) from error
    raise AssertionError("numbers do not end")


# The folders of outputs that are being made, and where they go.
_outputs: dict[Path, tuple[ObjectStore, str]] = {}
# The record, for the next command, of the files of an input folder that equal their objects.
_EQUAL = ".equal.json"


def fetch_input(path: str | Path) -> Path:
    """Return a path with ~ expanded; for a URL, return a local copy of the file or folder at the URL."""
    if not (url := find_url(path)):
        return local_path(path)
    above, _, name = url.rpartition("/")
    folder = cache_of(above) / "inputs"
    if not fetch_files(above, folder, below=name):
        raise UserError(f"{url} does not exist; correct the URL")
    show_as(folder, above)
    return folder / name


def fetch_files(
    url: str, folder: Path, *, below: str = "", wanted: Collection[str] | None = None
) -> list[str]:
    """Fetch the `wanted` objects (None: all) below a URL into `folder`; return the names of all objects.

    Files whose objects have not changed since they were fetched are not fetched again, so they keep their
    modification times. Files whose objects have been removed are deleted.
    """
    mirror, record = Mirror(ObjectStore(url), folder), folder / _EQUAL
    try:
        mirror.equal = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass
    mirror.objects = mirror.store.list(below)
    for name in [name for name in mirror.equal if f"{name}/".startswith(f"{below}/" if below else "")]:
        if name not in mirror.objects:
            (folder / name).unlink(missing_ok=True)
            del mirror.equal[name]
    try:
        mirror.fetch(name for name in mirror.objects if wanted is None or name in wanted)
    except FileNotFoundError as error:
        raise UserError(f"{url} has changed while it was read ({error}); run the command again") from error
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(record, json.dumps(mirror.equal).encode())
    return sorted(mirror.objects)


def open_output(path: str | Path, *, empty: bool = False) -> Path:
    """Return a path with ~ expanded; for a URL, return a local path, from which `publish_output` uploads.

    With `empty`, raise UserError if the URL already has files.
    """
    if not (url := find_url(path)):
        return local_path(path)
    above, _, name = url.rpartition("/")
    store = ObjectStore(above)
    if (present := store.list(name)) and empty:
        raise UserError(f"{url} is not empty: it has {', '.join(sorted(present)[:3])}; give another --output")
    folder = cache_of(url) / "outputs" / secrets.token_hex(4)  # another command may write to this URL
    folder.mkdir(parents=True)
    show_as(folder, above)
    _outputs[folder / name] = (store, name)
    return folder / name


def publish_output(path: Path) -> None:
    """Upload the file or folder at a path that `open_output` returned for a URL, then delete it locally."""
    if path in _outputs:
        store, name = _outputs.pop(path)
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        store.upload(
            (file, f"{name}/{file.relative_to(path).as_posix()}".removesuffix("/.")) for file in files
        )
        shutil.rmtree(path.parent, ignore_errors=True)
