"""Files in the cache folder, each with a digest: a damaged file counts as absent. Sweep of leftovers."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt import file_lock
from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.files import read_file


def digest(values: Any) -> str:
    """Hex digest of JSON values, 32 digits, the same in every process."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_cached(path: Path) -> dict[str, Any] | None:
    """Values that `write_cached` wrote; None if the file is absent, damaged or of an older version."""
    try:
        record = json.loads(read_file(path))
        values = record["values"]
        return values if isinstance(values, dict) and record["blake2b"] == digest(values) else None
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_cached(path: Path, values: dict[str, Any]) -> None:
    """Write JSON values with their digest, and make the folder; readers see only complete files."""
    text = json.dumps({"values": values, "blake2b": digest(values)}, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8", errors="backslashreplace"))


# The entry of the values with the digests of the arrays, by name.
_DIGESTS = "arrays"


def read_arrays(folder: Path, key: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Arrays (mapped) and values that `write_arrays` wrote; None if one is absent, damaged or older."""
    values = read_cached(folder / f"{key}.json") or {}
    digests = values.pop(_DIGESTS, None)
    if digests is None:
        return None
    files = {name: _name_file(folder, key, name) for name in digests}
    if not all(path.is_file() and digest_file(path) == digests[name] for name, path in files.items()):
        return None
    loaded = {name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in files.items()}
    return {name: array.view(np.ndarray) for name, array in loaded.items()}, values


def write_arrays(folder: Path, key: str, arrays: Mapping[str, np.ndarray], **values: Any) -> None:
    """Write arrays and JSON values, the digests last: readers see all of them or none."""
    digests = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        array, header = np.ascontiguousarray(array), io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
        parts = (header.getvalue(), array.data)  # as np.save writes them, without another copy
        write_atomically(_name_file(folder, key, name), *parts)
        content = hashlib.blake2b(digest_size=16)
        for part in parts:
            content.update(part)
        digests[name] = content.hexdigest()
    write_cached(folder / f"{key}.json", values | {_DIGESTS: digests})


def load_or_make(folder: Path, key: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if (cached := read_arrays(folder, key)) is not None:
        return cached[0]
    arrays = make()
    write_arrays(folder, key, arrays)
    return arrays


def _name_file(folder: Path, key: str, name: str) -> Path:
    return folder / f"{key}.{name}.npy"


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
    """Mark the cache as in use until this process ends; remove leftovers first if nobody else uses it."""
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
