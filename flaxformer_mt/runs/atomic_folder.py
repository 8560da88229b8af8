"""Atomic folders: a folder becomes visible only when it is complete, and its manifest reveals later damage.

Contains the manifest of a folder (file names, sizes and digests; written last) and the renames that publish a
finished folder. The contents of the files are left to the caller.

A folder NAME is written as `.writing-NAME`, sealed with its manifest, and renamed to NAME. An older NAME that
it replaces is called `.replaced-NAME` between the two renames. A folder to delete is called `.removed-NAME`
while its files are deleted. A process killed at any moment therefore leaves hidden folders, which
`sweep_folders` removes, and every visible folder is complete.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1

_WRITING, _REPLACED, _REMOVED = ".writing-", ".replaced-", ".removed-"


def begin_folder(final: Path) -> Path:
    """Creates the empty hidden folder in which `final` is written; deletes one left by an earlier attempt."""
    temporary = final.with_name(_WRITING + final.name)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def seal_folder(folder: Path, facts: dict[str, Any]) -> None:
    """Flushes all files of `folder` to disk, then writes the manifest that lists them.

    Args:
      facts: JSON values that the manifest stores in addition to the list of files.
    """
    files = {}
    for name, path in _walk_files(folder):
        with path.open("rb") as file:
            digest = _digest_file(file)
            os.fsync(file.fileno())
        files[name] = {"bytes": path.stat().st_size, "blake2b": digest}
    body = {"format": MANIFEST_FORMAT, "facts": facts, "files": files}
    text = json.dumps({**body, "blake2b": _digest_body(body)}, indent=1, sort_keys=True)
    with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync_directory(directory)


def publish_folder(final: Path) -> None:
    """Renames the sealed folder `.writing-NAME` to `final`, replacing an existing folder of that name."""
    temporary, replaced = final.with_name(_WRITING + final.name), final.with_name(_REPLACED + final.name)
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    _sync_directory(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def remove_folder(folder: Path) -> None:
    """Deletes `folder` after hiding it, so that a process killed meanwhile leaves only a hidden folder."""
    removed = folder.with_name(_REMOVED + folder.name)
    if removed.exists():
        shutil.rmtree(removed)
    os.rename(folder, removed)
    shutil.rmtree(removed)


def sweep_folders(parent: Path) -> None:
    """Removes the hidden folders that a killed process left in `parent`.

    Restores a folder that was renamed to be replaced, but whose replacement was never published. Only the one
    process that writes to `parent` may call this function.
    """
    if not parent.is_dir():
        return
    for path in sorted(parent.iterdir()):
        if path.name.startswith(_REPLACED):
            final = path.with_name(path.name.removeprefix(_REPLACED))
            if not final.exists():
                os.rename(path, final)
                continue
        if path.name.startswith((_WRITING, _REPLACED, _REMOVED)):
            shutil.rmtree(path)


def read_facts(folder: Path) -> dict[str, Any]:
    """Returns the `facts` given to `seal_folder`. Raises ValueError if the manifest is absent or damaged."""
    return _read_manifest(folder)["facts"]


def find_damage(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Compares the files of `folder` with its manifest; returns the first difference as text, "" if none.

    Args:
      wanted: selects the files to compare by their name relative to `folder`, such as `params/_METADATA`.
    """
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
    try:
        body = json.loads((folder / MANIFEST_NAME).read_bytes())
        digest = body.pop("blake2b")
    except FileNotFoundError:
        raise ValueError(f"file {MANIFEST_NAME} is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError):  # not UTF-8, not JSON, or no digest
        raise ValueError(f"file {MANIFEST_NAME} is not readable") from None
    if digest != _digest_body(body):
        raise ValueError(f"file {MANIFEST_NAME} has changed since it was written (its digest differs)")
    if body["format"] != MANIFEST_FORMAT:
        raise ValueError(
            f"file {MANIFEST_NAME} has format {body['format']}, "
            f"but this version of flaxformer_mt reads format {MANIFEST_FORMAT}"
        )
    return body


def _walk_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _digest_file(file: Any) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_body(body: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
