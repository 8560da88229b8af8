"""Atomic folders: a folder becomes visible only when it is complete, and its manifest reveals later damage.

A folder NAME is written as `.writing-NAME`, or as `.writing-NAME-` with a random number, sealed with its
manifest (file names, sizes and digests), and renamed to NAME. An older NAME that it replaces is called
`.replaced-NAME` between the two renames. A folder to delete is called `.removed-NAME` while its files are
deleted. A process killed at any moment therefore leaves hidden folders, which `sweep_folders` removes, and
every visible folder is complete. In the copy of a run in an object store, the folder is then uploaded, and
so is its removal.
"""

import functools
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.files import read_file
from flaxformer_mt.errors import name_full_disk
from flaxformer_mt.object_store import remote_runs

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1

_WRITING, _REPLACED, _REMOVED = ".writing-", ".replaced-", ".removed-"


class FileDigest(TypedDict):
    """Size and digest of a file, as a manifest lists them."""

    bytes: int
    blake2b: str


def begin_folder(final: Path, *, unique: bool = False) -> Path:
    """Create the empty hidden folder in which `final` is written; a `unique` name is used only once."""
    suffix = f"-{secrets.token_hex(8)}" if unique else ""
    temporary = final.with_name(_WRITING + final.name + suffix)
    _delete(temporary)
    temporary.mkdir(parents=True)
    return temporary


def digest_files(folder: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, FileDigest]:
    """Flush the files to disk; return their digests by their names relative to `folder`."""
    files: dict[str, FileDigest] = {}
    for name, path in _walk_files(folder):
        if wanted(name):
            with name_full_disk(path), path.open("rb") as file:
                digest = _digest_file(file)
                os.fsync(file.fileno())
            files[name] = {"bytes": path.stat().st_size, "blake2b": digest}
    return files


def seal_folder(
    folder: Path,
    metadata: dict[str, Any],
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    written: Mapping[str, FileDigest] = MappingProxyType({}),
) -> None:
    """Flush all `wanted` files to disk, then write the manifest, with JSON values, that lists them.

    `written` are files that another process has flushed, with what it has written.
    """
    files = dict(written) | digest_files(folder, wanted=lambda name: wanted(name) and name not in written)
    files = dict(sorted(files.items()))
    _write_manifest(folder, {"format": MANIFEST_FORMAT, "facts": metadata, "files": files})
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync_directory(directory)


def publish_folder(final: Path, written: Path | None = None) -> None:
    """Rename the sealed folder `written`, by default `.writing-NAME`, to `final`, replacing that."""
    temporary = final.with_name(_WRITING + final.name) if written is None else written
    replaced = final.with_name(_REPLACED + final.name)
    if os.path.lexists(final):
        _delete(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    _sync_directory(final.parent)
    _delete(replaced)
    remote_runs.publish(final)


def replace_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    """Give a sealed folder other metadata, at once; its files stay as they are."""
    _write_manifest(folder, {**_read_manifest(folder), "facts": metadata})
    _sync_directory(folder)
    remote_runs.publish(folder)


def remove_folder(folder: Path) -> None:
    """Delete `folder` after hiding it, so that a process killed meanwhile leaves only a hidden folder."""
    removed = folder.with_name(_REMOVED + folder.name)
    _delete(removed)
    os.rename(folder, removed)
    _delete(removed)
    remote_runs.withdraw(folder)


def sweep_folders(parent: Path) -> None:
    """Remove the hidden folders that a killed process left; only the writer of `parent` may call it.

    Restores a folder that was renamed to be replaced, but whose replacement was never published.
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


def read_metadata(folder: Path) -> dict[str, Any]:
    """The `metadata` given to `seal_folder`; raises ValueError if the manifest is absent or damaged."""
    return _read_manifest(folder)["facts"]


def find_damage(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Compare the `wanted` files with the manifest; return the first difference as text, "" if none."""
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
        with path.open("rb") as file:
            if _digest_file(file) != expected["blake2b"]:
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


def _write_manifest(folder: Path, body: dict[str, Any]) -> None:
    write_atomically(folder / MANIFEST_NAME, _manifest_bytes(body), sync=True)


@functools.lru_cache(maxsize=16)
def _parse_manifest(text: bytes) -> dict[str, Any]:
    """Not to be changed: a command reads the same manifest several times."""
    changed = f"file {MANIFEST_NAME} has changed since it was written (its digest differs)"
    try:
        body = json.loads(text)
        digest = body.pop("blake2b")
    # not UTF-8, not JSON, no digest, or nested too deeply
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"file {MANIFEST_NAME} is not readable") from None
    if digest != _digest_body(body):
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
    return f"{json.dumps({**body, 'blake2b': _digest_body(body)}, indent=1, sort_keys=True)}\n".encode()


def _walk_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _digest_file(file: Any) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_body(body: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
