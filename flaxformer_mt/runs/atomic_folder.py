"""Folders that appear whole or not at all, and that can tell when they have been damaged.

Owns the manifest of a folder (file names, sizes, digests; written last) and the renames that put a finished
folder in its place. Knows nothing of checkpoints, arrays or training.

A folder NAME is built as `.writing-NAME`, sealed, and renamed. When it replaces an older NAME, that one waits
as `.replaced-NAME` between the two renames; one that is deleted is `.removed-NAME` while its files go. So a
process killed at any moment leaves hidden folders, which `sweep_folders` clears, and no visible folder half
written.
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
    """Makes the empty hidden folder in which `final` is to be built; an earlier attempt is cleared away."""
    temporary = final.with_name(_WRITING + final.name)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def seal_folder(folder: Path, facts: dict[str, Any]) -> None:
    """Writes all files of `folder` through to the disk, then the manifest that lists them.

    Args:
      facts: what the manifest should say beside the files; JSON values.
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
    """Renames the sealed `.writing-NAME` to `final`; a folder of that name is replaced."""
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
    """Deletes `folder` so that a process killed in the middle leaves no visible half of it."""
    removed = folder.with_name(_REMOVED + folder.name)
    if removed.exists():
        shutil.rmtree(removed)
    os.rename(folder, removed)
    shutil.rmtree(removed)


def sweep_folders(parent: Path) -> None:
    """Clears what a killed process left in `parent`; only the one process that writes there may call this.

    A folder that was about to be replaced, but whose successor never came, is put back.
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
    """The `facts` that `seal_folder` was given. Raises ValueError if the manifest is absent or damaged."""
    return _read_manifest(folder)["facts"]


def find_damage(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Compares the files of `folder` with its manifest and says what is wrong; "" when nothing is.

    Args:
      wanted: which files to look at, by their name relative to `folder`, as in `params/_METADATA`.
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
                return f"file {name} does not have the content that was written (its digest differs)"
    return ""


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        body = json.loads((folder / MANIFEST_NAME).read_bytes())
        digest = body.pop("blake2b")
    except FileNotFoundError:
        raise ValueError(f"file {MANIFEST_NAME} is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError):  # not UTF-8, not JSON, or not an object of ours
        raise ValueError(f"file {MANIFEST_NAME} is not readable") from None
    if digest != _digest_body(body):
        raise ValueError(
            f"file {MANIFEST_NAME} does not have the content that was written (its digest differs)"
        )
    if body["format"] != MANIFEST_FORMAT:
        raise ValueError(f"it has format {body['format']}, and this version reads format {MANIFEST_FORMAT}")
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
