"""Arrays in the cache folder, beside JSON values that have their digests: damaged ones count as absent."""

import hashlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.corpus.cached_json import digest_file, read_cached, write_cached

# The entry of the values with the digests of the arrays, by name.
_DIGESTS = "arrays"


def read_arrays(folder: Path, key: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Return the arrays, mapped and by name, and the values that `write_arrays` wrote under this key.

    None if a file is absent, damaged, or of an older version.
    """
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
    """Return the arrays under this key, by name; missing ones are made and written."""
    if (found := read_arrays(folder, key)) is not None:
        return found[0]
    arrays = make()
    write_arrays(folder, key, arrays)
    return arrays


def _name_file(folder: Path, key: str, name: str) -> Path:
    return folder / f"{key}.{name}.npy"
