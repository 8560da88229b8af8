"""A run in an object store and its local copy: what is fetched when, and in which order what is published.

The store holds the same files as a run directory, as objects, so that any tool can copy it. The copy is a
folder of the user's cache folder; nothing is lost with it.

    Reading     The small files are fetched when the run is opened, and those of a checkpoint when they are
                asked for. What the copy has and the store has not, such as what was never published, is
                deleted.
    Publishing  An object appears at once, a folder does not. The manifest of a checkpoint is therefore
                written last, and a checkpoint without one does not exist. One that exists is replaced by way
                of `checkpoints/.replacing-STEP/`, which counts instead of STEP as long as it has a manifest.
                Checkpoints follow config.json. A new run that starts with a checkpoint has the object
                `.unfinished` until all of it is there, and does not exist before.
    Parts       The processes of a job have copies of their own. Each uploads its shards of a checkpoint to
                `checkpoints/.writing-...`; the first fetches those of the others, to put them together.

A process killed at any moment leaves objects that nobody sees; the next owner of the run removes them.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.lease import FOLDER as LEASE_FOLDER
from flaxformer_mt.object_store.lease import Lease

_CONFIG, _MANIFEST, _UNFINISHED = "config.json", "manifest.json", ".unfinished"
_WRITING, _REPLACING = ".writing-", ".replacing-"
# Of a checkpoint, what is fetched when a run is opened; folders that no command reads.
_SMALL = (_MANIFEST, "progress.json")
_NOT_READ = ("tensorboard/", "profile/", "plots/")

# An object, and the text that names its version.
Source = tuple[str, str]
# Size and time of change of a file.
Stamp = tuple[int, int]


class Mirror:
    """The copy of one run; its methods may be called by several threads."""

    def __init__(self, store: ObjectStore, root: Path) -> None:
        """Opens the copy, whose files are those of earlier commands; `root` is its folder.

        Only one process may use the folder above `root`.
        """
        self.store, self.root = store, root
        self.lease: Lease | None = None
        self._lock = threading.RLock()
        self._record = root.with_name(f"{root.name}.json")
        # All objects; what each file of the run comes from; the files that equal their objects, and as what.
        self._objects: dict[str, str] = {}
        self._sources: dict[str, Source] = {}
        self._equal: dict[str, tuple[Source, Stamp]] = {}
        # Shards of other processes, by their path in the copy.
        self._parts: dict[Path, str] = {}
        root.mkdir(parents=True, exist_ok=True)
        for path in [*root.rglob(".*"), *root.parent.glob(f".{root.name}*")]:  # of a process that was killed
            _delete(path)
        self._load_record()

    def pull(self) -> None:
        """Makes the copy equal to the store, but for files that are fetched when they are asked for."""
        with self._lock:
            self._objects = self.store.list()
            if not self._objects:
                self.store.require_bucket()
            self._sources = _find_sources(self._objects)
            for path in self._files():
                name = self._name(path)
                if self._equal.get(name) != (self._sources.get(name), _stamp(path)):
                    path.unlink()
                    self._equal.pop(name, None)
            for folder in sorted((p for p in self.root.rglob("*") if p.is_dir()), reverse=True):
                if not any(folder.iterdir()) and not _is_hidden(self._name(folder)):
                    folder.rmdir()
            self._download(name for name in self._sources if _is_small(name))

    def fetch(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        """Fetches the files of a folder that `wanted` selects by their names in it, unless they are here."""
        with self._lock:
            prefix = f"{self._name(folder)}/"
            inside = (name for name in self._sources if name.startswith(prefix))
            self._download(name for name in inside if wanted(name[len(prefix) :]))

    def publish_files(self) -> None:
        """Uploads the files outside of checkpoints that have changed; a manifest after the other files."""
        with self._lock:
            if _UNFINISHED in self._objects:  # what is left of a new run that was never finished
                self._remove(name for name in self._objects if name != _UNFINISHED)
                self._remove([_UNFINISHED])
            self._publish_files()

    def _publish_files(self) -> None:
        present = map(self._name, self._files())
        names = [
            name for name in present if not name.startswith("checkpoints/") and not name.endswith(".tmp")
        ]
        changed = [name for name in names if self._changed(name)]
        # The config first, which says what the rest is; a manifest after the files that it lists.
        self._upload({name: name for name in changed if name == _CONFIG})
        self._upload({name: name for name in changed if name != _CONFIG and not name.endswith(_MANIFEST)})
        self._upload({name: name for name in changed if name.endswith(_MANIFEST)})

    def publish_folder(self, folder: Path) -> None:
        """Uploads a complete checkpoint, replacing what has its name; the changed files of the run first."""
        with self._lock:
            if _CONFIG not in self._objects:
                return  # a new run, of which `publish_run` uploads everything
            self._check_lease()
            self._publish_files()  # the log reaches as far as the checkpoint
            name = self._name(folder)
            if f"{name}/{_MANIFEST}" in self._objects:
                self._upload_checkpoint(name, _replacing(name))
                self._finish_replacing(name)
            else:
                self._remove(self._below(name))
                self._upload_checkpoint(name, name)
            self._remove([part for part in self._objects if part.startswith(f"checkpoints/{_WRITING}")])
            self._parts = {}

    def withdraw_folder(self, folder: Path) -> None:
        """Removes the objects of a checkpoint: the manifest first, with which it ceases to exist."""
        with self._lock:
            self._check_lease()
            name = self._name(folder)
            self._remove([f"{name}/{_MANIFEST}"])
            self._remove(self._below(name))

    def publish_run(self) -> None:
        """Uploads a new run, which exists once all of it is there."""
        with self._lock:
            self._remove([name for name in self._objects if name != _UNFINISHED])
            self.store.write(_UNFINISHED, b"")
            self._publish_files()
            checkpoints = self.root / "checkpoints"
            for folder in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []:
                if folder.is_dir() and not folder.name.startswith("."):
                    self._upload_checkpoint(self._name(folder), self._name(folder))
            self._objects[_UNFINISHED] = ""
            self._remove([_UNFINISHED])

    def sweep(self) -> None:
        """Removes what killed processes left in the store; only the owner of the run may call this.

        Completes the replacements that they had begun.
        """
        with self._lock:
            sealed = {name.rpartition("/")[0] for name in self._objects if name.endswith(f"/{_MANIFEST}")}
            for folder in {"/".join(name.split("/")[:2]) for name in self._objects}:
                where, _, last = folder.partition("/")
                if where != "checkpoints" or not last:
                    continue
                if last.startswith(_REPLACING) and folder in sealed:
                    self._finish_replacing(f"{where}/{last.removeprefix(_REPLACING)}")
                elif last.startswith((_WRITING, _REPLACING)) or (last.isdigit() and folder not in sealed):
                    self._remove(self._below(folder))

    def send_parts(self, folder: Path) -> None:
        """Uploads the files of a hidden folder that this process has written, for the first process."""
        with self._lock:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            self.store.upload([(path, self._name(path)) for path in files])

    def collect_parts(self, folder: Path) -> None:
        """Fetches what the other processes have uploaded of a hidden folder."""
        with self._lock:
            found = self.store.list(self._name(folder))
            self._objects |= found
            absent = {name: self.root / name for name in found if not (self.root / name).exists()}
            self.store.download(absent.items())
            self._parts = {path.relative_to(folder): name for name, path in absent.items()}

    def _upload_checkpoint(self, name: str, where: str) -> None:
        """Uploads a checkpoint to `where`, the manifest last; copies the parts that are there already."""
        folder = self.root / name
        files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        parts = {
            path: part
            for path, part in self._parts.items()
            if (folder / path).is_file() and self._size(part) == (folder / path).stat().st_size
        }
        copies = [(part, f"{where}/{path.as_posix()}") for path, part in parts.items()]
        self.store.copy(copies)
        self._objects.update(dict.fromkeys((new for _, new in copies), ""))
        rest = [path.as_posix() for path in files if path not in parts and path.as_posix() != _MANIFEST]
        self._upload({f"{name}/{path}": f"{where}/{path}" for path in rest})
        self._check_lease()
        self._upload({f"{name}/{_MANIFEST}": f"{where}/{_MANIFEST}"})
        self._note_versions(name, where)

    def _finish_replacing(self, name: str) -> None:
        """Copies a complete `.replacing-STEP` to STEP, the manifest last; removes it, the manifest first."""
        new = _replacing(name)
        moved = {old: f"{name}{old[len(new) :]}" for old in self._below(new)}
        self._remove([old for old in self._below(name) if old not in moved.values()])
        for last in (False, True):
            pairs = [pair for pair in moved.items() if (pair[0] == f"{new}/{_MANIFEST}") == last]
            self.store.copy(pairs)
            self._objects.update((target, "") for _, target in pairs)
        self._remove([f"{new}/{_MANIFEST}"])
        self._remove(self._below(new))
        self._note_versions(name, name)

    def _note_versions(self, name: str, where: str) -> None:
        """Records that the files of a checkpoint equal its objects, so that they are not fetched again."""
        versions = self.store.list(where)
        self._objects |= versions
        for object_name, version in versions.items():
            path = f"{name}{object_name[len(where) :]}"
            self._sources[path] = (object_name, version)
            if (self.root / path).is_file():
                self._equal[path] = (self._sources[path], _stamp(self.root / path))
        self._save_record()

    def _download(self, names: Iterable[str]) -> None:
        absent = [name for name in names if not (self.root / name).exists()]
        try:
            self.store.download([(self._sources[name][0], self.root / name) for name in absent])
        except FileNotFoundError:
            pass  # removed since it was listed: whoever needs the file says that it is missing
        for name in absent:
            if (self.root / name).is_file():
                self._equal[name] = (self._sources[name], _stamp(self.root / name))
        if absent:
            self._save_record()

    def _upload(self, names: dict[str, str]) -> None:
        """Uploads files, by their names in the run, as objects of these names."""
        stamps = {name: _stamp(self.root / name) for name in names}
        self.store.upload([(self.root / name, target) for name, target in names.items()])
        for name, target in names.items():
            self._objects[target] = ""
            self._sources[name] = (target, "")
            self._equal[name] = (self._sources[name], stamps[name])

    def _remove(self, names: Iterable[str]) -> None:
        present = [
            name for name in names if name in self._objects and not name.startswith(f"{LEASE_FOLDER}/")
        ]
        self.store.remove(present)
        for name in present:
            self._objects.pop(name, None)
            self._sources.pop(name, None)

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _below(self, name: str) -> list[str]:
        return [other for other in self._objects if other.startswith(f"{name}/")]

    def _size(self, name: str) -> int:
        return int(self._objects[name].partition(" ")[0])

    def _changed(self, name: str) -> bool:
        return name not in self._equal or self._equal[name][1] != _stamp(self.root / name)

    def _files(self) -> list[Path]:
        """The files of the copy that belong to the run: hidden ones are those that somebody is writing."""
        paths = (path for path in self.root.rglob("*") if path.is_file())
        return [path for path in paths if not _is_hidden(self._name(path))]

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _load_record(self) -> None:
        try:
            stored = json.loads(self._record.read_text(encoding="utf-8"))
            self._equal = {
                name: ((source[0], source[1]), (stamp[0], stamp[1]))
                for name, (source, stamp) in stored.items()
            }
        except (OSError, ValueError, TypeError, AttributeError, IndexError):
            self._equal = {}  # everything is fetched again

    def _save_record(self) -> None:
        # What was uploaded, but not listed since, has no version, and is fetched again by a later command.
        partial = self._record.with_name(f"{self._record.name}.new")
        partial.write_text(json.dumps(self._equal), encoding="utf-8")
        os.replace(partial, self._record)


def _find_sources(objects: dict[str, str]) -> dict[str, Source]:
    """The object of each file of a run, given all objects and their versions."""
    if _UNFINISHED in objects:
        return {}
    sources = {}
    sealed = {name.rpartition("/")[0] for name in objects if name.endswith(f"/{_MANIFEST}")}
    for name, version in objects.items():
        found = re.match(rf"checkpoints/({re.escape(_REPLACING)})?([^/.][^/]*)/(.+)", name)
        if found is None:
            if not _is_hidden(name):
                sources[name] = (name, version)
            continue
        replacing, step, rest = found.groups()
        final = f"checkpoints/{step}"
        if (_replacing(final) if replacing else final) in sealed and (
            replacing or _replacing(final) not in sealed
        ):
            sources[f"{final}/{rest}"] = (name, version)
    return sources


def _replacing(name: str) -> str:
    where, _, last = name.rpartition("/")
    return f"{where}/{_REPLACING}{last}"


def _is_small(name: str) -> bool:
    parts = name.split("/")
    if parts[0] == "checkpoints":
        return len(parts) == 3 and parts[2] in _SMALL
    return not name.startswith(_NOT_READ)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _stamp(path: Path) -> Stamp:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
