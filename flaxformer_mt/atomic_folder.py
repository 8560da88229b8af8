"""Atomic folders: a folder becomes visible only when it is complete, and its manifest reveals later damage.

All caches use `artifact`: it builds a folder once for all processes, verifies the folder whenever it is
opened, and rebuilds a damaged folder. Checkpoints use the functions below `artifact`.

A folder NAME is written as `.writing-NAME` or `.writing-NAME-RANDOM`, sealed with its manifest (file names,
sizes and digests), and renamed. An older NAME is first renamed to `.replaced-NAME`, and a folder to delete to
`.removed-NAME-RANDOM`. So every visible folder is complete, and a killed process leaves only hidden folders,
which `sweep_folders` removes. Changes of a run's local copy are then also made in its object store.
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
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from flaxformer_mt import file_lock
from flaxformer_mt.atomic_file import sync_directory, write_atomically
from flaxformer_mt.config.files import read_file
from flaxformer_mt.errors import UserError, name_full_disk, warn_user
from flaxformer_mt.object_store import remote_runs

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1

_WRITING, _REPLACED, _REMOVED = ".writing-", ".replaced-", ".removed-"
# Number of builds after which a folder that is damaged again is blamed on the disk.
_ATTEMPTS = 5
# Seconds between two looks at the build of another process.
_WAIT = 0.1
# The folder of a killed build is removed after this time without a change in it.
_STALE_SECONDS = 24 * 3600

Result = TypeVar("Result")


class BuildStopped(Exception):
    """Raised if the event `stop` is set during a build, or while waiting for another process's build."""


def artifact(
    folder: Path,
    build: Callable[[Path], Any],
    load: Callable[[Path, Any], Result] = lambda folder, metadata: metadata,
    *,
    resume: bool = False,
    stop: threading.Event | None = None,
) -> Result:
    """Load `folder`; if it is absent or damaged, call `build` to write its files and return its metadata.

    One process builds, in the locked folder `.writing-NAME`, and the others wait. With `resume`, `build`
    gets the files that a killed build left. When another thread sets `stop`, waiting raises `BuildStopped`.
    """
    for _ in range(_ATTEMPTS):
        if metadata := read_artifact(folder):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
                return load(folder, *metadata)
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        with _claim(folder, stop) as partial:
            if partial is None:
                continue
            for path in partial.iterdir():
                if not resume or path.name == MANIFEST_NAME or path.name.startswith("."):
                    _delete(path)
            try:
                with name_full_disk(folder):
                    seal_folder(partial, build(partial), sync=False)
                os.rename(partial, folder)
            except BaseException as error:
                # A later build may resume after a signal, but not after an error.
                if isinstance(error, Exception) or not resume:
                    shutil.rmtree(partial, ignore_errors=True)
                if not (isinstance(error, OSError) and folder.is_dir()):  # built by another, without locks
                    raise
    raise UserError(f"{folder} is damaged again whenever it is written; use a cache folder on another disk")


def read_artifact(folder: Path) -> tuple[Any] | None:
    """Return (metadata,) of a cached folder, or None if it is absent or damaged; remove a damaged folder."""
    if not os.path.lexists(folder):
        return None
    if damage := find_damage(folder):
        warn_user(f"{folder} is damaged: {damage}; it is built again")
        discard(folder)
        return None
    with contextlib.suppress(ValueError):  # another process has removed it meanwhile
        return (read_metadata(folder),)
    return None


def discard(folder: Path) -> None:
    """Remove a cached folder (or a file at this path); it is renamed first, so that it disappears at once."""
    doomed = folder.with_name(f"{_REMOVED}{folder.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.rename(folder, doomed)
        _delete(doomed)


@contextlib.contextmanager
def _claim(folder: Path, stop: threading.Event | None) -> Iterator[Path | None]:
    """Yield a hidden folder that only this process writes to; None if another process has built `folder`.

    On a file system without locks, the hidden folder has a random name, and no later build resumes from it.
    """
    partial = folder.with_name(_WRITING + folder.name)
    while True:
        partial.mkdir(exist_ok=True)
        try:
            file = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # its builder has just renamed it
        try:
            try:
                file_lock.lock(file)
            except BlockingIOError:
                if stop is not None and stop.is_set():
                    raise BuildStopped from None
                time.sleep(_WAIT)
                continue
            except file_lock.FileHasNoLock:
                yield begin_folder(folder)
                return
            if os.path.lexists(folder):  # it was finished in the meantime
                with contextlib.suppress(OSError):
                    partial.rmdir()  # empty, if it was made above
                yield None
                return
            if file_lock.is_at(partial, file):
                yield partial
                return
        finally:
            os.close(file)


def _remove_leftovers(root: Path) -> None:
    """Remove the folders of builds that were killed more than a day ago."""
    for path in itertools.chain(root.glob(f"{_WRITING}*"), root.glob(f"{_REMOVED}*")):
        with contextlib.suppress(OSError):  # the build has just finished, or its process holds the lock
            changed = max(one.stat().st_mtime for one in (path, *path.iterdir()))
            if time.time() - changed > _STALE_SECONDS:
                file = os.open(path, os.O_RDONLY)
                try:
                    with contextlib.suppress(file_lock.FileHasNoLock):
                        file_lock.lock(file)  # the clock may have been set since a living process began
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(file)


def save_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write each array to NAME.npy in np.save's format; a full disk raises an error, unlike in np.save."""
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        with (folder / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(array.data)


def map_arrays(folder: Path, metadata: Any = None) -> dict[str, np.ndarray]:
    """Return memory maps of the arrays that `save_arrays` wrote, by name; data are read on access."""
    return {
        path.stem: np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        for path in folder.glob("*.npy")
    }


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `final` at the end, or removed after an error.

    Raises UserError if the folder cannot be created, or if `final` has files, which are never replaced.
    """
    try:
        partial = begin_folder(final)
    except OSError as error:
        raise UserError(f"cannot write to {final.parent}: {error.strerror}; give another folder") from error
    try:
        with name_full_disk(final):
            yield partial
        try:
            os.rename(partial, final)
        except OSError as error:  # another command was faster
            raise UserError(f"{final} cannot be written: {error.strerror}; give another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def begin_folder(final: Path) -> Path:
    """Create an empty hidden folder with a random name, which is later renamed to `final`."""
    partial = final.with_name(f"{_WRITING}{final.name}-{secrets.token_hex(8)}")
    partial.mkdir(parents=True)
    return partial


def digest_files(
    folder: Path, *, wanted: Callable[[str], bool] = lambda name: True, sync: bool = True
) -> dict[str, Any]:
    """Flush the `wanted` files of `folder` to disk; return their sizes and digests by relative file name."""
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and wanted(name):
            with name_full_disk(path), path.open("rb") as file:
                if sync:
                    os.fsync(file.fileno())
            files[name] = {"bytes": path.stat().st_size, "blake2b": digest_file(path)}
    return files


def seal_folder(
    folder: Path,
    metadata: Any,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    written: Mapping[str, Any] = MappingProxyType({}),
    sync: bool = True,
) -> None:
    """Flush all `wanted` files to disk, then write the manifest, which lists them and holds the metadata.

    `metadata` has JSON values; `written` has sizes and digests of files that another process has flushed.
    """
    files = dict(written) | digest_files(
        folder, wanted=lambda name: wanted(name) and name not in written, sync=sync
    )
    files = dict(sorted(files.items()))
    _write_manifest(folder, {"format": MANIFEST_FORMAT, "facts": metadata, "files": files}, sync=sync)
    for directory in filter(Path.is_dir, folder.rglob("*") if sync else ()):
        sync_directory(directory)


def publish_folder(sealed: Path, final: Path) -> None:
    """Rename a sealed folder to `final`; a folder that is already there is replaced."""
    replaced = final.with_name(_REPLACED + final.name)
    if os.path.lexists(final):
        _delete(replaced)
        os.rename(final, replaced)
    os.rename(sealed, final)
    sync_directory(final.parent)
    _delete(replaced)
    remote_runs.publish(final)


def replace_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    """Replace the metadata of a sealed folder atomically; its files stay unchanged."""
    _write_manifest(folder, {**_read_manifest(folder), "facts": metadata})
    remote_runs.publish(folder)


def remove_folder(folder: Path) -> None:
    """Delete a folder of a run; if the process is killed during this, only a hidden folder remains."""
    discard(folder)
    remote_runs.withdraw(folder)


def sweep_folders(parent: Path) -> None:
    """Remove hidden folders that a killed process left; only call this in the process that writes `parent`.

    A folder that was renamed to `.replaced-NAME`, but never replaced, gets its name back.
    """
    if not parent.is_dir():
        return
    for path in sorted(parent.iterdir()):
        if path.name.startswith(_REPLACED):
            final = path.with_name(path.name.removeprefix(_REPLACED))
            if not os.path.lexists(final):
                os.rename(path, final)
                continue
        if path.name.startswith((_WRITING, _REPLACED, _REMOVED)):
            _delete(path)


def read_metadata(folder: Path) -> Any:
    """Return the `metadata` given to `seal_folder`; raise ValueError if the manifest is absent or damaged."""
    return _read_manifest(folder)["facts"]


def find_damage(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Compare the `wanted` files with the manifest; return a description of the first difference, or ""."""
    remote_runs.fetch(folder, wanted)
    try:
        manifest = _read_manifest(folder)
    except ValueError as error:
        return str(error)
    for name, expected in manifest["files"].items():
        if not wanted(name):
            continue
        path = folder / name
        if not path.is_file():
            return f"file {name} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"file {name} has {size} bytes instead of {expected['bytes']}"
        if digest_file(path) != expected["blake2b"]:
            return f"file {name} has changed since it was written (its digest differs)"
    return ""


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir() and os.path.lexists(folder):
        raise ValueError("it is not a folder")
    try:
        text = read_file(folder / MANIFEST_NAME)
    except FileNotFoundError:
        raise ValueError(f"file {MANIFEST_NAME} is missing") from None
    except PermissionError:
        raise  # not damage: the file may be whole
    except (OSError, ValueError):  # such as a folder of that name
        raise ValueError(f"file {MANIFEST_NAME} is not readable") from None
    return _parse_manifest(text)


def _write_manifest(folder: Path, body: dict[str, Any], *, sync: bool = True) -> None:
    write_atomically(folder / MANIFEST_NAME, _manifest_bytes(body), sync=sync)


@functools.lru_cache(maxsize=16)
def _parse_manifest(text: bytes) -> dict[str, Any]:
    """Parse and check a manifest. Do not modify the result, which is cached for later calls."""
    changed = f"file {MANIFEST_NAME} has changed since it was written (its digest differs)"
    try:
        body = json.loads(text)
        written = body.pop("blake2b")
        [body["facts"], *((file["bytes"], file["blake2b"]) for file in body["files"].values())]
    # not UTF-8, not JSON, no digest, or nested too deeply
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"file {MANIFEST_NAME} is not readable") from None
    if written != digest(body):
        raise ValueError(changed)
    if body.get("format") != MANIFEST_FORMAT:
        raise ValueError(
            f"file {MANIFEST_NAME} has format {body.get('format')}, "
            f"but this version of flaxformer_mt reads format {MANIFEST_FORMAT}"
        )
    # The digest covers the values; the bytes between them, and a lost last byte, show here.
    if text != _manifest_bytes(body):
        raise ValueError(changed)
    return body


def _manifest_bytes(body: dict[str, Any]) -> bytes:
    return f"{json.dumps({**body, 'blake2b': digest(body)}, indent=1, sort_keys=True)}\n".encode()


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def digest(values: Any) -> str:
    """Return a digest of JSON values as 32 hexadecimal digits, the same in every process."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
