"""Runs in object stores, for everything that reads and writes run directories: each is a local folder.

`open_copy` turns the URL of a run into that folder. The other functions are called where runs are read and
written: they do nothing for a folder that is no copy of a run in a store. The store holds the same files.

    Reading     Small files are fetched when the run is opened, the arrays of a checkpoint when they are read.
    Publishing  An object appears at once, a folder does not. So the manifest of a checkpoint is written last,
                and a checkpoint without one does not exist; nor does a run without config.json. What replaces
                a checkpoint is first written to `checkpoints/.replacing-STEP/`, which counts once it has a
                manifest.
    Parts       The processes of a job have copies of their own. Each uploads its shards of a checkpoint to
                `checkpoints/.writing-...`; the first one fetches those of the others, to seal all of them.

A process that is killed leaves objects that nobody sees; the next owner of the run removes them.
"""

import contextlib
import itertools
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Concatenate, ParamSpec

from flaxformer_mt.errors import (
    TrainingInterrupted,
    UserError,
    find_url,
    folder_of_arrays,
    name_urls,
    show_as,
)
from flaxformer_mt.file_lock import FileHasNoLock, open_locked
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.owner_lock import OwnerLock
from flaxformer_mt.object_store.transfers import cache_of

P = ParamSpec("P")

_CONFIG, _MANIFEST = "config.json", "/manifest.json"
_CHECKPOINTS, _WRITING, _REPLACING = "checkpoints/", "checkpoints/.writing-", "checkpoints/.replacing-"
# Folders that no command reads.
_NOT_READ = ("tensorboard/", "profile/", "plots/", "wandb/")


class _Copy:
    """The copy of one run; `guard` is held while one of its methods runs."""

    def __init__(self, url: str) -> None:
        self.store, self.guard = ObjectStore(url), threading.RLock()
        self.folder_lock, self.root = _take_folder(url)
        weakref.finalize(self, self.folder_lock.close)
        self.owner_lock: OwnerLock | None = None
        # All objects with their versions. Of files that equal their objects: these, and their own stamps.
        self.objects: dict[str, str] = {}
        self.equal: dict[str, tuple[str, str, tuple[int, int]]] = {}

    def refresh(self, folder: Path) -> None:
        """Make the copy equal to the store, unless this process owns the run."""
        if self.owner_lock is None:
            self.objects = self.store.list()
            sources = self.sources()
            for path in map(self.root.joinpath, self.files()):
                source = sources.get(self.name(path), "")
                if self.equal.get(self.name(path)) != (source, self.objects.get(source), _stamp(path)):
                    path.unlink()
                    with contextlib.suppress(OSError):
                        os.removedirs(path.parent)  # those that are empty
            self.root.mkdir(parents=True, exist_ok=True)
            self.download(n for n in sources if not n.startswith(_CHECKPOINTS) or n.count("/") == 2)

    def fetch(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        """Fetch the files of a folder that `wanted` selects by their names in it."""
        prefix = f"{self.name(folder)}/"
        self.download(n for n in self.sources() if n.startswith(prefix) and wanted(n[len(prefix) :]))

    def publish_folder(self, folder: Path) -> None:
        """Upload a complete checkpoint, and the changed files of the run before, such as the log."""
        if _CONFIG not in self.objects:
            return  # a new run, of which `publish_run` uploads everything
        self.publish_files(folder)
        name = self.name(folder)
        names, hidden = self.files(name), name.replace(_CHECKPOINTS, _REPLACING)
        if name + _MANIFEST in self.objects:
            self.remove(hidden)
            self.upload({n: n.replace(name, hidden, 1) for n in names})
            self.finish(hidden)
        else:
            self.remove(name)
            parts = {part: n for part, n in self.parts(name).items() if n in names}
            self.store.copy(parts)
            self.upload({n: n for n in names if n not in parts.values()})
        self.note({n: n for n in names})
        self.sweep(_writing(name))  # a job may write other checkpoints meanwhile

    def withdraw_folder(self, folder: Path) -> None:
        """Remove a checkpoint from the store."""
        self.check_owner()
        self.remove(self.name(folder).replace(_CHECKPOINTS, _REPLACING))
        self.remove(self.name(folder))

    def publish_files(self, folder: Path) -> None:
        """Upload the changed files of a run outside of checkpoints; called by the first process of a job."""
        if _CONFIG not in self.objects:
            self.sweep(_CHECKPOINTS)  # those of a new run that was never complete
        names = [n for n in self.files() if not n.startswith(_CHECKPOINTS) and not n.endswith(".tmp")]
        self.upload({n: n for n in names if n not in self.equal or self.equal[n][2] != _stamp(self.root / n)})

    def publish_run(self, folder: Path) -> None:
        """Upload all of a new run; of several processes, the first calls it."""
        self.sweep(_CHECKPOINTS)
        self.upload({n: n for n in self.files()})

    def send_parts(self, folder: Path) -> None:
        """Upload what this process has written of a hidden folder."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self.store.upload((path, self.name(path)) for path in paths)

    def collect_parts(self, folder: Path) -> None:
        """Fetch what the other processes of the job have uploaded of a hidden folder."""
        parts = self.store.list(self.name(folder))
        self.objects |= parts
        self.store.download((n, self.root / n) for n in parts if not (self.root / n).exists())

    def check_owner(self) -> None:
        """Raise UserError if this process has owned the run, and another one does now."""
        if self.owner_lock is not None:
            self.owner_lock.check()

    def sweep(self, prefix: str) -> None:
        """Remove what killed processes have left of checkpoints whose names begin so."""
        for folder in {"/".join(n.split("/")[:2]) for n in self.objects if n.startswith(prefix)}:
            if folder + _MANIFEST not in self.objects or _CONFIG not in self.objects:
                self.remove(folder)
            elif folder.startswith(_REPLACING):
                self.finish(folder)

    def finish(self, hidden: str) -> None:
        """Make a complete `.replacing-STEP` the checkpoint STEP."""
        name = hidden.replace(_REPLACING, _CHECKPOINTS)
        moved = {n: n.replace(hidden, name, 1) for n in self.objects if n.startswith(f"{hidden}/")}
        self.store.copy(moved)
        self.store.remove(n for n in self.objects if n.startswith(f"{name}/") and n not in moved.values())
        self.remove(hidden)
        self.objects = self.store.list()

    def sources(self) -> dict[str, str]:
        """Return the object of each file of the run."""
        found: dict[str, str] = {}
        for name in self.objects if _CONFIG in self.objects else ():
            folder = "/".join(name.split("/")[:2])
            if name.startswith(_CHECKPOINTS):
                replaced = folder.replace(_CHECKPOINTS, _REPLACING) + _MANIFEST in self.objects
                seen = folder + _MANIFEST in self.objects and not replaced
            else:
                seen = not _is_hidden(name) and not name.startswith(_NOT_READ)
            if seen:
                found[name.replace(_REPLACING, _CHECKPOINTS)] = name
        return found

    def parts(self, name: str) -> dict[str, str]:
        """Return the objects that other processes have uploaded of a checkpoint, and what they become."""
        names = [n for n in self.objects if n.startswith(_writing(name))]
        return {n: f"{name}/{n.split('/', 2)[2]}" for n in names}

    def files(self, below: str = "") -> list[str]:
        """Return the names of the files that are here, without those that somebody is writing."""
        names = (self.name(path) for path in (self.root / below).rglob("*") if path.is_file())
        return [name for name in names if not _is_hidden(name)]

    def download(self, names: Iterable[str]) -> None:
        """Fetch files of the run that are not here."""
        sources = self.sources()
        absent = {n: sources[n] for n in names if not (self.root / n).exists()}
        with contextlib.suppress(FileNotFoundError):  # removed since: who needs it says that it is missing
            self.store.download((source, self.root / n) for n, source in absent.items())
        self.note(absent)

    def upload(self, targets: dict[str, str]) -> None:
        """Upload files as these objects: a manifest after what it lists, config.json last."""
        for rank in range(3):
            names = [n for n in targets if (2 if n == _CONFIG else n.endswith(_MANIFEST)) == rank]
            if names:
                self.check_owner()
                self.store.upload((self.root / n, targets[n]) for n in names)
        self.objects = self.store.list()
        self.note(targets)

    def remove(self, folder: str) -> None:
        """Remove the objects of a checkpoint: the manifest first, with which it ceases to exist."""
        names = {n for n in self.objects if n.startswith(f"{folder}/")}
        self.store.remove(sorted(names, key=lambda n: n != folder + _MANIFEST))
        self.objects = {n: version for n, version in self.objects.items() if n not in names}

    def note(self, sources: dict[str, str]) -> None:
        """Record that files equal their objects."""
        for name, source in sources.items():
            if (self.root / name).is_file() and source in self.objects:
                self.equal[name] = (source, self.objects[source], _stamp(self.root / name))

    def name(self, path: Path) -> str:
        return path.absolute().relative_to(self.root).as_posix()


# The copies of this process, by URL.
_copies: dict[str, _Copy] = {}
_guard = threading.Lock()


def _where_copied(
    method: Callable[Concatenate[_Copy, Path, P], None],
) -> Callable[Concatenate[Path, P], None]:
    """Return a function that calls a method for the copy that a folder belongs to, if it belongs to one."""

    def call(folder: Path, *arguments: P.args, **options: P.kwargs) -> None:
        if (copy := _find(folder)) is not None:
            with copy.guard:
                method(copy, folder, *arguments, **options)

    call.__doc__ = method.__doc__
    return call


refresh = _where_copied(_Copy.refresh)
fetch = _where_copied(_Copy.fetch)
publish_folder = _where_copied(_Copy.publish_folder)
withdraw_folder = _where_copied(_Copy.withdraw_folder)
publish_files = _where_copied(_Copy.publish_files)
publish_run = _where_copied(_Copy.publish_run)
send_parts = _where_copied(_Copy.send_parts)
collect_parts = _where_copied(_Copy.collect_parts)


def open_copy(run: str | Path) -> Path:
    """Return the folder of a run: that of a path, with its ~ expanded, or the local copy of the run at a URL.

    The copy is made equal to the store, but for the arrays of checkpoints, which follow when they are read.

    Raises:
      UserError: the store cannot be read.
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
    """Hold the lock of the run in its store while the body runs; upload its changed files at the end.

    Raises:
      UserError: another process trains the run.
    """
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
                publish_files(folder)
            raise
        publish_files(folder)
    finally:
        copy.owner_lock = None
        lock.release()


def to_url(folder: Path) -> str:
    """Return a text that names a folder to all processes of a job, whose copies differ."""
    return name_urls(str(folder))


def to_local(text: str) -> Path:
    """Return the folder that `to_url` has named in another process."""
    for url, copy in _copies.items():
        if f"{text}/".startswith(f"{url}/"):
            return copy.root / text[len(url) :].lstrip("/")
    return Path(text)


def _find(folder: Path) -> _Copy | None:
    folder = folder.absolute()
    return next((copy for copy in _copies.values() if folder.is_relative_to(copy.root)), None)


def _writing(name: str) -> str:
    return f"{name.replace(_CHECKPOINTS, _WRITING)}-"


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns


def _take_folder(url: str) -> tuple[BinaryIO, Path]:
    """Return an empty folder for a copy that no other process uses, and the lock that keeps it so."""
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
