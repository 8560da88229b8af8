"""JSON values in the cache folder, each file with a digest: a damaged file counts as absent."""

import hashlib
import json
from pathlib import Path
from typing import Any

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.files import read_file


def digest(values: Any) -> str:
    """Hex digest of JSON values, 32 digits, the same in every process."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def digest_file(path: Path) -> str:
    """Hex digest of the bytes of a file, 32 digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_cached(path: Path) -> dict[str, Any] | None:
    """Return the values that `write_cached` wrote; None if the file is absent, damaged, or of an older
    version.
    """
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
